"""What the model reaches on measured serving runs, and the closed form of a rollout on event simulation, with slack."""

from __future__ import annotations

from pathlib import Path

import accuracy_serving
import numpy as np
import pytest
import serving_rows
from serving_rows import Row

DATA = Path(__file__).parent / "data"

# Median error, median error after a scalar per device, model and engine, and rank correlation.
BOUNDS = {
    "serving_tpot": (1345, 0.10, 0.072, 0.94),
    "serving_tpot_dense": (574, 0.085, 0.062, 0.97),
    "serving_tpot_moe": (771, 0.11, 0.088, 0.91),
    "serving_throughput": (1340, 0.115, 0.08, 0.97),
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


def row(**said: str) -> Row:
    """Of a Llama on one H100, or what is said instead."""
    plain = {
        "gpu": "H100-SXM5-80GB", "model": "meta-llama/Llama-3.1-8B-Instruct", "backend": "vllm", "backend_version": "",
        "gemm_dtype": "", "moe_dtype": "", "mode": "agg", "isl": "1000", "osl": "500", "concurrency": "64",
        "batch_size": "64", "tp": "1", "pp": "1", "attention_dp": "1", "moe_tp": "1", "moe_ep": "1",
    }  # fmt: skip
    return plain | said


def test_lengths_are_drawn_where_the_source_drew_them() -> None:
    prompts, responses = serving_rows.lengths([row(), row(isl="1024", osl="8192")])
    assert prompts.tolist() == [1000.0, 0.9 * 1024.0]
    assert responses.tolist() == [500.0, 0.9 * 8192.0]


def test_engines_on_blackwell_keep_a_narrow_cache_and_reduce_as_tensorrt_llm_does() -> None:
    hopper, blackwell = (
        serving_rows.engine([row(gpu=gpu, gemm_dtype="fp8")]) for gpu in ("H100-SXM5-80GB", "B200-SXM6-180GB")
    )
    assert (hopper.kv_bytes[0], hopper.all_reduce) == (2.0, "vllm")
    assert (blackwell.kv_bytes[0], blackwell.all_reduce) == (1.0, "trtllm")


def test_a_release_tells_what_columns_do_not() -> None:
    deepseek = row(model="deepseek-ai/DeepSeek-R1", backend="trtllm", backend_version="1.2.0rc6.post3")
    assert serving_rows.guesses([deepseek, deepseek | {"attention_dp": "8"}]).tolist() == [3.0, 1.0]
    assert serving_rows.guesses([deepseek | {"backend_version": "1.2.0rc6.post2"}]).tolist() == [0.0]
    assert not serving_rows.reads_prompts([row(backend_version="0.12.0")])
    assert serving_rows.reads_prompts([row()])
    graphless = row(backend="trtllm", backend_version="1.3.0rc1")
    assert serving_rows.has_graphs([graphless, graphless | {"concurrency": "1"}]).tolist() == [False, True]


def test_sequences_of_fixed_lengths_come_together() -> None:
    rows = [row(isl="128"), row(isl="1024"), row(isl="4096"), row(isl="1024", osl="1024")]
    few = serving_rows.together(rows, np.full(4, 1e-3))
    assert few == pytest.approx([12.0, 2.0, 1.0, 1.0], rel=1e-3)
    assert serving_rows.together(rows, np.full(4, 3.0))[3] == pytest.approx(3.157, abs=1e-3)


def test_a_sequence_does_not_wait_for_its_own_prompt() -> None:
    alone, pair = (
        accuracy_serving.predict([row(batch_size=batch, isl=isl)])[0] for batch, isl in (("1", "8000"), ("2", "8000"))
    )
    short = accuracy_serving.predict([row(batch_size="1", isl="100")])[0]
    assert alone < 1.15 * short, "its keys are read, its prompt is not"
    assert pair > 1.03 * alone


def test_a_folder_without_the_file_has_no_figures(tmp_path: Path) -> None:
    assert accuracy_serving.SETS["serving_tpot"](tmp_path) is None
    assert accuracy_serving.SETS["offline_throughput"](tmp_path) is None


def test_the_closed_form_agrees_with_event_simulation() -> None:
    figures = accuracy_serving.SETS["makespan"](DATA).figures()  # type: ignore[union-attr]
    assert figures["rows"] == 36
    assert figures["mean"] <= 0.04
    assert figures["p90"] <= 0.08
    assert figures["mean"] < 0.25 * figures["baseline_mean"]
