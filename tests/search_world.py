"""A synthetic world for tests of the search: real axes and rules, a simple model, a hidden truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import build
import numpy as np
from numpy.typing import NDArray

from ir.backends import backend
from ir.graph import Op
from ir.plan import Plan
from ir.setting import Devices, Setting
from search.problem import Candidates, Floats, Monitor, Rows
from search.relevance import relevance_from
from search.study import Problem
from search.view import Identity
from space.build import default_space
from space.enumerate import LegalPlans, enumerate_legal
from traces.outcome import Outcome
from traces.schema import TrialState

STAGES = ("generate", "reference_logprob", "old_logprob", "update", "sync")
CAPACITY = 10e9


def make_candidates(*, prompts: int = 4, devices: int = 2, max_staleness: int = 1) -> Candidates:
    """All legal plans of a job of `prompts` x 4 samples, with a simple model: work over devices and a cost
    per pass, pools in turn or side by side."""
    job = build.job(prompts_per_step=prompts, max_staleness=max_staleness)
    groups = (Devices(count=devices, domain=devices),)
    setting = Setting(job=job, groups=groups, backend=backend("local"))
    space = default_space(setting)
    legal = enumerate_legal(space, setting)
    seconds = _stage_seconds(legal, job.workload.sequences)
    return Candidates(
        space=space,
        levels=legal.levels,
        stages=STAGES,
        stage_seconds=seconds,
        memory_bytes=_memory(legal),
        capacity_bytes=CAPACITY,
        relevance=relevance_from(legal.levels, seconds),
        compose=Composition(legal, overlap=1.0),
    )


def _stage_seconds(legal: LegalPlans, sequences: int) -> Floats:
    b = legal.batch
    generate_devices, train_devices = b["devices.rollout"], b["devices.actor"]
    waves = np.ceil(sequences / (generate_devices * b["generate.concurrency"]))
    generate = 0.4 + waves * (1.0 + 0.03 * b["generate.concurrency"])
    logprob = _passes(sequences, train_devices, b["reference_logprob.micro_batch"])
    old = np.where(b.has(Op.OLD_LOGPROB), _passes(sequences, train_devices, b["old_logprob.micro_batch"]), 0.0)
    old = np.where(b["fusions.merge_logprobs"] == 1, 0.6 * logprob, old)
    dp, size = b["update_actor.dp"], b["update_actor.micro_batch"]
    micro = np.ceil(sequences / (dp * size))
    update = micro * (0.1 + 0.06 * size) * np.where(b["update_actor.recompute"] > 0, 1.3, 1.0) + 0.05 * dp
    sync = np.where(b["place.actor"] == 0, 0.05, 0.3 + 0.05 * generate_devices)
    return np.stack([generate, logprob, old, update, sync], axis=1).astype(float)


def _passes(sequences: int, devices: NDArray[np.int32], size: NDArray[np.int32]) -> Floats:
    return np.asarray(np.ceil(sequences / (devices * np.maximum(size, 1))) * (0.05 + 0.02 * size), dtype=float)


def _memory(legal: LegalPlans) -> Floats:
    b = legal.batch
    less = np.where(b["update_actor.recompute"] > 0, 0.4, 1.0)
    training = 1e9 + 0.35e9 * b["update_actor.micro_batch"] * less / np.sqrt(b["update_actor.dp"])
    rollout = 0.5e9 + 0.06e9 * b["generate.concurrency"]
    together = np.where(b["place.actor"] == 0, training + rollout, np.maximum(training, rollout))
    return np.asarray(together, dtype=float)


class Composition:
    """Colocated: all stages in turn. Disaggregated: generation beside training where stale weights allow it;
    `overlap` is the share of the shorter side that is really hidden."""

    def __init__(self, legal: LegalPlans, overlap: float) -> None:
        self._side_by_side = (legal.batch["place.actor"] > 0) & (legal.batch["staleness"] > 0)
        self._streamed = legal.batch["fusions.stream"] == 1
        self._overlap = overlap

    def __call__(self, seconds: Floats, rows: Rows) -> Floats:
        generate, reference, old, update, sync = np.moveaxis(seconds, -1, 0)
        scored = np.where(self._streamed[rows], np.maximum(reference - generate, 0.0), reference)
        train = scored + old + update
        hidden = np.where(self._side_by_side[rows], self._overlap * np.minimum(generate, train), 0.0)
        return np.asarray(generate + train - hidden + sync, dtype=float)


@dataclass
class World:
    """What really happens, unknown to the search."""

    candidates: Candidates
    step_seconds: Floats
    """True, noiseless."""
    stage_seconds: Floats
    memory_bytes: Floats
    run_noise: float = 0.03
    step_noise: float = 0.03
    reports_stages: bool = True
    seed: int = 0
    runs: list[int] = field(default_factory=list)

    @property
    def fits(self) -> NDArray[np.bool_]:
        return self.memory_bytes <= CAPACITY

    @property
    def best(self) -> float:
        """The shortest true step of a plan that fits."""
        return float(self.step_seconds[self.fits].min())

    def distance(self, row: int) -> float:
        """How much slower a plan is than the best: 0.1 is 10%."""
        return float(self.step_seconds[row] / self.best - 1)

    def best_measured(self) -> float:
        """Distance of the best plan run so far."""
        return min(self.distance(row) for row in self.runs if self.fits[row])

    def evaluate(self, plan: Plan, monitor: Monitor) -> Outcome:
        """One run. Its noise depends on the plan and on how often it was run, so that a resumed study sees the same."""
        row = self.candidates.row_of(plan)
        assert row is not None
        start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=len(self.runs))
        rng = np.random.default_rng((self.seed, row, self.runs.count(row)))
        self.runs.append(row)
        end = start + timedelta(seconds=30)
        if not self.fits[row]:
            return Outcome(state=TrialState.INFEASIBLE, failure="oom", started_at=start, ended_at=end)
        run = np.exp(self.run_noise * rng.standard_normal(len(STAGES)))
        total = self.step_seconds[row] * np.exp(self.run_noise * rng.standard_normal())
        steps: list[float] = []
        while not steps or monitor(steps):
            steps.append(float(total * np.exp(self.step_noise * rng.standard_normal())))
        stages = {n: float(s) for n, s in zip(STAGES, self.stage_seconds[row] * run, strict=True) if s > 0}
        return Outcome(
            state=TrialState.COMPLETE,
            step_seconds=tuple(steps),
            stage_seconds=stages if self.reports_stages else {},
            peak_bytes=int(self.memory_bytes[row]),
            started_at=start,
            ended_at=end,
        )


IDENTITY = Identity(study="job", hardware="here", software="now", model_version="1")


def problem_of(world: World, **changes: Any) -> Problem:
    """The search problem of a world."""
    return Problem(candidates=world.candidates, evaluate=world.evaluate, identity=IDENTITY, **changes)


def true_world(candidates: Candidates, **changes: Any) -> World:
    """A world that is as the model says, with noise of half a percent."""
    return World(
        candidates=candidates,
        step_seconds=candidates.step_seconds,
        stage_seconds=candidates.stage_seconds,
        **{"memory_bytes": candidates.memory_bytes, "run_noise": 0.005, "step_noise": 0.005} | changes,
    )


def hidden_world(candidates: Candidates, seed: int, *, misfit: float = 1.0) -> World:
    """A world whose stages are 0.6-1.8 x the model's, bent along every relevant axis and one more."""
    rng = np.random.default_rng(seed)
    truth = candidates.stage_seconds.copy()
    for s in range(len(STAGES)):
        log = misfit * rng.uniform(np.log(0.6), np.log(1.8))
        axes = np.flatnonzero(candidates.relevance[s])
        others = np.flatnonzero(~candidates.relevance[s])
        for axis in [*axes, rng.choice(others)]:
            size = len(candidates.space.axes[axis].values)
            curve = np.cumsum(rng.normal(0.0, 0.12 * misfit, size))
            log = log + (curve - curve.mean())[candidates.levels[:, axis]]
        truth[:, s] *= np.exp(log)
    legal = LegalPlans(
        space=candidates.space, levels=candidates.levels, batch=candidates.space.decode(candidates.levels)
    )
    compose = Composition(legal, overlap=1.0 - 0.3 * misfit * rng.random())
    rows = np.arange(len(candidates))
    return World(
        candidates=candidates,
        step_seconds=compose(truth, rows),
        stage_seconds=truth,
        memory_bytes=candidates.memory_bytes * np.exp(misfit * rng.uniform(-0.1, 0.1)),
        seed=seed,
    )


def model_ranking(world: World, num: int) -> float:
    """Distance of the best of the first `num` runs in the order of the model."""
    model = world.candidates
    order = np.argsort(model.step_seconds, kind="stable")
    order = order[model.memory_bytes[order] <= CAPACITY][:num]
    tried: Sequence[int] = [int(row) for row in order if world.fits[row]]
    return min((world.distance(row) for row in tried), default=np.inf)
