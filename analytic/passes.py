"""Forward passes over a batch, and updates: micro-batches through a pipeline, gradients, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.costs import RESHARDED, Columns, Cost
from analytic.layers import Forward, Spread, Work, forward, spread_of
from analytic.priors import priors
from analytic.setup import Machine, Setup
from analytic.weights import (
    gradient_bytes,
    optimizer_bytes,
    parameters_on_device,
    shards,
    trained_on_device,
    weight_bytes,
)
from ir.batch import CODES
from ir.cluster import device_bandwidth
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]

OFFLOAD_OPTIMIZER, OFFLOAD_ALL = CODES["offload"].index("optimizer"), CODES["offload"].index("all")
SELECTIVE, FULL = CODES["recompute"].index("selective"), CODES["recompute"].index("full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """How a replica's sequences are cut up, arrays over layouts."""

    batches: Int
    """Micro-batches, one after the other."""
    mean: Work
    """Of one of them."""
    largest_tokens: Float
    """Tokens that the largest may have: memory must hold them, however rare they are."""


def cut(s: Setup, machine: Machine, x: Columns, count: Int, cp: Int, limit: Int | None = None) -> Micro:
    """Cut `count` sequences a replica into micro-batches. By sequences, a core pads them to the longest, while other
    engines pack them; by tokens, micro-batches are filled up. At most `limit` sequences come at a time."""
    total, longest = s.lengths.total, float(s.job.workload.max_tokens)
    size = np.maximum(np.minimum(x["micro_batch"], count), 1).astype(np.int64)
    size = size if limit is None else np.minimum(size, limit)
    budget = x["micro_tokens"].astype(np.float64) * cp
    tokens: Float = count * np.float64(total.mean)
    squares: Float = count * np.float64(total.second_moment)
    if machine.is_host:
        tokens, squares = total.padded(count, size), total.padded_squares(count, size)
    by_tokens = np.maximum(np.ceil(tokens / np.maximum(budget, 1.0)), 1.0)
    batches = np.where(budget > 0, by_tokens, -(-count // size)).astype(np.int64)
    head: Float = count * np.float64(s.lengths.response.mean)
    mean = Work(tokens=tokens, squares=squares, head_tokens=head).scaled(1.0 / batches)
    return Micro(batches=batches, mean=mean, largest_tokens=np.where(budget > 0, budget, size * longest))


def replicas(x: Columns) -> Int:
    """Replicas of a pass, which fill its pool."""
    return x["devices"].astype(np.int64) // (x["tp"].astype(np.int64) * x["pp"] * x["cp"])


def pass_cost(
    s: Setup, machine: Machine, shape: ModelShape, x: Columns, *, trained: bool, limit: Int | None = None
) -> Cost:
    """A forward pass over the step's batch.

    Args:
        s: The job and cluster.
        machine: The group of devices it runs on.
        shape: The model.
        x: Columns of the section.
        trained: Whether the weights are those that are trained on the pool, which hold their own memory.
        limit: Most sequences that come at a time; None for the whole batch.
    """
    at = spread_of(x, replicas(x))
    count = -(-s.job.workload.sequences // at.dp)
    micro = cut(s, machine, x, count, at.cp, limit)
    one = forward(machine, shape, at, micro.mean)
    host = machine.device.host
    launches = np.full(len(count), host.forward_s + shape.layers * host.forward_layer_s)
    gather = _gather_seconds(machine, shape, at, x["zero"])
    seconds = _pipelined(machine, micro.batches, at.pp, _scaled(one, machine.forward_scale), launches, gather)
    waits = x["offload"] == OFFLOAD_ALL
    weights = weight_bytes(machine, shape, at, x["zero"])
    none = np.zeros_like(weights)
    working = {
        "gathered layers": _unsharded_layers(shape, at, x["zero"]) * machine.device.bytes_per_value,
        "activations": _pass_activations(machine, shape, at, micro.largest_tokens),
    }
    if trained:
        network = device_bandwidth(machine.levels, len(machine.levels) - 1)
        return Cost(
            seconds=seconds,
            latency=seconds,
            reshard=weights / network,
            transient={RESHARDED: weights, **working},
        )
    seconds = seconds + np.where(waits, weights / _host_link(machine), 0.0)
    return Cost(
        seconds=seconds,
        latency=seconds,
        reshard=none,
        resident={"weights": np.where(waits, 0.0, weights)},
        transient={"weights": np.where(waits, weights, 0.0), **working},
    )


def update_cost(s: Setup, machine: Machine, shape: ModelShape, x: Columns) -> Cost:
    """All optimizer steps of an RL step."""
    at = spread_of(x, x["dp"].astype(np.int64))
    workload, p = s.job.workload, priors()
    count = workload.sequences // workload.minibatches // at.dp
    micro = cut(s, machine, x, count, at.cp)
    one = forward(machine, shape, at, micro.mean)
    again = np.where(x["recompute"] == FULL, 1.0, np.where(x["recompute"] == SELECTIVE, p.selective, 0.0))
    # Frozen weights need no gradients of their own: a backward pass for the inputs only.
    backward = p.backward_ratio if not shape.lora_rank else p.backward_ratio / 2.0
    both = Forward(
        kernels=one.kernels * (machine.train_scale * (1.0 + backward) + machine.forward_scale * again),
        collectives=one.collectives * (2.0 + again),
    )
    host = machine.device.host
    launches = host.train_s + shape.layers * (
        host.train_layer_s + np.where(x["recompute"] == FULL, host.forward_layer_s, 0.0)
    )
    gather = _gather_seconds(machine, shape, at, x["zero"])
    pieces = _pipelined(machine, micro.batches, at.pp, both, launches, 3.0 * gather, x["vpp"].astype(np.int64))
    step = pieces + _reduce_seconds(machine, shape, at, x["zero"]) + _optimizer_seconds(machine, shape, at, x)
    seconds = s.job.updates_per_step * step
    memory = _update_memory(machine, shape, at, x, micro)
    return Cost(seconds=seconds, latency=seconds, reshard=np.zeros_like(seconds), **memory)


def _scaled(one: Forward, scale: float) -> Forward:
    return Forward(kernels=one.kernels * scale, collectives=one.collectives)


def _pipelined(
    machine: Machine,
    batches: Int,
    pp: Int,
    one: Forward,
    launches: Float,
    gather: Float,
    vpp: Int | None = None,
) -> Float:
    """Micro-batches through a pipeline of equal stages (1F1B; interleaved pieces shorten its filling). Sharded weights
    are gathered for each, in part under the computation before."""
    overlap = priors().overlap
    whole = machine.with_launches(one.kernels, launches) + one.collectives
    whole = np.maximum(whole, gather) + (1.0 - overlap) * np.minimum(whole, gather)
    stage = whole / pp
    return batches * stage + (pp - 1) * stage / (1 if vpp is None else vpp)


def _gather_seconds(machine: Machine, shape: ModelShape, at: Spread, zero: NDArray[np.int32]) -> Float:
    """All-gathers of a model's weights where ZeRO-3 divides them."""
    dense, experts = parameters_on_device(shape, at)
    over, expert_over = shards(at)
    width = machine.device.bytes_per_value
    seconds = collective_seconds(machine.levels, "all_gather", dense * width, over.astype(np.int64), at.tp)
    if shape.is_moe:
        seconds = seconds + collective_seconds(
            machine.levels, "all_gather", experts * width, expert_over.astype(np.int64), at.ep
        )
    return np.where(zero == 3, seconds, 0.0)


def _reduce_seconds(machine: Machine, shape: ModelShape, at: Spread, zero: NDArray[np.int32]) -> Float:
    """What of the gradients' reduction, and of the gathering of new weights, is not hidden under the last micro-batch:
    on a core, all of it."""
    exposed = 1.0 if machine.is_host else 1.0 - priors().overlap
    total = np.zeros(len(zero))
    for parameters, over in zip(trained_on_device(shape, at), shards(at), strict=True):
        if parameters.any():
            ranks = over.astype(np.int64)
            total = total + collective_seconds(machine.levels, "all_reduce", 4.0 * parameters, ranks, at.tp)
    return np.asarray(exposed * np.where(zero == 3, 0.5 * total, total))


def _optimizer_seconds(machine: Machine, shape: ModelShape, at: Spread, x: Columns) -> Float:
    host, p = machine.device.host, priors()
    per_device = optimizer_bytes(machine, shape, at, x["zero"]) / (8.0 if machine.device.bytes_per_value >= 4 else 12.0)
    seconds = host.optimizer_s + shape.layers / at.pp * host.optimizer_layer_s
    seconds = seconds + p.optimizer_values * 4.0 * per_device / machine.device.memory_bandwidth
    # State that waits in host memory comes in and goes out again; weights and gradients too.
    moved = optimizer_bytes(machine, shape, at, x["zero"]) * (x["offload"] >= OFFLOAD_OPTIMIZER)
    moved = moved + weight_bytes(machine, shape, at, x["zero"]) * (x["offload"] == OFFLOAD_ALL)
    return np.asarray(seconds + 2.0 * moved / _host_link(machine))


def _host_link(machine: Machine) -> float:
    return machine.device.host_link or machine.device.memory_bandwidth


def _update_memory(
    machine: Machine, shape: ModelShape, at: Spread, x: Columns, micro: Micro
) -> dict[str, dict[str, Float]]:
    zero, offload = x["zero"], x["offload"]
    # Products in fp8 leave the weights at rest as they are.
    at = replace(at, fp8=np.zeros_like(at.fp8))
    weights = weight_bytes(machine, shape, at, zero)
    gradients = gradient_bytes(shape, at, zero)
    optimizer = optimizer_bytes(machine, shape, at, zero)
    if machine.is_host:
        # The weights a run starts from are kept beside the working ones; the all-reduce flattens the gradients.
        weights = 2.0 * weights
        gradients = gradients * (1.0 + (at.dp > 1))
    away, all_away = offload >= OFFLOAD_OPTIMIZER, offload == OFFLOAD_ALL
    return {
        "resident": {
            "weights": np.where(all_away, 0.0, weights),
            "gradients": np.where(all_away, 0.0, gradients),
            "optimizer": np.where(away, 0.0, optimizer),
        },
        "transient": {
            "training state": np.where(all_away, weights + gradients, 0.0) + np.where(away, optimizer, 0.0),
            "gathered layers": _unsharded_layers(shape, at, zero) * machine.device.bytes_per_value,
            "activations": _update_activations(machine, shape, at, x, micro),
        },
    }


def _unsharded_layers(shape: ModelShape, at: Spread, zero: NDArray[np.int32]) -> Float:
    """Parameters of the two layers that ZeRO-3 has gathered: one in use, one on its way."""
    dense, experts = parameters_on_device(shape, at)
    return np.asarray(np.where(zero == 3, 2.0 * (dense + experts) * at.pp / shape.layers, 0.0))


def _update_activations(machine: Machine, shape: ModelShape, at: Spread, x: Columns, micro: Micro) -> Float:
    """Kept for the backward pass: a layer's tensors, or with recomputation its input, for the micro-batches that a
    pipeline's first stage has in flight; and the logits."""
    p, width = machine.elementwise, machine.device.bytes_per_value
    tokens = micro.largest_tokens / (at.cp * at.tp)
    heads = shape.attention_width + shape.kv_width
    layer = p.saved_hidden * shape.hidden + p.saved_heads * heads + p.saved_ffn * _ffn_width(shape)
    kept = np.where(x["recompute"] == SELECTIVE, layer - p.saved_heads * heads / 2.0, layer)
    kept = np.where(x["recompute"] == FULL, float(shape.hidden), kept)
    in_flight = np.minimum(micro.batches, at.pp) * (1.0 + (at.pp - 1) / (at.pp * x["vpp"]) * (x["vpp"] > 1))
    saved = shape.layers / at.pp * in_flight * kept + np.where(x["recompute"] == FULL, layer, 0.0)
    return np.asarray(priors().fragmentation * tokens * (saved * width + 4.0 * shape.vocab * 4))


def _pass_activations(machine: Machine, shape: ModelShape, at: Spread, largest_tokens: Float) -> Float:
    width = machine.device.bytes_per_value
    layer = 6.0 * shape.hidden + 3.0 * _ffn_width(shape)
    tokens = largest_tokens / (at.cp * at.tp)
    return priors().fragmentation * tokens * (layer * width + 3.0 * shape.vocab * 4)


def _ffn_width(shape: ModelShape) -> int:
    """Widths of the networks a token goes through."""
    moe = shape.moe
    return shape.ffn if moe is None else moe.ffn * moe.experts_per_token + moe.shared_ffn
