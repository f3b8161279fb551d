"""A run: the controller's commands carried out on a fleet, the batch kept between them, the spans collected."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from executor.batching import deal
from executor.controller import Controller
from executor.fleet import Fleet, Pool
from executor.records import (
    Call,
    Command,
    Event,
    Finding,
    Generate,
    Generated,
    GenerateReply,
    OutOfDeviceMemory,
    Row,
    Setting,
    Visit,
    Visited,
    VisitReply,
)
from ir.graph import Op, Rpeg, Stage
from traces.schema import Span, Step

WARM_UP_STEPS = 1
"""Steps at the start whose times are dropped: caches fill and pipelines start."""

HANG_SECONDS = 60.0
"""Least time without any sign of life after which a run counts as hung."""

HANG_STEPS = 20.0
"""And that many predicted steps, if they are longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    step: int
    seconds: float
    """From the publication of the previous step to this one's."""
    reward: float
    """Mean over the samples that were trained on."""
    response_tokens: float
    staleness: tuple[int, ...]
    """Of every sample: updates between the oldest weights that sampled it and those it trained."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run gave. `failure` is empty, or `oom`, `timeout`, `worker-died` or `crash`."""

    steps: tuple[StepReport, ...]
    spans: tuple[Span, ...]
    stage_seconds: dict[str, float]
    """Median over the measured steps of the busiest device's seconds in each stage."""
    peak_bytes: int
    setup_seconds: float
    warm: bool
    failure: str = ""
    failure_detail: str = ""

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of the steps after the warm-up."""
        return tuple(report.seconds for report in self.steps[WARM_UP_STEPS:])

    @property
    def staleness(self) -> tuple[int, ...]:
        """Of every sample that was trained on."""
        return tuple(age for report in self.steps for age in report.staleness)

    def steps_as(self, run_id: str) -> list[Step]:
        """The steps as a trace keeps them."""
        return [
            Step(
                run_id=run_id,
                step=report.step,
                seconds=report.seconds,
                reward=report.reward,
                response_tokens=report.response_tokens,
                staleness=report.staleness,
                loss=report.metrics.get("loss", 0.0),
                gradient_norm=report.metrics.get("gradient_norm", 0.0),
            )
            for report in self.steps
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long a run may take."""

    steps: int
    """Steps in all, the warm-up included."""
    ahead: bool = True
    """Generate beyond the last step, so that it is measured like the others."""
    hang_seconds: float = HANG_SECONDS
    """A run in which nothing finishes for so long is ended."""


OnStep = Callable[[StepReport], bool]
"""Called after every step; False ends the run there."""


class _Failure(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


def execute(
    fleet: Fleet,
    rpeg: Rpeg,
    *,
    run_id: str,
    model_path: str,
    memory_limit: int,
    options: Options,
    on_step: OnStep,
) -> RunResult:
    """Run an RPEG for real. Failures of workers are results; `KeyboardInterrupt` passes through."""
    asked = time.monotonic()
    pools, warm = fleet.acquire(rpeg.pools)
    run = _Run(rpeg, pools, run_id=run_id, options=options, on_step=on_step)
    failure = _Failure("", "")
    try:
        run.begin(model_path, memory_limit)
        setup = time.monotonic() - asked
        run.loop()
    except _Failure as caught:
        failure = caught
        setup = time.monotonic() - asked
        fleet.discard(pools)
    return RunResult(
        steps=tuple(run.reports),
        spans=tuple(run.spans),
        stage_seconds=_by_key(rpeg, stage_seconds(run.spans, run.step_ends)),
        peak_bytes=0 if failure.kind else run.peak_bytes(),
        setup_seconds=setup,
        warm=warm,
        failure=failure.kind,
        failure_detail=failure.detail,
    )


class _Run:
    """State of one run between commands."""

    def __init__(self, rpeg: Rpeg, pools: Sequence[Pool], *, run_id: str, options: Options, on_step: OnStep) -> None:
        self._rpeg = rpeg
        self._pools = {pool.span.name: pool for pool in pools}
        self._run_id = run_id
        self._options = options
        self._on_step = on_step
        self._controller = Controller(rpeg, steps=options.steps, ahead=options.ahead)
        self._rows: dict[int, dict[int, Row]] = defaultdict(dict)
        self._weights: Any = None
        self._weights_version = 0
        self._engine_version = [0] * rpeg.stage(Op.GENERATE).layout.ranks
        self._pending: dict[Any, tuple[Command, int]] = {}
        self._left: dict[Visit, int] = {}
        self._metrics: dict[str, float] = {}
        self._stopped = False
        self._started = time.time()
        self.reports: list[StepReport] = []
        self.spans: list[Span] = []
        self.step_ends: list[float] = [0.0]

    # Set-up

    def begin(self, model_path: str, memory_limit: int) -> None:
        """Prepare every worker."""
        generate, update = self._rpeg.stage(Op.GENERATE), self._rpeg.stage(Op.UPDATE_ACTOR)
        refers = self._rpeg.stage_of(Op.REFERENCE_LOGPROB) is not None
        calls: list[Any] = []
        for name, pool in self._pools.items():
            for rank, worker in enumerate(pool.workers):
                setting = Setting(
                    run_id=self._run_id,
                    pool=name,
                    model_path=model_path,
                    algorithm=self._rpeg.job.algorithm,
                    workload=self._rpeg.job.workload,
                    slots=generate.layout.micro_batch if name == generate.pool else 0,
                    trains=name == update.pool and rank < update.layout.ranks,
                    refers=refers and name == update.pool,
                    memory_limit=memory_limit,
                    started=self._started,
                )
                calls.append(worker.call.remote("begin", setting))
        self._get(calls)

    def peak_bytes(self) -> int:
        """Largest peak over the workers."""
        calls = [worker.call.remote("peak_bytes") for pool in self._pools.values() for worker in pool.workers]
        peaks: list[int] = self._get(calls)
        return max(peaks)

    # The loop

    def loop(self) -> None:
        """Carry out commands until the controller is done or the caller has seen enough."""
        self.step_ends = [time.time() - self._started]
        for command in self._controller.start():
            self._submit(command)
        while not self._controller.done and not self._stopped:
            for event in self._wait():
                for command in self._controller.handle(event):
                    if not self._stopped:
                        self._submit(command)
        # Engines come back within a time slice; what they bring is no longer wanted.
        self._get(list(self._pending))

    def _wait(self) -> list[Event]:
        ready, _ = ray.wait(list(self._pending), timeout=self._options.hang_seconds)
        if not ready:
            stuck = ", ".join(sorted({_name(command) for command, _ in self._pending.values()}))
            raise _Failure("timeout", f"nothing finished for {self._options.hang_seconds:.0f} s in {stuck}")
        events = [self._receive(reference) for reference in ready]
        return [event for event in events if event is not None]

    def _receive(self, reference: Any) -> Event | None:
        command, _ = self._pending.pop(reference)
        (reply,) = self._get([reference])
        if isinstance(command, Generate):
            return self._generated(command, reply)
        self._take(reply)
        self._left[command] -= 1
        if self._left[command]:
            return None
        del self._left[command]
        self._finish(command)
        return Visited(visit=command)

    def _get(self, references: list[Any]) -> list[Any]:
        try:
            return ray.get(references, timeout=self._options.hang_seconds)
        except (OutOfMemoryError, OutOfDeviceMemory) as error:
            raise _Failure("oom", _last_line(error)) from error
        except GetTimeoutError as error:
            raise _Failure("timeout", f"no answer for {self._options.hang_seconds:.0f} s") from error
        except RayActorError as error:
            raise _Failure("worker-died", _last_line(error)) from error
        except RayTaskError as error:
            kind = "oom" if _is_memory(error) else "crash"
            raise _Failure(kind, _last_line(error)) from error

    # Commands

    def _submit(self, command: Command) -> None:
        if isinstance(command, Generate):
            self._submit_generate(command)
        elif Op.SYNC_WEIGHTS in command.ops:
            self._submit_sync(command)
        else:
            self._submit_visit(command)

    def _submit_generate(self, command: Generate) -> None:
        pool = self._pools[self._rpeg.stage(Op.GENERATE).pool]
        stale = self._engine_version[command.engine] < command.version
        self._engine_version[command.engine] = command.version
        reference: Any = pool.workers[command.engine].call.remote(
            "generate",
            groups=command.groups,
            step=command.version,
            version=command.version,
            weights=self._weights if stale and not self._rpeg.colocated else None,
            drain=command.drain,
        )
        self._pending[reference] = (command, command.engine)

    def _submit_visit(self, command: Visit) -> None:
        stage = self._rpeg.stage(command.ops[0])
        pool = self._pools[stage.pool]
        calls = self._calls(stage, command)
        self._left[command] = len(calls)
        for rank, (call, minibatches) in calls.items():
            self._pending[pool.workers[rank].call.remote("visit", call, minibatches)] = (command, rank)

    def _calls(self, stage: Stage, command: Visit) -> dict[int, tuple[Call, list[list[Row]]]]:
        """What each rank is told. Ranks without rows are left out, except where ranks work collectively."""
        updates = Op.UPDATE_ACTOR in stage.ops
        batches = self._minibatches(command.groups) if updates else [list(command.groups)]
        hands = [self._deal(groups, stage) for groups in batches]
        tokens = tuple(sum(len(r.sample.response) for hand in deal_ for r in hand) for deal_ in hands)
        call = Call(
            ops=stage.ops,
            step=command.step,
            micro_batch=stage.layout.micro_batch,
            recompute=stage.layout.recompute,
            ranks=stage.layout.ranks,
            minibatch_tokens=tokens if updates else (),
            epochs=self._rpeg.job.workload.epochs,
        )
        shares = {rank: (call, [hand[rank] for hand in hands]) for rank in range(stage.layout.ranks)}
        return {rank: share for rank, share in shares.items() if any(share[1])}

    def _deal(self, groups: Sequence[int], stage: Stage) -> list[list[Row]]:
        rows = [self._prepare(row, stage) for group in groups for row in self._rows[group].values()]
        if Op.ADVANTAGE in stage.ops:
            return [rows]
        hands = deal([row.sample.num_tokens for row in rows], stage.layout.ranks)
        return [[rows[i] for i in hand] for hand in hands]

    def _prepare(self, row: Row, stage: Stage) -> Row:
        """The update's old log-probs are the rollout's where no stage computes them."""
        if Op.UPDATE_ACTOR in stage.ops and self._rpeg.stage_of(Op.OLD_LOGPROB) is None:
            return replace(row, old_logprob=row.sample.rollout_logprob)
        return row

    def _minibatches(self, groups: Sequence[int]) -> list[list[int]]:
        count = self._rpeg.job.workload.minibatches
        size = len(groups) // count
        return [list(groups[i * size : (i + 1) * size]) for i in range(count)]

    def _submit_sync(self, command: Visit) -> None:
        """Weights go to other pools through the object store, and to idle ranks of the same pool by broadcast."""
        stage, update = self._rpeg.stage(Op.SYNC_WEIGHTS), self._rpeg.stage(Op.UPDATE_ACTOR)
        workers = self._pools[stage.pool].workers
        references: list[Any] = []
        if update.layout.ranks < len(workers):
            references += [worker.call.remote("broadcast", command.step) for worker in workers]
        if not self._rpeg.colocated:
            published: Any = workers[0].call.options(num_returns=2).remote("publish", command.step)
            self._weights, spans = published
            references.append(spans)
        if not references:
            references.append(ray.put(()))
        self._left[command] = len(references)
        for reference in references:
            self._pending[reference] = (command, 0)

    # Results

    def _generated(self, command: Generate, reply: GenerateReply) -> Generated:
        self.spans += reply.spans
        members = self._rpeg.job.workload.samples_per_prompt
        for sample in reply.samples:
            self._rows[sample.group][sample.member] = Row(sample=sample)
        groups = {sample.group for sample in reply.samples}
        whole = tuple(sorted(group for group in groups if len(self._rows[group]) == members))
        return Generated(engine=command.engine, groups=whole)

    def _take(self, reply: VisitReply | tuple[Span, ...]) -> None:
        if isinstance(reply, tuple):
            self.spans += reply
            return
        self.spans += reply.spans
        for name, value in reply.metrics.items():
            # A rank's loss is its part of the mean over all ranks' tokens; the norm is the same on all of them.
            self._metrics[name] = value + (self._metrics.get(name, 0.0) if name == "loss" else 0.0)
        for finding in reply.findings:
            group, member = finding.key
            self._rows[group][member] = _updated(self._rows[group][member], finding)

    def _finish(self, visit: Visit) -> None:
        if Op.SYNC_WEIGHTS not in visit.ops:
            return
        now = time.time() - self._started
        rows = [row for group in visit.groups for row in self._rows.pop(group).values()]
        ages = [visit.step - row.sample.version for row in rows]
        report = StepReport(
            step=visit.step,
            seconds=now - self.step_ends[-1],
            reward=_mean(row.reward for row in rows),
            response_tokens=_mean(len(row.sample.response) for row in rows),
            staleness=tuple(ages),
            metrics=dict(self._metrics),
        )
        self._metrics.clear()
        self.step_ends.append(now)
        self.reports.append(report)
        self._stopped = not self._on_step(report)


def stage_seconds(spans: Sequence[Span], step_ends: Sequence[float]) -> dict[str, float]:
    """Median over the measured steps of the busiest device's seconds in each stage.

    A step is the interval between two publications; a span counts with what lies in it, so that the same
    definition holds where stages of several steps overlap.
    """
    windows = list(zip(step_ends[WARM_UP_STEPS:-1], step_ends[WARM_UP_STEPS + 1 :], strict=True))
    if not windows:
        return {}
    result = {}
    for stage in sorted({span.stage for span in spans}):
        mine = [span for span in spans if span.stage == stage]
        devices = sorted({span.device for span in mine})
        busy = np.zeros((len(devices), len(windows)))
        for span in mine:
            for index, (low, high) in enumerate(windows):
                busy[devices.index(span.device), index] += max(min(span.end_s, high) - max(span.start_s, low), 0.0)
        result[stage] = float(np.median(busy.max(axis=0)))
    return result


def _by_key(rpeg: Rpeg, seconds: dict[str, float]) -> dict[str, float]:
    """Stage seconds under the stages' keys, so that plans with and without a fusion compare."""
    keys = {stage.name: stage.key for stage in rpeg.stages}
    return {keys.get(name, name): value for name, value in seconds.items()}


def _updated(row: Row, finding: Finding) -> Row:
    fields = ("reward", "reference_logprob", "old_logprob", "advantage")
    found = {name: getattr(finding, name) for name in fields if getattr(finding, name) is not None}
    return replace(row, **found)


def _mean(values: Iterable[float | None]) -> float:
    return float(np.mean([value for value in values if value is not None]))


def _name(command: Command) -> str:
    return Op.GENERATE if isinstance(command, Generate) else "+".join(command.ops)


def _is_memory(error: RayTaskError) -> bool:
    cause = error.cause
    return isinstance(cause, (OutOfDeviceMemory, MemoryError)) or "can't allocate memory" in str(cause)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
