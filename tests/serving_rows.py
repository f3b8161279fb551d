"""Published serving runs as engines, batches and lengths: what a row says, else how its source ran it.

Rows with prompts and responses of 1,024 and 8,192 tokens are InferenceX's (SemiAnalysisAI/InferenceX, formerly InferenceMAX,
Apache-2.0); its scripts under benchmarks/, its perf-changelog.yaml and the columns below say how they were run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from analytic.comm import Own
from analytic.engine import Engine, key_values
from analytic.fit import machine_of
from analytic.mixed import met
from analytic.serving import generation_of
from analytic.serving import serving as constants
from analytic.setup import Machine
from analytic.spread import Spread
from analytic.weights import parameters_on_device
from ir.errors import InputError
from ir.known_models import known_config
from ir.model import shape_from_config
from ir.shape import ModelShape
from ir.systems import system
from ir.workload import Speculation

Float = NDArray[np.float64]
Row = dict[str, str]

SAME = ("gpu", "model", "backend", "backend_version", "gemm_dtype", "moe_dtype")
"""Columns that the rows of an engine have in common."""

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
OWN: dict[str, Own] = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm"}
MEMORY_SHARE = 0.9
"""Of a device's memory, what the engines take by default."""
GRAPHS_BYTES = 2e9

DRAWN = {("1024", "1024"), ("1024", "8192"), ("8192", "1024")}
"""Prompts and responses of InferenceX, whose client draws lengths from 0.8 of them to all of them."""
MEAN_DRAWN = 0.9

MTP_RELEASES = {"1.2.0rc6.post3"}
"""TensorRT-LLM as InferenceX ran DeepSeek's models with the modules that predict several tokens; runs without are of
other releases (its change log, pull requests 594, 620, 632 and 642)."""
MTP = Speculation(acceptance=0.7, cost=0.03)
"""Three guesses make DeepSeek-R1 in four bits 2.16 times as fast as none, one sequence on 8 B200 (NVIDIA/TensorRT-LLM,
blog 2 on its implementation): 2.5 tokens a step of this model. A guess is one layer of 61 and the head."""
MTP_GUESSES, MTP_GUESSES_SHARED = 3.0, 1.0
"""And where attention is data-parallel."""

CACHING_RELEASES = {("vllm", "0.12.0")}
"""Engines that keep prompts they have read, vLLM's default, whose client asked them again: seen on their rows, where
reading all would take up to twice as long as the runs took. InferenceX switches that off."""
SPARE_TOKENS = 1500
"""Prompt tokens that a step takes beside one prompt, where lengths are fixed: the sequences that began in one step
end in one, so that their successors come together (ai-dynamo/aiconfigurator, rules of its generator, Apache-2.0)."""
GRAPHLESS_RELEASES = {("trtllm", "1.3.0rc1")}
"""Engines that decode without graphs unless one sequence runs alone: seen on their rows, whose steps are 2 to 15 times as
long as with graphs, about as long for few sequences as for many."""


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


def is_priced(row: Row) -> bool:
    formats = {row["gemm_dtype"], row["moe_dtype"]}
    return row["gpu"] in SYSTEMS and shape(row["model"]) is not None and formats <= set(FORMATS)


def engine(rows: Sequence[Row]) -> Engine:
    """The engine of rows that agree in `SAME`."""
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
    device = machine(one["gpu"]).device
    dense, experts = (constants().format(device, stored(one, column)) for column in ("gemm_dtype", "moe_dtype"))
    if "gpt-oss" in one["model"]:
        # Only its experts are stored in four bits.
        dense = constants().format(device, "bf16")
    blackwell = generation_of(device) == "blackwell"
    # The scripts ask all engines for a narrow cache there, and vLLM and SGLang for TensorRT-LLM's all-reduce; vLLM for that
    # with Llama on Hopper too.
    fused = blackwell or "Llama-3.1-70B" in one["model"]
    narrow_cache = (blackwell or one["backend"] == "trtllm") and one["gemm_dtype"] not in ("", "bfloat16")
    return Engine(
        machine=machine(one["gpu"]),
        shape=model,
        at=at,
        narrow=at.fp8,
        dense=(dense, dense),
        experts=(experts, experts),
        kv_bytes=np.full(len(tp), 1.0 if narrow_cache else 2.0),
        all_reduce="trtllm" if fused else OWN.get(one["backend"], "vllm"),
    )


def stored(row: Row, column: str) -> str:
    """The format of the weights: those that DeepSeek and Qwen3-235B come with in eight bits are scaled by blocks."""
    name = FORMATS[row[column]]
    return "fp8-block" if name == "fp8" and re.search("DeepSeek|Qwen3-235B", row["model"]) else name


def layout(rows: Sequence[Row]) -> tuple[NDArray[np.int64], ...]:
    """tp, pp, and of experts the tensor and expert degree, and the engines that share them."""
    tp, pp, moe_tp, moe_ep, dp = (degree(rows, name) for name in ("tp", "pp", "moe_tp", "moe_ep", "attention_dp"))
    if (model := shape(rows[0]["model"])) is None or model.moe is None:
        return tp, pp, np.ones_like(tp), np.ones_like(tp), np.ones_like(tp)
    dp = np.maximum(dp, moe_tp * moe_ep // tp)
    return tp, pp, moe_tp, moe_ep, dp


def degree(rows: Sequence[Row], name: str) -> NDArray[np.int64]:
    return np.array([max(int(float(row[name] or 1)), 1) for row in rows])


def lengths(rows: Sequence[Row]) -> tuple[Float, Float]:
    """Mean tokens of prompts and of responses."""
    share = np.where(drawn(rows), MEAN_DRAWN, 1.0)
    prompt, response = (np.array([float(row[name]) for row in rows]) for name in ("isl", "osl"))
    return prompt * share, response * share


def drawn(rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Whether lengths differ from sequence to sequence."""
    return np.array([row.get("mode") == "agg" and (row["isl"], row["osl"]) in DRAWN for row in rows])


def guesses(rows: Sequence[Row]) -> Float:
    """Tokens that are guessed ahead for each sequence."""
    one = rows[0]
    if one["backend_version"] not in MTP_RELEASES or "DeepSeek" not in one["model"]:
        return np.zeros(len(rows))
    return np.where(degree(rows, "attention_dp") > 1, MTP_GUESSES_SHARED, MTP_GUESSES)


def together(rows: Sequence[Row], arrivals: Float) -> Float:
    """Prompts that a step takes in if it takes any, where so many arrive a step."""
    prompt = np.array([float(row["isl"]) for row in rows])
    return np.maximum(met(arrivals), np.where(drawn(rows), 1.0, np.floor(1.0 + SPARE_TOKENS / prompt)))


def reads_prompts(rows: Sequence[Row]) -> bool:
    """Whether prompts are read, rather than found in the cache."""
    return (rows[0]["backend"], rows[0]["backend_version"]) not in CACHING_RELEASES


def has_graphs(rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Whether decode steps run as graphs."""
    one, alone = rows[0], np.array([float(row["concurrency"] or 0) == 1.0 for row in rows])
    return alone | ((one["backend"], one["backend_version"]) not in GRAPHLESS_RELEASES)


def each_engine(e: Engine, rows: Sequence[Row]) -> Float:
    """Sequences that an engine is given: the column counts those of a rank where attention is data-parallel."""
    given = np.array([float(row["batch_size"] or row["concurrency"]) for row in rows])
    return given * degree(rows, "attention_dp") / e.at.dp


def running(e: Engine, rows: Sequence[Row]) -> Float:
    """Sequences that an engine decodes together."""
    prompt, response = lengths(rows)
    return slots(e, each_engine(e, rows), prompt + response / 2.0, of_free=rows[0]["backend"] == "trtllm")


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
