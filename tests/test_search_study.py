"""The loop: what it runs, in which order, what it records, when it ends, and how it resumes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import build
import numpy as np
import optuna
import pytest
import search_world as sw

from ir.errors import Infeasible
from ir.plan import Plan
from search.choose import Chooser
from search.confidence import leave_one_out, recommend
from search.problem import Budget, Monitor
from search.study import Result, Stop, run_study
from traces.outcome import Outcome
from traces.schema import Span, Step, Trial, TrialState
from traces.store import read_spans, read_trials, write_spans, write_trial

CANDIDATES = sw.make_candidates()
LARGE = sw.make_candidates(prompts=8, devices=4)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NEVER = 2.0
"""A confidence that is never reached."""


def budget(max_trials: int, **changes: Any) -> Budget:
    return Budget(**{"max_trials": max_trials, "confidence": NEVER} | changes)


def plans(trials: Sequence[Trial]) -> list[str]:
    return [trial.plan_id for trial in trials]


@dataclass
class Script:
    """Gives prepared outcomes, one after the other, and keeps the plans it was given."""

    outcomes: Sequence[Outcome | Exception]
    plans: list[Plan] = field(default_factory=list)

    def __call__(self, plan: Plan, monitor: Monitor) -> Outcome:
        outcome = self.outcomes[min(len(self.plans), len(self.outcomes) - 1)]
        self.plans.append(plan)
        if isinstance(outcome, Exception):
            raise outcome
        start = NOON + timedelta(minutes=len(self.plans))
        return replace(outcome, started_at=start, ended_at=start + timedelta(seconds=30))


def done(*steps: float, **changes: Any) -> Outcome:
    return Outcome(state=TrialState.COMPLETE, step_seconds=steps, started_at=NOON, ended_at=NOON, **changes)


def search(script: Script, max_trials: int, **changes: Any) -> Result:
    world = sw.true_world(CANDIDATES)
    return run_study(replace(sw.problem_of(world, **changes), evaluate=script), budget(max_trials))


@pytest.mark.parametrize("cut", [2, 7, 11])
def test_a_resumed_study_runs_the_plans_of_an_unbroken_one(tmp_path: Path, cut: int) -> None:
    """Killed in the middle of a run, with everything stored but that run."""
    whole = run_study(sw.problem_of(sw.hidden_world(LARGE, 3)), budget(14))
    world = sw.hidden_world(LARGE, 3)

    def store(trial: Trial, spans: Sequence[Span], steps: Sequence[Step]) -> None:
        write_trial(tmp_path, trial)

    run_study(sw.problem_of(world), budget(cut), on_trial=store)
    resumed = run_study(sw.problem_of(world), budget(14), past=read_trials(tmp_path), on_trial=store)
    assert plans(resumed.trials) == plans(whole.trials)
    assert len(world.runs) == 14
    assert plans(read_trials(tmp_path)) == plans(whole.trials)
    assert resumed.confidence == whole.confidence


def test_what_a_trial_records(tmp_path: Path) -> None:
    span = Span(run_id="", step=0, stage="generate", pool="all", device=0, start_s=0.0, end_s=1.0)
    script = Script([done(2.0, 1.0, stage_seconds={"generate": 0.5}, peak_bytes=7, warm=True, spans=(span,))])

    def store(trial: Trial, spans: Sequence[Span], steps: Sequence[Step]) -> None:
        write_trial(tmp_path, trial)
        write_spans(tmp_path, spans)

    problem = replace(sw.problem_of(sw.true_world(CANDIDATES)), evaluate=script)
    (trial,) = run_study(problem, budget(1), on_trial=store).trials
    assert (trial.study, trial.hardware, trial.software, trial.model_version) == ("job", "here", "now", "1")
    assert trial.plan_id == script.plans[0].identity
    assert (trial.step_seconds, trial.stage_seconds, trial.peak_bytes) == ((2.0, 1.0), {"generate": 0.5}, 7)
    assert trial.warm and trial.started_at == NOON + timedelta(minutes=1)
    assert read_trials(tmp_path) == [trial]
    assert read_spans(tmp_path, trial.run_id) == [replace(span, run_id=trial.run_id)]


def test_labelled_plans_come_first_once_and_run_to_the_end() -> None:
    world = sw.hidden_world(CANDIDATES, 0)
    slow = int(CANDIDATES.step_seconds.argmax())
    labelled = {"slow": CANDIDATES.plan(slow), "same": CANDIDATES.plan(slow), "other": CANDIDATES.plan(3)}
    labelled["elsewhere"] = build.plan(rollout=9, train=9)
    problem = sw.problem_of(world, labelled=labelled)
    result = run_study(problem, budget(5, max_steps=4))
    assert [trial.label for trial in result.trials] == ["slow", "other", "", "", ""]
    assert world.runs[:2] == [slow, 3]
    assert [len(trial.step_seconds) for trial in result.trials[:2]] == [4, 4]
    assert [left.name for left in result.left_out] == ["elsewhere"]
    again = run_study(problem, budget(7), past=result.trials)
    assert [trial.label for trial in again.trials[5:]] == ["", ""], "no labelled plan is run again"


def test_a_losing_run_is_stopped_early() -> None:
    trials = run_study(sw.problem_of(sw.hidden_world(LARGE, 1)), budget(12, max_steps=6)).trials
    lengths = [len(trial.step_seconds) for trial in trials]
    assert min(lengths) == 2 and max(lengths) == 6


def test_a_crashing_plan_is_run_twice_at_most() -> None:
    """And a labelled one does not hold up the others."""
    crash = Outcome(state=TrialState.FAILED, failure="crash", started_at=NOON, ended_at=NOON)
    labelled = {"broken": CANDIDATES.plan(3)}
    script = Script([crash, crash, *[done(1.0)] * 8, crash])
    trials = search(script, 20, labelled=labelled).trials
    counts = {plan: plans(trials).count(plan) for plan in plans(trials)}
    assert plans(trials)[:3] == [CANDIDATES.plan(3).identity] * 2 + [plans(trials)[2]]
    assert max(counts.values()) == 2
    assert counts[plans(trials)[12]] == 2, "a crash is given a second chance"


@pytest.mark.parametrize(
    ("given", "state", "failure"),
    [
        (Infeasible("oom", "needs 9 GB"), TrialState.INFEASIBLE, "oom"),
        (Infeasible("timeout", "hung"), TrialState.FAILED, "timeout"),
        (done(), TrialState.FAILED, "no-time"),
        (done(1.0, float("nan")), TrialState.FAILED, "no-time"),
        (done(float("inf")), TrialState.FAILED, "no-time"),
        (done(0.0), TrialState.FAILED, "no-time"),
    ],
)
def test_runs_that_give_no_time_are_data(given: Outcome | Exception, state: TrialState, failure: str) -> None:
    trials = search(Script([given, done(1.0)]), 3).trials
    assert (trials[0].state, trials[0].failure, trials[0].step_seconds) == (state, failure, ())
    assert [trial.state for trial in trials[1:]] == [TrialState.COMPLETE] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_anything_else_passes_through(error: BaseException) -> None:
    def evaluate(plan: Plan, monitor: Monitor) -> Outcome:
        raise error

    problem = replace(sw.problem_of(sw.true_world(CANDIDATES)), evaluate=evaluate)
    with pytest.raises(type(error)):
        run_study(problem, budget(3))


def test_when_all_first_runs_are_out_of_memory_smaller_plans_follow() -> None:
    """Plans need 6 x the modelled memory, so only the smallest 8% of them fit."""
    memory = 6.0 * LARGE.memory_bytes
    world = sw.true_world(LARGE, memory_bytes=memory)
    assert not world.fits[Chooser(LARGE).first[:5]].any()
    trials = run_study(sw.problem_of(world), budget(16)).trials
    states = [trial.state for trial in trials]
    first = states.index(TrialState.COMPLETE)
    assert 0 < first <= 6
    assert memory[world.runs[first]] < memory[world.runs[0]]
    assert states[first:].count(TrialState.INFEASIBLE) <= 6
    assert world.best_measured() < 0.05


def test_a_study_without_stage_times_goes_on() -> None:
    world = sw.hidden_world(LARGE, 2)
    world.reports_stages = False
    result = run_study(sw.problem_of(world), budget(16))
    assert world.best_measured() < world.distance(world.runs[0])
    assert result.confidence is not None and 0 <= result.confidence.p3 <= 1


def test_why_a_study_ends() -> None:
    assert search(Script([done(1.0)]), 2).stop is Stop.TRIALS
    problem = replace(sw.problem_of(sw.true_world(CANDIDATES)), evaluate=Script([done(1.0)]))
    timed = run_study(problem, budget(99, max_seconds=75))
    assert timed.stop is Stop.SECONDS and len(timed.trials) == 3, "runs of 30 seconds"
    few = sw.make_candidates(prompts=2, devices=1, max_staleness=0)
    tried = run_study(sw.problem_of(sw.true_world(few)), budget(999))
    assert tried.stop is Stop.EXHAUSTED and len(tried.trials) == len(few)
    eager = run_study(sw.problem_of(sw.true_world(few)), Budget(max_trials=99, confidence=0.0, min_completed=5))
    assert eager.stop is Stop.CONFIDENT and len(eager.trials) == 5


def test_the_record_is_made_before_the_study_learns() -> None:
    """A trial whose record fails to be written is not searched on with."""

    def fail(trial: Trial, spans: Sequence[Span], steps: Sequence[Step]) -> None:
        raise OSError("disk full")

    script = Script([done(1.0)])
    problem = replace(sw.problem_of(sw.true_world(CANDIDATES)), evaluate=script)
    with pytest.raises(OSError, match="disk full"):
        run_study(problem, budget(5), on_trial=fail)
    assert len(script.plans) == 1


def test_optuna_stays_quiet_and_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    search(Script([done(1.0)]), 6)
    assert optuna.logging.get_verbosity() == before == logging.INFO
    assert capfd.readouterr() == ("", "")


def test_what_is_predicted_after_the_runs() -> None:
    """Leaving a plan out, the surrogate foretells it better than the model does."""
    world = sw.hidden_world(LARGE, 5)
    trials = run_study(sw.problem_of(world), budget(16)).trials
    measured = np.array([np.median(trial.step_seconds) for trial in trials])
    modelled = LARGE.step_seconds[world.runs]
    predicted = leave_one_out(LARGE, trials)
    error = np.abs(predicted / measured - 1)
    assert np.nanmedian(error) < 0.5 * np.median(np.abs(modelled / measured - 1))
    best = recommend(LARGE, trials)
    assert best is not None and best.plan_id in plans(trials)


def test_nothing_is_recommended_when_nothing_ran() -> None:
    result = search(Script([Infeasible("oom", "")]), 3)
    assert result.confidence is None
    assert recommend(CANDIDATES, result.trials) is None
    assert np.isnan(leave_one_out(CANDIDATES, result.trials)).all()
