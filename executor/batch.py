"""The batch in the making: what is known of every sample, and how it is dealt out to the ranks of a visit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from executor.batching import deal
from executor.records import Call, Finding, Row, Sample, Visit
from executor.result import StepReport
from ir.graph import Op, Rpeg, Stage

Share = tuple[Call, list[list[Row]]]
"""What one rank of a visit is told: how, and its rows by minibatch."""


class Batch:
    """Rows by group and member, from the first sample until the step is reported."""

    def __init__(self, rpeg: Rpeg) -> None:
        self._rpeg = rpeg
        self._rows: dict[int, dict[int, Row]] = defaultdict(dict)

    def add(self, samples: Iterable[Sample]) -> tuple[int, ...]:
        """Take samples in; gives the groups that are whole now."""
        touched = set()
        for sample in samples:
            self._rows[sample.group][sample.member] = Row(sample=sample)
            touched.add(sample.group)
        members = self._rpeg.job.workload.samples_per_prompt
        return tuple(sorted(group for group in touched if len(self._rows[group]) == members))

    def note(self, findings: Iterable[Finding]) -> None:
        """Add what a visit found out."""
        for finding in findings:
            group, member = finding.key
            self._rows[group][member] = _updated(self._rows[group][member], finding)

    def shares(self, stage: Stage, visit: Visit) -> dict[int, Share]:
        """What each rank with rows is told. An update has rows for every rank: its ranks divide the minibatch."""
        updates = Op.UPDATE_ACTOR in stage.ops
        batches = self._minibatches(visit.groups) if updates else [list(visit.groups)]
        hands = [self._deal(groups, stage) for groups in batches]
        sequences = tuple(sum(len(rows) for rows in hand) for hand in hands)
        call = Call(
            ops=stage.ops,
            step=visit.step,
            micro_batch=stage.layout.micro_batch,
            recompute=stage.layout.recompute == "full",
            ranks=stage.layout.ranks,
            minibatch_sequences=sequences if updates else (),
            epochs=self._rpeg.job.workload.epochs,
        )
        shares = {rank: (call, [hand[rank] for hand in hands]) for rank in range(stage.layout.ranks)}
        return {rank: share for rank, share in shares.items() if any(share[1])}

    def _deal(self, groups: Sequence[int], stage: Stage) -> list[list[Row]]:
        rows = [self._prepare(row, stage) for group in groups for row in self._rows[group].values()]
        if Op.ADVANTAGE in stage.ops:
            return [rows]
        hands = deal([row.sample.num_tokens for row in rows], stage.layout.ranks)
        return [[rows[i] for i in hand] for hand in hands]

    def _prepare(self, row: Row, stage: Stage) -> Row:
        """The update's old log-probs are the rollout's where no stage computes them."""
        if Op.UPDATE_ACTOR in stage.ops and self._rpeg.stage_of(Op.OLD_LOGPROB) is None:
            return replace(row, old_logprob=row.sample.rollout_logprob)
        return row

    def _minibatches(self, groups: Sequence[int]) -> list[list[int]]:
        count = self._rpeg.job.workload.minibatches
        size = len(groups) // count
        return [list(groups[i * size : (i + 1) * size]) for i in range(count)]

    def report(self, visit: Visit, *, seconds: float, metrics: dict[str, float]) -> StepReport:
        """Close a step: what was trained on, which is then forgotten."""
        rows = [row for group in visit.groups for row in self._rows.pop(group).values()]
        return StepReport(
            step=visit.step,
            seconds=seconds,
            reward=_mean(row.reward for row in rows),
            response_tokens=_mean(len(row.sample.response) for row in rows),
            staleness=tuple(visit.step - row.sample.version for row in rows),
            metrics=metrics,
        )


def _updated(row: Row, finding: Finding) -> Row:
    fields = ("reward", "reference_logprob", "old_logprob", "advantage")
    found = {name: getattr(finding, name) for name in fields if getattr(finding, name) is not None}
    return replace(row, **found)


def _mean(values: Iterable[float | None]) -> float:
    return float(np.mean([value for value in values if value is not None]))
