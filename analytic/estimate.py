"""The one entry of the model: prices a batch of plans on a cluster.

Plans of one structure (placement and fusions) lower to RPEGs that differ only in
numbers, so each structure is lowered once and its plans are priced together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic import stages
from analytic.compose import Terms, is_streamed, num_visits, period
from analytic.memory import Memory, memory
from ir.batch import COLUMNS, PlanBatch
from ir.cluster import Cluster
from ir.graph import Op, Rpeg
from ir.job import Job
from ir.lower import lower

Float = NDArray[np.float64]
Rows = NDArray[np.intp]

MODEL_VERSION = "1"
"""Changes with every change of the model's numbers."""

STAGES: tuple[str, ...] = (
    Op.GENERATE,
    Op.REWARD,
    Op.REFERENCE_LOGPROB,
    Op.OLD_LOGPROB,
    f"{Op.REFERENCE_LOGPROB}+{Op.OLD_LOGPROB}",
    Op.UPDATE_ACTOR,
    Op.SYNC_WEIGHTS,
)
"""Keys of the stages that a plan may have, the columns of `stage_seconds`. Advantages take no time that counts."""

BLOCK = 1 << 14
"""Plans priced at a time."""

PARALLEL_FROM = 4_000_000
"""Plans from which on worker processes save more than they take to start (some seconds)."""

_STRUCTURE = ("colocated", "rollout_logprob", "fold_old_logprob", "merge_logprobs", "stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What plans cost, one row a plan."""

    batch: PlanBatch
    stage_seconds: Float
    """float64[n, STAGES], busy seconds per step of a stage's slowest device; 0 where a plan has no such stage."""
    latency_ratio: Float
    """float64[n], generation's latency over its busy seconds."""
    memory: Memory
    structures: tuple[Rpeg, ...]
    structure: NDArray[np.intp]
    """intp[n], the plan's structure."""
    call_s: float

    @property
    def step_seconds(self) -> Float:
        """float64[n]."""
        return self.compose(self.stage_seconds, np.arange(len(self.batch)))

    def compose(self, stage_seconds: Float, rows: Rows) -> Float:
        """Step seconds float64[..., m] from stage seconds float64[..., m, STAGES] of the plans `rows` intp[m]:
        the model's composition, open to corrected stage times."""
        cycles = self.cycles(stage_seconds, rows)
        longest: Float = np.maximum.reduce(list(cycles.values()))
        return longest

    def cycles(self, stage_seconds: Float, rows: Rows) -> dict[str, Float]:
        """Seconds per step of each cycle, float64[..., m]; 0 where a plan has no such cycle."""
        result: dict[str, Float] = {}
        for index, rpeg in enumerate(self.structures):
            here = self.structure[rows] == index
            if not here.any():
                continue
            for name, seconds in period(rpeg, self._terms(rpeg, stage_seconds[..., here, :], rows[here])).items():
                whole = result.setdefault(name, np.zeros(stage_seconds.shape[:-1]))
                whole[..., here] = seconds
        return result

    def _terms(self, rpeg: Rpeg, seconds: Float, rows: Rows) -> Terms:
        generate = seconds[..., STAGES.index(Op.GENERATE)]
        streamed = np.zeros_like(generate)
        serial = np.zeros_like(generate)
        for stage in rpeg.stages:
            if stage.key in STAGES and Op.GENERATE not in stage.ops:
                part = seconds[..., STAGES.index(stage.key)]
                if is_streamed(rpeg, stage.key):
                    streamed = streamed + part
                else:
                    serial = serial + part
        return Terms(
            generate=generate,
            latency=generate * self.latency_ratio[rows],
            streamed=streamed,
            serial=serial,
            calls=np.full_like(generate, num_visits(rpeg) * self.call_s),
            staleness=self.batch.staleness[rows],
        )


def estimate(job: Job, batch: PlanBatch, cluster: Cluster) -> Estimate:
    """Price legal plans. Any number of plans goes through the same code."""
    s = stages.setup(job, cluster)
    structures, structure = _structures(job, batch)
    generation = stages.generate(s, batch)
    columns = _columns(s, batch)
    seconds = np.zeros((len(batch), len(STAGES)))
    seconds[:, STAGES.index(Op.GENERATE)] = generation.busy_s
    for index, rpeg in enumerate(structures):
        here = structure == index
        for stage in rpeg.stages:
            if stage.key in STAGES and Op.GENERATE not in stage.ops:
                priced = columns(rpeg, stage.key)
                seconds[here, STAGES.index(stage.key)] = priced[here]
    return Estimate(
        batch=batch,
        stage_seconds=seconds,
        latency_ratio=generation.latency_s / generation.busy_s,
        memory=memory(s, batch),
        structures=structures,
        structure=structure,
        call_s=cluster.call_s,
    )


def estimate_blocks(job: Job, batch: PlanBatch, cluster: Cluster, jobs: int = -1) -> Estimate:
    """As `estimate`, block by block so that temporaries stay in the cache, and on `jobs` cores (-1: all) once
    there are so many plans that starting processes pays."""
    blocks = [np.arange(start, min(start + BLOCK, len(batch))) for start in range(0, len(batch), BLOCK)]
    if len(batch) < PARALLEL_FROM or jobs == 1:
        return concatenate([estimate(job, batch.take(rows), cluster) for rows in blocks])
    from joblib import Parallel, delayed

    priced = Parallel(n_jobs=jobs)(delayed(estimate)(job, batch.take(rows), cluster) for rows in blocks)
    return concatenate(list(priced))


def concatenate(parts: Sequence[Estimate]) -> Estimate:
    """The estimates of consecutive blocks as one."""
    structures = list(dict.fromkeys(_shape(r) for part in parts for r in part.structures))
    example = {_shape(r): r for part in parts for r in part.structures}
    index = [np.array([structures.index(_shape(r)) for r in part.structures])[part.structure] for part in parts]
    memories = [part.memory for part in parts]
    return Estimate(
        batch=PlanBatch(**{n: np.concatenate([getattr(p.batch, n) for p in parts]) for n in COLUMNS}),
        stage_seconds=np.concatenate([part.stage_seconds for part in parts]),
        latency_ratio=np.concatenate([part.latency_ratio for part in parts]),
        memory=Memory(
            rollout=np.concatenate([m.rollout for m in memories]),
            train=np.concatenate([m.train for m in memories]),
            terms={name: np.concatenate([m.terms[name] for m in memories]) for name in memories[0].terms},
        ),
        structures=tuple(example[key] for key in structures),
        structure=np.concatenate(index),
        call_s=parts[0].call_s,
    )


def _shape(rpeg: Rpeg) -> tuple[object, ...]:
    """What plans of one structure have in common."""
    return rpeg.colocated, tuple(stage.ops for stage in rpeg.stages), rpeg.data


def _columns(s: stages.Setup, batch: PlanBatch) -> Callable[[Rpeg, str], Float]:
    """Seconds float64[n] of a stage by RPEG and key, each computed once for the whole batch."""
    known: dict[str, Float] = {}

    def once(name: str, price: Callable[[stages.Setup, PlanBatch], Float]) -> Float:
        if name not in known:
            known[name] = price(s, batch)
        return known[name]

    def column(rpeg: Rpeg, key: str) -> Float:
        match key:
            case Op.REWARD:
                return once("reward", stages.reward)
            case Op.UPDATE_ACTOR:
                return once("update", stages.update)
            case Op.SYNC_WEIGHTS:
                return once("sync", stages.sync)
            case Op.REFERENCE_LOGPROB | Op.OLD_LOGPROB:
                if is_streamed(rpeg, key):
                    return once("streamed", stages.streamed_pass)
                return once("pass", stages.logprob_pass)
        return 2.0 * once("pass", stages.logprob_pass)

    return column


def _structures(job: Job, batch: PlanBatch) -> tuple[tuple[Rpeg, ...], NDArray[np.intp]]:
    """One RPEG per structure, and each plan's."""
    code = np.zeros(len(batch), dtype=np.int64)
    for name in _STRUCTURE:
        code = 2 * code + getattr(batch, name)
    _, first, structure = np.unique(code, return_index=True, return_inverse=True)
    return tuple(lower(job, batch.plan(int(row))) for row in first), structure.reshape(-1)
