"""The step's period against a simulation of many steps, for every structure that a plan can have."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations_with_replacement

import build
import numpy as np
import pytest
from numpy.typing import NDArray

from analytic.circuits import Cycle, cycles_of
from analytic.compose import cycles
from analytic.events import shape_of
from ir.graph import Op, Rpeg, Stage
from ir.job import Job
from ir.lower import lower
from ir.plan import Plan
from ir.setting import Devices, Setting
from space.build import default_space
from space.enumerate import enumerate_legal

Float = NDArray[np.float64]

STEPS, DRAWS = 240, 4
JOBS = build.jobs()
POOLED = {"grpo": 3, "ppo": 5, "dapo": 2, "remax": 3, "distillation": 3, "lora": 3}
GROUPS = 4


@cache
def structures(name: str) -> tuple[Rpeg, ...]:
    """The different structures among legal plans that differ in placement, fusions and sharing only."""
    job, found = JOBS[name], dict[object, Rpeg]()
    setting = Setting(job=job, groups=(Devices(count=POOLED[name]),))
    fixed = build.pinned(setting, "place.", "devices.", "sync", "fusions.", "sharing.")
    batch = enumerate_legal(default_space(setting, fixed), setting).batch
    rng = np.random.default_rng(0)
    for row in rng.permutation(len(batch))[:150]:
        rpeg = lower(job, batch.plan(int(row)))
        found.setdefault(shape_of(rpeg, pieces=False), rpeg)
    return tuple(found.values())[:24]


def drawn(rpeg: Rpeg, seed: int) -> dict[str, Float]:
    rng = np.random.default_rng(seed)
    return {stage.key: rng.exponential(1.0, DRAWS) * rng.integers(0, 3, DRAWS) for stage in rpeg.stages}


def simulated(rpeg: Rpeg, seconds: dict[str, Float], ratio: Float, call: float, staleness: int) -> Float:
    """Mean seconds between the last half of the steps, each stage started as soon as it may."""
    done: list[dict[Op, Float]] = []
    started: list[Float] = []
    free = {stage.pool: np.zeros(DRAWS) for stage in rpeg.stages}
    for step in range(STEPS):
        here: dict[Op, Float] = {}
        work: dict[str, Float] = {}
        for stage in sorted(
            rpeg.stages, key=lambda stage: (Op.GENERATE not in stage.ops, not is_streamed(rpeg, stage))
        ):
            if Op.GENERATE in stage.ops:
                begin = start_of_generation(rpeg, done, free[stage.pool], step, staleness)
                free[stage.pool] = begin + (
                    seconds[stage.key] + call if rpeg.colocated else paused(rpeg, seconds, call)
                )
                end = begin + seconds[stage.key] * ratio + call
                started.append(begin)
            else:
                end = end_of(rpeg, stage, seconds, call, ratio, here, work, free[stage.pool], begin, done)
                free[stage.pool] = np.maximum(end, free[stage.pool])
            here |= dict.fromkeys(stage.ops, end)
        done.append(here)
    half = STEPS // 2
    return (started[-1] - started[half - 1]) / half


def is_streamed(rpeg: Rpeg, stage: Stage) -> bool:
    apart = stage.pool != rpeg.stage(Op.GENERATE).pool
    return apart and all(op in rpeg.streamed for op in stage.ops if op not in stage.riders)


def paused(rpeg: Rpeg, seconds: dict[str, Float], call: float) -> Float:
    generate, sync = rpeg.stage(Op.GENERATE), rpeg.stage(Op.SYNC_WEIGHTS)
    return seconds[generate.key] + seconds[sync.key] + call


def start_of_generation(rpeg: Rpeg, done: list[dict[Op, Float]], free: Float, step: int, staleness: int) -> Float:
    version = step - 1 - staleness
    return np.maximum(free, done[version][Op.SYNC_WEIGHTS]) if version >= 0 else free


def end_of(
    rpeg: Rpeg,
    stage: Stage,
    seconds: dict[str, Float],
    call: float,
    ratio: Float,
    here: dict[Op, Float],
    work: dict[str, Float],
    free: Float,
    begin: Float,
    done: list[dict[Op, Float]],
) -> Float:
    busy = seconds[stage.key] + call
    sources = {edge.source for edge in rpeg.data if edge.target in stage.ops and edge.source not in stage.ops}
    sources |= {Op.UPDATE_ACTOR} if Op.SYNC_WEIGHTS in stage.ops else set()
    ready = np.maximum.reduce([here[op] for op in sources] + [np.zeros(DRAWS)])
    if done:
        old = [done[-1][Op.UPDATE_ACTOR]] if Op.OLD_LOGPROB in stage.ops else []
        old += [done[-1][Op.UPDATE_CRITIC]] if Op.VALUES in stage.ops and Op.UPDATE_CRITIC in done[-1] else []
        free = np.maximum.reduce([free, *old])
    if not is_streamed(rpeg, stage):
        return np.maximum(free, ready) + busy
    generate = rpeg.stage(Op.GENERATE)
    first = begin + (seconds[generate.key] * ratio + call) / GROUPS
    # Streamed stages of a pool work in turn, and behind what the pool did before the first of them.
    earlier = work.get(stage.pool)
    start = np.maximum(
        first if Op.GENERATE in {rpeg.stage(op).ops[0] for op in sources} else begin,
        start_after(rpeg, stage, sources, work, seconds, call, first),
    )
    start = np.maximum(start, free if earlier is None else earlier)
    work[stage.pool] = start + busy
    work[stage.name] = start
    return np.maximum(start + busy, np.maximum(ready, free if earlier is not None else 0.0) + busy / GROUPS)


def start_after(
    rpeg: Rpeg,
    stage: Stage,
    sources: set[Op],
    work: dict[str, Float],
    seconds: dict[str, Float],
    call: float,
    first: Float,
) -> Float:
    """A streamed stage fed by another begins with that one's first group."""
    fed = [rpeg.stage(op) for op in sources if rpeg.stage(op).name in work]
    return np.maximum.reduce([first, *(work[s.name] + (seconds[s.key] + call) / GROUPS for s in fed)])


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_the_longest_cycle_is_the_period_of_many_simulated_steps(name: str, staleness: int) -> None:
    for index, rpeg in enumerate(structures(name)):
        if rpeg.colocated and staleness:
            continue
        seconds, call = drawn(rpeg, index), 0.01 * (index % 2)
        ratio = 1.0 + np.random.default_rng(index).integers(0, 2, DRAWS) * (staleness > 0)
        found = cycles(rpeg, lambda stage, s=seconds: s[stage.key], ratio, call, np.full(DRAWS, staleness))  # type: ignore[misc]
        longest = np.maximum.reduce(list(found.values()))
        expected = simulated(rpeg, seconds, ratio, call, staleness)
        # A run of steps is off by at most a transient over its length.
        assert np.allclose(longest, expected, rtol=0.03, atol=1e-9), (rpeg.stages, found, expected)


def pieces_simulated(generate: float, train: float, sync: float, pieces: int, staleness: int) -> float:
    """Mean seconds a step of a pool that trains on each mini-batch when it is finished."""
    synced, free, engine, started = list[float](), 0.0, 0.0, list[float]()
    for step in range(STEPS):
        version = step - 1 - staleness
        begin = max(engine, synced[version] if version >= 0 else 0.0)
        started.append(begin)
        engine, now = begin + generate + sync, free
        for piece in range(1, pieces + 1):
            now = max(now, begin + generate * piece / pieces) + train / pieces
        free = now + sync
        synced.append(free)
    return (started[-1] - started[STEPS // 2 - 1]) / (STEPS // 2)


@pytest.mark.parametrize("times", [(5.0, 2.0, 0.1), (2.0, 5.0, 0.5), (3.0, 3.0, 0.0)])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_mini_batches_are_handed_over_as_they_are_finished(times: tuple[float, float, float], staleness: int) -> None:
    job: Job = build.job(minibatches=4)
    plan: Plan = build.plan(rollout_logprob=True, reference=False, staleness=staleness)
    rpeg = lower(build.job(minibatches=4, kl_coefficient=0.0), plan)
    of = dict(zip((Op.GENERATE, Op.UPDATE_ACTOR, Op.SYNC_WEIGHTS), times, strict=True))
    found = cycles(
        rpeg,
        lambda stage: np.array([of.get(stage.ops[-1], 0.0)]),
        np.ones(1),
        0.0,
        np.array([staleness]),
        np.array([True]),
    )
    assert max(float(v[0]) for v in found.values()) == pytest.approx(
        pieces_simulated(*times, pieces=job.workload.minibatches, staleness=staleness), rel=1e-6
    )


def test_few_cycles_are_left_of_many() -> None:
    counts = [len(cycles_of(shape_of(rpeg, pieces=False))) for rpeg in structures("ppo")]
    assert max(counts) <= 16


def test_no_cycle_that_is_left_is_within_another_or_two() -> None:
    for rpeg in structures("ppo"):
        left = cycles_of(shape_of(rpeg, pieces=False))
        for one in left:
            others = [other for other in left if other is not one]
            groups = [some for n in (1, 2) for some in combinations_with_replacement(others, n)]
            assert not any(are_longer(some, one) for some in groups)


def are_longer(some: tuple[Cycle, ...], one: Cycle) -> bool:
    """Whether cycles one after the other hold all times of one, in as many steps at most."""
    steps = sum(cycle.steps for cycle in some) <= one.steps
    stale = sum(cycle.per_staleness for cycle in some) <= one.per_staleness
    return steps and stale and Counter(term for cycle in some for term in cycle.times) >= Counter(one.times)
