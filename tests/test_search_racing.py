"""A clear loser is stopped; a near tie and a winner are not."""

from __future__ import annotations

import pytest

from search.problem import Budget
from search.racing import Race, chance_better, race_of, to_the_end
from search.runs import Run
from traces.schema import TrialState

RACE = Race(leader=(1.0, 1.02, 0.98, 1.0, 1.0), step_sd=0.05, min_steps=2, max_steps=5)


@pytest.mark.parametrize(
    ("steps", "goes_on"),
    [
        ([2.0], True),
        ([2.0, 2.0], False),
        ([1.10, 1.10], False),
        ([1.03, 1.02], True),
        ([1.02, 1.02, 1.02, 1.02], True),
        ([1.06, 1.06, 1.06, 1.06], False),
        ([0.5, 0.5], True),
        ([0.9, 0.9, 0.9, 0.9, 0.9], False),
    ],
    ids=["one step", "clear loser", "loser", "near tie", "tie", "loser late", "winner", "all steps done"],
)
def test_who_goes_on(steps: list[float], goes_on: bool) -> None:
    assert RACE.goes_on(steps) is goes_on


def test_the_chance_is_the_normal_gap() -> None:
    """One sd of the gap behind: Phi(-1); level: one half."""
    assert chance_better([1.0, 1.0], [1.0, 1.0], 0.05) == pytest.approx(0.5)
    behind = 1.0 * 2.718281828 ** (0.05 * (1 / 2 + 1 / 2) ** 0.5)
    assert chance_better([behind, behind], [1.0, 1.0], 0.05) == pytest.approx(0.158655, abs=1e-5)


def test_noisier_steps_stop_later() -> None:
    steps = [1.10, 1.10]
    noisy = Race(leader=RACE.leader, step_sd=0.15, min_steps=2, max_steps=5)
    assert noisy.goes_on(steps) and not RACE.goes_on(steps)


def test_the_leader_is_the_shortest_completed_run() -> None:
    def run(row: int, *steps: float, state: TrialState = TrialState.COMPLETE) -> Run:
        return Run(row=row, state=state, step_seconds=steps, stage_seconds={})

    budget = Budget(min_steps=2, max_steps=4)
    runs = [run(0, 3.0, 3.0), run(1, 2.0, 1.0, 5.0), run(2, 1.0, state=TrialState.FAILED)]
    assert race_of(runs, budget).leader == (2.0, 1.0, 5.0)
    assert race_of([], budget).leader == ()
    assert race_of([], budget).goes_on([5.0, 5.0, 5.0]) and not race_of([], budget).goes_on([5.0] * 4)


def test_an_exempt_run_goes_to_the_end() -> None:
    monitor = to_the_end(Budget(max_steps=3))
    assert [monitor([99.0] * k) for k in (1, 2, 3)] == [True, True, False]
