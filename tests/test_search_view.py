"""Which trials make up a study, and what the study says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import optuna
import pytest
import search_world as sw

from search.problem import Budget
from search.sampler import StageResidualSampler
from search.study import run_study
from search.view import admit, build_study
from traces.schema import Trial, TrialState

CANDIDATES = sw.make_candidates()
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def trials_of(count: int) -> Sequence[Trial]:
    return run_study(sw.problem_of(sw.true_world(CANDIDATES)), Budget(max_trials=count)).trials


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"study": "x"}, "another job"),
        ({"hardware": "x"}, "other hardware"),
        ({"software": "x"}, "other software"),
        ({"space_version": "0"}, "another version of the space"),
        ({"params": {"dp": "1"}}, "must name the axes"),
        ({"state": TrialState.COMPLETE, "step_seconds": ()}, "not positive"),
    ],
)
def test_trials_of_other_studies_are_left_out_and_named(changes: dict[str, Any], reason: str) -> None:
    past = trials_of(3)
    admitted, (left,) = admit(CANDIDATES, sw.IDENTITY, [past[0], replace(past[1], **changes), past[2]])
    assert admitted == [past[0], past[2]]
    assert left.name == past[1].run_id and reason in left.reason


@pytest.mark.parametrize("value", ["3", "x", "999"])
def test_a_value_that_an_axis_lacks_is_reported(value: str) -> None:
    (trial,) = trials_of(1)
    _, (left,) = admit(CANDIDATES, sw.IDENTITY, [replace(trial, params=trial.params | {"update_actor.dp": value})])
    assert "axis update_actor.dp" in left.reason and value in left.reason


def test_a_plan_that_is_no_longer_legal_is_reported() -> None:
    (trial,) = trials_of(1)
    illegal = trial.params | {"place.actor": "0", "fusions.stream": "1"}
    _, (left,) = admit(CANDIDATES, sw.IDENTITY, [replace(trial, params=illegal)])
    assert "legal" in left.reason


def test_the_study_says_in_optunas_words_how_runs_ended() -> None:
    complete, infeasible, failed = trials_of(3)
    complete = replace(complete, step_seconds=(3.0, 1.0, 2.0))
    infeasible = replace(infeasible, state=TrialState.INFEASIBLE, failure="oom", step_seconds=())
    failed = replace(failed, state=TrialState.FAILED, failure="crash")
    study = build_study(CANDIDATES, StageResidualSampler(CANDIDATES), [complete, infeasible, failed])
    frozen = study.get_trials()
    states = optuna.trial.TrialState
    assert [t.state for t in frozen] == [states.COMPLETE, states.PRUNED, states.FAIL]
    assert [t.values for t in frozen] == [[2.0], None, None]
    assert frozen[0].constraints["memory"] <= 0 < frozen[1].constraints["memory"]
    assert study.best_trial.number == 0
    assert frozen[0].user_attrs["run_id"] == complete.run_id
    assert frozen[0].datetime_start == complete.started_at


def test_trials_are_taken_in_the_order_of_their_start() -> None:
    """Numbers seed the choice of plans, so they must not depend on the order of files."""
    trials = [replace(t, started_at=NOON + timedelta(hours=i)) for i, t in enumerate(trials_of(3))]
    assert admit(CANDIDATES, sw.IDENTITY, trials[::-1])[0] == trials
