"""Products, attention and experts of measured tables, and the axes of the tables that the model keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measured_shapes import PRECISIONS, SYSTEMS, Columns, Float, Kernel, Shapes, floats, held, machine, parts

from analytic import kernels
from analytic.moe import imbalance
from analytic.spread import Routing
from ir.shape import Mla, ModelShape


def gemm_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """Products, by device and precision. Fp8 kernels of SGLang are others than those of the rest and left out."""
    for (gpu, dtype), part in parts(folder, "gemm.parquet", ["gpu", "dtype"], dtype=list(PRECISIONS)):
        keep = (part["framework"] != "sglang") | (dtype == "bfloat16")
        part = {name: column[keep] for name, column in part.items()}
        yield f"gemm/{SYSTEMS[gpu][2]}/{PRECISIONS[dtype]}", gemm_shapes(part, gpu, dtype)


def gemm_shapes(part: Columns, gpu: str, dtype: str) -> Shapes:
    """Of one device and precision."""
    m, n, k = floats(part, "m", "n", "k")
    precision: Any = PRECISIONS[dtype]
    return Shapes(
        coordinates=(m, n, k),
        closed=kernels.gemm_closed(machine(gpu), m, k, n, precision),
        predicted=kernels.gemm_seconds(machine(gpu), m, k, n, precision),
        measured=part["latency_us"] / 1e6,
        work=2.0 * m * n * k,
        held_out=held(part, "gemm"),
        group=f"{gpu} {dtype}",
    )


def prefill_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """Causal attention cores over whole sequences."""
    found = parts(folder, "attention_prefill.parquet", ["gpu"], attn_dtype="bfloat16", kv_dtype="bfloat16",
                  framework="vllm")  # fmt: skip
    for (gpu,), part in found:
        keep = part["seq"] > 1
        part = {name: column[keep] for name, column in part.items()}
        b, s, q, kv, d = floats(part, "batch", "seq", "q_heads", "kv_heads", "head_dim")
        flops, traffic = 2.0 * b * q * d * s * s, 2.0 * b * s * d * (2.0 * q + 2.0 * kv)
        predicted = np.zeros(len(b))
        for width in np.unique(d):
            at = d == width
            predicted[at] = kernels.prefill_seconds(
                machine(gpu), flops[at], traffic[at], s[at], (b * q)[at], int(width)
            )
        yield (
            f"prefill/{SYSTEMS[gpu][2]}",
            Shapes(
                coordinates=(s, b * q, d),
                closed=kernels.attention_closed(machine(gpu), flops, traffic, _launch("prefill")),
                predicted=predicted,
                measured=part["latency_us"] / 1e6,
                work=flops,
                held_out=held(part, "attention_prefill"),
                group=gpu,
            ),
        )


def decode_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """Attention of one token over a cache. FlashInfer's older decode kernel is left out."""
    for (gpu,), part in parts(folder, "attention_decode.parquet", ["gpu"], kv_dtype="bfloat16", framework="vllm"):
        keep = part["kernel"] != "vllm_flashinfer_fidecode"
        part = {name: column[keep] for name, column in part.items()}
        b, s, q, kv, d = floats(part, "batch", "kv_len", "q_heads", "kv_heads", "head_dim")
        traffic, predicted = 4.0 * b * s * kv * d, np.zeros(len(b))
        for heads in np.unique(np.stack([q, kv, d], axis=-1), axis=0):
            at = (q == heads[0]) & (kv == heads[1]) & (d == heads[2])
            shape = _attention_shape(int(heads[0]), int(heads[1]), int(heads[2]))
            predicted[at] = kernels.decode_attention_seconds(machine(gpu), shape, 1, b[at], s[at])
        yield (
            f"decode/{SYSTEMS[gpu][2]}",
            Shapes(
                coordinates=(b * kv, s, q / kv, d),
                closed=kernels.attention_closed(machine(gpu), 0.0, traffic, _launch("decode")),
                predicted=predicted,
                measured=part["latency_us"] / 1e6,
                work=traffic,
                held_out=held(part, "attention_decode"),
                group=gpu,
            ),
        )


_MLA = Mla(kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)


def _attention_shape(heads: int, kv_heads: int, width: int, mla: Mla | None = None) -> ModelShape:
    return ModelShape(
        layers=1, hidden=heads * width, heads=heads, kv_heads=kv_heads, head_dim=width, ffn=1, vocab=1, tied=True,
        qkv_bias=False, qk_norm=False, mla=mla,
    )  # fmt: skip


def latent_decode_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """Absorbed latent attention of one token over a cache."""
    for (gpu,), part in _latent(folder, "decode"):
        b, past, heads = floats(part, "batch", "past", "heads")
        s, predicted = past + 1.0, np.zeros(len(b))
        traffic, flops = kernels.latent_decode_work(_MLA, heads, b, s)
        for n in np.unique(heads):
            at = heads == n
            shape = _attention_shape(int(n), int(n), 192, _MLA)
            predicted[at] = kernels.decode_attention_seconds(machine(gpu), shape, 1, b[at], s[at])
        yield (
            f"mla_decode/{SYSTEMS[gpu][2]}",
            Shapes(
                coordinates=(b, s, heads),
                closed=kernels.attention_closed(machine(gpu), flops, traffic, _launch("decode")),
                predicted=predicted,
                measured=part["latency_us"] / 1e6,
                work=traffic,
                held_out=held(part, "attention_mla"),
                group=gpu,
            ),
        )


def _latent(folder: Path, phase: str) -> Iterator[tuple[tuple[Any, ...], Columns]]:
    """Of TensorRT-LLM: SGLang's takes the absorbed form for prompts too, three times as many operations."""
    return parts(folder, "attention_mla.parquet", ["gpu"], kv_dtype="bfloat16", phase=phase, framework="trtllm")


def latent_prefill_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """Latent attention over whole sequences, keys and values uncompressed."""
    for (gpu,), part in _latent(folder, "prefill"):
        keep = (part["past"] == 0) & (part["seq"] > 1)
        part = {name: column[keep] for name, column in part.items()}
        b, s, heads = floats(part, "batch", "seq", "heads")
        flops, traffic = b * heads * s * s * 320.0, 2.0 * b * s * heads * (2.0 * 192 + 2.0 * 128)
        yield (
            f"mla_prefill/{SYSTEMS[gpu][2]}",
            Shapes(
                coordinates=(s, b * heads),
                closed=kernels.attention_closed(machine(gpu), flops, traffic, _launch("prefill")),
                predicted=kernels.prefill_seconds(machine(gpu), flops, traffic, s, b * heads, 0),
                measured=part["latency_us"] / 1e6,
                work=flops,
                held_out=held(part, "attention_mla"),
                group=gpu,
            ),
        )


def experts_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """Routed experts under balanced routing; A100 has only uneven one, which without expert parallelism hardly counts."""
    for (gpu, dtype), part in parts(folder, "moe_experts.parquet", ["gpu", "dtype"], dtype=["bfloat16", "fp8"]):
        keep = part["routing"] == "balanced"
        if not keep.any():
            keep = (part["routing"] == "power_law_1.01") & (part["moe_ep"] == 1)
        part = {name: column[keep] for name, column in part.items()}
        yield f"experts/{SYSTEMS[gpu][2]}/{PRECISIONS[dtype]}", experts_shapes(part, gpu, PRECISIONS[dtype])


def uneven_experts_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """Routed experts of the fullest device under power-law routing, whose draw is not known: its median is predicted."""
    found = parts(folder, "moe_experts.parquet", ["gpu", "dtype"], dtype=["bfloat16", "fp8"], routing="power_law_1.01")
    for (gpu, dtype), part in found:
        uneven = imbalance(part["moe_ep"], part["tokens"].astype(np.float64), Routing())
        yield f"experts/{SYSTEMS[gpu][2]}/{PRECISIONS[dtype]}", experts_shapes(part, gpu, PRECISIONS[dtype], uneven)


def experts_shapes(part: Columns, gpu: str, precision: Any, uneven: Float | float = 1.0) -> Shapes:
    """Of one device and precision; the load is `uneven` times the mean."""
    tokens, hidden, inter, topk, experts, tp, ep = floats(
        part, "tokens", "hidden", "inter", "topk", "experts", "moe_tp", "moe_ep"
    )
    load, local, width = tokens * topk / ep, experts / ep, inter / tp
    share = 1.0 - (1.0 - topk / experts) ** tokens
    arguments = (machine(gpu), precision, load * uneven, local, width, hidden, share)
    return Shapes(
        coordinates=(load / local, local, width, hidden),
        closed=kernels.experts_closed(*arguments),
        predicted=kernels.experts_seconds(*arguments),
        measured=part["latency_us"] / 1e6,
        work=6.0 * load * hidden * width,
        held_out=held(part, "moe_experts"),
        group=f"{gpu} {precision}",
    )


def _launch(kernel: str) -> float:
    return float(kernels.kernel_facts()["launch"][kernel])


_WIDTHS = np.arange(5.0, 17.0)

KERNELS = (
    Kernel(tables=gemm_tables, axes=(np.arange(16.0), _WIDTHS, _WIDTHS)),
    Kernel(tables=prefill_tables, axes=(np.arange(4.0, 15.0), np.arange(0, 13, 1.5), np.array([6.0, 7, 8]))),
    Kernel(
        tables=decode_tables,
        axes=(np.arange(0, 14, 1.5), np.arange(7.0, 18.0), np.arange(5.0), np.array([6.0, 7, 8])),
    ),
    Kernel(tables=latent_decode_tables, axes=(np.arange(0, 11, 2.0), np.arange(4, 18, 2.0), np.arange(0.0, 8, 1.0))),
    Kernel(tables=latent_prefill_tables, axes=(np.arange(4.0, 16), np.arange(0, 16, 1.5))),
    Kernel(
        tables=experts_tables,
        axes=(np.arange(-8.0, 17.0), np.arange(0, 9, 2.0), np.arange(5, 15, 2.0), np.array([10.0, 11.5, 13])),
    ),
)
