"""The sampler under Optuna's contract."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import optuna
import pytest
import search_world as sw

from search.choose import Chooser
from search.runs import Run
from search.sampler import StageResidualSampler
from search.view import PLAN_ATTRIBUTE, build_study, distributions, row_of_params, study_params
from traces.schema import TrialState

CANDIDATES = sw.make_candidates()
AXES = distributions(CANDIDATES.space)


def ask(study: optuna.Study) -> tuple[optuna.Trial, int]:
    trial = study.ask(AXES)
    row = row_of_params(CANDIDATES, trial.params)
    assert row is not None
    return trial, row


def empty_study() -> optuna.Study:
    return build_study(CANDIDATES, StageResidualSampler(CANDIDATES, seed=1), [])


def test_a_study_by_hand_finds_a_good_plan() -> None:
    """Optuna alone, telling values and nothing else: the step itself is learnt."""
    study = empty_study()
    world = sw.true_world(CANDIDATES)
    for _ in range(6):
        trial, row = ask(study)
        study.tell(trial, float(CANDIDATES.step_seconds[row]))
    assert world.distance(row_of_params(CANDIDATES, study.best_params) or 0) < 0.01


def test_the_choice_is_seen_by_others_at_once_and_survives_storage(tmp_path: Path) -> None:
    """Plain ints, short, on the trial before it runs; kept by a storage that writes JSON."""
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, sampler=StageResidualSampler(CANDIDATES))
    trial, row = ask(study)
    written = storage.get_trial(trial._trial_id).system_attrs[PLAN_ATTRIBUTE]
    assert written == study_params(CANDIDATES, row)
    assert len(json.dumps(written)) < 2046


def test_no_plan_is_given_twice() -> None:
    study = empty_study()
    rows = [ask(study)[1] for _ in range(6)]
    trial, row = ask(study)
    study.tell(trial, 1.0)
    rows += [row, *(ask(study)[1] for _ in range(6))]
    assert len(set(rows)) == len(rows) == 13


def test_threads_get_plans_of_their_own() -> None:
    study = empty_study()
    for _ in range(4):
        trial, row = ask(study)
        study.tell(trial, float(CANDIDATES.step_seconds[row]))
    barrier = threading.Barrier(4)

    def one(_: int) -> int:
        barrier.wait()
        return ask(study)[1]

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(one, range(4)))) == 4


def test_an_enqueued_plan_is_taken_as_it_is() -> None:
    study = empty_study()
    study.enqueue_trial(study_params(CANDIDATES, 5))
    assert [ask(study)[1], ask(study)[1] != 5] == [5, True]


def test_what_the_sampler_refuses() -> None:
    study = empty_study()
    study.enqueue_trial({"dp": 0})
    with pytest.raises(ValueError, match="every axis"):
        study.ask(AXES)
    with pytest.raises(ValueError, match="`unknown` must be an axis"):
        study.ask({"unknown": optuna.distributions.IntDistribution(0, 3)})


def test_when_every_plan_was_tried() -> None:
    few = sw.make_candidates(prompts=2, devices=1, max_staleness=0)
    chooser = Chooser(few)
    runs: list[Run] = []
    while (row := chooser.next_row(runs, (), (0, len(runs)))) is not None:
        runs.append(Run(row=row, state=TrialState.COMPLETE, step_seconds=(1.0,), stage_seconds={}))
    assert sorted(run.row for run in runs) == list(range(len(few)))


def test_the_first_plans_are_fast_fit_and_unlike() -> None:
    large = sw.make_candidates(prompts=8, devices=4)
    first = Chooser(large).first
    room = large.memory_bytes <= 0.9 * large.capacity_bytes
    assert len(set(first.tolist())) == 8 and room[first].all()
    assert large.step_seconds[first[0]] == large.step_seconds[room].min()
    assert large.step_seconds[first].max() < np.quantile(large.step_seconds[room], 0.06)
    unlike = (large.levels[first][:, None] != large.levels[first][None]).sum(axis=-1)
    assert unlike[np.triu_indices(8, 1)].min() >= 3


def test_a_plan_that_crashed_is_tried_once_more() -> None:
    """And not at once in the first runs: other plans come before it."""
    chooser = Chooser(CANDIDATES)
    crash = Run(row=int(chooser.first[0]), state=TrialState.FAILED, stage_seconds={})
    assert chooser.next_row([crash], (), (0, 1)) == chooser.first[1]
    few = sw.make_candidates(prompts=2, devices=1, max_staleness=0)
    once = [Run(row=row, state=TrialState.FAILED, stage_seconds={}) for row in range(len(few))]
    assert Chooser(few).next_row(once, (), (0, 1)) is not None
    assert Chooser(few).next_row([*once, *once], (), (0, 1)) is None
