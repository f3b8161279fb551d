"""What moves between stages and pools: new weights to the engines, and responses through a verifier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.distinct import distinct
from analytic.parallel import host_link
from analytic.priors import priors
from analytic.resharding import Sharding, lacking, node_share
from analytic.setup import Machine, Setup
from analytic.steps import steps
from ir.batch import CODES, PlanBatch, fields_of
from ir.cluster import device_bandwidth
from ir.graph import Op
from ir.shape import ModelShape

Float = NDArray[np.float64]

_RESHARD = CODES["sync"].index("reshard")

_BESIDE = {
    "micro_batch",
    "micro_tokens",
    "recompute",
    "offload",
    "vpp",
    "concurrency",
    "memory_percent",
    "prefill_tokens",
}
_READ = (
    "sync",
    *(f"{what}.{role}" for what in ("devices", "group") for role in ("actor", "rollout")),
    *(f"{op}.{name}" for op in (Op.UPDATE_ACTOR, Op.GENERATE) for name in fields_of(op) if name not in _BESIDE),
)
"""Columns that the sync of weights may depend on: how trainer and engines are laid out, but not how they work."""


def sync_seconds(s: Setup, b: PlanBatch) -> Float:
    """Seconds until the engines have the actor's new weights, float64[n]."""
    first, inverse = distinct((b[name] for name in _READ), len(b))
    b = b.take(first)
    seconds = np.zeros(len(b))
    for group, machine in enumerate(s.machines):
        rows = np.flatnonzero(b["group.actor"] == group)
        if len(rows):
            seconds[rows] = (_host_sync if machine.is_host else _sync)(s, machine, b.take(rows))
    return seconds.take(inverse)


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
    """Between accelerators, by the plan's method, with the pause of the engines."""
    shape = s.job.actor
    size = np.full(len(b), sent_bytes(machine, shape))
    engine = np.maximum(b["generate.tp"].astype(np.float64) * b["generate.pp"], 1.0)
    engines = np.maximum(b["devices.rollout"] / engine, 1.0)
    trainers = b["devices.actor"].astype(np.float64)
    copied = copy_seconds(machine, size / engine)
    methods: list[Callable[[], Float]] = [
        lambda: _reshard_seconds(s, machine, b, engine) + steps().sync.wake_s,
        lambda: _broadcast_seconds(machine, shape, b, size, _network(s, machine, b)),
        lambda: pieces_seconds(shape, size, (trainers, engine, engines), _network(s, machine, b)),
        lambda: 2.0 * size / steps().sync.disk,
        lambda: _delta_seconds(machine, shape, b, size, _network(s, machine, b)),
        lambda: _delta_disk_seconds(machine, shape, size, (trainers, engine)),
    ]
    codes = np.unique(b["sync"]).tolist()
    chosen = np.select([b["sync"] == code for code in codes], [methods[code]() for code in codes])
    return np.asarray(steps().sync.pause_s + copied + chosen)


def sent_bytes(machine: Machine, shape: ModelShape) -> float:
    """Bytes of the weights that change: adapters are merged before they are sent, so all of them."""
    return float(shape.parameters * machine.device.bytes_per_value)


def num_tensors(shape: ModelShape) -> int:
    """Tensors of a checkpoint that an engine loads: its matrices, each expert's too, and norms."""
    experts = shape.moe.experts if shape.moe else 0
    networks = shape.num_dense_layers * len(shape.dense_ffn_matmuls)
    return _other_tensors(shape) + networks + shape.num_moe_layers * experts * len(shape.expert_matmuls)


def _other_tensors(shape: ModelShape) -> int:
    """All but those of dense networks and routed experts."""
    layer = len(shape.attention_matmuls) + shape.norms_per_layer
    return shape.layers * layer + shape.num_moe_layers * (len(shape.shared_ffn_matmuls) + 1) + 3


def copy_seconds(machine: Machine, size: Float) -> Float:
    """Slicing, casting and copying a device's bytes into place."""
    return np.asarray(size / (steps().sync.copy * machine.device.memory_bandwidth))


def _broadcast_seconds(machine: Machine, shape: ModelShape, b: PlanBatch, size: Float, link: Float) -> Float:
    """Whole tensors to all engines: over the network, or inside a node that holds both pools. Trainers gather them as
    for engines of their own pool; those with ZeRO-3 keep float32."""
    constants, tensors = steps().sync, num_tensors(shape)
    kept = np.where(b["update_actor.zero"] == 3, 4.0 / machine.device.bytes_per_value, 1.0)
    gathered = np.maximum(
        chain_seconds(size, tensors, constants.gathered, constants.handle_s),
        wire_seconds(machine, size, b["devices.actor"].astype(np.float64), kept, link),
    )
    inside = chain_seconds(size, tensors, in_node_rate(machine), constants.tensor_s)
    return np.where(_in_a_node(machine, b), inside, gathered)


def _in_a_node(machine: Machine, b: PlanBatch) -> NDArray[np.bool_]:
    """Where a node holds trainers and engines."""
    together = b["devices.actor"] + b["devices.rollout"] <= machine.levels[0].size
    return np.asarray(together & (b["group.actor"] == b["group.rollout"]))


def _delta_seconds(machine: Machine, shape: ModelShape, b: PlanBatch, size: Float, link: Float) -> Float:
    """Changed values to all engines: found by each device in its part of the weights, gathered, and sent on."""
    trainers, changed = b["devices.actor"].astype(np.float64), changed_bytes(machine, size)
    inside = changes_seconds(shape, changed, in_node_rate(machine))
    across = np.maximum(
        changes_seconds(shape, changed, steps().sync.tensors), wire_seconds(machine, changed, trainers, 1.0, link)
    )
    return np.asarray(compared_seconds(machine, size / trainers) + np.where(_in_a_node(machine, b), inside, across))


def _delta_disk_seconds(machine: Machine, shape: ModelShape, size: Float, ends: tuple[Float, Float]) -> Float:
    """Changed values of whole tensors, which are gathered first, into files and out of them. A host's copy of all
    weights is patched, and engines load their part of it. `ends` are devices that train, and those of an engine."""
    (trainers, engine), constants, tensors = ends, steps().sync, num_tensors(shape)
    gathered = chain_seconds(size, tensors, constants.gathered, constants.handle_s)
    moved = 2.0 * changed_bytes(machine, size) / constants.disk
    loaded = size / engine / host_link(machine) + tensors * constants.tensor_s
    return gathered + compared_seconds(machine, size / trainers) + moved + loaded


def changed_bytes(machine: Machine, size: Float) -> Float:
    """Values that differ from those sent last, of weights of `size` bytes, and their places."""
    constants = steps().sync
    return size * constants.changed * (1.0 + constants.place_bytes / machine.device.bytes_per_value)


def compared_seconds(machine: Machine, held: Float) -> Float:
    """Comparing the bytes that a device holds with those sent last, which come from host memory and which these
    replace; memory traffic of the device is nothing beside that."""
    return 2.0 * held / host_link(machine)


def changes_seconds(shape: ModelShape, changed: Float, bandwidth: float) -> Float:
    """Changed values gathered on one rank, sent on at some bytes per second, and written over those of the engine's
    tensors, each of which is made whole for it."""
    return chain_seconds(changed, num_tensors(shape), bandwidth, steps().sync.handle_s)


def wire_seconds(machine: Machine, size: Float, trainers: Float, kept: Float | float, link: Float | float) -> Float:
    """Seconds that network cards of a node need for whole tensors: those that engines receive, and where trainers span
    several nodes also those that are gathered first, of `kept` times the bytes. `link` is what a device gets of bytes
    per second to the engines."""
    levels = machine.levels
    domain = float(np.prod([level.size for level in levels[:-1]] or [levels[0].size], dtype=np.int64))
    gathered = size * np.where(trainers > domain, kept, 0.0) / device_bandwidth(levels, len(levels) - 1)
    return np.asarray((size / link + gathered) / domain)


def in_node_rate(machine: Machine) -> float:
    """Bytes per second of whole tensors inside a node: a tree of links that each pass a tensor on."""
    return max(device_bandwidth(machine.levels, 0) / 2.0, steps().sync.everyone)


def chain_seconds(size: Float, tensors: int, bandwidth: Float | float, each: float) -> Float:
    """Whole tensors gathered on one rank, sent down a chain of engines and loaded by name: `size` bytes at the chain's
    bytes per second, and the host's seconds for `each` tensor."""
    return np.asarray(size / bandwidth + tensors * each)


def pieces_seconds(shape: ModelShape, size: Float, places: tuple[Float, Float, Float], link: Float) -> Float:
    """Matrices of networks from shard to shard, see `point_to_point_seconds`; what is left is gathered as a whole."""
    share = network_share(shape)
    rest = chain_seconds(size * (1.0 - share), _other_tensors(shape), steps().sync.gathered, steps().sync.handle_s)
    return steps().sync.begin_s + rest + point_to_point_seconds(size * share, *places, link)


def network_share(shape: ModelShape) -> float:
    """Of a model's parameters, those of dense networks and routed experts."""
    dense = shape.num_dense_layers * sum(k * n for k, n in shape.dense_ffn_matmuls)
    return (dense + shape.expert_parameters) / shape.parameters


def point_to_point_seconds(size: Float, trainers: Float, engine: Float, engines: Float, link: Float) -> Float:
    """Each engine rank is sent just its part.

    Args:
        size: Bytes of the model.
        trainers: Devices that hold it between them.
        engine: Devices of an engine.
        engines: Engines, each of which wants the whole model.
        link: Bytes per second of a device's link.

    Engines are all fed by the trainers, or pass on what they have in pieces where that is quicker.
    """
    constants = steps().sync
    relayed = np.minimum(engines, 1.0 + (engines - 1.0) / constants.pieces)
    most = np.maximum(size / engine, size * relayed / trainers)
    return np.asarray(most / (constants.point_to_point * link))


def _network(s: Setup, machine: Machine, b: PlanBatch) -> Float:
    """A device's link to the engines: inside the group of the trainers, or between groups."""
    inside = device_bandwidth(machine.levels, len(machine.levels) - 1)
    between = min(inside, s.cluster.between.bandwidth) if s.cluster.between else inside
    return np.where(b["group.actor"] == b["group.rollout"], inside, between)


def _reshard_seconds(s: Setup, machine: Machine, b: PlanBatch, engine: Float) -> Float:
    """Regrouping within a pool: what a device lacks of its engine's part comes from its node or from other nodes, which
    send each node what it lacks once. Today's frameworks gather whole tensors on every rank, which mostly takes longer,
    unless training and generation are laid out alike."""
    shape, levels = s.job.actor, machine.levels
    size, node = sent_bytes(machine, shape), float(levels[0].size)
    sharding = Sharding.of(b)
    lacks = lacking(shape, sharding) * machine.device.bytes_per_value
    inside = lacks / device_bandwidth(levels, 0)
    wanted = size * np.minimum(node / engine, 1.0) / node
    across = wanted * (1.0 - node_share(sharding, node)) / device_bandwidth(levels, len(levels) - 1)
    wire = np.maximum(inside, np.where(b["devices.actor"] > node, across, 0.0))
    whole = np.where(lacks > 0.0, size / steps().sync.gathered, 0.0)
    return np.asarray(np.maximum(wire, whole) + num_tensors(shape) * steps().sync.handle_s)


def reward_seconds(s: Setup, b: PlanBatch) -> Float:
    """Verifying responses, divided over the devices of the pool that trains; of a machine with accelerators each has
    some cores, of which one is counted."""
    each = s.job.workload.reward_seconds or priors().reward_s
    return np.asarray(s.job.generated_sequences * each / np.maximum(b["devices.actor"], 1).astype(float))
