"""Lowering and moves: what an RPEG looks like, and what holds for every legal plan."""

from __future__ import annotations

import build
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.batch import batch_of
from ir.errors import InputError
from ir.graph import Data, Op, Rpeg
from ir.lower import lower
from ir.plan import Plan
from ir.rules import RULES, Setting, check, legal
from space.axes import default_space
from space.enumerate import enumerate_legal

JOB = build.job()
SETTING = Setting(job=JOB, devices=3)
LEGAL = enumerate_legal(default_space(JOB, 3), SETTING)


def names(rpeg: Rpeg) -> list[str]:
    return [stage.name for stage in rpeg.stages]


BASE = ["generate", "reward", "reference_logprob", "old_logprob", "advantage", "update_actor", "sync_weights"]


@pytest.mark.parametrize(
    ("fusion", "stages"),
    [
        ({}, BASE),
        ({"rollout_logprob": True}, [n for n in BASE if n != "old_logprob"]),
        (
            {"fold_old_logprob": True},
            ["generate", "reward", "reference_logprob", "advantage", "old_logprob+update_actor", "sync_weights"],
        ),
        (
            {"merge_logprobs": True},
            ["generate", "reward", "reference_logprob+old_logprob", "advantage", "update_actor", "sync_weights"],
        ),
    ],
)
def test_fusions_change_the_stages(fusion: dict[str, bool], stages: list[str]) -> None:
    assert names(lower(JOB, build.plan(**fusion))) == stages


def test_without_a_kl_term_there_is_no_reference() -> None:
    assert names(lower(build.job(kl_coefficient=0.0), build.plan())) == [n for n in BASE if n != "reference_logprob"]


def test_streaming_marks_the_edges_into_reward_and_reference() -> None:
    rpeg = lower(JOB, build.plan(stream=True))
    assert rpeg.streamed == {Op.REWARD, Op.REFERENCE_LOGPROB}
    assert lower(JOB, build.plan()).streamed == frozenset()


def test_placement_and_layouts_follow_the_plan() -> None:
    rpeg = lower(JOB, build.plan(rollout=2, train=3, dp=2, micro_batch=8, recompute=True, concurrency=16, staleness=3))
    assert [(p.name, p.device_ids) for p in rpeg.pools] == [("rollout", (0, 1)), ("train", (2, 3, 4))]
    generate, update = rpeg.stage(Op.GENERATE), rpeg.stage(Op.UPDATE_ACTOR)
    assert (generate.pool, generate.layout.ranks, generate.layout.micro_batch) == ("rollout", 2, 16)
    assert (update.pool, update.layout.ranks, update.layout.micro_batch, update.layout.recompute) == (
        "train",
        2,
        8,
        True,
    )
    assert rpeg.stage(Op.REFERENCE_LOGPROB).layout.ranks == 3
    assert rpeg.staleness == 3
    assert not rpeg.colocated


legal_plans = st.integers(0, len(LEGAL.batch) - 1).map(LEGAL.batch.plan)


@given(plan=legal_plans)
@settings(max_examples=150, deadline=None)
def test_data_reaches_every_consumer_and_state_keeps_its_bound(plan: Plan) -> None:
    rpeg = lower(JOB, plan)
    order = {op: (i, j) for i, stage in enumerate(rpeg.stages) for j, op in enumerate(stage.ops)}
    for edge in rpeg.data:
        assert order[edge.source] < order[edge.target], "data flows forward"
    into_update = {edge.data for edge in rpeg.data if edge.target is Op.UPDATE_ACTOR}
    assert {Data.TOKENS, Data.ROLLOUT_LOGPROB, Data.ADVANTAGE, Data.REFERENCE_LOGPROB} <= into_update
    computed = Data.OLD_LOGPROB in into_update
    folded = Op.OLD_LOGPROB in rpeg.stage(Op.UPDATE_ACTOR).ops
    assert computed + folded + plan.fusions.rollout_logprob == 1, "exactly one source of old log-probs"
    bounds = {edge.target: edge.staleness for edge in rpeg.state}
    assert bounds[Op.GENERATE] == plan.staleness
    assert all(bound == 0 for target, bound in bounds.items() if target is not Op.GENERATE)
    pools = {pool.name for pool in rpeg.pools}
    assert all(stage.pool in pools and stage.layout.ranks <= rpeg.pool(stage.pool).devices for stage in rpeg.stages)
    ids = [device for pool in rpeg.pools for device in pool.device_ids]
    assert ids == list(range(len(ids)))


@given(plan=legal_plans)
@settings(max_examples=100, deadline=None)
def test_arrays_and_plans_are_the_same_thing(plan: Plan) -> None:
    assert batch_of([plan]).plan(0) == plan
    check(plan, SETTING)


# One plan per rule that breaks it, and the only rule it breaks.
BROKEN: dict[str, tuple[Plan, dict[str, object]]] = {
    "pools-fit-the-devices": (build.plan(rollout=2, train=2), {}),
    "staleness-within-limit": (build.plan(staleness=3), {"max_staleness": 2}),
    "staleness-needs-own-pool": (build.plan(colocated=True, staleness=1), {}),
    "one-source-of-old-logprobs": (build.plan(rollout_logprob=True, fold_old_logprob=True), {}),
    "fold-needs-a-single-update": (build.plan(fold_old_logprob=True), {"epochs": 2}),
    "merge-needs-a-reference": (build.plan(merge_logprobs=True), {"kl_coefficient": 0.0}),
    "stream-needs-own-pool": (build.plan(colocated=True, stream=True), {}),
    "stream-excludes-merge": (build.plan(stream=True, merge_logprobs=True), {}),
    "dp-fits-the-pool": (build.plan(dp=2), {}),
    "dp-divides-the-minibatch": (build.plan(colocated=True, train=3, dp=3, concurrency=4), {}),
    "update-micro-batch-fits": (build.plan(micro_batch=32), {}),
    "logprob-micro-batch-fits": (build.plan(logprob_micro_batch=32), {}),
    "concurrency-fits": (build.plan(concurrency=32), {}),
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_every_rule_is_broken_by_a_plan_that_breaks_no_other(name: str) -> None:
    if name == "a-shared-pool-has-one-size":
        # A plan cannot break it: it names its pool once. Arrays can.
        batch = batch_of([build.plan(colocated=True)])
        object.__setattr__(batch, "train_devices", np.array([2]))
        setting = SETTING
    else:
        plan, changes = BROKEN[name]
        setting = Setting(job=build.job(**changes), devices=3)
        batch = batch_of([plan])
        with pytest.raises(InputError) as caught:
            check(plan, setting, where="plan.toml")
        assert (
            f"(rule {name})" in str(caught.value)
            and "plan.toml: " in str(caught.value)
            and ", got " in str(caught.value)
        )
    assert [rule.name for rule in RULES if not rule.holds(batch, setting)[0]] == [name]
    assert not legal(batch, setting)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprob": {"pool": "rollout", "micro_batch": 4}}, "logprobs-run-where-the-actor-trains"),
        ({"generate": {"pool": "gpu", "concurrency": 4}}, "generate.pool: must be one of"),
        (
            {"pools": [{"name": "rollout", "devices": 1}] * 2 + [{"name": "train", "devices": 1}]},
            "pools-are-named-once",
        ),
        ({"pools": [{"name": n, "devices": 1} for n in ("rollout", "train", "spare")]}, "every pool must run a stage"),
    ],
)
def test_pools_must_make_sense(change: dict[str, object], message: str) -> None:
    import msgspec

    from ir.documents import plain

    plan = msgspec.convert(plain(build.plan()) | change, Plan)
    with pytest.raises(InputError) as caught:
        check(plan, SETTING)
    assert message in str(caught.value)
