"""A synthetic world for tests of the search: real axes and rules, a simple model, a hidden truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from ir.job import Algorithm, Job, JobDocument, Limits, Models, ModelSource, Task, WarmStart, Workload
from ir.model import ModelShape
from ir.plan import Plan
from ir.rules import Setting
from search.problem import Candidates, Floats, Monitor, Outcome, Rows
from search.relevance import relevance_from
from space.axes import default_space
from space.enumerate import LegalPlans, enumerate_legal
from traces.schema import TrialState

STAGES = ("generate", "reference_logprob", "old_logprob", "update", "sync")
CAPACITY = 10e9


def make_job(*, prompts: int = 32, samples: int = 4, max_staleness: int = 2) -> Job:
    """A job of `prompts` x `samples` sequences per step."""
    document = JobDocument(
        name="synthetic",
        algorithm=Algorithm(name="grpo", learning_rate=1e-4, kl_coefficient=0.01),
        models=Models(
            actor=ModelSource(path="config.json", warm_start=WarmStart(steps=1, batch=1, learning_rate=1e-3))
        ),
        workload=Workload(
            tasks=(Task(dataset="sums"),),
            prompts_per_step=prompts,
            samples_per_prompt=samples,
            max_prompt_tokens=32,
            max_response_tokens=32,
        ),
        limits=Limits(max_staleness=max_staleness),
    )
    shape = ModelShape(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        vocab=256,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
    )
    return Job(document=document, directory=Path("."), actor=shape)


def make_candidates(job: Job, devices: int) -> Candidates:
    """All legal plans with a simple model: work over devices, per-pass overhead, pools in turn or side by side."""
    space = default_space(job, devices)
    legal = enumerate_legal(space, Setting(job=job, devices=devices))
    seconds = _stage_seconds(legal, job.workload.sequences)
    return Candidates(
        space=space,
        levels=legal.levels,
        stages=STAGES,
        stage_seconds=seconds,
        memory_bytes=_memory(legal),
        capacity_bytes=CAPACITY,
        relevance=relevance_from(space, legal.levels, seconds),
        compose=_composition(legal, overlap=1.0),
    )


def _stage_seconds(legal: LegalPlans, sequences: int) -> Floats:
    b = legal.batch
    waves = np.ceil(sequences / (b.generate_devices * b.concurrency))
    generate = 0.4 + waves * (1.0 + 0.03 * b.concurrency)
    passes = np.ceil(sequences / (b.train_devices * b.logprob_micro_batch))
    logprob = passes * (0.05 + 0.02 * b.logprob_micro_batch)
    old = np.where((b.rollout_logprob == 1) | (b.fold_old_logprob == 1), 0.0, logprob)
    old = np.where(b.merge_logprobs == 1, 0.6 * old, old)
    micro = np.ceil(sequences / (b.dp * b.update_micro_batch))
    update = micro * (0.1 + 0.06 * b.update_micro_batch) * np.where(b.recompute == 1, 1.3, 1.0) + 0.05 * b.dp
    sync = np.where(b.colocated == 1, 0.05, 0.3 + 0.05 * b.generate_devices)
    return np.stack([generate, logprob, old, update, sync], axis=1).astype(float)


def _memory(legal: LegalPlans) -> Floats:
    b = legal.batch
    training = 1e9 + 0.35e9 * b.update_micro_batch * np.where(b.recompute == 1, 0.4, 1.0) / np.sqrt(b.dp)
    rollout = 0.5e9 + 0.06e9 * b.concurrency
    together = np.where(b.colocated == 1, training + rollout, np.maximum(training, rollout))
    return np.asarray(together, dtype=float)


class _composition:
    """Colocated: all stages in turn. Disaggregated: generation beside training where stale weights allow it;
    `overlap` is the share of the shorter side that is really hidden."""

    def __init__(self, legal: LegalPlans, overlap: float) -> None:
        self._side_by_side = (legal.batch.colocated == 0) & (legal.batch.staleness > 0)
        self._streamed = legal.batch.stream == 1
        self._overlap = overlap

    def __call__(self, seconds: Floats, rows: Rows) -> Floats:
        generate, reference, old, update, sync = np.moveaxis(seconds, -1, 0)
        scored = np.where(self._streamed[rows], np.maximum(reference - generate, 0.0), reference)
        train = scored + old + update
        hidden = np.where(self._side_by_side[rows], self._overlap * np.minimum(generate, train), 0.0)
        return np.asarray(generate + train - hidden + sync, dtype=float)


@dataclass
class World:
    """What really happens: per stage a multiplier and a curve per axis unknown to the model; noise."""

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
    def fits(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return self.memory_bytes <= CAPACITY

    @property
    def best(self) -> float:
        """The shortest true step of a plan that fits."""
        return float(self.step_seconds[self.fits].min())

    def distance(self, row: int) -> float:
        """How much slower a plan is than the best: 0.1 is 10%."""
        return float(self.step_seconds[row] / self.best - 1)

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
    compose = _composition(legal, overlap=1.0 - 0.3 * misfit * rng.random())
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
