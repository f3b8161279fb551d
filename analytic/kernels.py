"""Seconds of single kernels: a closed form of arithmetic and traffic, times what was measured over it on like devices.

Closed forms are simple because tables correct them (see `analytic.grids`); a device without tables uses its own fitted
closed form. All arguments are arrays of one shape or numbers; tensors are bfloat16 unless a function says otherwise.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from analytic.device import knee
from analytic.grids import Grid, grid, kernel_facts, tables_of
from analytic.setup import Machine
from ir.shape import Mla, ModelShape

Float = NDArray[np.float64]
Number = Float | float
Precision = Literal["bf16", "fp8", "fp8_block"]
"""Of a product's inputs; fp8 with one scale a tensor, or a block of it."""

_KV_WIDTH = 2.0


def table(machine: Machine, kernel: str, *parts: str) -> Grid | None:
    """The device's table of a kernel, or its nearest relative's."""
    name = tables_of(machine.device.name)
    return None if name is None or machine.is_host else grid("/".join((kernel, name, *parts)))


def gemm_seconds(
    machine: Machine, m: Number, k: Number, n: Number, precision: Precision = "bf16", output_bytes: Number = 2.0
) -> Float:
    """Seconds of a product [m, k] x [k, n], its launch included; on a core without the launch.

    Args:
        machine: The device.
        m: Rows.
        k: Values of a row.
        n: Values of an output's row.
        precision: Of the inputs. Products in fp8 quantise the rows first, as measured ones do.
        output_bytes: Bytes read and written for a value of the output.
    """
    if machine.is_host:
        return np.asarray(machine.roofline.matmul(np.asarray(m, dtype=np.float64), k, n))
    found = table(machine, "gemm", precision)
    if found is None:
        narrow = precision != "bf16"
        own = machine.roofline
        seconds = own.matmul(np.asarray(m, dtype=np.float64), k, n, speed=_peak(machine, precision) if narrow else 1.0)
        wider = (np.asarray(output_bytes) - 2.0) * m * n * own.seconds_per_byte
        return np.asarray(seconds + wider + own.launch_s)
    return gemm_closed(machine, m, k, n, precision, output_bytes) * found.factor(m, n, k)


def gemm_closed(
    machine: Machine, m: Number, k: Number, n: Number, precision: Precision = "bf16", output_bytes: Number = 2.0
) -> Float:
    """What the tables of products correct: a root of squares, and a launch."""
    own, width = machine.roofline, 2.0 if precision == "bf16" else 1.0
    compute = np.asarray(m) * (k * 2.0 * np.asarray(n) * own.seconds_per_flop / _peak(machine, precision))
    values = np.asarray(m) * (width * np.asarray(k) + output_bytes * np.asarray(n)) + width * np.asarray(k * n)
    return knee(compute, values * own.seconds_per_byte, 2.0) + own.launch_s


def narrow_seconds(machine: Machine, m: Number, k: Number, n: Number, output_bytes: Number = 2.0) -> Float:
    """Seconds of a product in fp8 whose inputs lie there quantised: what measured ones take, less what they quantise
    their rows in, but not less than the arithmetic at the data sheet's peak."""
    own = machine.roofline
    whole = gemm_seconds(machine, m, k, n, "fp8", output_bytes)
    if table(machine, "gemm", "fp8") is None:
        return whole
    rows = kernel_facts()["fp8"]["quantise"] * np.asarray(m) * k
    least = np.asarray(m) * (k * 2.0 * np.asarray(n)) / machine.device.peak_flops["fp8"] + own.launch_s
    return np.asarray(np.maximum(whole - rows, least))


def gemm_traffic(machine: Machine, m: Number, k: Number, n: Number) -> NDArray[np.bool_]:
    """Whether a product takes its time for memory traffic rather than for arithmetic."""
    own = machine.roofline
    values = np.asarray(m) * (k + n) + np.asarray(k * n)
    return np.asarray(values * own.bytes_per_value * own.seconds_per_byte > 2.0 * m * k * n * own.seconds_per_flop)


def _peak(machine: Machine, precision: Precision) -> float:
    """FLOP/s of a precision over those of bf16; a device that lacks it multiplies in bf16."""
    peaks = machine.device.peak_flops
    return peaks["fp8"] / peaks["bf16"] if precision != "bf16" and "fp8" in peaks else 1.0


def prefill_seconds(machine: Machine, flops: Float, traffic: Float, keys: Float, rows: Float, head: int) -> Float:
    """An attention core over whole sequences, packed, causal, one layer.

    Args:
        machine: The device.
        flops: Two for each key that each query sees and each value of query and value heads.
        traffic: Bytes of queries, keys, values and outputs.
        keys: Mean length of the sequences, or twice the keys that a query sees where a window limits them.
        rows: Sequences times query heads on the device.
        head: Width of a head; 0 for MLA's uncompressed ones.
    """
    found = table(machine, "prefill") if head else table(machine, "mla_prefill")
    if found is None:
        return flops / machine.device.attention_flops + machine.device.attention_launch_s
    closed = attention_closed(machine, flops, traffic, kernel_facts()["launch"]["prefill"])
    return closed * (found.factor(keys, rows, float(head)) if head else found.factor(keys, rows))


def attention_closed(machine: Machine, flops: Number, traffic: Number, launch_s: float) -> Float:
    """What the tables of attention correct: arithmetic, traffic and a launch, added up at the data sheet's rates."""
    device = machine.device
    # A device that was measured has no data sheet: its achievable rates stand in.
    peak = device.peak_flops.get("bf16", 1.0 / machine.roofline.seconds_per_flop)
    bandwidth = device.peak_bandwidth or device.memory_bandwidth
    return np.asarray(flops / peak + traffic / bandwidth + launch_s)


def decode_attention_seconds(machine: Machine, shape: ModelShape, tp: Number, batch: Float, length: Float) -> Float:
    """Attention of one decode step over all layers: each sequence's new token over its cached keys and values.

    Args:
        machine: The device.
        shape: The model; layers with a window read no more than it. With MLA the absorbed form reads the latent, which
            every tensor-parallel rank holds whole.
        tp: Tensor-parallel ranks; KV heads repeat beyond their number.
        batch: Sequences.
        length: Cached tokens of each.
    """
    total = np.zeros(np.broadcast_shapes(np.shape(tp), np.shape(batch), np.shape(length)))
    for window, layers in shape.window_groups:
        seen = np.minimum(length, window) if window else length
        one = _latent_decode if shape.mla is not None else _decode
        total = total + layers * one(machine, shape, tp, batch, seen)
    return total


def _decode(machine: Machine, shape: ModelShape, tp: Number, batch: Float, length: Float) -> Float:
    heads = np.maximum(shape.kv_heads / np.asarray(tp), 1.0)
    traffic = batch * length * heads * (2.0 * shape.head_dim * _KV_WIDTH)
    found = table(machine, "decode")
    if found is None:
        return np.asarray(traffic / machine.device.kv_bandwidth + machine.device.kv_launch_s)
    closed = attention_closed(machine, 0.0, traffic, kernel_facts()["launch"]["decode"])
    group = np.maximum(shape.heads / np.asarray(tp), 1.0) / heads
    return closed * found.factor(batch * heads, length + 0.0 * heads, _number(group), float(shape.head_dim))


def _latent_decode(machine: Machine, shape: ModelShape, tp: Number, batch: Float, length: Float) -> Float:
    assert shape.mla is not None
    heads = np.maximum(shape.heads / np.asarray(tp), 1.0)
    traffic, flops = latent_decode_work(shape.mla, heads, batch, length)
    found = table(machine, "mla_decode")
    if found is None:
        device = machine.device
        return np.asarray(
            np.maximum(traffic / device.kv_bandwidth, flops / device.attention_flops) + device.kv_launch_s
        )
    closed = attention_closed(machine, flops, traffic, kernel_facts()["launch"]["decode"])
    return closed * found.factor(batch + 0.0 * heads, length + 0.0 * heads, heads + 0.0 * batch)


def latent_decode_work(mla: Mla, heads: Number, batch: Number, length: Number) -> tuple[Float, Float]:
    """(bytes, FLOP) of the absorbed form: the latent is read once for all heads, and each head's query meets all of
    it, its output the part that values are made from."""
    width = mla.kv_lora_rank + mla.rope_head_dim
    keys = np.asarray(batch * length)
    return keys * (_KV_WIDTH * width), keys * heads * (2.0 * (width + mla.kv_lora_rank))


def experts_seconds(
    machine: Machine, precision: Precision, load: Number, local: Number, width: Number, hidden: Number, share: Number
) -> Float:
    """The routed experts of a layer on one device: sorting, grouped products, activation, gathering.

    Args:
        machine: The device.
        precision: Of weights and products.
        load: Tokens that the device's experts get, each counted once an expert.
        local: Experts on the device.
        width: Of an expert's network there.
        hidden: Of the model.
        share: Of the local experts, those that get any token.
    """
    closed = experts_closed(machine, precision, load, local, width, hidden, share)
    found = table(machine, "experts", "bf16" if precision == "bf16" else "fp8")
    if found is None:
        return np.asarray(closed / kernel_facts()["experts"]["efficiency"])
    return closed * found.factor(load / np.asarray(local), local + 0.0 * load, width + 0.0 * load, _number(hidden))


def experts_closed(
    machine: Machine, precision: Precision, load: Number, local: Number, width: Number, hidden: Number, share: Number
) -> Float:
    """What the tables of experts correct: arithmetic, weights and activations, and launches, added up."""
    value = 2.0 if precision == "bf16" else 1.0
    flops = np.asarray(load) * width * (6.0 * hidden) / _peak(machine, precision)
    traffic = np.asarray(share * local) * width * (3.0 * value * hidden) + load * 2.0 * (2.0 * hidden + 3.0 * width)
    return attention_closed(machine, flops, traffic, kernel_facts()["launch"]["experts"])


def _number(x: Number) -> Number:
    """One number where an array repeats it, so that tables lose an axis."""
    if np.ndim(x) and np.size(x) and np.all(np.asarray(x) == np.asarray(x).flat[0]):
        return float(np.asarray(x).flat[0])
    return x
