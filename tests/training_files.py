"""How each file of published training rows is read: its columns as rows, or the reason why a row can't be priced."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from training_rows import SYSTEMS, Record, Row, gpt, gpu_of, integer, machine, model, pieces

from analytic.exchange import distinct
from analytic.training import training
from ir.shape import ModelShape

NO_MODEL = "sizes of the model unknown (hybrid, Llama 4, DeepSeek-V4)"
NO_TIME = "no step time printed"
NO_LAYOUT = "layout or batch not printed"
NO_DEVICE = "device not described (V100)"
NO_FORMAT = "4-bit products or precision not printed"
MISPRINT = "layout misprinted (more pipeline ranks than layers)"
OFFLOADED = "activations offloaded"
OTHER = "printed values of another granularity"

BALANCED = ("megatron-bridge", "megatron-core", "automodel")
"""Whose tables of mixtures of experts balance routing by force."""

QKV = 0.15
"""Share of adapters' traffic where only queries, keys and values have one: the default of NeMo's recipes
(examples/nlp/language_modeling/tuning/conf), for the sizes of Llama 3 8B."""

SQUAD = 22
"""Samples of SQuAD that NeMo and Megatron Bridge pack into 4,096 tokens to fine-tune on: contexts of 120 words and
questions of 10, some 185 tokens with the template (NeMo 24.07, performance summary, "Finetuning"; recipes of NeMo 2 and
Megatron Bridge in performance mode)."""

LORA_RANK = 16
"""Of rows that do not print it: the default of NeMo's recipes."""


def dgxc(r: Record) -> Row | str:
    """DGX Cloud recipes: NeMo with userbuffers; Maxtext and Paxml are fully sharded."""
    shape = model(recipe(r["model"]), integer(r, "layers", 0), LORA_RANK if r["task"] == "LoRA" else 0)
    if shape is None:
        return NO_MODEL
    if not r["step_time_s"] or not r["global_batch"]:
        return NO_TIME
    if integer(r, "pp") > shape.layers:
        return MISPRINT
    sharded = r["workload"] in ("maxtext", "paxml")
    row = _megatron(
        # Where no degree is printed experts are divided as the rest is: the default of Megatron-Core.
        {**r, "etp": r["etp"] or r["tp"]},
        shape,
        "sharded jax" if sharded else "nemo",
        float(r["step_time_s"]),
        sharded=sharded,
        recompute="" if sharded else "none",
    )
    if isinstance(row, str):
        return row
    return replace(
        row,
        imbalance=1.0 if r["workload"] in CAPPED else row.imbalance,
        attention_limit=training().trainers["flash2"].attention_limit if _without_cudnn(r) else None,
    )


CAPPED = ("grok1",)
"""Workloads of which every expert gets as many tokens as any (grok1/grok1_314b.yaml: capacity factor 1, padded)."""


def _without_cudnn(r: Record) -> bool:
    """Whether a recipe turns the fused attention of cuDNN off, so that FlashAttention-2 is left: those of NeMo 1 for
    GPT-3, Grok and Nemotron 340B (`NVTE_FUSED_ATTN=0` in their configure.sh)."""
    return r["tag"] < "v25.04" and (r["workload"] in ("nemo_megatron", "grok1") or "340b" in r["model"])


def _sequences(r: Record) -> float:
    """Of a step. A number that replicas cannot share is a misprint: then what their micro-batches add up to."""
    printed, replicas = float(r["global_batch"]), integer(r, "num_gpus") / math.prod(integer(r, n) for n in DEGREES)
    each = replicas * integer(r, "micro_batch")
    return each * integer(r, "grad_accum") if r.get("grad_accum") and printed % each else printed


DEGREES = ("tp", "pp", "cp")


def bridge(r: Record) -> Row | str:
    """Megatron-Bridge."""
    if r["alt"] == "1":
        return OTHER
    if r["precision"] not in ("BF16", "FP8", "FP8-CS", "FP8-MX", "MXFP8"):
        return NO_FORMAT
    shape = model(r["model"], 0, LORA_RANK if r["phase"] == "lora" else 0)
    if shape is None:
        return NO_MODEL
    if r["preset_cpu_offload_layers"]:
        return OFFLOADED
    sharded = integer(r, "fsdp_shard", 0) > 0
    row = _megatron(r, shape, "megatron-bridge", float(r["step_time_s_derived"]), sharded=sharded)
    if isinstance(row, str):
        return row
    whole = "full_iteration" in r["preset_cuda_graph"] or _as_26_06(r)
    partly = "moe_router" in r["preset_cuda_graph"] or not r["preset_cuda_graph"]
    overlaps = r["preset_moe_a2a_overlap"] == "True" or _as_26_06(r)
    biases = _biases(row) if "GPT OSS" in r["model"] and r["container"] < "26.06" else 0.0
    return replace(row, launched=0.0 if whole else PARTLY if partly else 1.0, overlaps_experts=overlaps, beside=biases)


BIAS_BYTES, CLAMP_BYTES = 68.0, 26.0
"""Read and written, forward and backward, for a value of an expert's output to add its bias times the router's weight in
float32, which is concatenated and cast back; and for a value of its gate and up projections to clamp and concatenate them,
once again where activations are recomputed."""


def _biases(row: Row) -> float:
    """Seconds of a step in which Megatron-Core biases and clamps gpt-oss' experts with kernels of their own
    (`TEGroupedMLP._apply_bias`, `weighted_bias_quick_geglu_impl`); from release 26.06 on they are fused with products."""
    shape = row.shape
    assert shape.moe is not None
    each = BIAS_BYTES * shape.hidden + CLAMP_BYTES * 2.0 * shape.moe.ffn
    rows = row.global_batch * row.seq_len * shape.moe.experts_per_token * shape.num_moe_layers / row.num_gpus
    return rows * each / machine(row.gpu, row.num_gpus).device.memory_bandwidth


PARTLY = 0.5
"""Of the launches of a layer with experts, those outside CUDA graphs that hold attention, router and preparation of the
dispatch; also where a row's preset is not known."""


def _as_26_06(r: Record) -> bool:
    """Whether a row without a preset is of a release from 26.06 on, whose presets for GB200 put whole steps in graphs and
    overlap the exchange."""
    return not r["preset_tag"] and r["container"] >= "26.06" and "GB200" in r["gpu"]


def nemo(r: Record) -> Row | str:
    """NeMo 24.07."""
    if not r["step_time_s_derived"] or not r["micro_batch"]:
        return NO_TIME
    shape = model(r["model"], 0, LORA_RANK if r["task"] == "LoRA" else 0)
    return NO_MODEL if shape is None else _megatron(r, shape, "nemo", float(r["step_time_s_derived"]))


def megatron_moe(r: Record) -> Row | str:
    """Megatron-Core's collection of mixtures of experts."""
    shape = model(r["model"])
    if shape is None:
        return NO_MODEL
    if not r["step_time_s"]:
        return NO_TIME
    recompute = {"": "", "full": "full"}.get(r["recompute"], "none")
    return _megatron(
        r, shape, "megatron-core", float(r["step_time_s"]), sharded=r["fsdp"] == "True", recompute=recompute
    )


def automodel(r: Record) -> Row | str:
    """NeMo AutoModel: FSDP2 and expert parallelism."""
    shape = model(r["model"], 0, LORA_RANK if r["task"] == "LoRA" else 0)
    if shape is None:
        return NO_MODEL
    # Tokens go through DeepEP in groups of experts' devices only: where no degree is printed, those of a shard.
    parallel = r["ep"] or (r["fsdp"] if shape.is_moe and "DeepEP" in r["kernels"] else "")
    recompute = next((kind for name, kind in RECOMPUTED.items() if r["model"].startswith(name)), "")
    row = _megatron(
        {**r, "ep": parallel}, shape, "automodel", float(r["step_time_s"]), sharded=True, recompute=recompute
    )
    return row if isinstance(row, str) else replace(row, exchanged=_in_turn(shape, row.ep))


RECOMPUTED = {
    "DeepSeek V3": "full",
    "Kimi K2": "full",
    "Qwen3 MoE": "full",
    "GPT-OSS": "none",
    "Llama3 70B": "full",
    "Qwen2.5 32B": "full",
}
"""What AutoModel's recipes recompute, by model (examples/benchmark/configs and examples/llm_benchmark,
`activation_checkpointing`)."""


def _in_turn(shape: ModelShape, ep: int) -> float:
    """Of copies of tokens to random devices, those that go out where a token's experts are the next ones in turn, as
    AutoModel's benchmarks route them (`FakeBalancedGate`): they lie on as few devices as hold so many."""
    if shape.moe is None or ep == 1:
        return 1.0
    each, local = shape.moe.experts_per_token, shape.moe.experts / ep
    return max(each / local, 1.0) / distinct(ep, each)


def _megatron(
    r: Record, shape: ModelShape, framework: str, seconds: float, *, sharded: bool = False, recompute: str = "none"
) -> Row | str:
    gpu = gpu_of(r["gpu"])
    if gpu not in SYSTEMS:
        return NO_DEVICE
    return Row(
        framework=framework,
        gpu=gpu,
        num_gpus=integer(r, "num_gpus"),
        shape=shape,
        seq_len=integer(r, "seq_len"),
        global_batch=_sequences(r),
        micro_batch=integer(r, "micro_batch"),
        seconds=seconds,
        tp=integer(r, "tp"),
        pp=integer(r, "pp"),
        vpp=_pieces(r, shape),
        cp=integer(r, "cp"),
        ep=integer(r, "ep"),
        etp=integer(r, "etp"),
        zero=3 if sharded else 1,
        recompute=recompute,
        adapters=QKV if framework == "nemo" else 1.0,
        fp8="FP8" in r["precision"].upper(),
        imbalance=1.0 if framework in BALANCED else None,
        trainer="userbuffers" if framework in PACKING else "flash",
        samples=SQUAD if framework in PACKING and (r.get("task") or r.get("phase", "")).upper() in TUNING else 1,
    )


PACKING = ("nemo", "megatron-bridge")
TUNING = ("SFT", "LORA")


def _pieces(r: Record, shape: ModelShape) -> int:
    """Pieces of a pipeline rank. Some recipes print the layers of a piece instead: then there are more pieces than a
    rank has layers."""
    pp = integer(r, "pp")
    printed = integer(r, "vp", pieces(recipe(r["model"]), pp))
    return printed if pp > 1 and printed * pp <= shape.layers + pp else 1


def recipe(name: str) -> str:
    """A model's name without task, precision, device and version."""
    return re.sub(r"\s+(LORA|SFT|BF16|FP8|H100|24\.\d\d|\(proxy, fewer layers\))", "", name).strip()


def megatron(r: Record) -> Row | str:
    """Megatron-LM tables of 2020 to 2024."""
    if "A100" not in r["gpu"] and "H100" not in r["gpu"]:
        return NO_DEVICE
    seconds = r["measured_step_s"] or r["step_time_s_derived"]
    if not seconds:
        return NO_TIME
    if not r["layers"] or not r["tp"] or not r["seq_len"]:
        return NO_LAYOUT
    shape = gpt_of(r)
    return Row(
        framework=r["table"],
        gpu=gpu_of(r["gpu"]),
        num_gpus=integer(r, "num_gpus"),
        shape=shape,
        seq_len=integer(r, "seq_len"),
        global_batch=float(r["global_batch"]),
        # Where no micro-batch is printed: 1, as the paper uses for its large models.
        micro_batch=integer(r, "micro_batch"),
        seconds=float(seconds),
        tp=integer(r, "tp"),
        pp=integer(r, "pp"),
        vpp=_pieces(r, shape),
        zero=0,
        recompute={"full": "full", "": "none"}.get(r["recompute"], "selective"),
        trainer="unfused" if "A100" in r["gpu"] else "flash",
    )


def gpt_of(r: Record) -> ModelShape:
    """A GPT by the sizes in its row: a network of two matrices of 4 h, as a gated one of 8/3 h."""
    hidden = integer(r, "hidden")
    return gpt(
        layers=integer(r, "layers"),
        hidden=hidden,
        heads=integer(r, "heads"),
        ffn=round(8 * hidden / 3),
        vocab=integer(r, "vocab", 51200),
        tied=True,
    )


def vtrain(r: Record) -> Row | str:
    """Plans of Megatron-LM on A100, before FlashAttention, with full recomputation (not printed: the steps of large
    micro-batches take the FLOPs of it). The rows that the host's time per layer was read off are not reported."""
    if r["hidden"] == "1024" and r["layers"] == "12" and r["tp"] == r["pp"] == "1" and r["mbs"] in ("1", "2"):
        return "the host's time per layer was read off them"
    shape = gpt_of({**r, "vocab": "51200"})
    return Row(
        framework=f"vtrain {r['set']}",
        gpu="a100",
        num_gpus=integer(r, "gpus"),
        shape=shape,
        seq_len=integer(r, "seq"),
        global_batch=float(r["gbs"]),
        micro_batch=integer(r, "mbs"),
        seconds=float(r["iter_ms"]) / 1e3,
        tp=integer(r, "tp"),
        pp=integer(r, "pp"),
        zero=0,
        recompute="full",
        trainer="unfused",
    )
