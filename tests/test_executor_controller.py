"""The controller without Ray: a scheduler in the test finishes commands in a random order."""

from __future__ import annotations

import random
from collections import defaultdict

import build
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.controller import Controller
from executor.records import Command, Event, Generate, Generated, Visit, Visited
from ir.graph import Op
from ir.lower import lower
from ir.plan import Plan

PER_STEP, MEMBERS = 4, 4


class Machine:
    """Carries commands out in a random order and checks what must hold at every moment."""

    def __init__(self, plan: Plan, *, steps: int, seed: int) -> None:
        self.rpeg = lower(build.job(), plan)
        self.controller = Controller(self.rpeg, steps=steps, ahead=False)
        self.random = random.Random(seed)
        self.running: list[Command] = []
        self.queues: dict[int, list[int]] = defaultdict(list)
        self.versions: dict[int, int] = defaultdict(int)
        self.started_with: dict[int, int] = {}
        self.finished: set[int] = set()
        self.log: list[Visit] = []
        self.ages: list[int] = []

    def run(self) -> None:
        self.take(self.controller.start())
        while not self.controller.done:
            assert self.running, "nothing runs and nothing is done: the controller is stuck"
            command = self.running.pop(self.random.randrange(len(self.running)))
            self.take(self.controller.handle(self.finish(command)))

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Generate):
                assert command.engine not in [c.engine for c in self.running if isinstance(c, Generate)]
                self.versions[command.engine] = command.version
                self.queues[command.engine] += command.groups
                for group in self.queues[command.engine]:
                    self.started_with.setdefault(group, command.version)
            else:
                assert not any(isinstance(c, Visit) for c in self.running), "one visit at a time"
                assert set(command.groups) <= self.finished
                if self.rpeg.colocated:
                    assert not any(isinstance(c, Generate) for c in self.running)
            self.running.append(command)

    def finish(self, command: Command) -> Event:
        if isinstance(command, Generate):
            queue = self.queues[command.engine]
            count = len(queue) if command.drain else self.random.randint(0, min(2, len(queue)))
            done = self.random.sample(queue, count)
            self.queues[command.engine] = [g for g in queue if g not in done]
            self.finished |= set(done)
            return Generated(engine=command.engine, groups=tuple(done))
        self.log.append(command)
        if Op.SYNC_WEIGHTS in command.ops:
            self.ages += [command.step - self.started_with[g] for g in command.groups]
        return Visited(visit=command)


PLANS = {
    "colocated": build.plan(colocated=True, train=2, dp=2),
    "colocated-merged": build.plan(colocated=True, train=2, merge_logprobs=True),
    "disaggregated": build.plan(),
    "streamed": build.plan(stream=True),
    "one-step-off": build.plan(staleness=1, rollout_logprob=True),
    "async-two-engines": build.plan(rollout=2, staleness=4, concurrency=16),
    "async-streamed-folded": build.plan(staleness=2, stream=True, fold_old_logprob=True),
}


@pytest.mark.parametrize("name", PLANS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_every_step_visits_every_stage_once_in_order_and_keeps_the_bound(name: str, seed: int) -> None:
    plan = PLANS[name]
    machine = Machine(plan, steps=6, seed=seed)
    machine.run()
    order = [stage.ops for stage in machine.rpeg.stages if Op.GENERATE not in stage.ops]
    for step in range(6):
        visits = [v for v in machine.log if v.step == step]
        for ops in order:
            groups = sorted(g for v in visits if v.ops == ops for g in v.groups)
            assert groups == list(range(step * PER_STEP, (step + 1) * PER_STEP))
        last_seen = [max(i for i, v in enumerate(machine.log) if v.step == step and v.ops == ops) for ops in order]
        streamed = [all(op in machine.rpeg.streamed for op in ops) for ops in order]
        firm = [i for i, is_streamed in zip(last_seen, streamed, strict=True) if not is_streamed]
        assert firm == sorted(firm)
    assert max(machine.ages) <= plan.staleness


def test_a_bound_of_zero_is_exactly_on_policy() -> None:
    machine = Machine(PLANS["streamed"], steps=5, seed=3)
    machine.run()
    assert set(machine.ages) == {0}


def test_a_positive_bound_is_used() -> None:
    machine = Machine(PLANS["async-two-engines"], steps=12, seed=3)
    machine.run()
    assert max(machine.ages) > 1


def test_generation_stops_at_the_last_step_unless_told_to_run_ahead() -> None:
    rpeg = lower(build.job(), PLANS["one-step-off"])
    controller = Controller(rpeg, steps=1, ahead=False)
    commands = controller.start()
    assert [c.groups for c in commands if isinstance(c, Generate)] == [(0, 1, 2)]
    more = controller.handle(Generated(engine=0, groups=(0, 1)))
    assert [c.groups for c in more if isinstance(c, Generate)] == [(3,)]


def test_streamed_stages_start_on_the_first_finished_group() -> None:
    rpeg = lower(build.job(), PLANS["streamed"])
    controller = Controller(rpeg, steps=2, ahead=False)
    controller.start()
    commands = controller.handle(Generated(engine=0, groups=(2,)))
    assert Visit(ops=(Op.REWARD,), step=0, groups=(2,)) in commands
