"""What the model reaches on published RL steps, weight transfers and staleness, with slack."""

from __future__ import annotations

from pathlib import Path

import accuracy_rl
import numpy as np
import pytest
from accuracy import Evaluation

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def steps() -> Evaluation:
    found = accuracy_rl.rl_steps(DATA)
    assert found is not None
    return found


def test_steps_are_ranked_and_told_within_the_spread_of_frameworks(steps: Evaluation) -> None:
    figures = steps.figures()
    assert len(steps.measured) == 54
    assert figures["mean"] <= 0.15
    assert figures["tau"] >= 0.8
    assert figures["mean_after_scalar"] <= 0.14


def test_phases_are_ranked() -> None:
    found = accuracy_rl.rl_phases(DATA)
    assert found is not None
    figures = found.figures()
    assert figures["tau"] >= 0.8
    assert figures["mean"] <= 0.15
    assert figures["mean_after_scalar"] <= 0.20 < figures["baseline_mean"]


def test_most_steps_lie_inside_two_bars() -> None:
    found = accuracy_rl.rl_bars(DATA)
    assert found is not None
    assert found["within_2"] >= 0.9
    assert found["within_2_after_scalar"] >= 0.85


def test_pairs_with_and_without_staleness() -> None:
    found = accuracy_rl.sync_async_sign(DATA)
    assert found is not None
    assert found["pairs"] == 11
    assert found["value"] >= 0.9


def test_staleness_is_told_within_a_few_percent() -> None:
    found = accuracy_rl.staleness(DATA)
    assert found is not None
    assert found.errors.max() <= 0.08
    assert found.errors.mean() <= 0.04 < float(found.figures()["baseline_mean"])


def test_most_weight_transfers_lie_within_a_factor() -> None:
    found = accuracy_rl.weight_sync_factor(DATA)
    assert found is not None
    assert found["value"] >= 0.85
    assert found["other_pages"] >= 0.75


def test_a_folder_without_files_gives_nothing(tmp_path: Path) -> None:
    assert all(evaluate(tmp_path) is None for evaluate in accuracy_rl.SETS.values())


def test_no_prediction_is_missing(steps: Evaluation) -> None:
    assert np.isfinite(steps.predicted).all() and (steps.predicted > 0).all()
