"""Plans as a structure of arrays: what rules and the model compute on, one plan or a million alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ir.plan import Fusions, Generate, LogProb, Plan, Pool, Update

Column = NDArray[np.int64]

COLOCATED_POOL = "all"
GENERATE_POOL = "rollout"
TRAIN_POOL = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBatch:
    """One int64 column of equal length n per degree of freedom of a plan; booleans are 0 and 1."""

    colocated: Column
    generate_devices: Column
    train_devices: Column
    """Equal to `generate_devices` where colocated: it is the same pool."""
    staleness: Column
    concurrency: Column
    logprob_micro_batch: Column
    dp: Column
    update_micro_batch: Column
    recompute: Column
    rollout_logprob: Column
    fold_old_logprob: Column
    merge_logprobs: Column
    stream: Column

    def __len__(self) -> int:
        return len(self.colocated)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> PlanBatch:
        """The given rows."""
        return PlanBatch(**{name: getattr(self, name)[rows] for name in COLUMNS})

    def plan(self, row: int) -> Plan:
        """One row as a plan, with the canonical pool names."""
        value = {name: int(getattr(self, name)[row]) for name in COLUMNS}
        colocated = bool(value["colocated"])
        rollout, train = (COLOCATED_POOL,) * 2 if colocated else (GENERATE_POOL, TRAIN_POOL)
        pools = [Pool(name=rollout, devices=value["generate_devices"])]
        if not colocated:
            pools.append(Pool(name=train, devices=value["train_devices"]))
        return Plan(
            pools=tuple(pools),
            generate=Generate(pool=rollout, concurrency=value["concurrency"]),
            logprob=LogProb(pool=train, micro_batch=value["logprob_micro_batch"]),
            update=Update(
                pool=train,
                dp=value["dp"],
                micro_batch=value["update_micro_batch"],
                recompute=bool(value["recompute"]),
            ),
            fusions=Fusions(
                rollout_logprob=bool(value["rollout_logprob"]),
                fold_old_logprob=bool(value["fold_old_logprob"]),
                merge_logprobs=bool(value["merge_logprobs"]),
                stream=bool(value["stream"]),
            ),
            staleness=value["staleness"],
        )


COLUMNS = tuple(field.name for field in fields(PlanBatch))


def batch_of(plans: Sequence[Plan]) -> PlanBatch:
    """The given plans as arrays."""
    rows = [_row(plan) for plan in plans]
    return PlanBatch(**{name: np.array([row[name] for row in rows], dtype=np.int64) for name in COLUMNS})


def _row(plan: Plan) -> dict[str, int]:
    return {
        "colocated": plan.colocated,
        "generate_devices": plan.devices_of(plan.generate.pool),
        "train_devices": plan.devices_of(plan.update.pool),
        "staleness": plan.staleness,
        "concurrency": plan.generate.concurrency,
        "logprob_micro_batch": plan.logprob.micro_batch,
        "dp": plan.update.dp,
        "update_micro_batch": plan.update.micro_batch,
        "recompute": plan.update.recompute,
        "rollout_logprob": plan.fusions.rollout_logprob,
        "fold_old_logprob": plan.fusions.fold_old_logprob,
        "merge_logprobs": plan.fusions.merge_logprobs,
        "stream": plan.fusions.stream,
    }
