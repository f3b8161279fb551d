"""The proved optimum against the price of every legal plan."""

from __future__ import annotations

from dataclasses import replace

import build
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytic.bounds import devices_of_group
from analytic.estimate import Estimate, estimate_blocks
from analytic.fit import setup
from analytic.money import price_per_step
from analytic.setup import Setup
from ir.batch import ROLES, PlanBatch
from ir.cluster import Cluster, Link
from ir.errors import InputError
from ir.job import Job, Role
from ir.known_models import KNOWN, known_config
from ir.model import ModelShape, Moe, shape_from_config
from ir.rules import setting_of
from ir.systems import load_cluster
from ir.workload import Speculation
from search.cheapest import cheapest
from search.designs import Designs
from search.optimum import FURTHER, optimum
from search.pareto import SLOWEST, front, limits_of, points_of
from search.records import Reached, fits
from search.skyline import skyline, staircase
from search.tables import Tables
from space.build import default_space
from space.enumerate import LegalSpace, enumerate_legal, legal_space

GIB = 1 << 30
PLACES = ("place.", "devices.", "sync", "staleness")


def shape(name: str) -> ModelShape:
    assert name in KNOWN
    return shape_from_config(known_config(name, where=name), where=name)


SMALL, LARGE = shape("Qwen/Qwen2.5-1.5B-Instruct"), shape("Qwen/Qwen2.5-7B-Instruct")
MOE = replace(build.SHAPE, layers=8, hidden=1024, ffn=2048, moe=Moe(experts=4, experts_per_token=2, ffn=1024))
LONG = {"max_prompt_tokens": 512, "max_response_tokens": 1024, "prompts_per_step": 32, "samples_per_prompt": 8}


def grpo(model: ModelShape, **changes: object) -> Job:
    return build.job(shape=model, **(LONG | {"max_staleness": 2} | changes))


def ppo(actor: ModelShape, other: ModelShape, **changes: object) -> Job:
    job = build.job(shape=actor, name="ppo", **(LONG | {"max_staleness": 1} | changes))
    return replace(job, others={**job.others, Role.CRITIC: other, Role.REWARD: other})


def shrunk(name: str, devices: int, memory_bytes: int | None = None) -> Cluster:
    """A known cluster of a few devices, with less memory if given."""
    cluster = load_cluster(f"{name}:8")
    group = cluster.groups[0]
    level = msgspec.structs.replace(group.levels[0], size=devices)
    device = msgspec.structs.replace(group.device, memory_bytes=memory_bytes or group.device.memory_bytes)
    group = msgspec.structs.replace(group, levels=(level,), device=device)
    return msgspec.structs.replace(cluster, groups=(group,))


def two_nodes(devices: int) -> Cluster:
    """Two nodes of a few devices each."""
    cluster = load_cluster("dgx-h100:16")
    group = cluster.groups[0]
    levels = tuple(
        msgspec.structs.replace(level, size=size) for level, size in zip(group.levels, (devices, 2), strict=True)
    )
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, levels=levels),))


CASES: dict[str, tuple[Job, Cluster, tuple[str, ...]]] = {
    "cores": (build.job(max_staleness=1), build.cluster(devices=2), (*PLACES, "fusions.", "update_actor.", "generate.c")),
    "cores with little memory": (
        build.job(max_staleness=1),
        build.cluster(devices=3, memory_bytes=422 << 20),
        (*PLACES, "fusions.", "update_actor.m", "update_actor.dp", "update_actor.recompute", "generate.c"),
    ),
    "grpo, tight": (
        grpo(LARGE),
        shrunk("dgx-a100", 4, 78 * GIB),
        (*PLACES, "fusions.", "generate.tp", "update_actor.tp", "update_actor.zero", "update_actor.off", "old_logprob.tp"),
    ),
    "grpo, streamed": (
        grpo(SMALL, max_staleness=1),
        shrunk("dgx-h100", 4),
        (*PLACES, "fusions.", "reference_logprob.micro", "update_actor.tp", "generate.tp"),
    ),
    "grpo, disaggregated": (
        grpo(LARGE, max_staleness=2),
        shrunk("dgx-a100", 6, 180 * GIB),
        ("devices.", "sync", "staleness", "generate.", "update_actor.rec", "update_actor.off", "update_actor.micro_b"),
    ),
    "ppo, colocated and tight": (
        ppo(LARGE, SMALL),
        shrunk("dgx-a100", 2, 160 * GIB),
        ("sharing.", "fusions.m", "fusions.i", "values.", "update_critic.off", "update_critic.zero", "update_actor.off",
         "update_actor.zero", "update_actor.rec"),
    ),
    "ppo, pools": (
        ppo(SMALL, SMALL, max_staleness=0),
        shrunk("dgx-h100", 4),
        (*PLACES, "sharing.", "fusions.", "update_critic.tp"),
    ),
    "experts": (
        grpo(MOE, max_staleness=1),
        shrunk("dgx-h100", 4, 3 * GIB),
        (*PLACES, "generate.tp", "generate.ep", "update_actor.dp", "update_actor.ep", "update_actor.tp",
         "update_actor.zero", "old_logprob.ep", "old_logprob.zero"),
    ),
    "two nodes, with guesses": (
        grpo(SMALL, max_staleness=1, speculation=Speculation(acceptance=0.8)),
        two_nodes(2),
        ("devices.", "place.", "sync", "staleness", "generate.draft", "generate.tp", "update_actor.dp", "update_actor.tp", "update_actor.pp",
         "update_actor.schedule", "update_actor.zero", "update_actor.shard", "old_logprob.zero", "old_logprob.shard",
         "reference_logprob.zero", "reference_logprob.shard"),
    ),
}  # fmt: skip
"""A job, a cluster, and the axes that are free."""


def world(name: str) -> tuple[LegalSpace, Setup]:
    job, cluster, free = CASES[name]
    return freed(job, cluster, *free)


def all_steps(legal: LegalSpace, s: Setup) -> np.ndarray:
    """Steps of all plans that fit, shortest first, with their devices, staleness and memory, float64[n, 4]."""
    found = all_priced(legal, s)
    return points_of(found)[np.argsort(found.step_seconds)]


def all_priced(legal: LegalSpace, s: Setup) -> Estimate:
    """All plans that fit."""
    batch = enumerate_legal(legal.space, legal.setting).batch
    priced = estimate_blocks(s.job, batch, s.cluster)
    return priced.take(fits(s, priced))


Design = tuple[int, ...]
"""Where each role lies, and the staleness."""


def designs_of(batch: PlanBatch) -> list[Design]:
    names = [f"{what}.{role}" for what in ("place", "group") for role in ROLES]
    return [tuple(row) for row in np.stack([batch[name] for name in (*names, "staleness")], axis=1).tolist()]


def best_of_designs(found: Estimate) -> dict[Design, float]:
    """The best step of each design, if no fresher plan of its placement is as fast, shortest first."""
    least: dict[Design, float] = {}
    for design, step in zip(designs_of(found.batch), found.step_seconds.tolist(), strict=True):
        least[design] = min(least.get(design, np.inf), step)
    kept = {
        design: step
        for design, step in least.items()
        if all(step < (1 - 1e-8) * least.get((*design[:-1], fresher), np.inf) for fresher in range(design[-1]))
    }
    return dict(sorted(kept.items(), key=lambda one: one[1]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 4])
def test_the_best_plans_of_designs_are_those_of_all(name: str, count: int) -> None:
    legal, s = world(name)
    best = best_of_designs(all_priced(legal, s))
    found, steps = optimum(legal, s, count=count), list(best.values())[:count]
    assert found.num_proved == len(found.seconds)
    # Designs that are slower by far may be left out.
    assert len(found.seconds) == sum(step <= steps[0] * FURTHER[-1] for step in steps)
    np.testing.assert_allclose(found.seconds, steps[: len(found.seconds)], rtol=1e-7)
    # Whichever of equally fast ones are shown, none is staler than it must be.
    shown = designs_of(found.best.batch)
    np.testing.assert_allclose(found.seconds, [best[design] for design in shown], rtol=1e-9)
    assert len(set(shown)) == len(shown)


def test_a_fresher_plan_that_is_as_fast_as_the_best_is_news() -> None:
    legal, s = world("cores")
    every = all_priced(legal, s)
    rows = np.flatnonzero(every.batch["staleness"] == 1)
    known = every.take(rows[np.argsort(every.step_seconds[rows])[:1]])
    record = Designs(setup=s, roles=legal.setting.roles)
    record.add(known.batch, np.zeros(1))
    step, alike = known.step_seconds[0], 0
    for family in Tables(legal=legal, setup=s, within=limits_of(legal.setting)[0]).families:
        sizes = np.ones((2, len(family.case.pools)), dtype=np.int64)
        fresh, stale = record.limit(Reached(family=family, sizes=sizes, staleness=np.array([0, 1])))
        assert stale == step <= fresh < step * (1 + 1e-7)
        alike += fresh > step
    assert 0 < alike < len(legal.structures["staleness"]), "those of its placement"


@pytest.mark.parametrize("name", CASES)
def test_any_known_plan_is_improved_to_the_best(name: str) -> None:
    legal, s = world(name)
    batch = enumerate_legal(legal.space, legal.setting).batch
    priced = estimate_blocks(s.job, batch, s.cluster)
    order = np.argsort(np.where(fits(s, priced), priced.step_seconds, np.inf))
    for row in order[[0, 1, int(fits(s, priced).sum()) - 1]]:
        found = optimum(legal, s, known=batch.take(np.array([row])))
        assert found.proved
        assert found.seconds[0] == pytest.approx(priced.step_seconds[order[0]], rel=1e-9)


def test_without_work_the_known_plan_is_given_back_unproved() -> None:
    legal, s = world("ppo, pools")
    known = legal.factor(0, tuple(1 for _ in legal.cases[0][0].pools)).plans(np.zeros(1, dtype=np.int64))
    found = optimum(legal, s, known=known, most_work=0)
    assert not found.proved
    assert len(found.best.batch) == 1
    assert found.best.batch.plan(0) == known.plan(0)


@pytest.mark.parametrize("name", ["cores", "grpo, tight", "experts", "grpo, disaggregated", "ppo, pools"])
def test_no_plan_beats_the_front_by_what_matters(name: str) -> None:
    legal, s = world(name)
    points = all_steps(legal, s)
    found = front(legal, s)
    got = points_of(found.plans)
    assert found.proved
    assert got[0, 0] == pytest.approx(points[0, 0], rel=1e-9)
    for limit in limits_of(legal.setting):
        most = (limit.devices, limit.staleness, limit.memory)
        inside, shown = points[(points[:, 1:] <= most).all(axis=1), 0], got[(got[:, 1:] <= most).all(axis=1), 0]
        if len(inside) and inside[0] <= SLOWEST * points[0, 0] * 0.95:
            assert shown.min() <= inside[0] / 0.95 * (1 + 1e-9)
    for i, point in enumerate(got):
        assert not any((other <= point).all() for other in np.delete(got, i, axis=0))


def two_groups(first: int, second: int, gib: int) -> Cluster:
    """Two groups of a few devices each, the second's with less memory."""
    groups = []
    for i, (devices, memory) in enumerate(((first, 180), (second, gib))):
        group = shrunk("dgx-a100", devices, memory * GIB).groups[0]
        device = msgspec.structs.replace(group.device, name=f"{group.device.name}-{i}")
        groups.append(msgspec.structs.replace(group, name=f"group{i}", device=device))
    between = Link(latency_s=1e-5, bandwidth=2e10)
    return msgspec.structs.replace(load_cluster("dgx-a100:8"), groups=tuple(groups), between=between)


def freed(job: Job, cluster: Cluster, *free: str) -> tuple[LegalSpace, Setup]:
    """A space in which only some axes are free."""
    setting = setting_of(job, cluster)
    return legal_space(default_space(setting, build.pinned(setting, *free)), setting), setup(job, cluster)


def free_steps(job: Job, cluster: Cluster, *free: str) -> tuple[LegalSpace, Setup, np.ndarray]:
    """The same, and the steps of all its plans that fit."""
    legal, s = freed(job, cluster, *free)
    return legal, s, all_steps(legal, s)


def assert_best(legal: LegalSpace, s: Setup, steps: np.ndarray) -> None:
    """The best plans of a space are the first of `steps`."""
    if len(steps) == 0:
        with pytest.raises(InputError, match="fits in memory"):
            optimum(legal, s)
        return
    found = optimum(legal, s)
    assert found.proved
    np.testing.assert_allclose(found.seconds, steps[:1, 0], rtol=1e-9)


MEMORY = st.sampled_from([60, 70, 78, 90, 120, 200])


def priced_cluster(cluster: Cluster, *prices: float) -> Cluster:
    """With the price of a device of each group."""
    groups = tuple(
        msgspec.structs.replace(g, device=msgspec.structs.replace(g.device, price_per_hour=price))
        for g, price in zip(cluster.groups, prices, strict=True)
    )
    return msgspec.structs.replace(cluster, groups=groups)


@settings(max_examples=10, deadline=None)
@given(MEMORY, st.sampled_from([0, 1]), st.sampled_from([None, 2, 3, 5.5]), st.sampled_from([(1, 3), (2, 2), (3, 1)]))
def test_the_cheapest_plan_is_that_of_all(gib: int, staleness: int, most: float | None, sizes: tuple[int, int]) -> None:
    limits = {} if most is None else {"max_price_per_hour": most}
    job = grpo(SMALL, max_staleness=staleness, **limits)
    cluster = priced_cluster(two_groups(*sizes, gib), 1.0, 2.0)
    free = ("place.", "group.", "devices.", "sync", "staleness", "generate.tp", "update_actor.off", "update_actor.zero")
    legal, s = freed(job, cluster, *free)
    batch = enumerate_legal(legal.space, legal.setting).batch
    found = estimate_blocks(job, batch, cluster)
    rate = sum(devices_of_group(batch, group) * price for group, price in enumerate((1.0, 2.0)))
    fit = (found.memory.fill <= 0.95) & (rate <= (most or np.inf))
    if not fit.any():
        with pytest.raises(InputError, match="fits in memory"):
            cheapest(legal, s)
        return
    best = cheapest(legal, s)
    assert best.proved
    cost = price_per_step(best.best.batch, cluster, best.seconds)
    assert cost is not None
    assert cost[0] == pytest.approx((found.step_seconds * rate / 3600.0)[fit].min(), rel=1e-9)
    assert_best(legal, s, np.sort(found.step_seconds[fit])[:, None])


@given(st.data())
def test_what_is_left_out_is_beaten_by_what_is_kept(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=60))
    points = np.array(values, dtype=np.float64)
    group = np.array([data.draw(st.integers(0, 1)) for _ in values])
    kept = skyline(points, group)
    for row in range(len(points)):
        better = (points[kept] <= points[row]).all(axis=1) & (group[kept] == group[row])
        assert better.sum() == 1 if row in kept else better.any()


@given(st.lists(st.tuples(*[st.integers(-2, 4)] * 4), min_size=1, max_size=60))
def test_of_two_coordinates_only_what_none_beats_is_kept(values: list[tuple[int, int, int, int]]) -> None:
    first, second, *groups = np.array(values).T
    kept = staircase(first.astype(np.float64), second.astype(np.float64), *groups)
    all_kept = skyline(np.stack([first, second], axis=1).astype(np.float64), *groups)
    assert sorted(kept.tolist()) == sorted(all_kept.tolist())


@given(st.integers(0, 1 << 30), st.sampled_from([3, 12, 1000]))
def test_large_groups_keep_each_point_that_none_beats(seed: int, values: int) -> None:
    points = np.random.default_rng(seed).integers(0, values, (400, 3)).astype(np.float64)
    beats = (points[:, None] <= points[None]).all(axis=2) & (points[:, None] != points[None]).any(axis=2)
    kept = skyline(points)
    best = points[beats.sum(axis=0) == 0]
    assert sorted(map(tuple, points[kept].tolist())) == sorted(set(map(tuple, best.tolist())))


@settings(max_examples=8, deadline=None)
@given(MEMORY, st.sampled_from([0, 1, 2]), st.sampled_from([None, 2, 3]), st.sampled_from([0.05, 0.2]))
def test_the_best_plan_is_that_of_all_under_any_limits(
    gib: int, staleness: int, most: int | None, margin: float
) -> None:
    job = grpo(LARGE, max_staleness=staleness, max_devices=most, memory_margin=margin)
    free = (*PLACES, "in_flight", "fusions.m", "fusions.s", "generate.tp", "update_actor.off", "update_actor.zero")
    assert_best(*free_steps(job, shrunk("dgx-a100", 4, gib * GIB), *free))


@settings(max_examples=6, deadline=None)
@given(MEMORY, st.sampled_from([3, 4, 5, (2, 4)]), st.sampled_from([0, 1]))
def test_side_pools_keep_to_an_exact_number_of_devices(
    gib: int, devices: int | tuple[int, ...], staleness: int
) -> None:
    job = ppo(SMALL, SMALL, max_staleness=staleness, devices=devices)
    free = ("place.", "devices.", "sync", "sharing.", "update_critic.tp", "update_critic.off")
    legal, s, steps = free_steps(job, shrunk("dgx-a100", 5, gib * GIB), *free)
    assert set(steps[:, 1]) <= set(devices if isinstance(devices, tuple) else (devices,))
    assert_best(legal, s, steps)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([20, 40, 80]), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 1]))
def test_the_best_plan_over_groups_of_devices_is_that_of_all(gib: int, first: int, second: int, staleness: int) -> None:
    job = grpo(SMALL, max_staleness=staleness)
    free = ("place.", "group.", "devices.", "sync", "staleness", "generate.tp", "update_actor.off", "update_actor.zero")
    assert_best(*free_steps(job, two_groups(first, second, gib), *free))


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([24, 30, 40, 80]), st.sampled_from([0, 1]))
def test_several_side_pools_of_several_sections_are_laid_out_best(gib: int, staleness: int) -> None:
    job = ppo(SMALL, SMALL, max_staleness=staleness)
    free = (
        "place.",
        "devices.",
        "values.tp",
        "update_critic.tp",
        "update_critic.off",
        "update_critic.rec",
        "reward.off",
    )
    assert_best(*free_steps(job, shrunk("dgx-a100", 4, gib * GIB), *free))
