"""Forward passes over a step's batch, and updates: seconds by kind, and the bytes that they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from analytic.activations import fragmentation, held, pass_bytes
from analytic.comm import collective_overlap
from analytic.costs import RESHARDED, Columns, Cost
from analytic.device import overlapped
from analytic.layers import Spread, spread_of
from analytic.microbatch import Micro, batch_of_job, cut
from analytic.parallel import OFFLOAD_ALL, OFFLOAD_OPTIMIZER, gather_seconds, host_link
from analytic.setup import Machine, Setup
from analytic.stages import flight_seconds, parts, slowest_stage
from analytic.training import Trainer, training
from analytic.update import forward_pass, launched_layers, made, train_step
from analytic.weights import (
    gradient_bytes,
    largest_stage,
    optimizer_bytes,
    parameters_on_device,
    shards,
    weight_bytes,
)
from ir.cluster import device_bandwidth
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Terms = dict[str, Float]

LONGEST = "longest batch"
"""What the largest micro-batch holds beyond the mean one: counted for the peak that must fit, not for the expected."""


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
    micro = cut(machine, x, batch_of_job(s, count), at.cp, limit)
    kinds = _pass_seconds(machine, shape, at, x, micro)
    weights = weight_bytes(machine, shape, at, x["zero"])
    none = np.zeros_like(weights)
    working = {"gathered layers": _gathered(machine, shape, at, x["zero"]), **_pass_memory(machine, shape, at, micro)}
    waits = np.zeros(len(none), dtype=bool) if trained else x["offload"] == OFFLOAD_ALL
    kinds["communication"] = kinds["communication"] + np.where(waits, weights / host_link(machine), 0.0)
    seconds: Float = sum(kinds.values(), none)
    if trained:
        network = device_bandwidth(machine.levels, len(machine.levels) - 1)
        return Cost(
            seconds=seconds,
            latency=seconds,
            reshard=weights / network,
            kinds=kinds,
            transient={RESHARDED: weights, **working},
        )
    return Cost(
        seconds=seconds,
        latency=seconds,
        reshard=none,
        kinds=kinds,
        resident={"weights": np.where(waits, 0.0, weights)},
        transient={"weights": np.where(waits, weights, 0.0), **working},
    )


def _pass_seconds(machine: Machine, shape: ModelShape, at: Spread, x: Columns, micro: Micro) -> Terms:
    """Micro-batches through a pipeline, forward only, by kind. Sharded weights are gathered for each, in part under the
    layers before."""
    host, trainer = machine.device.host, training().trainers["flash"]
    one = parts(machine, shape, at, micro.mean, micro.imbalance, made(at, x["zero"], trainer))
    forth = forward_pass(machine, shape, at, micro.mean, one, trainer, machine.forward_scale)
    kernels = forth.compute + forth.memory + forth.head
    launches = np.full(len(kernels), host.forward_s + launched_layers(machine, shape, trainer) * host.forward_layer_s)
    waits = machine.with_launches(kernels, launches) - kernels
    layers = forth.layers + waits
    slowest = slowest_stage(shape, at.pp, layers, forth.head)
    busy, bubble = flight_seconds(slowest, layers + forth.head, micro.batches, at.pp, np.ones_like(at.pp))
    gather = gather_seconds(machine, shape, at, x["zero"])
    hidden = collective_overlap(machine.levels, shards(at)[0].astype(np.int64), at.tp)
    sharded = micro.batches * (overlapped(slowest, gather, hidden) - slowest + gather / shape.layers)
    part = busy / (layers + forth.head)
    return {
        "compute": part * (forth.compute + forth.head),
        "memory": part * forth.memory,
        "communication": part * forth.communication + sharded,
        "bubble": bubble,
        "host": part * waits,
    }


def update_cost(s: Setup, machine: Machine, shape: ModelShape, x: Columns) -> Cost:
    """All optimizer steps of an RL step."""
    at = spread_of(x, x["dp"].astype(np.int64))
    trainer = training().trainers["flash"]
    count = s.job.workload.sequences // s.job.workload.minibatches // at.dp
    kinds, micro = train_step(machine, shape, at, x, batch_of_job(s, count), trainer)
    kinds = {kind: s.job.updates_per_step * seconds for kind, seconds in kinds.items()}
    kinds["other"] = np.full(len(count), 0.0 if machine.is_host else training().step_s)
    seconds: Float = sum(kinds.values(), np.zeros(len(count)))
    resident, transient = update_memory(machine, shape, at, x, micro, trainer)
    return Cost(
        seconds=seconds,
        latency=seconds,
        reshard=np.zeros_like(seconds),
        kinds=kinds,
        resident=resident,
        transient=transient,
    )


def update_memory(
    machine: Machine, shape: ModelShape, at: Spread, x: Columns, micro: Micro, trainer: Trainer
) -> tuple[Terms, Terms]:
    """(resident, transient) bytes of an update by name; see `train_step` for the arguments."""
    zero, offload = x["zero"], x["offload"]
    # Products in fp8 leave the weights at rest as they are.
    products, at = at, replace(at, fp8=np.zeros_like(at.fp8))
    weights = weight_bytes(machine, shape, at, zero)
    gradients = gradient_bytes(shape, at, zero) * (trainer.gradient_bytes / 4.0)
    optimizer = optimizer_bytes(machine, shape, at, zero)
    if machine.is_host:
        # The weights a run starts from are kept beside the working ones; the all-reduce flattens the gradients.
        weights = 2.0 * weights
        gradients = gradients * (1.0 + (at.dp > 1))
    away, all_away = offload >= OFFLOAD_OPTIMIZER, offload == OFFLOAD_ALL
    resident = {
        "weights": np.where(all_away, 0.0, weights),
        "gradients": np.where(all_away, 0.0, gradients),
        "optimizer": np.where(away, 0.0, optimizer),
    }
    if not machine.is_host:
        resident["communicators"] = training().communicator_bytes * _extra_groups(at)
    return resident, {
        "weights": np.where(all_away, weights, 0.0),
        "training state": np.where(all_away, gradients, 0.0) + np.where(away, optimizer, 0.0),
        "gathered layers": _gathered(machine, shape, at, zero, shape.trainable_parameters / shape.parameters),
        **_update_activations(machine, shape, products, x, micro, trainer),
    }


def _extra_groups(at: Spread) -> Float:
    """Communicators beyond one: a device has one for each dimension that it is parallel in."""
    groups = sum((degree > 1).astype(np.float64) for degree in (at.tp, at.pp, at.cp, at.ep, at.dp, at.shard))
    return np.maximum(groups - 1.0, 0.0)


def _gathered(machine: Machine, shape: ModelShape, at: Spread, zero: NDArray[np.int32], trained: float = 0.0) -> Float:
    """Bytes of what ZeRO-3 has gathered: a layer in use, one on its way and the collective's buffer that it is copied
    out of, or the embedding and its buffer if that is more; a pipeline rank keeps all its layers from the first
    micro-batch to the last. Where `trained` (the share that has gradients) is not 0, their gradients too: float32, and
    beside a layer's those in the width of the weights."""
    width = float(machine.device.bytes_per_value)
    dense, experts = parameters_on_device(shape, at)
    if machine.is_host:
        return np.where(zero == 3, 2.0 * (dense + experts) * at.pp / shape.layers * width, 0.0)
    embedding = float(shape.embedding_parameters) / at.tp
    ends = embedding + shape.head_parameters / at.tp
    body = np.maximum((dense + experts) * at.pp - ends, 0.0)
    one = np.maximum(body / shape.layers, embedding)
    some = np.maximum(3.0 * body / shape.layers, 2.0 * embedding) * width + one * trained * (width + 4.0)
    stage = sum(largest_stage(shape, at)) * (width + 4.0 * trained)
    return np.where(zero == 3, fragmentation(machine) * np.where(at.pp > 1, stage, some), 0.0)


def _update_activations(
    machine: Machine, shape: ModelShape, at: Spread, x: Columns, micro: Micro, trainer: Trainer
) -> Terms:
    largest = held(machine, shape, at, x, micro, trainer, micro.largest_tokens)
    if machine.is_host:
        return {"activations": fragmentation(machine) * largest.peak}
    mean = held(machine, shape, at, x, micro, trainer, micro.mean.tokens)
    # The last pipeline rank may be the one that is full: then the logits are in its peak.
    logits = np.where(mean.peak > mean.layers + mean.working, mean.logits, 0.0)
    scale = fragmentation(machine)
    return {
        "activations": scale * (mean.peak - logits),
        "logits": scale * logits,
        LONGEST: scale * np.maximum(largest.peak - mean.peak, 0.0),
    }


def _pass_memory(machine: Machine, shape: ModelShape, at: Spread, micro: Micro) -> Terms:
    scale = fragmentation(machine)
    largest = scale * pass_bytes(machine, shape, at, micro.largest_tokens)
    if machine.is_host:
        return {"activations": largest}
    mean = scale * pass_bytes(machine, shape, at, micro.mean.tokens)
    return {"activations": mean, LONGEST: np.maximum(largest - mean, 0.0)}
