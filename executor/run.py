"""A run: the controller's commands carried out on a fleet, the batch kept between them, the spans collected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from executor.batch import Batch
from executor.controller import Controller
from executor.failures import Failure, failures
from executor.fleet import START_TIMEOUT_S, Fleet, Pool
from executor.records import (
    Command,
    Event,
    Generate,
    Generated,
    GenerateReply,
    Setting,
    Visit,
    Visited,
    VisitReply,
)
from executor.result import RunResult, StepReport, by_key, stage_seconds, warm_up_steps
from ir.graph import Op, Rpeg
from traces.schema import Span

HANG_SECONDS = 60.0
"""Least time without any sign of life after which a run counts as hung."""

HANG_STEPS = 20.0
"""And that many predicted steps, if they are longer."""


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
    warm_up = warm_up_steps(rpeg.staleness)
    run = _Run(rpeg, run_id=run_id, options=options, on_step=on_step)
    failure, setup, warm, peak = Failure("", ""), 0.0, False, 0
    try:
        warm = run.acquire(fleet)
        run.begin(model_path, memory_limit)
        setup = time.monotonic() - asked
        run.loop()
        peak = run.peak_bytes()
    except Failure as caught:
        failure = caught
        fleet.discard(run.pools)
    return RunResult(
        steps=tuple(run.reports),
        spans=tuple(run.spans),
        stage_seconds=by_key(rpeg, stage_seconds(run.spans, run.step_ends, warm_up)),
        peak_bytes=peak,
        setup_seconds=setup,
        warm=warm,
        warm_up=warm_up,
        failure=failure.kind,
        failure_detail=failure.detail,
    )


class _Run:
    """State of one run between commands."""

    def __init__(self, rpeg: Rpeg, *, run_id: str, options: Options, on_step: OnStep) -> None:
        self._rpeg = rpeg
        self._pools: dict[str, Pool] = {}
        self._run_id = run_id
        self._options = options
        self._on_step = on_step
        self._controller = Controller(rpeg, steps=options.steps, ahead=options.ahead)
        self._batch = Batch(rpeg)
        self._weights: Any = None
        self._engine_version = [0] * rpeg.stage(Op.GENERATE).layout.ranks
        self._pending: dict[Any, Command] = {}
        self._left: dict[Visit, int] = {}
        self._metrics: dict[str, float] = {}
        self._stopped = False
        self._started = time.time()
        self.reports: list[StepReport] = []
        self.spans: list[Span] = []
        self.step_ends: list[float] = [0.0]

    # Set-up

    @property
    def pools(self) -> list[Pool]:
        """The pools this run works on."""
        return list(self._pools.values())

    def acquire(self, fleet: Fleet) -> bool:
        """Get the pools; returns whether all of them were warm."""
        with failures(START_TIMEOUT_S):
            pools, warm = fleet.acquire(self._rpeg.pools)
        self._pools = {pool.span.name: pool for pool in pools}
        return warm

    def begin(self, model_path: str, memory_limit: int) -> None:
        """Prepare every worker."""
        generate, update = self._rpeg.stage(Op.GENERATE), self._rpeg.stage(Op.UPDATE_ACTOR)
        reference = self._rpeg.stage_of(Op.REFERENCE_LOGPROB)
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
                    refers=reference is not None and name == reference.pool,
                    training_ranks=update.layout.ranks if name == update.pool else 0,
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
            stuck = ", ".join(sorted({_name(command) for command in self._pending.values()}))
            raise Failure("timeout", f"nothing finished for {self._options.hang_seconds:.0f} s in {stuck}")
        events = [self._receive(reference) for reference in ready]
        return [event for event in events if event is not None]

    def _receive(self, reference: Any) -> Event | None:
        command = self._pending.pop(reference)
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
        with failures(self._options.hang_seconds):
            return ray.get(references, timeout=self._options.hang_seconds)

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
        self._pending[reference] = command

    def _submit_visit(self, command: Visit) -> None:
        stage = self._rpeg.stage(command.ops[0])
        pool = self._pools[stage.pool]
        shares = self._batch.shares(stage, command)
        self._left[command] = len(shares)
        for rank, (call, minibatches) in shares.items():
            self._pending[pool.workers[rank].call.remote("visit", call, minibatches)] = command

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
            self._pending[reference] = command

    # Results

    def _generated(self, command: Generate, reply: GenerateReply) -> Generated:
        self.spans += reply.spans
        return Generated(engine=command.engine, groups=self._batch.add(reply.samples))

    def _take(self, reply: VisitReply | tuple[Span, ...]) -> None:
        if isinstance(reply, tuple):
            self.spans += reply
            return
        self.spans += reply.spans
        for name, value in reply.metrics.items():
            # A rank's loss is its part of the mean over all ranks' sequences; the norm is the same on all of them.
            self._metrics[name] = value + (self._metrics.get(name, 0.0) if name == "loss" else 0.0)
        self._batch.note(reply.findings)

    def _finish(self, visit: Visit) -> None:
        if Op.SYNC_WEIGHTS not in visit.ops:
            return
        now = time.time() - self._started
        seconds = now - self.step_ends[-1]
        report = self._batch.report(visit, seconds=seconds, metrics=dict(self._metrics))
        self._metrics.clear()
        self.step_ends.append(now)
        self.reports.append(report)
        self._stopped = not self._on_step(report)


def _name(command: Command) -> str:
    return Op.GENERATE if isinstance(command, Generate) else "+".join(command.ops)
