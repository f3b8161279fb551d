"""An inference engine on described accelerators: its layout, its number formats, and the products of a layer.

Engines fuse what reads the same input: queries, keys and values in one product, gate and up in another. With latent
attention keys and values are folded into queries and outputs, so that the latent alone is cached and read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.comm import Own
from analytic.serving import Format, serving
from analytic.setup import Machine
from analytic.spread import Spread
from ir.shape import ModelShape

Float = NDArray[np.float64]

Product = tuple[Float | float, Float | float]
"""Input and output width on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds by what they are spent on, float64[n] each."""

    compute: Float
    memory: Float
    communication: Float
    host: Float
    """Launches inside a step, and the engine's own work around it."""

    @property
    def total(self) -> Float:
        """All of them."""
        return self.compute + self.memory + self.communication + self.host

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            compute=self.compute + other.compute,
            memory=self.memory + other.memory,
            communication=self.communication + other.communication,
            host=self.host + other.host,
        )

    def times(self, factor: Float | float) -> Seconds:
        """So many of them, one after the other."""
        return Seconds(
            compute=self.compute * factor,
            memory=self.memory * factor,
            communication=self.communication * factor,
            host=self.host * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine's model, layout and formats, arrays over layouts."""

    machine: Machine
    shape: ModelShape
    at: Spread
    narrow: NDArray[np.bool_]
    """Where weights are of the narrow formats, bool[n]."""
    dense: tuple[Format, Format]
    """Of attention and dense networks: the plain one, and the narrow one."""
    experts: tuple[Format, Format]
    kv_bytes: Float
    """Bytes of a cached value, float64[n]."""
    all_reduce: Own = "vllm"
    """Whose all-reduce of few tokens it is."""

    def of(self, name: str, *, experts: bool = False) -> Float:
        """A figure of each layout's format."""
        plain, narrow = self.experts if experts else self.dense
        gemm = self.machine.device.gemm
        assert gemm is not None, "only described devices have engines of their own"
        default = {"launch_s": gemm.launch_s, "p": gemm.p}
        low, high = (default.get(name) if (v := getattr(f, name)) is None else v for f in (plain, narrow))
        assert low is not None and high is not None
        return np.where(self.narrow, high, low)


def engine_of(machine: Machine, shape: ModelShape, at: Spread) -> Engine:
    """An engine that keeps its cache in bf16, with fp8 weights where the plan asks for them: scaled by blocks, as
    frameworks make them of weights that change (NeMo-RL, docs/fp8)."""
    formats = [serving().format(machine.device, name) for name in ("bf16", "fp8-block")]
    pair = (formats[0], formats[1])
    width = np.full(len(at.tp), float(machine.device.bytes_per_value))
    return Engine(machine=machine, shape=shape, at=at, narrow=at.fp8, dense=pair, experts=pair, kv_bytes=width)


def key_values(e: Engine) -> Float:
    """Cached values of a token in one layer on a device."""
    if e.shape.mla is not None:
        return np.full(len(e.at.tp), float(e.shape.kv_values_per_token))
    return e.shape.kv_values_per_token / np.minimum(e.at.tp, e.shape.kv_heads)


def attention_products(e: Engine) -> list[Product]:
    """Products of a layer's attention on a device, queries, keys and values fused; a rank has a KV head at least."""
    s, tp, mla = e.shape, e.at.tp, e.shape.mla
    if mla is None:
        kv = 2.0 * s.head_dim * np.maximum(s.kv_heads / tp, 1.0)
        return [(float(s.hidden), s.attention_width / tp + kv), (s.attention_width / tp, float(s.hidden))]
    down = float(mla.kv_lora_rank + mla.rope_head_dim + mla.q_lora_rank)
    query = (float(mla.q_lora_rank or s.hidden), s.attention_width / tp)
    # Keys and values are folded into queries and outputs.
    folded: list[Product] = [(float(mla.kv_lora_rank), s.heads * w / tp) for w in (mla.nope_head_dim, mla.v_head_dim)]
    return [(float(s.hidden), down), query, *folded, (s.value_width / tp, float(s.hidden))]


def gated_products(e: Engine, width: int) -> list[Product]:
    """Gate and up in one product, then down."""
    return [(float(e.shape.hidden), 2.0 * width / e.at.tp), (width / e.at.tp, float(e.shape.hidden))]


def elementwise_values(e: Engine) -> Float:
    """Values that elementwise kernels move per token over all layers; ranks repeat the norms, and share the rest."""
    p, shape, moe = e.machine.elementwise, e.shape, e.shape.moe
    routed = moe.ffn * moe.experts_per_token + moe.shared_ffn if moe else 0
    ffn = shape.num_dense_layers * shape.ffn + shape.num_moe_layers * routed
    shared = shape.layers * p.head_passes * (shape.attention_width + shape.kv_width) + p.ffn_passes * ffn
    return shape.layers * p.hidden_passes * shape.hidden + shared / e.at.tp


def peak_flops(e: Engine) -> float:
    """Of the data sheet in bf16."""
    return e.machine.device.peak_flops.get("bf16", 1.0 / e.machine.roofline.seconds_per_flop)


def peak_bandwidth(e: Engine) -> float:
    """Of the data sheet."""
    device = e.machine.device
    return device.peak_bandwidth or device.memory_bandwidth
