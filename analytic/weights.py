"""Bytes of a model on a device: weights, gradients and optimizer state, by how the model is spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analytic.layers import Spread
from analytic.setup import Machine
from ir.shape import ModelShape

Float = NDArray[np.float64]


def parameters_on_device(shape: ModelShape, at: Spread) -> tuple[Float, Float]:
    """(dense, expert) parameters of a device before data parallelism divides any: tensor-parallel ranks hold norms and
    routers whole, expert-parallel ranks their experts only, pipeline ranks their layers."""
    replicated = float(shape.replicated_parameters)
    experts = float(shape.expert_parameters)
    divided = shape.parameters - replicated - experts
    dense = (divided / at.tp + replicated) / at.pp
    return dense, experts / (at.ep * at.etp * at.pp)


def trained_on_device(shape: ModelShape, at: Spread) -> tuple[Float, Float]:
    """As `largest_stage`, of what has gradients: the adapters, if the model trains those only."""
    dense, experts = largest_stage(shape, at)
    share = shape.trainable_parameters / shape.parameters
    return dense * share, experts * share


def shards(at: Spread) -> tuple[Float, Float]:
    """Devices over which ZeRO divides (dense, expert) state: those that it is the same on, or a group of them."""
    devices = np.where(at.shard > 0, at.shard, at.dp * at.cp).astype(np.float64)
    return devices, np.maximum(devices * at.tp / (at.ep * at.etp), 1.0)


def copies(at: Spread) -> tuple[Float, Float]:
    """Groups of devices that have a copy of (dense, expert) state each; 1 without hybrid sharding."""
    devices = (at.dp * at.cp).astype(np.float64)
    whole = devices, np.maximum(devices * at.tp / (at.ep * at.etp), 1.0)
    dense, experts = shards(at)
    return whole[0] / dense, whole[1] / experts


def largest_stage(shape: ModelShape, at: Spread) -> tuple[Float, Float]:
    """(dense, expert) parameters on the fullest pipeline rank, as `parameters_on_device` on the mean one: the first has
    the embedding, the last the head, and both a tied one. Where layers do not divide, these two have one less."""
    dense, experts = parameters_on_device(shape, at)
    ends = float(max(shape.embedding_parameters, shape.head_parameters)) / at.tp
    body = np.maximum(dense * at.pp - float(shape.embedding_parameters + shape.head_parameters) / at.tp, 0.0)
    most, least = np.ceil(shape.layers / at.pp) / shape.layers, np.floor(shape.layers / at.pp) / shape.layers
    fullest = np.maximum(body * most, body * least + ends)
    return np.where(at.pp > 1, fullest, dense), np.where(at.pp > 1, experts * at.pp * most, experts)


def weight_bytes(machine: Machine, shape: ModelShape, at: Spread, zero: NDArray[np.int32]) -> Float:
    """Weights at rest on a device; ZeRO-3 divides them."""
    width = np.where(at.fp8, 1.0, machine.device.bytes_per_value)
    dense, experts = largest_stage(shape, at)
    over_dense, over_experts = (np.where(zero == 3, n, 1.0) for n in shards(at))
    return np.asarray(width * (dense / over_dense + experts / over_experts))


def gradient_bytes(shape: ModelShape, at: Spread, zero: NDArray[np.int32]) -> Float:
    """Gradients in float32; ZeRO-2 and -3 divide them."""
    dense, experts = trained_on_device(shape, at)
    over_dense, over_experts = (np.where(zero >= 2, n, 1.0) for n in shards(at))
    return np.asarray(4.0 * (dense / over_dense + experts / over_experts))


def optimizer_bytes(machine: Machine, shape: ModelShape, at: Spread, zero: NDArray[np.int32]) -> Float:
    """Two moments in float32, and a float32 copy of weights that are narrower; ZeRO divides them. Where the weights are
    divided too, they and their copy are one, so that it takes only what they are narrower by."""
    narrow = machine.device.bytes_per_value < 4
    width = np.where(zero == 3, 10.0, 12.0) if narrow else 8.0
    dense, experts = trained_on_device(shape, at)
    over_dense, over_experts = (np.where(zero >= 1, n, 1.0) for n in shards(at))
    return np.asarray(width * (dense / over_dense + experts / over_experts))
