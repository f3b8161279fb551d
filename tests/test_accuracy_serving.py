"""What the model reaches on measured serving runs, and the closed form of a rollout on event simulation, with slack."""

from __future__ import annotations

from pathlib import Path

import accuracy_serving
import pytest

DATA = Path(__file__).parent / "data"

# Median error, median error after a scalar per device, model and engine, and rank correlation.
BOUNDS = {
    "serving_tpot": (1345, 0.115, 0.095, 0.88),
    "serving_tpot_dense": (574, 0.095, 0.08, 0.88),
    "serving_tpot_moe": (771, 0.135, 0.115, 0.88),
    "serving_throughput": (1340, 0.125, 0.10, 0.97),
    "offline_throughput": (196, 0.23, 0.15, 0.96),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_serving_runs(name: str) -> None:
    rows, median, after, rank = BOUNDS[name]
    found = accuracy_serving.SETS[name](DATA)
    assert found is not None
    figures = found.figures()
    assert figures["rows"] == rows
    assert figures["median"] <= median
    assert figures["median_after_scalar"] <= after
    assert figures["spearman"] >= rank
    assert figures["mean"] < 0.75 * figures["baseline_mean"], "better than a constant bandwidth"


def test_a_folder_without_the_file_has_no_figures(tmp_path: Path) -> None:
    assert accuracy_serving.SETS["serving_tpot"](tmp_path) is None
    assert accuracy_serving.SETS["offline_throughput"](tmp_path) is None


def test_the_closed_form_agrees_with_event_simulation() -> None:
    figures = accuracy_serving.SETS["makespan"](DATA).figures()  # type: ignore[union-attr]
    assert figures["rows"] == 36
    assert figures["mean"] <= 0.04
    assert figures["p90"] <= 0.08
    assert figures["mean"] < 0.25 * figures["baseline_mean"]
