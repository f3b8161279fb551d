"""cluster.toml: the machine, measured or described: one kind of device and what joins the devices."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class MatmulPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured product [m, k] x [k, n]."""

    m: Positive
    k: Positive
    n: Positive
    seconds: PositiveFloat


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that launching costs whatever the tensors' size: measured on models too small for anything else."""

    decode_step_s: NonNegative
    """A decode step of an engine, without its layers."""
    decode_layer_s: NonNegative
    """A layer of a decode step."""
    decode_sequence_s: NonNegative
    """A live sequence in a decode step."""
    forward_s: NonNegative
    """A forward pass without gradients, without its layers."""
    forward_layer_s: NonNegative
    train_s: NonNegative
    """A forward and backward pass, without its layers."""
    train_layer_s: NonNegative
    optimizer_s: NonNegative
    """An optimizer step, without its tensors' size."""
    optimizer_layer_s: NonNegative


class MeasuredPass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured pass of a small dense decoder over sequences of equal length, launches included."""

    kind: Literal["forward", "train"]
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    ffn: Positive
    vocab: Positive
    sequences: Positive
    length: Positive
    response: Positive
    """Tokens of each sequence that go through the output head."""
    seconds: PositiveFloat


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: here what a worker process is pinned to."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: Positive
    bytes_per_value: Positive = 4
    """Width of weights and activations: 4 for float32."""
    base_memory_bytes: Annotated[int, Meta(ge=0)]
    """What a worker occupies before it holds any model."""
    memory_bandwidth: PositiveFloat
    """Bytes per second of an elementwise operation on a few MB, read and written bytes together."""
    attention_flops: PositiveFloat
    """FLOP per second of the attention core on a training micro-batch."""
    kv_bandwidth: PositiveFloat
    """Bytes per second of cached keys and values that a decode step gets through."""
    host: Host
    matmul: Annotated[tuple[MatmulPoint, ...], Meta(min_length=4)]
    """The measured curve that the roofline is fitted to."""
    passes: tuple[MeasuredPass, ...] = ()
    """What the kernels' sum is scaled to: a whole pass also waits for memory between kernels. None: not scaled."""


class CollectivePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured collective."""

    op: Literal["all_reduce", "broadcast"]
    ranks: Annotated[int, Meta(ge=2)]
    bytes: Positive
    seconds: PositiveFloat


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the hierarchy: `size` members of the level below it joined by a link."""

    name: str
    size: Positive
    latency_s: PositiveFloat
    """Time of the smallest message between two members."""
    bandwidth: PositiveFloat
    """Bytes per second and member."""
    collectives: tuple[CollectivePoint, ...] = ()
    """Measured points; where there are none, latency and bandwidth are used."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of cluster.toml."""

    name: str
    fingerprint: str
    """Identity of the hardware that was measured: traces of other hardware are not mixed with this one's."""
    device: Device
    levels: Annotated[tuple[Level, ...], Meta(min_length=1)]
    call_s: NonNegative
    """Time between telling a worker to do something and its starting."""
    process_start_s: NonNegative
    """Time from asking for a worker process until it answers."""

    @property
    def num_devices(self) -> int:
        """Devices in the whole cluster."""
        total = 1
        for level in self.levels:
            total *= level.size
        return total
