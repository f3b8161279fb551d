"""What data parallelism exchanges: gradients, new weights, weights that are gathered layer by layer; the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from analytic.comm import Kind, collective_overlap, collective_seconds
from analytic.costs import Columns
from analytic.device import overlapped
from analytic.distinct import at_rows, distinct
from analytic.layers import Spread
from analytic.priors import priors
from analytic.setup import Machine
from analytic.training import Trainer, training
from analytic.weights import copies, optimizer_bytes, parameters_on_device, shards, trained_on_device, weight_bytes
from ir.batch import CODES
from ir.shape import ModelShape

Float = NDArray[np.float64]
Zero = NDArray[np.int32]

OFFLOAD_OPTIMIZER, OFFLOAD_ALL = CODES["offload"].index("optimizer"), CODES["offload"].index("all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Seconds of a pipeline rank's collectives over its replicas, float64[n] each, nothing hidden."""

    gather: Float
    """Of all its weights for a pass, where ZeRO-3 divides them."""
    reduce: Float
    """Of all its gradients, inside groups where ZeRO divides state in groups."""
    across: Float
    """Of its shard of the gradients, all-reduced across such groups."""
    renew: Float
    """Of new weights to all replicas after an optimizer step, where ZeRO-1 and -2 divide the optimizer."""
    hidden: Float
    """Share that hides under products."""
    across_hidden: Float
    """The same of what goes across groups."""
    tail: Float
    """Share of the last bucket, which nothing hides."""


def exchange(machine: Machine, shape: ModelShape, at: Spread, zero: Zero, trainer: Trainer) -> Exchange:
    """Each different spread is priced once: how a batch is cut changes nothing in it."""
    first, inverse = distinct((*(getattr(at, field.name) for field in fields(at)), zero), len(zero))
    return at_rows(_exchange(machine, shape, at_rows(at, first), zero[first], trainer), inverse)


def _exchange(machine: Machine, shape: ModelShape, at: Spread, zero: Zero, trainer: Trainer) -> Exchange:
    """ZeRO divides what gradients are reduced to."""
    dense, experts = trained_on_device(shape, at)
    t, each = training(), trainer.gradient_bytes
    width = np.where(at.fp8, 1.0, float(machine.device.bytes_per_value))
    whole = _over_replicas(machine, shape, at, "all_reduce", (dense * each, experts * each))
    halves = _over_replicas(machine, shape, at, "reduce_scatter", (dense * each, experts * each))
    renew = _over_replicas(machine, shape, at, "all_gather", (dense * width, experts * width))
    bucket = np.maximum(t.bucket_parameters, t.bucket_parameters_per_replica * at.dp)
    across, hidden_across = _across_groups(machine, shape, at, (dense * each, experts * each))
    hidden = collective_overlap(machine.levels, shards(at)[0].astype(np.int64), at.tp)
    hides = float(trainer.overlaps and not machine.is_host)
    return Exchange(
        gather=gather_seconds(machine, shape, at, zero),
        reduce=np.where(zero >= 1, halves, whole),
        across=across,
        renew=np.where((zero == 1) | (zero == 2), renew, 0.0),
        hidden=hides * hidden,
        across_hidden=hides * hidden_across,
        tail=np.minimum(bucket / np.maximum(dense + experts, 1.0), 1.0),
    )


def gather_seconds(machine: Machine, shape: ModelShape, at: Spread, zero: Zero) -> Float:
    """All-gathers of a pipeline rank's weights where ZeRO-3 divides them."""
    if not (zero == 3).any():
        return np.zeros(len(zero))
    dense, experts = parameters_on_device(shape, at)
    width = np.where(at.fp8, 1.0, float(machine.device.bytes_per_value))
    seconds = _over_replicas(machine, shape, at, "all_gather", (dense * width, experts * width))
    return np.where(zero == 3, seconds, 0.0)


def _over_replicas(machine: Machine, shape: ModelShape, at: Spread, op: Kind, sizes: tuple[Float, Float]) -> Float:
    dense, experts = sizes
    over, expert_over = (n.astype(np.int64) for n in shards(at))
    seconds = collective_seconds(machine.levels, op, dense, over, at.tp)
    if shape.is_moe:
        seconds = seconds + collective_seconds(machine.levels, op, experts, expert_over, at.ep * at.etp)
    return seconds


def _across_groups(machine: Machine, shape: ModelShape, at: Spread, sizes: tuple[Float, Float]) -> tuple[Float, Float]:
    """(seconds of the all-reduce of every rank's shard of the gradients across the groups that have a copy each, share
    of it that hides under products)."""
    if not at.shard.any():
        return np.zeros(len(at.dp)), np.zeros(len(at.dp))
    (over, expert_over), (groups, expert_groups) = shards(at), copies(at)
    stride, (dense, experts) = (at.tp * over).astype(np.int64), sizes
    seconds = collective_seconds(machine.levels, "all_reduce", dense / over, groups.astype(np.int64), stride)
    if shape.is_moe:
        expert_stride = (at.ep * at.etp * expert_over).astype(np.int64)
        members = expert_groups.astype(np.int64)
        moved = collective_seconds(machine.levels, "all_reduce", experts / expert_over, members, expert_stride)
        seconds = seconds + moved
    return seconds, collective_overlap(machine.levels, groups.astype(np.int64), stride)


def exposed_across(e: Exchange, backward: Float, beside: Float) -> Float:
    """Seconds that a step waits for gradients to be all-reduced across groups: once, after the last micro-batch, since
    a rank's shard adds those of the others up (MiCS, arXiv:2205.00119, section 3.4; FSDP2, `set_requires_all_reduce`).

    Args:
        e: The exchange.
        backward: Seconds of a micro-batch's backward pass on a rank, float64[n].
        beside: Seconds of other traffic under it, float64[n].
    """
    if not e.across.any():
        return np.zeros_like(backward)
    moved = e.across * (1.0 - e.tail)
    both = beside + moved
    hidden = e.hidden + (e.across_hidden - e.hidden) * moved / np.maximum(both, 1e-30)
    return overlapped(backward, both, hidden) - overlapped(backward, beside, e.hidden) + e.across * e.tail


def exposed_reduction(e: Exchange, zero: Zero, batches: NDArray[np.int64], forward: Float, backward: Float) -> Float:
    """Seconds of gradients and new weights that an optimizer step waits for, ZeRO-3 apart.

    Args:
        e: The exchange.
        zero: Stage of ZeRO; 2 reduces the gradients of every micro-batch, the others only the last.
        batches: Micro-batches of a step.
        forward: Seconds of a micro-batch's forward pass on a rank, under which new weights arrive.
        backward: Of its backward pass, under which gradients leave.
    """
    last = overlapped(backward, e.reduce * (1.0 - e.tail), e.hidden) - backward + e.reduce * e.tail
    first = overlapped(forward, e.renew, e.hidden) - forward
    times = np.where(zero == 2, batches, 1)
    across = exposed_across(e, backward, e.reduce * (1.0 - e.tail))
    return np.where(zero == 3, 0.0, times * last + across + first)


def optimizer_seconds(machine: Machine, shape: ModelShape, at: Spread, x: Columns) -> tuple[Float, Float]:
    """(seconds of the optimizer's traffic and launches, seconds of state that waits in host memory)."""
    host, zero = machine.device.host, x["zero"]
    state = optimizer_bytes(machine, shape, at, zero)
    over = np.where(zero >= 1, 1.0, 0.0)
    parameters = sum(
        n / np.maximum(over * d, 1.0) for n, d in zip(trained_on_device(shape, at), shards(at), strict=True)
    )
    each = 4.0 * priors().optimizer_values if machine.is_host else training().optimizer_bytes
    launches = host.optimizer_s + shape.layers / at.pp * host.optimizer_layer_s
    seconds = launches + each * parameters / machine.device.memory_bandwidth
    # State that waits in host memory comes in and goes out again; weights and gradients too.
    moved = state * (x["offload"] >= OFFLOAD_OPTIMIZER)
    moved = moved + weight_bytes(machine, shape, at, zero) * (x["offload"] == OFFLOAD_ALL)
    return seconds, 2.0 * moved / host_link(machine)


def host_link(machine: Machine) -> float:
    """Bytes per second to host memory."""
    return machine.device.host_link or machine.device.memory_bandwidth
