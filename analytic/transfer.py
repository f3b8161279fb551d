"""What moves between stages and pools: new weights to the engines, and responses through a verifier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.priors import priors
from analytic.setup import Machine, Setup
from ir.batch import CODES, PlanBatch
from ir.cluster import device_bandwidth

Float = NDArray[np.float64]

_RESHARD, _BROADCAST, _P2P, _DISK = range(len(CODES["sync"]))


def sync_seconds(s: Setup, b: PlanBatch) -> Float:
    """Seconds until the engines have the actor's new weights, float64[n]."""
    seconds = np.zeros(len(b))
    for group, machine in enumerate(s.machines):
        here = b["group.actor"] == group
        if here.any():
            rows = np.flatnonzero(here)
            seconds[rows] = (_host_sync if machine.is_host else _sync)(s, machine, b.take(rows))
    return seconds


def _host_sync(s: Setup, machine: Machine, b: PlanBatch) -> Float:
    """Between cores: nowhere if all ranks trained, else by broadcast within the pool or through host memory."""
    size = s.job.actor.parameters * 4.0
    train = b["devices.actor"].astype(np.int64)
    inside = collective_seconds(machine.levels, "broadcast", size, train)
    inside = np.where(b["update_actor.dp"] < train, inside, 0.0)
    # Flattened, put into shared memory, read and copied into place: each a read and a write.
    across = s.cluster.call_s + 4 * 2.0 * size / machine.device.memory_bandwidth
    return np.asarray(inside + np.where(b["sync"] == _RESHARD, 0.0, across))


def _sync(s: Setup, machine: Machine, b: PlanBatch) -> Float:
    """Between accelerators, by the plan's method. What crosses the network is at least what one device of an engine
    holds; a gather and broadcast moves whole tensors along a chain."""
    p, device = priors(), machine.device
    size = float(s.job.actor.parameters * device.bytes_per_value)
    engine = np.maximum(b["generate.tp"].astype(np.float64) * b["generate.pp"], 1.0)
    network = device_bandwidth(machine.levels, len(machine.levels) - 1)
    trainers = b["devices.actor"].astype(np.float64)
    engines = b["devices.rollout"] / engine
    copied = size / engine / (0.4 * device.memory_bandwidth)
    spans = b["devices.actor"].astype(np.int64)
    reshard = collective_seconds(machine.levels, "all_gather", size / engine, spans) + copied
    # Every engine is fed its whole model by trainers that share the sending.
    p2p = np.maximum(size / engine, size * engines / trainers) / network + copied
    methods = [reshard, size / p.broadcast_bandwidth + copied, p2p, 2.0 * size / p.disk_bandwidth + copied]
    return p.pause_s + np.select([b["sync"] == code for code in range(len(methods))], methods)


def reward_seconds(s: Setup, b: PlanBatch) -> Float:
    """Verifying responses, divided over the devices of the pool that trains; of a machine with accelerators each has
    some cores, of which one is counted."""
    each = s.job.workload.reward_seconds or priors().reward_s
    return np.asarray(s.job.generated_sequences * each / np.maximum(b["devices.actor"], 1).astype(float))
