"""Seconds of a forward pass of a model over some tokens, on one replica: products, attention, traffic, collectives.

Everything is an array over layouts. Tensor parallelism divides matrices, context
parallelism tokens, expert parallelism experts, pipeline parallelism layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.priors import priors
from analytic.setup import Machine
from ir.shape import Matmul, ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a model is spread, int64[n] each; those that a section lacks are 1."""

    tp: Int
    pp: Int
    cp: Int
    ep: Int
    etp: Int
    dp: Int
    fp8: NDArray[np.bool_]

    @property
    def speed(self) -> Float:
        """Gain in the products' FLOP/s."""
        return np.where(self.fp8, priors().fp8_speed, 1.0)


def spread_of(x: Mapping[str, NDArray[np.int32]], dp: Int) -> Spread:
    """From a section's columns and its replicas."""
    one = np.ones(len(dp), dtype=np.int64)
    degrees = {name: x[name].astype(np.int64) if name in x else one for name in ("tp", "pp", "cp", "ep", "etp")}
    fp8 = x["precision"] == 1 if "precision" in x else np.zeros(len(dp), dtype=bool)
    return Spread(**degrees, dp=dp, fp8=fp8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a replica passes through a model, float64[n] each."""

    tokens: Float
    squares: Float
    """Sum over sequences of the squared length: what attention to earlier tokens takes."""
    head_tokens: Float
    """Tokens that go through the output head."""

    def scaled(self, factor: Float | float) -> Work:
        """So many times the work."""
        return Work(tokens=self.tokens * factor, squares=self.squares * factor, head_tokens=self.head_tokens * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Seconds of one forward pass over all layers and the head, on the device that is longest at it."""

    kernels: Float
    collectives: Float

    @property
    def seconds(self) -> Float:
        """Both."""
        return self.kernels + self.collectives


def forward(machine: Machine, shape: ModelShape, at: Spread, work: Work) -> Forward:
    """A forward pass without the host's launches; pipeline stages added up."""
    m = work.tokens / at.cp
    dense, experts = shape.num_dense_layers, shape.num_moe_layers
    mixer = _products(machine, shape.attention_matmuls, at, m) + _elementwise(machine, shape, at, m)
    kernels = shape.layers * mixer + _attention(machine, shape, at, work)
    kernels = kernels + dense * _products(machine, shape.dense_ffn_matmuls, at, m)
    if experts:
        kernels = kernels + experts * (
            _products(machine, shape.shared_ffn_matmuls, at, m) + _experts(machine, shape, at, m)
        )
    kernels = kernels + _head(machine, shape, at, work.head_tokens / at.cp)
    collectives = shape.layers * (_tensor_traffic(machine, shape, at, m) + _context_traffic(machine, shape, at, m))
    if experts:
        collectives = collectives + experts * _expert_traffic(machine, shape, at, m)
    return Forward(kernels=kernels, collectives=collectives)


def num_launches(shape: ModelShape) -> int:
    """Products that a decode step of one layer launches one after the other."""
    return len(shape.attention_matmuls) + len(shape.dense_ffn_matmuls or shape.expert_matmuls)


def _products(machine: Machine, matmuls: tuple[Matmul, ...], at: Spread, m: Float) -> Float:
    """Matrices in pairs divide their outer and then their inner width; either way a device has 1/tp of each."""
    total = np.zeros_like(m)
    for k, n in matmuls:
        total = total + machine.roofline.matmul(m, float(k), n / at.tp, speed=at.speed)
    return total


def _elementwise(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """Norms, rotary embedding, gates and additions; sequence parallelism divides them too."""
    p = machine.elementwise
    ffn = shape.ffn if not shape.moe else shape.moe.ffn * shape.moe.experts_per_token + shape.moe.shared_ffn
    values = p.hidden_passes * shape.hidden + p.head_passes * (shape.attention_width + shape.kv_width)
    values += p.ffn_passes * ffn
    return m / at.tp * values * machine.device.bytes_per_value / machine.device.memory_bandwidth


def _attention(machine: Machine, shape: ModelShape, at: Spread, work: Work) -> Float:
    """The causal attention cores of all layers: a token sees half of its sequence, or its window."""
    total = np.zeros_like(work.tokens)
    half = work.squares / np.maximum(work.tokens, 1e-9) / 2.0
    flops_per_key = 2.0 * (shape.attention_width + shape.value_width)
    for window, layers in shape.window_groups:
        keys = np.minimum(half, window) if window else half
        total = total + layers * flops_per_key * work.tokens * keys
    launches = shape.layers * machine.device.attention_launch_s
    core = total / (at.tp * at.cp) / machine.device.attention_flops
    return np.asarray(core + np.where(work.tokens > 0, launches, 0.0))


def _experts(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """Router and routed experts of a layer: the fullest device's tokens, and the weights of the experts they hit."""
    moe, p = shape.moe, priors()
    assert moe is not None and shape.router_matmul is not None
    router = machine.roofline.matmul(m, *map(float, shape.router_matmul))
    devices = at.tp * at.cp * at.dp
    # Tokens of all devices of an expert-parallel group meet in its experts.
    tokens = m * at.cp * at.dp * moe.experts_per_token / np.maximum(devices / (at.ep * at.etp), 1.0) / at.ep
    tokens = tokens * np.where(at.ep > 1, p.expert_imbalance, 1.0)
    local = moe.experts / at.ep
    hit = local * (1.0 - np.exp(-tokens / local))
    total = np.zeros_like(m)
    for k, n in shape.expert_matmuls:
        width = n / at.etp
        flops = 2.0 * tokens * k * width * machine.roofline.seconds_per_flop / (p.expert_efficiency * at.speed)
        values = hit * k * width / np.minimum(at.speed, 2.0) + tokens * (k + width)
        traffic = values * machine.device.bytes_per_value * machine.roofline.seconds_per_byte
        total = total + np.maximum(flops, traffic)
    return router + total


def _head(machine: Machine, shape: ModelShape, at: Spread, tokens: Float) -> Float:
    width = shape.vocab / at.tp
    softmax = 6.0 * tokens * width * machine.device.bytes_per_value / machine.device.memory_bandwidth
    return machine.roofline.matmul(tokens, float(shape.hidden), width) + softmax


def _tensor_traffic(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """Two all-reduces of the hidden state a layer, or what is the same with sequence parallelism."""
    size = m * shape.hidden * machine.device.bytes_per_value
    return 2.0 * collective_seconds(machine.levels, "all_reduce", size, at.tp)


def _context_traffic(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """Keys and values of the other devices pass by once a layer, in part under the attention core."""
    size = m * at.cp * shape.kv_values_per_token / at.tp * machine.device.bytes_per_value
    seconds = collective_seconds(machine.levels, "all_gather", size, at.cp, at.tp)
    return (1.0 - priors().overlap) * seconds


def _expert_traffic(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """Dispatch and combine: each token's hidden state goes to the devices of its experts."""
    assert shape.moe is not None
    # Of ep devices, a token's experts lie on so many different ones.
    spread = at.ep * (1.0 - (1.0 - 1.0 / at.ep) ** shape.moe.experts_per_token)
    size = m / at.tp * spread * shape.hidden * machine.device.bytes_per_value
    return 2.0 * collective_seconds(machine.levels, "all_to_all", size, at.ep)
