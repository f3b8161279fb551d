"""Serving runs and rollouts: the decode step against measured engines, and the closed form against event simulation."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from accuracy import Evaluation, constant_rate, find
from accuracy_makespan import makespan
from numpy.typing import NDArray

from analytic.decode import key_seconds, prefill_seconds, step_seconds
from analytic.engine import Engine, key_values
from analytic.fit import machine_of
from analytic.serving import serving as constants
from analytic.setup import Machine
from analytic.spread import Spread
from analytic.weights import parameters_on_device
from ir.errors import InputError
from ir.known_models import known_config
from ir.model import shape_from_config
from ir.shape import ModelShape
from ir.systems import system

Float = NDArray[np.float64]
Row = dict[str, str]
Of = Callable[[Sequence[Row]], Float]

SERVED = "inference_serving_aic.csv"
OFFLINE_BATCH = 2048
"""Most sequences that TensorRT-LLM decodes together by default."""

SYSTEMS = {
    "A100-SXM4-80GB": "dgx-a100",
    "H100-SXM5-80GB": "dgx-h100",
    "H200-SXM5-141GB": "dgx-h200",
    "B200-SXM6-180GB": "hgx-b200",
    "B300-SXM6": "hgx-b300",
    "GB200-NVL72": "gb200-nvl72",
    "GB300-NVL72": "gb300-nvl72",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "hgx-b200",
    "GB200": "gb200-nvl72",
}
FORMATS = {"": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4"}
MEMORY_SHARE = 0.9
"""Of a device's memory, what the engines take by default."""
GRAPHS_BYTES = 2e9


@cache
def machine(gpu: str) -> Machine:
    return machine_of(system(SYSTEMS[gpu], 8, where="accuracy").groups[0])


@cache
def shape(model: str) -> ModelShape | None:
    """The known model of a checkpoint, whose name may say how its weights are stored."""
    name = re.sub(r"-(FP8|NVFP4|FP4)$", "", model.rsplit("/", 1)[-1])
    try:
        return shape_from_config(known_config(name, where="accuracy"), where="accuracy")
    except InputError:
        return None


def engine(rows: Sequence[Row]) -> Engine:
    """The engine of rows that have GPU, model, backend and formats in common."""
    one, tp, pp, moe_tp, moe_ep, dp = rows[0], *layout(rows)
    model = shape(one["model"])
    assert model is not None
    at = Spread(
        tp=tp,
        pp=pp,
        cp=np.ones_like(tp),
        ep=moe_ep,
        etp=moe_tp,
        dp=dp,
        shard=np.zeros_like(tp),
        fp8=np.zeros(len(tp), dtype=bool),
    )
    dense, experts = (
        constants().format(machine(one["gpu"]).device, FORMATS[one[c]]) for c in ("gemm_dtype", "moe_dtype")
    )
    if "gpt-oss" in one["model"]:
        # Only its experts are stored in four bits.
        dense = constants().format(machine(one["gpu"]).device, "bf16")
    narrow_cache = one["backend"] == "trtllm" and one["gemm_dtype"] not in ("", "bfloat16")
    return Engine(
        machine=machine(one["gpu"]),
        shape=model,
        at=at,
        narrow=at.fp8,
        dense=(dense, dense),
        experts=(experts, experts),
        kv_bytes=np.full(len(tp), 1.0 if narrow_cache else 2.0),
    )


def layout(rows: Sequence[Row]) -> tuple[NDArray[np.int64], ...]:
    """tp, pp, and of experts the tensor and expert degree, and the engines that share them."""
    tp, pp, moe_tp, moe_ep, dp = (degree(rows, name) for name in ("tp", "pp", "moe_tp", "moe_ep", "attention_dp"))
    if (model := shape(rows[0]["model"])) is None or model.moe is None:
        return tp, pp, np.ones_like(tp), np.ones_like(tp), np.ones_like(tp)
    dp = np.maximum(dp, moe_tp * moe_ep // tp)
    return tp, pp, moe_tp, moe_ep, dp


def degree(rows: Sequence[Row], name: str) -> NDArray[np.int64]:
    return np.array([max(int(float(row[name] or 1)), 1) for row in rows])


def each_engine(e: Engine, rows: Sequence[Row]) -> Float:
    """Sequences that an engine is given: the column counts those of a rank where attention is data-parallel."""
    given = np.array([float(row["batch_size"] or row["concurrency"]) for row in rows])
    return given * degree(rows, "attention_dp") / e.at.dp


def slots(e: Engine, wanted: Float, tokens: Float, *, of_free: bool) -> Float:
    """Sequences of so many tokens that the cache of an engine holds, at most those that are wanted. Its share is one
    of all memory, or of what is free once the weights are loaded; so it is where that is all there is."""
    dense, experts = parameters_on_device(e.shape, e.at)
    weights = dense * e.of("weight_bytes") + experts * e.of("weight_bytes", experts=True)
    device = e.machine.device
    held = weights + device.base_memory_bytes + GRAPHS_BYTES
    free = MEMORY_SHARE * (device.memory_bytes - held)
    room = MEMORY_SHARE * device.memory_bytes - held
    room = np.where((room > 0) & (not of_free), room, free)
    each = e.shape.layers / e.at.pp * key_values(e) * e.kv_bytes * tokens
    return np.minimum(wanted, np.maximum(np.floor(room / each), 1.0))


def inter_token_seconds(e: Engine, batch: Float, prompt: Float, response: Float) -> Float:
    """Seconds between the tokens of a sequence in a steady state: a step, and the prompts that arrive meanwhile."""
    reading = np.zeros_like(batch)
    for window, layers in e.shape.window_groups:
        keys = prompt + response / 2.0
        keys = np.minimum(keys, window) if window else keys
        reading = reading + layers * batch * keys * key_seconds(e)
    chunk = np.minimum(prompt, constants().chunk_tokens)
    return step_seconds(e, batch, reading).total + batch / response * prefill_seconds(e, prompt, prompt**2, chunk).total


def running(e: Engine, rows: Sequence[Row]) -> Float:
    """Sequences that an engine decodes together."""
    tokens = np.array([float(row["isl"]) + float(row["osl"]) / 2.0 for row in rows])
    return slots(e, each_engine(e, rows), tokens, of_free=rows[0]["backend"] == "trtllm")


def predict(rows: Sequence[Row]) -> Float:
    e = engine(rows)
    isl, osl = (np.array([float(row[name]) for row in rows]) for name in ("isl", "osl"))
    return inter_token_seconds(e, running(e, rows), isl, osl)


def constant_bandwidth(rows: Sequence[Row]) -> Float:
    """Seconds to read weights and cached keys at the peak bandwidth."""
    e = engine(rows)
    dense, experts = parameters_on_device(e.shape, e.at)
    isl, osl = (np.array([float(row[name]) for row in rows]) for name in ("isl", "osl"))
    cached = running(e, rows) * (isl + osl / 2.0) * e.shape.layers * key_values(e) * e.kv_bytes / e.at.pp
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


SAME = ("gpu", "model", "backend", "gemm_dtype", "moe_dtype")


def read(folder: Path, name: str, keep: Callable[[Row], bool] = lambda _: True) -> list[Row] | None:
    path = find(folder, name)
    if path is None:
        return None
    with path.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if keep(row)]


def is_priced(row: Row) -> bool:
    formats = {row["gemm_dtype"], row["moe_dtype"]}
    return row["gpu"] in SYSTEMS and shape(row["model"]) is not None and formats <= set(FORMATS)


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
    return predict(rows) / running(e, rows) * e.at.tp * e.at.pp


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
