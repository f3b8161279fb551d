"""How near the search comes to a known best, against measuring the model's favourites in order."""

from __future__ import annotations

import numpy as np
import pytest
import search_world as sw

from search.confidence import Confidence, confidence_of
from search.problem import Budget
from search.runs import runs_of
from search.study import run_study

CANDIDATES = sw.make_candidates(prompts=16, devices=4, max_staleness=2)
NUM_RUNS = 20


@pytest.fixture(scope="module")
def searches() -> list[tuple[sw.World, Confidence]]:
    """Ten worlds after 20 runs: stages 0.4-2.4 x the model's, bent along every axis that matters."""
    found = []
    for seed in range(10):
        world = sw.hidden_world(CANDIDATES, seed, misfit=1.5)
        result = run_study(sw.problem_of(world), Budget(max_trials=NUM_RUNS, confidence=2.0))
        assert result.confidence is not None
        found.append((world, result.confidence))
    return found


def test_twenty_runs_come_twice_as_near_as_the_models_ranking(
    searches: list[tuple[sw.World, Confidence]],
) -> None:
    ours = [world.distance(confidence.leader) for world, confidence in searches]
    ranking = [sw.model_ranking(world, NUM_RUNS) for world, _ in searches]
    assert np.mean(ours) < 0.5 * np.mean(ranking)
    assert np.mean(ours) < 0.03


def test_confidence_is_no_overstatement(searches: list[tuple[sw.World, Confidence]]) -> None:
    """As many leaders are within 3% of the best as the search believes, a tenth allowed for luck."""
    within = [world.distance(confidence.leader) <= 0.03 for world, confidence in searches]
    assert np.mean(within) >= np.mean([confidence.p3 for _, confidence in searches]) - 0.1


def test_a_perfect_model_is_believed() -> None:
    """The leader is within 1% from the 6th run on, and by the 12th the search is rather sure of it."""
    for seed in range(3):
        world = sw.true_world(CANDIDATES, seed=seed)
        trials = run_study(sw.problem_of(world), Budget(max_trials=12, confidence=2.0)).trials
        runs = runs_of(CANDIDATES, trials)
        for count in (6, 9, 12):
            confidence = confidence_of(CANDIDATES, runs[:count])
            assert confidence is not None and world.distance(confidence.leader) < 0.01
        assert confidence.p3 > 0.5
        assert confidence.expected_gap < 0.05
