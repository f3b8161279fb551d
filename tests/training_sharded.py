"""How the files of frameworks other than Megatron are read: most are fully sharded."""

from __future__ import annotations

import re
from dataclasses import replace

from training_files import NO_MODEL, OFFLOADED
from training_rows import Record, Row, clocks, gpu_of, integer, machine, model

from analytic.training import training


def mpt(r: Record) -> Row | str:
    """MosaicML's benchmarks: fully sharded."""
    shape = model(r["model"])
    if shape is None:
        return NO_MODEL
    if r["activation_cpu_offload"] == "True":
        return OFFLOADED
    return Row(
        framework="llm-foundry",
        gpu=gpu_of(r["gpu"]),
        num_gpus=integer(r, "num_gpus"),
        shape=shape,
        seq_len=integer(r, "seq_len"),
        global_batch=float(r["global_batch"]),
        micro_batch=integer(r, "micro_batch"),
        seconds=float(r["step_time_s_derived"]),
        zero=3 if r["sharding"] == "FULL_SHARD" else 2,
        recompute="full" if r["activation_checkpointing"] == "True" else "none",
        fp8=r["precision"] == "amp_fp8",
        # The default of the script that runs them (scripts/train/benchmarking/submit_benchmarks.py).
        trainer="triton",
        # A fused loss that writes gradients over bfloat16 logits.
        logit_bytes=2.0,
    )


TITAN_LENGTH = 8192
"""Of the rows that print none: the length in torchtitan's Llama 3 configurations."""


def titan(r: Record) -> Row | str:
    """torchtitan: fully sharded."""
    shape = model(r["model"])
    if shape is None:
        return NO_MODEL
    gpus, degrees = integer(r, "num_gpus"), {name: integer(r, name) for name in ("tp", "pp", "cp")}
    dp = gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    length, local = integer(r, "seq_len", TITAN_LENGTH), integer(r, "local_batch")
    watts = re.search(r"(\d+)W", r["gpu"])
    gpu = gpu_of(r["gpu"]) + (f"@{watts[1]}" if watts else "")
    return Row(
        framework="torchtitan",
        gpu=gpu,
        num_gpus=gpus,
        shape=shape,
        seq_len=length,
        global_batch=float(local * dp),
        # A pipeline cuts the local batch into as many micro-batches as it has ranks.
        micro_batch=max(local // degrees["pp"], 1),
        seconds=local * dp * length / (float(r["tokens_per_s_per_gpu"]) * gpus),
        zero=3,
        recompute={"full": "full", "": ""}.get(r["activation_checkpointing"], "selective"),
        fp8="float8" in r["precision"],
        trainer="flash2",
        cut_up=r["async_tp"] == "True",
        attention_limit=clocks(gpu) * training().trainers["flash2"].attention_limit,
        **degrees,
    )


def prime(r: Record) -> Row | str:
    """prime-rl's trainer: fully sharded, a sequence a micro-batch."""
    shape = model(r["model"].split("/")[-1], 0, integer(r, "lora_rank", 0)) or model(r["model"])
    if shape is None:
        return NO_MODEL
    if r["activation"] == "Offload":
        return OFFLOADED
    gpus, cp, micro = integer(r, "num_gpus"), integer(r, "cp"), integer(r, "micro_batches")
    row = Row(
        framework="prime-rl",
        gpu=gpu_of(r["gpu"]),
        num_gpus=gpus,
        shape=shape,
        seq_len=integer(r, "seq_len"),
        global_batch=micro * gpus / cp,
        micro_batch=1,
        seconds=float(r["step_time_s_mean"]),
        cp=cp,
        ep=integer(r, "ep"),
        zero=3,
        recompute="full",
        trainer="flash2" if r["attention"].endswith("2") else "flash3",
        # For RL the head and the loss go in chunks; else the loss is torch's.
        beside=training().step_s if r["type"] == "rl" else 0.0,
        logit_bytes=0.0 if r["type"] == "rl" else training().trainers["flash2"].logit_bytes,
    )
    return _looped(row) if shape.is_moe and shape.lora_rank and "h" not in row.gpu else row


def _looped(row: Row) -> Row:
    """On devices other than Hopper, prime-rl goes through experts with adapters one by one
    (trainer/models/layers/lora/multi_moe.py, `_forward_for_loop`): nine products and eight elementwise kernels for each,
    as many launches as an interpreted layer has. The gradient of each expert's slice of the tokens is as large as all of
    them, zeros that are written, read and added up."""
    shape = row.shape
    assert shape.moe is not None
    local = shape.moe.experts / row.ep
    fused, interpreted = training().trainers[row.trainer].expert_launches, training().trainers["unfused"].launches
    sorted_bytes = 2.0 * row.seq_len * shape.moe.experts_per_token * shape.hidden
    zeros = 4.0 * local * sorted_bytes / machine(row.gpu, row.num_gpus).device.memory_bandwidth
    passes = row.global_batch / row.dp * shape.num_moe_layers
    return replace(row, launched=local * interpreted / fused, beside=row.beside + passes * zeros)


def llama3(r: Record) -> Row | str:
    """The Llama 3 paper prints FLOP/s; of short sequences the step follows from the parameters."""
    shape = model(r["model"])
    if shape is None or integer(r, "seq_len") > 8192:
        return "long sequences: the FLOPs that the source counts are not known"
    gpus, tokens = integer(r, "num_gpus"), 16 * 2**20
    length = integer(r, "seq_len")
    return Row(
        framework="llama3",
        gpu="h100",
        num_gpus=gpus,
        shape=shape,
        seq_len=length,
        global_batch=tokens / length,
        micro_batch=1,
        seconds=3.0 * (shape.matmul_flops_per_token + shape.attention_flops_per_token(length // 2)) * tokens
        / (gpus * 1e12 * float(r["tflops_per_gpu"])),
        tp=integer(r, "tp"),
        pp=integer(r, "pp"),
        cp=integer(r, "cp"),
        # One layer a piece: 126 layers and room for embedding and head on 16 ranks (section 3.3.2).
        vpp=8,
        zero=1,
        # Section 3.3.2: sequences of 8,192 tokens needed none.
        recompute="none",
    )  # fmt: skip
