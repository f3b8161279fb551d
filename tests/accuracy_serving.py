"""Serving runs and rollouts: the decode step against measured engines, and the closed form against event simulation."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from accuracy import Evaluation, constant_rate, find
from accuracy_makespan import makespan
from numpy.typing import NDArray
from serving_rows import (
    MTP,
    SAME,
    Row,
    engine,
    guesses,
    has_graphs,
    is_priced,
    lengths,
    reads_prompts,
    running,
    shape,
    together,
)

from analytic.decode import prefill_seconds
from analytic.engine import Engine, key_values
from analytic.mixed import graphless_seconds, launch_waits
from analytic.serving import serving as constants
from analytic.speculation import Decoder, tokens_per_step
from analytic.weights import parameters_on_device
from ir.shape import ModelShape

Float = NDArray[np.float64]
Of = Callable[[Sequence[Row]], Float]

SERVED = "inference_serving_aic.csv"
OFFLINE_BATCH = 2048
"""Most sequences that TensorRT-LLM decodes together by default."""


def predict(rows: Sequence[Row]) -> Float:
    """Seconds between the tokens of a sequence, which does not wait for its own prompt."""
    e = engine(rows)
    batch = running(e, rows)
    return token_seconds(e, rows, batch, batch - 1.0)


def token_seconds(e: Engine, rows: Sequence[Row], batch: Float, others: Float) -> Float:
    """Seconds in which each sequence of a steady batch gains a token, while others end and begin again."""
    prompt, response = lengths(rows)
    ahead = guesses(rows)
    decoder = Decoder(engine=e, keys=keys_seen(e, prompt, response), guesses=ahead, speculation=MTP)
    gained = tokens_per_step(MTP, ahead)
    step = decoder.seconds(batch).total * gained
    step = np.where(has_graphs(rows), step, np.maximum(step, graphless_seconds(e)))
    arrivals = np.maximum(others, 1e-6) * gained / response
    read = prefill_seconds(e, prompt, prompt**2, np.minimum(prompt, constants().chunk_tokens)).total
    read = read if reads_prompts(rows) else np.zeros_like(read)
    at_once, beside = together(rows, arrivals), step
    if rows[0]["backend"] == "sglang":
        # It reads prompts in passes of their own, whose weights no sequence streams for them.
        beside, alone = np.zeros_like(step), replace(decoder, keys=0.0).seconds(np.ones_like(batch)).total
        read = read + alone / at_once
    return (step + arrivals * read + launch_waits(e, beside, read, arrivals, at_once)) / gained


def keys_seen(e: Engine, prompt: Float, response: Float) -> Float:
    """Cached keys that a sequence reads in a step, over all layers, halfway through its response."""
    keys = prompt + response / 2.0
    return np.asarray(sum(n * (np.minimum(keys, window) if window else keys) for window, n in e.shape.window_groups))


def constant_bandwidth(rows: Sequence[Row]) -> Float:
    """Seconds to read weights and cached keys at the peak bandwidth."""
    e = engine(rows)
    dense, experts = parameters_on_device(e.shape, e.at)
    prompt, response = lengths(rows)
    cached = running(e, rows) * (prompt + response / 2.0) * e.shape.layers * key_values(e) * e.kv_bytes / e.at.pp
    read = dense * e.of("weight_bytes") + experts * e.of("weight_bytes", experts=True) + cached
    return read / (e.machine.device.peak_bandwidth or 1.0)


def in_groups(rows: Sequence[Row], keys: Sequence[str], of: Callable[[Sequence[Row]], Float]) -> Float:
    """A function of rows that agree in some columns, for all rows."""
    result = np.zeros(len(rows))
    names = np.array(["|".join(row[key] for key in keys) for row in rows])
    for name in np.unique(names):
        here = np.flatnonzero(names == name)
        result[here] = of([rows[i] for i in here])
    return result


def read(folder: Path, name: str, keep: Callable[[Row], bool] = lambda _: True) -> list[Row] | None:
    path = find(folder, name)
    if path is None:
        return None
    with path.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if keep(row)]


def evaluation(rows: Sequence[Row], measured: Float, of: Of, work: Of, *, left_out: int) -> Evaluation:
    """Predictions of rows beside a constant rate of work, in groups of one GPU, model and engine."""
    groups = [f"{row['gpu']} {row['model']} {row['backend']}" for row in rows]
    return Evaluation(
        predicted=in_groups(rows, SAME, of),
        measured=measured,
        groups=groups,
        baseline=constant_rate(in_groups(rows, SAME, work), measured, groups),
        left_out=left_out,
        why_left_out="models that are not known, int4 weights" if left_out else "",
    )


def serving(folder: Path, keep: Callable[[ModelShape], bool] = lambda _: True) -> tuple[list[Row], int] | None:
    """Aggregated runs of known models, and how many others there are."""
    rows = read(folder, SERVED, lambda row: row["mode"] == "agg" and row["layout_suspect"] == "False")
    if rows is None:
        return None
    known = [row for row in rows if is_priced(row)]
    return [row for row in known if (model := shape(row["model"])) is not None and keep(model)], len(rows) - len(known)


def serving_tpot(folder: Path, keep: Callable[[ModelShape], bool] = lambda _: True) -> Evaluation | None:
    """Seconds between tokens."""
    if (found := serving(folder, keep)) is None:
        return None
    rows, left_out = found
    measured = np.array([float(row["tpot_ms"]) / 1e3 for row in rows])
    return evaluation(rows, measured, predict, constant_bandwidth, left_out=left_out)


def serving_throughput(folder: Path) -> Evaluation | None:
    """Seconds of a device per token; waiting for a slot and for the first token are in the measured ones."""
    if (found := serving(folder)) is None:
        return None
    rows, left_out = found
    measured = np.array([1.0 / float(row["output_tok_s_per_gpu_derived"] or np.nan) for row in rows])
    good = [i for i in range(len(rows)) if np.isfinite(measured[i])]
    chosen = [rows[i] for i in good]
    return evaluation(chosen, measured[good], device_seconds, constant_device_bandwidth, left_out=left_out)


def offline(folder: Path) -> Evaluation | None:
    """Seconds of a device per token in batch runs of TensorRT-LLM with as many sequences as the cache holds."""
    rows = read(folder, "inference_trtllm.csv")
    if rows is None:
        return None
    served = [offline_row(row) for row in rows]
    known = [row for row in served if is_priced(row)]
    measured = np.array([1.0 / float(row["output_tok_s_per_gpu"]) for row in known])
    return evaluation(known, measured, device_seconds, constant_device_bandwidth, left_out=len(rows) - len(known))


def offline_row(row: Row) -> Row:
    """A row of the offline table with the columns of the other one."""
    n = int(re.sub(r"\D", "", row["parallelism"]))
    expert = row["parallelism"].startswith("DEP")
    dtype = {"FP4": "nvfp4", "FP8": "fp8"}[row["precision"]]
    given = float(row["num_requests"] or OFFLINE_BATCH) / (n if expert else 1)
    return row | {
        "backend": "trtllm",
        "backend_version": "",
        "gemm_dtype": dtype,
        "moe_dtype": dtype,
        "tp": "1" if expert else str(n),
        "pp": "1",
        "attention_dp": str(n if expert else 1),
        "moe_tp": "1",
        "moe_ep": str(n),
        "batch_size": str(min(given, OFFLINE_BATCH)),
        "concurrency": "",
    }


def device_seconds(rows: Sequence[Row]) -> Float:
    """Seconds of one device per token of an engine that is kept full."""
    e = engine(rows)
    batch = running(e, rows)
    return token_seconds(e, rows, batch, batch) / batch * e.at.tp * e.at.pp


def constant_device_bandwidth(rows: Sequence[Row]) -> Float:
    e = engine(rows)
    return constant_bandwidth(rows) / running(e, rows) * e.at.tp * e.at.pp


SETS: dict[str, Callable[[Path], Evaluation | None]] = {
    "serving_tpot": serving_tpot,
    "serving_tpot_dense": lambda folder: serving_tpot(folder, lambda s: s.moe is None),
    "serving_tpot_moe": lambda folder: serving_tpot(folder, lambda s: s.moe is not None),
    "serving_throughput": serving_throughput,
    "offline_throughput": offline,
    "makespan": makespan,
}
