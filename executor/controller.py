"""The controller: a pure state machine that walks an RPEG step after step.

It owns no process and no clock: events go in, commands come out. Invariants:
- group i is trained in step i // prompts_per_step, in that order and no other;
- a group is given to an engine only while (its step) - (version of the engine's
  weights) <= staleness bound, so no sample can exceed the bound, however slow it is;
- a pool has at most one visit in progress, and an engine at most one call.
"""

from __future__ import annotations

from collections import defaultdict

from executor.records import Command, Event, Generate, Generated, Visit, Visited
from ir.graph import Op, Rpeg


class Controller:
    """Decides what runs next. Call `start` once, then `handle` for every event until `done`."""

    def __init__(self, rpeg: Rpeg, *, steps: int, ahead: bool) -> None:
        """Walk `steps` steps. `ahead` goes on generating for steps after the last one, as an endless run
        would, so that the last steps of a short measurement are like the others."""
        workload = rpeg.job.workload
        generate = rpeg.stage(Op.GENERATE)
        self._rpeg = rpeg
        self._steps = steps
        self._per_step = workload.prompts_per_step
        self._members = workload.samples_per_prompt
        self._slots = generate.layout.micro_batch
        self._last_group = (steps + (rpeg.staleness + 1 if ahead else 0)) * self._per_step
        self._visits = [stage.ops for stage in rpeg.stages if Op.GENERATE not in stage.ops]
        self._engine_groups: list[set[int]] = [set() for _ in range(generate.layout.ranks)]
        self._engine_busy = [False] * generate.layout.ranks
        self._pool_busy = False
        self._admitted = 0
        self._generated: set[int] = set()
        self._visited: dict[tuple[Op, ...], set[int]] = defaultdict(set)
        self.version = 0
        """Updates published so far."""

    @property
    def done(self) -> bool:
        """Whether the last step has been published."""
        return self.version >= self._steps

    def start(self) -> list[Command]:
        """The first commands."""
        return self._next()

    def handle(self, event: Event) -> list[Command]:
        """Take an event in and give the commands that it makes possible."""
        if isinstance(event, Generated):
            self._engine_busy[event.engine] = False
            self._engine_groups[event.engine] -= set(event.groups)
            self._generated |= set(event.groups)
        else:
            self._finish(event)
        return [] if self.done else self._next()

    def _finish(self, event: Visited) -> None:
        self._pool_busy = False
        self._visited[event.visit.ops] |= set(event.visit.groups)
        if Op.SYNC_WEIGHTS in event.visit.ops:
            self.version += 1
            finished = set(event.visit.groups)
            self._generated -= finished
            for groups in self._visited.values():
                groups -= finished

    def _next(self) -> list[Command]:
        return [*self._generate(), *self._visit()]

    def _generate(self) -> list[Command]:
        """Admit what the bound allows, to the emptiest engine first; wake engines that have work."""
        admitted = self._admit()
        commands: list[Command] = []
        for engine, busy in enumerate(self._engine_busy):
            if not busy and self._engine_groups[engine]:
                self._engine_busy[engine] = True
                groups = tuple(sorted(admitted[engine]))
                commands.append(Generate(engine=engine, groups=groups, version=self.version, drain=self._drains))
        return commands

    @property
    def _drains(self) -> bool:
        """Whether an engine may run on until it is empty: nothing new could be given to it, and nobody waits
        for single groups."""
        return self._rpeg.staleness == 0 and not self._rpeg.streamed

    def _admit(self) -> dict[int, list[int]]:
        admitted: dict[int, list[int]] = defaultdict(list)
        while self._admitted < self._last_group:
            if self._admitted // self._per_step - self.version > self._rpeg.staleness:
                break
            idle = [e for e, busy in enumerate(self._engine_busy) if not busy and self._has_room(e)]
            if not idle:
                break
            engine = min(idle, key=lambda e: len(self._engine_groups[e]))
            self._engine_groups[engine].add(self._admitted)
            admitted[engine].append(self._admitted)
            self._admitted += 1
        return admitted

    def _has_room(self, engine: int) -> bool:
        """With a bound of 0 every group starts from the same weights whenever it is given out. Otherwise a group is
        held back until slots are about to fall free, so that it starts from the newest weights."""
        if self._rpeg.staleness == 0:
            return True
        return len(self._engine_groups[engine]) * self._members < self._slots + self._members

    def _visit(self) -> list[Command]:
        """At most one visit at a time: the earliest step first, then the order of the stages."""
        if self._pool_busy:
            return []
        for step in range(self.version, self._admitted // self._per_step + 1):
            whole = range(step * self._per_step, (step + 1) * self._per_step)
            for ops in self._visits:
                groups = self._ready(ops, whole, current=step == self.version)
                if groups:
                    self._pool_busy = True
                    return [Visit(ops=ops, step=step, groups=groups)]
                if not self._is_streamed(ops) and not self._is_done(ops, whole):
                    break
        return []

    def _ready(self, ops: tuple[Op, ...], whole: range, *, current: bool) -> tuple[int, ...]:
        """Groups of the step that `ops` can visit now."""
        waiting = tuple(g for g in whole if g in self._generated and g not in self._visited[ops])
        if self._is_streamed(ops):
            return waiting
        if len(waiting) < len(whole) or not all(self._is_done(before, whole) for before in self._before(ops)):
            return ()
        # Stages that read the newest weights wait for the updates of all earlier steps.
        return waiting if current else ()

    def _before(self, ops: tuple[Op, ...]) -> list[tuple[Op, ...]]:
        return self._visits[: self._visits.index(ops)]

    def _is_done(self, ops: tuple[Op, ...], whole: range) -> bool:
        return all(group in self._visited[ops] for group in whole)

    def _is_streamed(self, ops: tuple[Op, ...]) -> bool:
        return all(op in self._rpeg.streamed for op in ops)
