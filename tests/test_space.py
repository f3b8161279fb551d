"""The space: counts by hand, axes and what is fixed on them, neighbours, and which rules cut most."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import build
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.backend import Backend
from ir.backends import backend
from ir.batch import COLUMNS, PlanBatch, batch_of
from ir.errors import InputError
from ir.graph import Op
from ir.job import Job
from ir.plan import Plan
from ir.rules import breaches, legal
from ir.setting import Devices, Setting
from ir.workload import Speculation
from space.axes import Axis, Space
from space.build import default_space, parse_fix, pool_sizes, value_text
from space.enumerate import LegalSpace, enumerate_legal, legal_space
from space.neighbours import neighbours, neighbours_in
from space.selectivity import selectivity
from space.tables import section_table

JOBS = build.jobs()
NODE = Devices(count=4, domain=4, fp8=True, host=True)
GUESSING = build.job(speculation=Speculation(acceptance=0.7), max_staleness=2)
DOMAINS = Devices(count=8, domain=4, host=True)


def local(job: Job, devices: int) -> Setting:
    return Setting(job=job, groups=(Devices(count=devices, domain=devices),), backend=backend("local"))


SETTING = local(build.job(), 2)
SPACE = default_space(SETTING)


def test_counts_by_hand() -> None:
    # 16 sequences; micro-batches 4, 8 and 16. On one device: concurrencies 8 and 16, 3 micro-batches of reference and
    # update, recompute or not, and the old log-probs by a pass of 3 micro-batches or by one of 3 fusions.
    one = 2 * 3 * (3 + 3) * (3 * 2)
    alone = local(build.job(), 1)
    assert legal_space(default_space(alone), alone).num_plans == one == 216
    # Colocated on two: 8 sequences a replica leave concurrency 8 and micro-batches 4 and 8 of either pass; the update
    # has dp 1 with 3 micro-batches or dp 2 with 2.
    two = 1 * 2 * (2 + 3) * ((3 + 2) * 2)
    # Apart: all but the merged visit stream or not; up to 16 (1 + k) sequences in flight for k = 0..4.
    apart = (2 + 3 + 3 + 4 + 4) * 3 * (2 * 3 + 2 + 2 + 1) * (3 * 2)
    found = enumerate_legal(SPACE, SETTING)
    assert len(found.batch) == one + two + apart == 3484
    colocated = found.batch["place.actor"] == 0
    assert [int((colocated & (found.batch["devices.rollout"] == n)).sum()) for n in (1, 2)] == [one, two]


# Axes


def test_axes_are_columns_with_ascending_values() -> None:
    for job in JOBS.values():
        space = default_space(Setting(job=job, groups=(NODE, NODE)))
        assert [axis.name for axis in space.axes] == sorted((a.name for a in space.axes), key=COLUMNS.index)
        assert all(list(axis.values) == sorted(set(axis.values)) and len(axis.values) > 1 for axis in space.axes)
        assert not {axis.name for axis in space.axes} & set(space.constants)
    labels = {axis.name for axis in SPACE.axes if not axis.ordered}
    assert labels == {
        "in_flight", "sync", "place.actor", "place.reference", "fusions.rollout_logprob", "fusions.fold_old_logprob",
        "fusions.merge_logprobs", "fusions.stream", "update_actor.recompute",
    }  # fmt: skip


def test_a_space_counts_its_combinations() -> None:
    tiny = Space(
        axes=(Axis(name="staleness", values=(0, 1, 2), ordered=True), Axis(name="sync", values=(1, 3), ordered=False)),
        constants={"devices.rollout": 1},
    )
    assert tiny.num_combinations == 6
    assert (tiny["staleness"], tiny["devices.rollout"], tiny["generate.tp"]) == ((0, 1, 2), (1,), (0,))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (build.plan(concurrency=12), r"axis generate.concurrency: must be one of [8, 16, 32, 64], got 12"),
        (build.plan(micro_batch=32), r"axis update_actor.micro_batch: must be one of [4, 8, 16], got 32"),
        (build.full_plan(build.job(), change={"generate": {"tp": 2}}), "axis generate.tp: must be 1 in this space, got 2"),
        (
            build.full_plan(build.job(), flags=("reward_with_generation",)),
            "axis fusions.reward_with_generation: must be 0 in this space, got 1",
        ),
    ],
)  # fmt: skip
def test_a_value_off_its_axis_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(InputError) as caught:
        SPACE.encode(batch_of([plan]))
    assert str(caught.value) == message


def test_values_that_only_the_backend_has_are_considered() -> None:
    own = Backend(name="own", what="an engine", values={"generate.prefill_tokens": (4096,)})
    found = default_space(Setting(job=JOBS["grpo"], groups=(NODE,), backend=own))
    assert found.constants["generate.prefill_tokens"] == 4096


def test_state_is_divided_among_all_or_in_each_domain() -> None:
    """A domain has 4 devices: 4 ranks of one device fill it, or 2 of two."""
    setting = Setting(job=JOBS["grpo"], groups=(DOMAINS,))
    assert default_space(setting)["update_actor.shard"] == (0, 2, 4)
    assert default_space(Setting(job=JOBS["grpo"], groups=(NODE,)))["update_actor.shard"] == (0,), "a single domain"
    with_megatron = Setting(job=JOBS["grpo"], groups=(DOMAINS,), backend=backend("megatron"))
    assert default_space(with_megatron)["update_actor.shard"] == (0,)
    table = section_table(default_space(setting), setting, Op.UPDATE_ACTOR)
    columns = {name: table.rows[:, i] for i, name in enumerate(table.fields)}
    grouped = columns["shard"] > 0
    found = {
        tuple(int(columns[name][row]) for name in ("tp", "shard", "zero")) for row in np.flatnonzero(grouped).tolist()
    }
    assert found == {(1, 4, 2), (1, 4, 3), (2, 2, 2), (2, 2, 3)}
    assert (columns["dp"] * columns["cp"])[grouped].min() == 4


def test_guesses_are_an_axis_where_the_job_says_how_often_they_are_right() -> None:
    assert default_space(Setting(job=GUESSING, groups=(NODE,)))["generate.draft_tokens"] == (0, 1, 2, 4)
    assert default_space(Setting(job=JOBS["grpo"], groups=(NODE,)))["generate.draft_tokens"] == (0,)
    assert default_space(local(GUESSING, 2))["generate.draft_tokens"] == (0,), "this project's engine guesses nothing"


def test_zero_bubble_schedules_are_of_plain_pipelines() -> None:
    setting = Setting(job=JOBS["grpo"], groups=(NODE,))
    table = section_table(default_space(setting), setting, Op.UPDATE_ACTOR)
    columns = {name: table.rows[:, i] for i, name in enumerate(table.fields)}
    piped = (columns["pp"] > 1) & (columns["vpp"] == 1)
    assert set(columns["pp"].tolist()) == {1, 2}
    assert (columns["schedule"] == 1).sum() == ((columns["schedule"] == 0) & piped).sum() > 0
    assert not ((columns["schedule"] == 1) & ~piped).any()
    for name in ("local", "torch", "deepspeed", "megatron"):
        kept = Setting(job=JOBS["grpo"], groups=(NODE,), backend=backend(name))
        assert default_space(kept)["update_actor.schedule"] == (0,)


SPACES: dict[str, LegalSpace] = {
    "local": legal_space(SPACE, SETTING),
    **{kind: legal_space(default_space(s), s) for kind, s in ((k, Setting(job=j, groups=(NODE,))) for k, j in JOBS.items())},
    "two domains": legal_space(default_space(d := Setting(job=JOBS["grpo"], groups=(DOMAINS,))), d),
    "guesses": legal_space(default_space(g := Setting(job=GUESSING, groups=(NODE,), backend=backend("torch"))), g),
    "two groups": legal_space(default_space(s := Setting(job=JOBS["ppo"], groups=(NODE, NODE))), s),
    "megatron": legal_space(default_space(m := Setting(job=JOBS["grpo"], groups=(NODE,), backend=backend("megatron"))), m),
}  # fmt: skip
SAMPLES = {name: legal.sample(100, np.random.default_rng(11)) for name, legal in SPACES.items()}


@given(name=st.sampled_from(sorted(SPACES)), row=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_plans_and_levels_are_a_bijection(name: str, row: int) -> None:
    space, plan = SPACES[name].space, SAMPLES[name].take(np.array([row]))
    decoded = space.decode(space.encode(plan))
    assert decoded.plan(0) == plan.plan(0)
    assert all(np.array_equal(decoded[column], plan[column]) for column in COLUMNS)
    assert np.array_equal(space.encode(batch_of([plan.plan(0)])), space.encode(plan))


@given(data=st.data(), name=st.sampled_from(["local", "grpo", "ppo"]))
@settings(max_examples=100, deadline=None)
def test_any_levels_decode_to_what_encodes_as_the_active_ones(data: st.DataObject, name: str) -> None:
    space = SPACES[name].space
    levels = np.array([[data.draw(st.integers(0, len(axis.values) - 1)) for axis in space.axes]])
    batch = space.decode(levels)
    active = np.array([[bool(axis.active(batch)[0]) for axis in space.axes]])
    assert np.array_equal(space.encode(batch), np.where(active, levels, 0))


# What is fixed


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("generate.tp=2", ("generate.tp", 2)),
        ("update_actor.recompute=full", ("update_actor.recompute", 2)),
        ("place.actor=rollout", ("place.actor", 0)),
        ("fusions.stream=true", ("fusions.stream", 1)),
        ("in_flight=false", ("in_flight", 0)),
        ("sync=p2p", ("sync", 2)),
        ("sync=delta-disk", ("sync", 5)),
        ("update_actor.schedule=zero-bubble", ("update_actor.schedule", 1)),
        ("staleness=0", ("staleness", 0)),
    ],
)
def test_a_fix_is_read_and_written(text: str, fixed: tuple[str, int]) -> None:
    assert parse_fix(text) == fixed
    assert f"{fixed[0]}={value_text(*fixed)}" == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("generate.tp", "fix generate.tp: must be AXIS=VALUE with an axis that `space` prints"),
        ("generate.cp=2", "fix generate.cp=2: must be AXIS=VALUE with an axis that `space` prints"),
        ("generate.tp=two", "fix generate.tp: must be a whole number, got 'two'"),
        ("generate.tp=-1", "fix generate.tp: must be a whole number, got '-1'"),
        ("generate.tp=0", "fix generate.tp: must be a value that a plan may have (Expected `int` >= 1), got 0"),
        ("values.zero=2", "fix values.zero: must be a value that a plan may have (Invalid enum value 2), got 2"),
        ("devices.actor=0", "fix devices.actor: must be a value that a plan may have (Expected `int` >= 1), got 0"),
        ("sync=pigeon", "fix sync: must be reshard or broadcast or p2p or disk or delta or delta-disk, got 'pigeon'"),
        ("fusions.stream=1", "fix fusions.stream: must be false or true, got '1'"),
    ],
)
def test_a_wrong_fix_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_fix(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ({"values.tp": 1}, "fix values.tp: must be an axis of this job's plans, got values.tp"),
        ({"generate.tp": 2}, "axis generate.tp: must have a value that the job and the backend allow, got ['2']"),
        ({"staleness": 5}, "axis staleness: must have a value that the job and the backend allow, got ['5']"),
        ({"sync": 3}, "axis sync: must have a value that the job and the backend allow, got ['disk']"),
        (
            {"fusions.merge_logprobs": 1, "fusions.stream": 1},
            "axis fusions.merge_logprobs: must have a value that the job and the backend allow, got ['true']",
        ),
    ],
)
def test_a_fix_that_leaves_nothing_is_refused(fix: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        default_space(SETTING, fix)
    assert str(caught.value) == message


def test_fixed_columns_hold_in_every_plan() -> None:
    fix = {"generate.concurrency": 12, "fusions.fold_old_logprob": 1, "devices.actor": 1}
    space = default_space(SETTING, fix)
    found = enumerate_legal(space, SETTING).batch
    assert all((found[name] == value).all() for name, value in fix.items())
    assert not found["fusions.rollout_logprob"].any() and not found["fusions.merge_logprobs"].any()
    # Colocated on one device, or apart with 5 bounds, streaming or not; 3 micro-batches of the reference, 3 x 2 updates.
    assert len(found) == (1 + 5 * 2) * 3 * (3 * 2)


def test_what_is_ruled_out_is_ruled_out_to_the_end() -> None:
    # The backend leaves no token budgets, so one micro-batch must be above 0, although it is asked about first.
    assert SPACE["update_actor.micro_tokens"] == (0,)
    assert SPACE["update_actor.micro_batch"] == (4, 8, 16)


@pytest.mark.parametrize(
    ("counts", "limits", "sizes"),
    [
        ((3,), {}, (1, 2, 3)),
        ((8,), {}, (1, 2, 3, 4, 5, 6, 7, 8)),
        ((2, 4), {}, (1, 2, 3, 4)),
        ((16,), {}, (1, 2, 3, 4, 6, 8, 10, 12, 13, 14, 16)),
        ((16,), {"devices": (5, 40)}, (1, 2, 3, 4, 5, 6, 8, 10, 12, 13, 14, 16)),
    ],
)
def test_pool_sizes(counts: tuple[int, ...], limits: dict[str, Any], sizes: tuple[int, ...]) -> None:
    groups = tuple(Devices(count=n, domain=4) for n in counts)
    assert pool_sizes(Setting(job=build.job(**limits), groups=groups)) == sizes


# Neighbours


def differing(one: PlanBatch, other: PlanBatch) -> set[str]:
    return {name for name in COLUMNS if one[name][0] != other[name][0]}


@pytest.mark.parametrize("name", sorted(SPACES))
def test_neighbours_are_legal_distinct_and_not_the_plan(name: str) -> None:
    legal_plans = SPACES[name]
    for row in range(8):
        plan = SAMPLES[name].take(np.array([row]))
        near = neighbours_in(legal_plans, plan)
        levels = legal_plans.space.encode(near)
        assert legal(near, legal_plans.setting).all()
        assert len(np.unique(levels, axis=0)) == len(near) > 5
        assert not (levels == legal_plans.space.encode(plan)).all(axis=1).any()
        assert all(batch_of([near.plan(i)]).plan(0) == near.plan(i) for i in range(len(near)))


def test_neighbours_of_a_plan_by_hand() -> None:
    plan = build.plan(concurrency=16, logprob_micro_batch=8, micro_batch=8, staleness=1)
    found = neighbours(SPACE, SETTING, batch_of([plan]))
    assert {found.plan(i).describe() for i in range(len(found))} == {
        # one field of a layout
        "rollout 1 + train 1 k=1~ broadcast gen[x8] ref[mb8] old[mb8] actor[mb8]",
        "rollout 1 + train 1 k=1~ broadcast gen[x32] ref[mb8] old[mb8] actor[mb8]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb16] old[mb8] actor[mb8]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] old[mb16] actor[mb8]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] old[mb8] actor[mb16]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] old[mb8] actor[mb8 re-full]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb4] old[mb8] actor[mb8]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] old[mb4] actor[mb8]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] old[mb8] actor[mb4]",
        # one part of the structure, with what must follow it
        "rollout 1 + train 1 k=0 broadcast gen[x16] ref[mb8] old[mb8] actor[mb8]",
        "rollout 1 + train 1 k=2~ broadcast gen[x16] ref[mb8] old[mb8] actor[mb8]",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] old[mb8] actor[mb8] stream",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] actor[mb8] rollout-logprob",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] actor[mb8] fold",
        "rollout 1 + train 1 k=1~ broadcast gen[x16] ref[mb8] actor[mb8] merge",
        # the actor joins the pool that generates, which keeps its size
        "all 1 k=0 gen[x16] ref[mb8] old[mb8] actor[mb8]",
    }


def test_a_split_shares_the_devices_and_a_section_that_appears_is_like_others() -> None:
    setting = Setting(job=JOBS["grpo"], groups=(replace(NODE, count=8),))
    space = default_space(setting)
    change = {
        "reference_logprob": {"tp": 2, "micro_batch": 8},
        "update_actor": {"dp": 4},
        "generate": {"concurrency": 8},
    }
    plan = build.full_plan(JOBS["grpo"], pools={"all": 4}, flags=("rollout_logprob",), change=change)
    plan = msgspec.structs.replace(plan, update_actor=msgspec.structs.replace(plan.update_actor, micro_batch=4))
    found = neighbours(space, setting, batch_of([plan]))
    plans = [found.plan(i) for i in range(len(found))]
    apart = [p for p in plans if len(p.pools) == 2 and p.generate.pool != p.update_actor.pool]
    assert {(p.pools[0].devices, p.pools[1].devices) for p in apart} == {(2, 2)}
    assert {p.sync for p in apart} == {"broadcast", "p2p", "disk", "delta"}
    passes = [p.old_logprob for p in plans if p.old_logprob is not None and len(p.pools) == 1]
    assert {(p.tp, p.micro_batch) for p in passes} == {(2, 8)}


def test_a_pool_grows_at_anothers_cost_where_the_job_fixes_their_sum() -> None:
    setting = local(build.job(devices=3), 3)
    plan = build.plan(rollout=1, train=2, dp=2, micro_batch=8, logprob_micro_batch=8)
    found = neighbours(default_space(setting), setting, batch_of([plan]))
    sizes = {tuple(pool.devices for pool in found.plan(i).pools) for i in range(len(found))}
    assert sizes == {(1, 2), (2, 1), (3,)}


@given(name=st.sampled_from(sorted(SPACES)), row=st.integers(0, 99), data=st.data())
@settings(max_examples=60, deadline=None)
def test_steps_along_an_ordered_axis_go_both_ways(name: str, row: int, data: st.DataObject) -> None:
    legal_plans, plan = SPACES[name], SAMPLES[name].take(np.array([row]))
    ordered = {axis.name for axis in legal_plans.space.axes if axis.ordered}
    near = neighbours_in(legal_plans, plan)
    pure = [i for i in range(len(near)) if len(d := differing(plan, near.take(np.array([i])))) == 1 and d <= ordered]
    if pure:
        other = near.take(np.array([data.draw(st.sampled_from(pure))]))
        back = legal_plans.space.encode(neighbours_in(legal_plans, other))
        assert (back == legal_plans.space.encode(plan)).all(axis=1).any()


CONNECTED: dict[str, tuple[Setting, tuple[str, ...]]] = {
    "grpo": (
        local(build.job(max_staleness=1), 2),
        ("place.", "devices.", "sync", "staleness", "in_flight", "fusions.", "generate.concurrency", "update_actor.dp"),
    ),
    "fixed sum": (
        local(build.job(max_staleness=1, devices=3), 3),
        ("place.", "devices.", "sync", "staleness", "in_flight", "fusions.", "update_actor.dp", "update_actor.micro"),
    ),
    "ppo": (
        Setting(job=JOBS["ppo"], groups=(replace(NODE, count=2),)),
        ("place.", "devices.", "sync", "sharing.", "fusions.interleave", "update_actor.dp", "update_critic.dp"),
    ),
    "layouts": (
        Setting(job=JOBS["grpo"], groups=(NODE,)),
        ("place.actor", "devices.actor", "sync", "update_actor.dp", "update_actor.tp", "update_actor.pp", "update_actor.micro"),
    ),
    "two groups": (
        Setting(job=JOBS["grpo"], groups=(replace(NODE, count=1), replace(NODE, count=2))),
        ("place.", "group.", "devices.", "sync", "update_actor.dp"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONNECTED)
def test_every_plan_is_reached_from_any_other(name: str) -> None:
    setting, free = CONNECTED[name]
    legal_plans = legal_space(default_space(setting, build.pinned(setting, *free)), setting)
    listed = enumerate_legal(legal_plans.space, setting)
    number = {levels.tobytes(): i for i, levels in enumerate(listed.levels)}
    edges = [
        [number[levels.tobytes()] for levels in legal_plans.space.encode(neighbours_in(legal_plans, one))]
        for one in (listed.batch.take(np.array([i])) for i in range(len(listed.batch)))
    ]
    backwards: list[list[int]] = [[] for _ in edges]
    for source, targets in enumerate(edges):
        for target in targets:
            backwards[target].append(source)
    # Strongly connected: the first plan reaches all, and all reach it.
    assert len(reached(edges)) == len(reached(backwards)) == len(edges)
    assert len(edges) > 30


def reached(edges: list[list[int]]) -> set[int]:
    seen, waiting = {0}, deque([0])
    while waiting:
        new = set(edges[waiting.popleft()]) - seen
        seen |= new
        waiting.extend(new)
    return seen


def test_a_plan_of_another_space_has_no_neighbours() -> None:
    plan = build.plan(concurrency=16, logprob_micro_batch=8, micro_batch=8, staleness=1)
    with pytest.raises(InputError) as caught:
        neighbours(default_space(SETTING, {"staleness": 0}), SETTING, batch_of([plan]))
    assert str(caught.value) == "neighbours: must be of a legal plan of the space"


# Selectivity


def test_the_share_that_a_rule_refuses_by_hand() -> None:
    found = dict(selectivity(SPACE, SETTING))
    # Two of three fusions or all three: 4 of 8 combinations. The actor's own pool, half of all, wants a broadcast.
    assert found["one-source-of-old-logprobs"] == pytest.approx(1 / 2, abs=0.015)
    assert found["weights-reshard-within-a-pool"] == pytest.approx(1 / 2, abs=0.015)
    # Stale in 4 of 5, colocated in half.
    assert found["staleness-needs-own-pool"] == pytest.approx(2 / 5, abs=0.015)
    assert found["staleness-within-limit"] == 0
    # Apart on 2 devices; the reference joins either or leads a third pool, a third each.
    # Two pools fit as 1 + 1 only: all but 1/4; three never; colocated with a reference of its own 3/4.
    assert found["pools-fit-the-devices"] == pytest.approx(
        1 / 2 * (1 / 2 * 0 + 1 / 2 * 3 / 4) + 1 / 2 * (2 / 3 * 3 / 4 + 1 / 3), abs=0.015
    )


@pytest.mark.parametrize("name", ["grpo", "ppo", "two groups"])
def test_selectivity_is_sorted_repeatable_and_of_every_rule(name: str) -> None:
    space, setting = SPACES[name].space, SPACES[name].setting
    found = selectivity(space, setting, samples=2000, seed=3)
    assert found == selectivity(space, setting, samples=2000, seed=3)
    assert [share for _, share in found] == sorted((share for _, share in found), reverse=True)
    rules = {breach.name for breach in breaches(SAMPLES[name], setting)}
    assert {rule for rule, _ in found} == rules
    assert all(0 <= share <= 1 for _, share in found) and found[0][1] > 0.5
