"""Seconds of a forward pass of a model over some tokens, on one replica: products, attention, traffic, collectives.

Everything is an array over layouts. Tensor parallelism divides matrices, context
parallelism tokens, expert parallelism experts, pipeline parallelism layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds, overlap_of
from analytic.device import overlapped
from analytic.grids import kernel_facts
from analytic.kernels import gemm_seconds, gemm_traffic, prefill_seconds
from analytic.moe import expert_traffic, experts
from analytic.setup import Machine
from analytic.spread import Forward, Routing, Spread, Work, spread_of
from ir.shape import Matmul, ModelShape

__all__ = ["Forward", "Routing", "Spread", "Work", "forward", "num_launches", "spread_of", "ulysses_seconds"]

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Cut = Literal["columns", "rows", "whole"]
"""What of a matrix tensor parallelism divides: its outputs, its inputs, or nothing."""


_PLAIN = Routing()


def forward(machine: Machine, shape: ModelShape, at: Spread, work: Work, routing: Routing = _PLAIN) -> Forward:
    """A forward pass without the host's launches; pipeline stages added up."""
    m, one = work.tokens / at.cp, around(machine, shape, at, work, routing)
    kernels, memory, collectives = one.kernels, one.memory, one.collectives
    for count, cuts in matrices(machine, shape):
        seconds, slow = _products(machine, cuts, at, m)
        kernels, memory = kernels + count * seconds, memory + count * slow
    if shape.num_moe_layers:
        seconds, slow = experts(machine, shape, at, m, routing)
        kernels, memory = kernels + shape.num_moe_layers * seconds, memory + shape.num_moe_layers * slow
        collectives = collectives + shape.num_moe_layers * expert_traffic(machine, shape, at, m, routing)
    return replace(one, kernels=kernels, collectives=collectives, memory=memory)


def around(machine: Machine, shape: ModelShape, at: Spread, work: Work, routing: Routing = _PLAIN) -> Forward:
    """What of a forward pass is around the products of its layers and around experts: attention cores, traffic, the
    head, and collectives of tensor and context parallelism."""
    m, layers = work.tokens / at.cp, shape.layers
    attention = _attention(machine, shape, at, work)
    head, head_memory = _head(machine, shape, at, work.head_tokens / at.cp)
    moving = layers * _elementwise(machine, shape, at, m)
    tensor = _tensor_traffic(machine, shape, at, m, routing)
    return Forward(
        kernels=moving + attention + head,
        collectives=tensor + layers * _context_traffic(machine, shape, at, m, attention),
        memory=moving + head_memory,
        attention=attention,
        head=head,
        tensor=tensor,
    )


def matrices(machine: Machine, shape: ModelShape) -> list[tuple[int, list[tuple[Matmul, Cut]]]]:
    """(layers, matrices) of all but experts."""
    return [(shape.layers, _attention_cuts(machine, shape)), *_network_cuts(machine, shape)]


def divided(at: Spread, matrix: Matmul, cut: Cut) -> tuple[Float | float, Float | float]:
    """(values of an input's row, of an output's) on a tensor-parallel device."""
    (k, n), tp = matrix, _number(at.tp)
    return (k / tp if cut == "rows" else float(k)), (n / tp if cut == "columns" else float(n))


def num_launches(shape: ModelShape) -> int:
    """Products that a decode step of one layer launches one after the other."""
    return len(shape.attention_matmuls) + len(shape.dense_ffn_matmuls or shape.expert_matmuls)


def _attention_cuts(machine: Machine, shape: ModelShape) -> list[tuple[Matmul, Cut]]:
    """A layer's attention: accelerators fuse products of one input. Heads are divided, MLA's latents are not."""
    if machine.is_host:
        return [(matmul, "columns") for matmul in shape.attention_matmuls]
    h, mla = shape.hidden, shape.mla
    output: tuple[Matmul, Cut] = (shape.value_width, h), "rows"
    if mla is None:
        return [((h, shape.attention_width + 2 * shape.kv_width), "columns"), output]
    latent = mla.kv_lora_rank + mla.rope_head_dim
    expand: tuple[Matmul, Cut] = (mla.kv_lora_rank, shape.heads * (mla.nope_head_dim + mla.v_head_dim)), "columns"
    if mla.q_lora_rank:
        query: tuple[Matmul, Cut] = (mla.q_lora_rank, shape.attention_width), "columns"
        return [((h, mla.q_lora_rank + latent), "whole"), query, expand, output]
    return [((h, shape.attention_width), "columns"), ((h, latent), "whole"), expand, output]


def _network_cuts(machine: Machine, shape: ModelShape) -> list[tuple[int, list[tuple[Matmul, Cut]]]]:
    """(layers, matrices) of dense and of shared feed-forward networks."""
    dense = _gated_cuts(machine, shape, shape.ffn if shape.num_dense_layers else 0)
    shared = _gated_cuts(machine, shape, shape.moe.shared_ffn if shape.moe else 0)
    return [(n, cuts) for n, cuts in ((shape.num_dense_layers, dense), (shape.num_moe_layers, shared)) if n and cuts]


def _gated_cuts(machine: Machine, shape: ModelShape, width: int) -> list[tuple[Matmul, Cut]]:
    if not width:
        return []
    if machine.is_host:
        gate: tuple[Matmul, Cut] = (shape.hidden, width), "columns"
        return [gate, gate, ((width, shape.hidden), "columns")]
    return [((shape.hidden, 2 * width), "columns"), ((width, shape.hidden), "rows")]


def _products(machine: Machine, cuts: list[tuple[Matmul, Cut]], at: Spread, m: Float) -> tuple[Float, Float]:
    """Seconds of the matrices one after the other, and of those among them that take it for memory traffic."""
    total, memory = np.zeros_like(m), np.zeros_like(m)
    for matrix, cut in cuts:
        inner, outer = divided(at, matrix, cut)
        seconds = _product(machine, at, m, inner, outer)
        total = total + seconds
        memory = memory + seconds * gemm_traffic(machine, m, inner, outer)
    return total, memory


def _product(machine: Machine, at: Spread, m: Float, k: Float | float, n: Float | float) -> Float:
    # Nothing goes through a product of no rows, not even a launch.
    some = m > 0
    if not at.fp8.any():
        return gemm_seconds(machine, m, k, n) * some
    narrow = gemm_seconds(machine, m, k, n, "fp8") * some
    return narrow if at.fp8.all() else np.where(at.fp8, narrow, gemm_seconds(machine, m, k, n) * some)


def _number(values: Int) -> Float | float:
    """One number where all are equal, which tables are quicker at."""
    first = float(values[0]) if len(values) else 1.0
    return first if (values == first).all() else values.astype(np.float64)


def _elementwise(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """Norms, rotary embedding, gates and additions; sequence parallelism divides them too."""
    p = machine.elementwise
    ffn = shape.ffn if not shape.moe else shape.moe.ffn * shape.moe.experts_per_token + shape.moe.shared_ffn
    values = p.hidden_passes * shape.hidden + p.head_passes * (shape.attention_width + shape.kv_width)
    values += p.ffn_passes * ffn
    seconds = m / at.tp * (values * machine.device.bytes_per_value / machine.device.memory_bandwidth)
    if machine.is_host:
        return seconds
    small = kernel_facts()["memory_kernels"]
    return np.asarray(seconds + small["per_layer"] * small["seconds"] * (m > 0))


def _attention(machine: Machine, shape: ModelShape, at: Spread, work: Work) -> Float:
    """The causal attention cores of all layers: a token sees half of its sequence, or its window."""
    length = work.squares / np.maximum(work.tokens, 1e-9)
    flops_per_key = 2.0 * (shape.attention_width + shape.value_width)
    device, share = machine.device, at.tp * at.cp
    total = np.zeros_like(work.tokens)
    some, core = work.tokens > 0, work.squares > 0
    traffic = work.tokens * (2.0 * (shape.attention_width + shape.value_width + 2.0 * shape.kv_width)) / share
    rows = work.tokens / np.maximum(length, 1.0) * shape.heads / at.tp
    for window, layers in shape.window_groups:
        keys = np.minimum(length / 2.0, window) if window else length / 2.0
        flops = flops_per_key * work.tokens * keys / share
        if machine.is_host:
            one = flops / device.attention_flops + device.attention_launch_s * some
        else:
            head = 0 if shape.mla else shape.head_dim
            full = prefill_seconds(machine, flops, traffic, 2.0 * keys, rows, head)
            one = np.where(core, full, device.attention_launch_s * some)
        total = total + layers * one
    return total


def _head(machine: Machine, shape: ModelShape, at: Spread, tokens: Float) -> tuple[Float, Float]:
    """The output head and its softmax, and what of them memory traffic takes."""
    width, softmax = np.maximum(shape.outputs / _number(at.tp), 1.0), softmax_seconds(machine, shape, at, tokens)
    product = gemm_seconds(machine, tokens, float(shape.hidden), width)
    product = product if machine.is_host else product * (tokens > 0)
    return product + softmax, softmax + product * gemm_traffic(machine, tokens, float(shape.hidden), width)


def softmax_seconds(machine: Machine, shape: ModelShape, at: Spread, tokens: Float) -> Float:
    """Memory traffic of log-probabilities of the logits of so many tokens."""
    width = np.maximum(shape.outputs / _number(at.tp), 1.0)
    return np.asarray(6.0 * tokens * width * machine.device.bytes_per_value / machine.device.memory_bandwidth)


def _tensor_traffic(machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing) -> Float:
    """Collectives of all layers over the hidden state: all-reduces, or what is the same with sequence parallelism."""
    size = m * shape.hidden * machine.device.bytes_per_value
    once = collective_seconds(machine.levels, "all_reduce", size, at.tp, engine="vllm" if routing.engine else None)
    if routing.engine or machine.is_host or not shape.num_moe_layers:
        return 2.0 * shape.layers * once
    return (shape.layers + shape.num_dense_layers + shape.num_moe_layers * _expert_collectives(shape, at)) * once


def _expert_collectives(shape: ModelShape, at: Spread) -> Float:
    """All-reduces of the hidden state that a trainer's layer needs for its experts: none where each is whole on a
    device, since tokens are dispatched from where sequence parallelism left them; where tensor parallelism divides
    them, what arrived for them is gathered and scattered, as many copies as a token has experts. Shared experts are
    divided as dense networks are (Megatron-Core, `MoEAlltoAllTokenDispatcher`, `SharedExpertMLP`)."""
    assert shape.moe is not None
    return np.where(at.etp > 1, float(shape.moe.experts_per_token), 0.0) + float(shape.moe.shared_ffn > 0)


def _context_traffic(machine: Machine, shape: ModelShape, at: Spread, m: Float, attention: Float) -> Float:
    """Keys and values of the other devices pass by in a ring once a layer, under the attention core, which waits for
    what is slower."""
    size = m * at.cp * shape.kv_values_per_token / at.tp * machine.device.bytes_per_value
    seconds = collective_seconds(machine.levels, "all_gather", size, at.cp, at.tp)
    core = attention / max(shape.layers, 1)
    return overlapped(core, seconds, overlap_of(machine.levels, at.cp, at.tp)) - core


def ulysses_seconds(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """Context parallelism over heads instead of a ring: a layer exchanges queries, keys, values and outputs, all
    exposed. Its degree must divide the heads; KV heads repeat beyond their number."""
    heads = shape.attention_width + shape.value_width + shape.kv_values_per_token
    size = m * heads / at.tp * machine.device.bytes_per_value / 4.0
    return 4.0 * collective_seconds(machine.levels, "all_to_all", size, at.cp, at.tp)
