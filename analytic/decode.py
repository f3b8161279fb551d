"""Seconds of an engine's decode step and of the prompts that it takes in, on described accelerators.

A step is a plane `a0 + a1 b + a2 K` over its sequences b and their cached tokens K as long as products stream
weights; where they compute, their knee bends it. So a step without cached keys is a function of b, and keys add
in proportion. An engine runs a step as one CUDA graph: each kernel costs its launch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.engine import (
    Engine,
    Product,
    Seconds,
    attention_products,
    elementwise_values,
    gated_products,
    key_values,
    peak_bandwidth,
    peak_flops,
)
from analytic.moe import expert_traffic
from analytic.serving import generation_of, serving
from analytic.spread import Routing

Float = NDArray[np.float64]


def step_seconds(e: Engine, batch: Float, reading: Float) -> Seconds:
    """A decode step of `batch` sequences (float64[n]), whose cached keys take `reading` seconds over all layers.

    Pipeline stages work on their parts of the batch at the same time, so a round over all parts takes as long as all
    layers take for one, but the last stage has the head for each of them. An engine prepares the next step while the
    devices work on this one, so that the longer of both counts.
    """
    parts = np.minimum(e.at.pp, np.maximum(batch, 1.0))
    m, read = batch / parts, reading / parts
    shape, dense, moe = e.shape, e.shape.num_dense_layers, e.shape.num_moe_layers
    total = _products(e, attention_products(e), m).times(shape.layers)
    total = total + _products(e, gated_products(e, shape.ffn), m).times(dense)
    if shape.moe is not None:
        shared = gated_products(e, shape.moe.shared_ffn) if shape.moe.shared_ffn else []
        router: list[Product] = [(float(shape.hidden), np.full_like(m, shape.moe.experts))]
        total = total + (_products(e, shared + router, m) + _experts(e, m)).times(moe)
    total = total + _small(e, m) + _head(e, m).times(parts) + _collectives(e, m, prefill=False)
    host = e.machine.device.host
    waits = parts * (host.decode_step_s + shape.layers * host.decode_layer_s) + batch * host.decode_sequence_s
    return replace(
        total,
        memory=total.memory + read,
        host=total.host + np.maximum(waits - total.total - read, 0.0),
    )


def key_seconds(e: Engine, queries: Float | float = 1.0) -> Float:
    """Seconds that a layer takes per cached token that it reads for so many tokens of a sequence, float64[n]. A
    tensor-parallel rank holds its share of KV heads, one at least, or a latent as a whole."""
    device, mla = e.machine.device, e.shape.mla
    if mla is None:
        return key_values(e) * e.kv_bytes / device.kv_bandwidth
    # Every query head of a rank reads the same latent, so that many heads are bound by products.
    latent = serving().latent
    flops = 2.0 * queries * e.shape.heads / e.at.tp * (2 * mla.kv_lora_rank + mla.rope_head_dim)
    compute = flops / (latent.flops * peak_flops(e))
    memory = key_values(e) * e.kv_bytes / (latent.bandwidth * peak_bandwidth(e))
    return _knee(compute, memory, np.full_like(compute, latent.p))


def prefill_seconds(e: Engine, tokens: Float, squares: Float, chunk: Float) -> Seconds:
    """Seconds that prompts add to the steps that take them in: products and attention of their tokens, and collectives;
    weights stream and kernels launch for the decoding sequences anyway.

    Args:
        e: The engine.
        tokens: Prompt tokens in all, float64[n].
        squares: Sum of the squared lengths of the prompts.
        chunk: Tokens that a step takes in.
    """
    shape, device = e.shape, e.machine.device
    weights = shape.layers * _weights(attention_products(e)) + shape.num_dense_layers * _weights(
        gated_products(e, shape.ffn)
    )
    if shape.moe is not None and shape.moe.shared_ffn:
        weights = weights + shape.num_moe_layers * _weights(gated_products(e, shape.moe.shared_ffn))
    gemm = 2.0 * tokens * weights / (e.of("prefill_flops") / e.machine.roofline.seconds_per_flop)
    if shape.moe is not None:
        each = 2.0 * 3 * shape.hidden * shape.moe.ffn * shape.moe.experts_per_token / (e.at.ep * e.at.etp)
        shared_by = np.maximum(e.at.ep * e.at.etp / e.at.tp, 1.0)
        rate = e.of("expert_prefill_flops", experts=True) * peak_flops(e)
        gemm = gemm + shape.num_moe_layers * tokens * shared_by * each / rate
    keys = np.zeros_like(tokens)
    for window, layers in shape.window_groups:
        half = squares / np.maximum(tokens, 1e-9) / 2.0
        keys = keys + layers * (np.minimum(half, window) if window else half)
    flops = 2.0 * (shape.attention_width + shape.value_width) * tokens * keys / e.at.tp
    attention = flops / (serving().latent.prefill_flops * peak_flops(e) if shape.mla else device.attention_flops)
    memory = tokens * elementwise_values(e) * device.bytes_per_value / device.memory_bandwidth
    zero = np.zeros_like(tokens)
    work = Seconds(compute=gemm + attention, memory=memory, communication=zero, host=zero)
    moved = _collectives(e, np.maximum(chunk, 1.0), prefill=True).times(tokens / np.maximum(chunk, 1.0))
    return (work + moved).times(1.0 / e.at.pp)


def _weights(products: list[Product]) -> Float:
    return np.asarray(sum(np.asarray(k * n) for k, n in products))


def _products(e: Engine, products: list[Product], m: Float) -> Seconds:
    roofline, launch, p = e.machine.roofline, e.of("launch_s"), e.of("p")
    rate, width = e.of("flops") / roofline.seconds_per_flop, e.of("weight_bytes")
    pace = roofline.seconds_per_byte / e.of("bandwidth")
    total = _nothing(m)
    for k, n in products:
        values = roofline.bytes_per_value * m * (k + n) + width * k * n
        total = total + _split(2.0 * m * k * n / rate, values * pace, p, launch)
    return total


def _experts(e: Engine, m: Float) -> Seconds:
    """Routed experts of a layer: the tokens of all engines that share them, and the weights of those that are hit."""
    shape, moe = e.shape, e.shape.moe
    assert moe is not None
    tokens = m * np.maximum(e.at.ep * e.at.etp / e.at.tp, 1.0)
    routed = tokens * moe.experts_per_token / e.at.ep
    hit = moe.experts / e.at.ep * (1.0 - (1.0 - moe.experts_per_token / moe.experts) ** tokens)
    width = moe.ffn / e.at.etp
    values = hit * 3.0 * shape.hidden * width * e.of("weight_bytes", experts=True)
    values = values + e.machine.device.bytes_per_value * routed * (2.0 * shape.hidden + 3.0 * width)
    compute = 6.0 * routed * shape.hidden * width / (e.of("expert_flops", experts=True) * peak_flops(e))
    memory = values / (e.of("expert_bandwidth", experts=True) * peak_bandwidth(e))
    return _split(compute, memory, e.of("expert_p", experts=True), e.of("expert_launch_s", experts=True))


def _small(e: Engine, m: Float) -> Seconds:
    """All other kernels of the layers, with what attention takes beside cached keys."""
    c, device = serving(), e.machine.device
    launch = c.latent.launch_s if e.shape.mla else device.kv_launch_s
    kernels = e.shape.layers * c.kernels + e.shape.num_moe_layers * c.router_kernels
    heads = c.sequence_head_s[generation_of(device)] * e.shape.heads / e.at.tp
    traffic = m * elementwise_values(e) * device.bytes_per_value / device.memory_bandwidth
    zero = np.zeros_like(m)
    return Seconds(
        compute=zero,
        memory=traffic + e.shape.layers * m * heads,
        communication=zero,
        host=zero + kernels * c.kernel_s + e.shape.layers * launch,
    )


def _head(e: Engine, m: Float) -> Seconds:
    """The output head in bf16, and sampling from its logits in float32."""
    shape, device = e.shape, e.machine.device
    width = shape.vocab / e.at.tp
    seconds = e.machine.roofline.matmul(m, float(shape.hidden), width)
    softmax = 3 * 4.0 * m * shape.vocab / device.memory_bandwidth
    zero = np.zeros_like(m)
    return Seconds(compute=zero, memory=seconds + softmax, communication=zero, host=zero + e.machine.roofline.launch_s)


def _collectives(e: Engine, m: Float, *, prefill: bool) -> Seconds:
    """Two all-reduces a layer; engines that share experts dispatch and combine instead of the second one."""
    shape, at, levels = e.shape, e.at, e.machine.levels
    size = m * shape.hidden * float(e.machine.device.bytes_per_value)
    each = collective_seconds(levels, "all_reduce", size, at.tp, engine=e.all_reduce)
    apart = at.ep * at.etp > at.tp
    total = 2.0 * shape.layers * each
    if shape.moe is not None and apart.any():
        exchange = expert_traffic(e.machine, shape, at, m, Routing(engine=True))
        total = np.where(apart, total + shape.num_moe_layers * (exchange - each), total)
    hops = np.where(at.pp > 1, at.pp * levels[0].latency_s * (0.0 if prefill else 1.0), 0.0)
    zero = np.zeros_like(m)
    return Seconds(compute=zero, memory=zero, communication=total + hops, host=zero)


def _split(compute: Float, memory: Float, p: Float, launch: Float) -> Seconds:
    """Both joined by a knee, each with its share."""
    both, share = _knee(compute, memory, p), compute / np.maximum(compute + memory, 1e-30)
    zero = np.zeros_like(both)
    return Seconds(compute=both * share, memory=both * (1.0 - share), communication=zero, host=zero + launch)


def _knee(x: Float, y: Float, p: Float) -> Float:
    """As `device.knee`, with a sharpness for each row."""
    high, low = np.maximum(x, y), np.minimum(x, y)
    ratio = low / np.maximum(high, 1e-30)
    return np.asarray(high * (1.0 + ratio**p) ** (1.0 / p))


def _nothing(like: Float) -> Seconds:
    zero = np.zeros_like(like)
    return Seconds(compute=zero, memory=zero, communication=zero, host=zero)
