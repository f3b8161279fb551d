"""Counting, listing and drawing the legal plans, against each other and against brute force."""

from __future__ import annotations

from dataclasses import replace

import build
import numpy as np
import pytest

from ir.backends import backend
from ir.batch import ROLES, PlanBatch
from ir.errors import InputError
from ir.job import Job, Role
from ir.model import Moe
from ir.rules import check, legal
from ir.setting import Devices, Setting
from space.axes import Space
from space.build import default_space
from space.enumerate import enumerate_legal, legal_space

JOBS = build.jobs()
MOE = replace(build.SHAPE, moe=Moe(experts=4, experts_per_token=2, ffn=32))
MOE_JOB = replace(JOBS["grpo"], actor=MOE, others={Role.REFERENCE: MOE})
PLACING = ("place.", "group.", "devices.", "sync", "staleness", "in_flight")


def setting_of(job: Job, devices: int | tuple[int, ...], name: str | None = None) -> Setting:
    counts = devices if isinstance(devices, tuple) else (devices,)
    groups = tuple(Devices(count=n, domain=n, fp8=True, host=True) for n in counts)
    return Setting(job=job, groups=groups, backend=backend(name) if name else None)


SPACES: dict[str, tuple[Setting, tuple[str, ...]]] = {
    "grpo on one device, all axes of the local backend": (setting_of(JOBS["grpo"], 1, "local"), ("",)),
    "grpo on two, all axes of the local backend": (setting_of(JOBS["grpo"], 2, "local"), ("",)),
    "grpo on three, local": (setting_of(JOBS["grpo"], 3, "local"), ("",)),
    "grpo on four, fusions and degrees of training": (
        setting_of(JOBS["grpo"], 4),
        ("place.actor", "devices.", "sync", "fusions.", "update_actor.dp", "update_actor.tp", "update_actor.pp"),
    ),
    "grpo on two, every layout of training": (
        setting_of(JOBS["grpo"], 2), ("place.actor", "devices.", "sync", "update_actor."),
    ),
    "grpo on four, engines of vLLM": (
        setting_of(JOBS["grpo"], 4, "torch"), ("place.actor", "devices.", "sync", "staleness", "generate.", "update_actor.dp"),
    ),
    "experts on four, Megatron": (
        setting_of(MOE_JOB, 4, "megatron"),
        ("place.actor", "devices.", "sync", "generate.tp", "generate.ep", "update_actor.dp", "update_actor.tp",
         "update_actor.ep", "update_actor.etp", "update_actor.zero"),
    ),
    "ppo on three, all structures": (setting_of(JOBS["ppo"], 3), (*PLACING, "fusions.", "sharing.", "update_actor.dp")),
    "ppo on three, critic and reward": (
        setting_of(JOBS["ppo"], 3), ("place.", "devices.", "sync", "values.", "sharing.", "update_actor.dp", "update_critic.dp"),
    ),
    "dapo on two": (setting_of(JOBS["dapo"], 2), (*PLACING, "fusions.", "old_logprob.micro")),
    "remax on two": (setting_of(JOBS["remax"], 2), (*PLACING, "fusions.", "reference_logprob.")),
    "distillation on two, sharded teacher": (setting_of(JOBS["distillation"], 2), (*PLACING, "fusions.", "teacher_logprob.")),
    "multi-turn on two": (setting_of(JOBS["multi-turn"], 2), (*PLACING, "fusions.", "generate.")),
    "lora on two, shared reference": (setting_of(JOBS["lora"], 2), (*PLACING, "fusions.", "sharing.", "reference_logprob.zero")),
    "two groups": (setting_of(JOBS["grpo"], (1, 3), "local"), ("",)),
    "two groups, ppo": (setting_of(JOBS["ppo"], (2, 2)), ("place.actor", "place.critic", "group.", "devices.", "sync", "update_actor.dp", "update_critic.dp")),
    "exactly two of three devices": (setting_of(build.job(devices=2), 3, "local"), ("",)),
    "one or three devices": (setting_of(build.job(devices=(1, 3)), 3, "local"), ("",)),
    "at most two of three devices": (setting_of(build.job(max_devices=2), 3, "local"), ("",)),
}  # fmt: skip


def space_of(name: str) -> tuple[Space, Setting]:
    setting, free = SPACES[name]
    return default_space(setting, build.pinned(setting, *free)), setting


@pytest.mark.parametrize("name", SPACES)
def test_what_is_counted_is_listed_is_legal_and_is_distinct(name: str) -> None:
    space, setting = space_of(name)
    found = enumerate_legal(space, setting)
    assert legal_space(space, setting).num_plans == len(found.batch) > 0
    assert legal(found.batch, setting).all()
    assert len(np.unique(found.levels, axis=0)) == len(found.levels)
    for row in range(0, len(found.batch), max(len(found.batch) // 5, 1)):
        check(found.batch.plan(row), setting)


def combinations(space: Space) -> PlanBatch:
    sizes = [len(axis.values) for axis in space.axes]
    assert space.num_combinations < 1_000_000
    return space.decode(np.stack(np.unravel_index(np.arange(space.num_combinations), sizes), axis=1))


def stand_for_plans(batch: PlanBatch, roles: tuple[str, ...]) -> np.ndarray:
    """Which rows name each pool by the first of its roles and give it one size and group."""
    mask = np.ones(len(batch), dtype=bool)
    for role in roles:
        leads = np.zeros(len(batch), dtype=bool)
        for other in roles[: roles.index(role) + 1]:
            index = ROLES.index(other)
            same = [batch[f"{what}.{role}"] == batch[f"{what}.{other}"] for what in ("devices", "group")]
            leads |= (batch[f"place.{role}"] == index) & (batch[f"place.{other}"] == index) & same[0] & same[1]
        mask &= leads
    return mask


BRUTE: dict[str, tuple[Setting, tuple[str, ...]]] = {
    "grpo, structures and sizes": (
        setting_of(build.job(max_staleness=1), 2, "local"),
        (*PLACING, "fusions.", "generate.concurrency", "old_logprob.micro_batch"),
    ),
    "grpo, layouts of one section": (
        setting_of(build.job(max_staleness=0), 2),
        ("devices.actor", "place.actor", "sync", "fusions.stream", "update_actor.dp", "update_actor.tp",
         "update_actor.pp", "update_actor.cp", "update_actor.vpp", "update_actor.zero", "update_actor.micro"),
    ),
    "ppo, shared models": (
        setting_of(JOBS["ppo"], 2),
        ("place.actor", "place.critic", "devices.actor", "devices.critic", "sync", "sharing.", "fusions.interleave",
         "fusions.merge", "fusions.rollout", "fusions.stream", "values.zero"),
    ),
    "two groups": (
        setting_of(build.job(max_staleness=1, devices=(1, 3)), (1, 2)),
        ("place.actor", "place.reference", "group.", "devices.", "sync", "staleness", "update_actor.precision"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BRUTE)
def test_the_listing_is_all_that_brute_force_finds(name: str) -> None:
    setting, free = BRUTE[name]
    space = default_space(setting, build.pinned(setting, *free))
    every = combinations(space)
    kept = every.take(stand_for_plans(every, setting.roles) & legal(every, setting))
    by_force = np.unique(space.encode(kept), axis=0)
    listed = enumerate_legal(space, setting).levels
    assert len(listed) > 20
    assert np.array_equal(np.unique(listed, axis=0), by_force)
    assert len(listed) == len(by_force)


@pytest.mark.parametrize("size", [1, 7, 100, 1_000_000])
def test_blocks_of_any_size_give_the_same(size: int) -> None:
    space, setting = space_of("grpo on two, all axes of the local backend")
    whole = enumerate_legal(space, setting).levels
    blocks = list(legal_space(space, setting).blocks(size))
    assert np.array_equal(np.concatenate([space.encode(block) for block in blocks]), whole)
    assert max(map(len, blocks)) < 2 * size + 1


def test_plans_of_local_are_plans_of_any() -> None:
    _, local = space_of("grpo on two, all axes of the local backend")
    found = enumerate_legal(default_space(local), local)
    anything = replace(local, backend=None)
    assert len(default_space(anything).encode(found.batch)) == len(found.batch)
    assert legal(found.batch, anything).all()


@pytest.mark.parametrize("name", ["local", "torch", "deepspeed", "megatron"])
def test_a_backends_space_holds_only_what_it_supports(name: str) -> None:
    setting = setting_of(JOBS["grpo"], 4, name)
    legal_plans = legal_space(default_space(setting), setting)
    plans = legal_plans.sample(500, np.random.default_rng(1))
    assert legal(plans, setting).all()
    for row in range(10):
        check(plans.plan(row), setting)


def test_pools_never_exceed_their_group() -> None:
    space, setting = space_of("two groups")
    found = enumerate_legal(space, setting).batch
    used = np.zeros((len(found), 2), dtype=int)
    for index, role in enumerate(ROLES):
        for group in (0, 1):
            used[:, group] += np.where(
                (found[f"place.{role}"] == index) & (found[f"group.{role}"] == group), found[f"devices.{role}"], 0
            )
    assert (used <= [1, 3]).all()
    assert {tuple(row) for row in used.tolist()} == {
        (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "totals"),
    [
        ("grpo on three, local", {1, 2, 3}),
        ("exactly two of three devices", {2}),
        ("one or three devices", {1, 3}),
        ("at most two of three devices", {1, 2}),
    ],
)
def test_the_jobs_limits_hold(name: str, totals: set[int]) -> None:
    found = enumerate_legal(*space_of(name)).batch
    leads = [np.where(found[f"place.{role}"] == i, found[f"devices.{role}"], 0) for i, role in enumerate(ROLES)]
    assert set(np.sum(leads, axis=0).tolist()) == totals


def test_nothing_legal_is_said() -> None:
    three, two = setting_of(JOBS["grpo"], 3), setting_of(JOBS["grpo"], (1, 1))
    with pytest.raises(InputError) as caught:
        torn = {"place.actor": 0, "group.rollout": 0, "group.actor": 1}
        legal_space(default_space(two, torn), two)
    assert str(caught.value) == "space: must have a legal structure with what is fixed and the backend, got none"
    crowded = {"place.actor": 1, "devices.rollout": 2, "devices.actor": 2}
    apart = legal_space(default_space(three, crowded), three)
    assert apart.num_plans == 0
    with pytest.raises(InputError) as caught:
        apart.sample(1, np.random.default_rng(0))
    assert str(caught.value) == ("space: must have a legal plan with what is fixed, the backend and the job's limits")


# Drawing


@pytest.mark.parametrize(
    "name", ["grpo on two, all axes of the local backend", "two groups", "lora on two, shared reference"]
)
def test_plans_are_drawn_uniformly(name: str) -> None:
    space, setting = space_of(name)
    listed = enumerate_legal(space, setting).levels
    drawn = space.encode(legal_space(space, setting).sample(20 * len(listed), np.random.default_rng(3)))
    _, counts = np.unique(np.concatenate([listed, drawn]), axis=0, return_counts=True)
    assert len(counts) == len(listed), "nothing is drawn that is not listed"
    # Twenty are expected of each; the statistic has mean n - 1 and standard deviation sqrt(2 (n - 1)).
    statistic = (((counts - 1) - 20) ** 2 / 20).sum()
    assert abs(statistic - (len(listed) - 1)) < 4 * np.sqrt(2 * (len(listed) - 1))


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_draws_from_huge_spaces_are_legal(kind: str) -> None:
    setting = setting_of(JOBS[kind], (16, 8))
    legal_plans = legal_space(default_space(setting), setting)
    assert legal_plans.num_plans > 10**10
    drawn = legal_plans.sample(400, np.random.default_rng(5))
    assert len(drawn) == 400 and legal(drawn, setting).all()
    assert len(np.unique(legal_plans.space.encode(drawn), axis=0)) > 390
    assert len(legal_plans.sample(0, np.random.default_rng(5))) == 0


def test_draws_are_repeatable_and_not_sorted() -> None:
    legal_plans = legal_space(*space_of("grpo on three, local"))
    levels = [legal_plans.space.encode(legal_plans.sample(200, np.random.default_rng(seed))) for seed in (1, 1, 2)]
    assert np.array_equal(levels[0], levels[1])
    assert not np.array_equal(levels[0], levels[2])
    assert not (np.diff(levels[0][:, 0]) >= 0).all()
