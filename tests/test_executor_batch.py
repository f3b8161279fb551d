"""What each rank of a visit is told: the stage's own layout, and rows for all."""

from __future__ import annotations

import build
import msgspec
import numpy as np
import pytest

from executor.batch import Batch
from executor.records import Call, Finding, Sample, Visit
from executor.result import by_key
from ir.graph import Op
from ir.lower import lower
from ir.plan import Pass, Plan, Update

GROUPS = (0, 1, 2, 3)

APART = msgspec.structs.replace(
    build.plan(colocated=True, train=2),
    reference_logprob=Pass(pool="all", micro_batch=8),
    old_logprob=Pass(pool="all", micro_batch=2),
    update_actor=Update(pool="all", dp=1, micro_batch=5, recompute="full"),
)
MERGED = msgspec.structs.replace(
    build.plan(colocated=True, train=2, dp=2, merge_logprobs=True),
    reference_logprob=Pass(pool="all", micro_batch=8),
)
FOLDED = build.plan(colocated=True, train=2, dp=2, fold_old_logprob=True)


def full_batch(plan: Plan) -> Batch:
    batch = Batch(lower(build.job(), plan))
    zeros = np.zeros(3, dtype=np.float32)
    tokens = np.ones(3, dtype=np.int64)
    batch.add(
        Sample(group=g, member=m, prompt=tokens, response=tokens, rollout_logprob=zeros - g, version=0)
        for g in GROUPS
        for m in range(4)
    )
    return batch


def calls(plan: Plan, op: Op) -> list[tuple[Call, int]]:
    """(call, rows) of every rank that visits the stage of `op`."""
    stage = lower(build.job(), plan).stage(op)
    shares = full_batch(plan).shares(stage, Visit(ops=stage.ops, step=0, groups=GROUPS))
    return [(call, sum(len(rows) for rows in minibatches)) for call, minibatches in shares.values()]


@pytest.mark.parametrize(
    ("plan", "op", "micro_batch", "recompute", "rows"),
    [
        (APART, Op.REFERENCE_LOGPROB, 8, False, [8, 8]),
        (APART, Op.OLD_LOGPROB, 2, False, [8, 8]),
        (APART, Op.UPDATE_ACTOR, 5, True, [16]),
        (APART, Op.ADVANTAGE, 0, False, [16]),
        (APART, Op.REWARD, 0, False, [8, 8]),
        (MERGED, Op.OLD_LOGPROB, 8, False, [8, 8]),
        (MERGED, Op.UPDATE_ACTOR, 4, False, [8, 8]),
        (FOLDED, Op.OLD_LOGPROB, 4, False, [8, 8]),
    ],
)
def test_a_visit_is_done_by_its_stages_own_layout(
    plan: Plan, op: Op, micro_batch: int, recompute: bool, rows: list[int]
) -> None:
    told = calls(plan, op)
    assert [call.micro_batch for call, _ in told] == [micro_batch] * len(rows)
    assert [call.recompute for call, _ in told] == [recompute] * len(rows)
    assert [count for _, count in told] == rows


def test_ops_of_a_merged_visit_share_one_call() -> None:
    assert calls(MERGED, Op.OLD_LOGPROB)[0][0].ops == (Op.REFERENCE_LOGPROB, Op.OLD_LOGPROB)
    assert calls(FOLDED, Op.UPDATE_ACTOR)[0][0].ops == (Op.OLD_LOGPROB, Op.UPDATE_ACTOR)


@pytest.mark.parametrize(("fusion", "expected"), [("rollout_logprob", -2.0), ("fold_old_logprob", None), ("", 7.0)])
def test_old_logprobs_come_from_where_the_plan_says(fusion: str, expected: float | None) -> None:
    plan = build.plan(colocated=True, **({fusion: True} if fusion else {}))
    batch = full_batch(plan)
    if not fusion:
        batch.note(Finding(key=(g, m), old_logprob=np.full(3, 7.0, np.float32)) for g in GROUPS for m in range(4))
    stage = lower(build.job(), plan).stage(Op.UPDATE_ACTOR)
    ((_, ((*rows,),)),) = batch.shares(stage, Visit(ops=stage.ops, step=0, groups=(2,))).values()
    assert [None if row.old_logprob is None else float(row.old_logprob[0]) for row in rows] == [expected] * 4


def test_stage_seconds_compare_with_and_without_a_fold() -> None:
    seconds = {"generate": 2.0, "old_logprob+update_actor": 1.0, "sync_weights": 0.1}
    assert by_key(lower(build.job(), FOLDED), seconds) == {"generate": 2.0, "update_actor": 1.0, "sync_weights": 0.1}
    merged = {"reference_logprob+old_logprob": 1.5}
    assert by_key(lower(build.job(), MERGED), merged) == merged
