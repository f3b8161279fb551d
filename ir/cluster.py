"""cluster.toml: the machine, measured or described: groups of equal devices and the levels that join them.

Levels go from the inside out: the first joins devices, each further one joins members of the level below it.
A group has one kind of device; a machine with several kinds has several groups.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ir.errors import InputError

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]

PRECISIONS = ("fp32", "bf16", "fp8", "fp4")
"""Number formats that a device may have a peak for."""

MIN_PRODUCTS = 4
"""Measured products that a curve of three constants needs, with one to spare."""


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


class Gemm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closed form of a product [m, k] x [k, n]: `(tc^p + tm^p)^(1/p) + launch_s` seconds, where
    `tc = 2mnk / flops` and `tm = bytes / bandwidth`."""

    flops: PositiveFloat
    """Achievable FLOP per second of a large product."""
    bandwidth: PositiveFloat
    """Achievable bytes per second of a product that streams its weights."""
    launch_s: NonNegative
    p: Annotated[float, Meta(ge=1)]
    """Sharpness of the knee between the two: 1 adds them up, large values take the larger."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: here what a worker process is pinned to. Its products are measured (`matmul`) or described
    (`gemm`), never both."""

    kind: Literal["cpu", "cuda", "rocm"]
    name: str
    memory_bytes: Positive
    """What the driver reports, or what the devices of a host may share out among them."""
    bytes_per_value: Positive = 4
    """Width of weights and activations: 4 for float32, 2 for bfloat16."""
    base_memory_bytes: Annotated[int, Meta(ge=0)]
    """What a worker occupies before it holds any model."""
    memory_bandwidth: PositiveFloat
    """Bytes per second of an elementwise operation on a few MB, read and written bytes together."""
    attention_flops: PositiveFloat
    """FLOP per second of the attention core on a training micro-batch."""
    attention_launch_s: NonNegative = 0.0
    """Time of an attention core over whole sequences beside its FLOPs, per layer."""
    kv_bandwidth: PositiveFloat
    """Bytes per second of cached keys and values that a decode step gets through."""
    kv_launch_s: NonNegative = 0.0
    """Time of an attention core of a decode step beside its cached bytes, per layer."""
    host: Host
    matmul: tuple[MatmulPoint, ...] = ()
    """The measured curve that the roofline is fitted to."""
    gemm: Gemm | None = None
    """The curve itself, where nothing was measured."""
    passes: tuple[MeasuredPass, ...] = ()
    """What the kernels' sum is scaled to: a whole pass also waits for memory between kernels. None: not scaled."""
    peak_flops: dict[str, PositiveFloat] = {}
    """Dense FLOP per second of the data sheet by precision; one that is missing is not supported in hardware."""
    peak_bandwidth: PositiveFloat | None = None
    """Bytes per second of device memory by the data sheet."""
    processors: Positive | None = None
    """Streaming multiprocessors or compute units."""
    cache_bytes: Positive | None = None
    """Last level of cache."""
    scale_up_link: PositiveFloat | None = None
    """Bytes per second one way to all neighbours together by the data sheet; None has none but the host link."""
    host_link: PositiveFloat | None = None
    """Bytes per second one way to host memory."""
    host_memory_bytes: Positive | None = None
    """Share of one device in the memory of its host."""
    watts: PositiveFloat | None = None
    """Thermal design power."""
    price_per_hour: PositiveFloat | None = None
    """US dollars."""
    price_date: str | None = None
    """When the price was read: prices move by tens of percent within months."""

    def __post_init__(self) -> None:
        where = f"device {self.name}"
        if bool(self.matmul) == (self.gemm is not None):
            got = "both" if self.matmul else "neither"
            raise InputError(where, "must have exactly one of `matmul` and `gemm`", got)
        if self.matmul and len(self.matmul) < MIN_PRODUCTS:
            raise InputError(where, f"must have at least {MIN_PRODUCTS} points in `matmul`", len(self.matmul))
        for precision in self.peak_flops:
            if precision not in PRECISIONS:
                raise InputError(f"{where}: peak_flops", f"must be of {', '.join(PRECISIONS)}", precision)
        if (self.price_per_hour is None) != (self.price_date is None):
            raise InputError(where, "must have both `price_per_hour` and `price_date` or neither")


class CollectivePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured collective."""

    op: Literal["all_reduce", "broadcast"]
    ranks: Annotated[int, Meta(ge=2)]
    bytes: Positive
    seconds: PositiveFloat


class CollectiveFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closed form of a collective: `(latency_s^p + (wire / bandwidth)^p)^(1/p)` seconds, where `wire` is what a rank
    sends: `2 (n-1)/n` of the tensor for all_reduce, `(n-1)/n` for all_gather, reduce_scatter and all_to_all."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
    ranks: Annotated[int, Meta(ge=2)]
    """n, members of the collective inside one member of the level."""
    latency_s: PositiveFloat
    bandwidth: PositiveFloat
    """Bytes per second on the wire (bus bandwidth) of a rank."""
    p: PositiveFloat
    """Below 1: middle sizes cost more than latency and transfer together, as is seen on NVLink."""


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the hierarchy: `size` members of the level below it (the first level: devices) joined by links."""

    name: str
    size: Positive
    latency_s: PositiveFloat
    """Time of the smallest message between two members."""
    bandwidth: PositiveFloat
    """Achievable bytes per second one way of one link."""
    links: Positive = 1
    """Links that each member has to this level, shared by the devices inside the member: a node with 8 GPUs and
    8 network cards has 8 to the network, one with a single card has 1."""
    collectives: tuple[CollectivePoint, ...] = ()
    """Measured points; where there are none, fits are used."""
    fits: tuple[CollectiveFit, ...] = ()
    """Closed forms; where there are none, latency and bandwidth are used."""


def device_bandwidth(levels: tuple[Level, ...], i: int) -> float:
    """Bytes per second one way that a device gets across level `i` while all devices below share its links.

    What crosses a level crosses those below it too, so that a level is never faster than one inside it.
    """
    below, slowest = 1, float("inf")
    for level in levels[: i + 1]:
        slowest = min(slowest, level.bandwidth * level.links / below)
        below *= level.size
    return slowest


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal devices and the levels that join them."""

    name: str
    device: Device
    """In a cluster.toml also the name of a known device, which `ir.systems.load_cluster` looks up."""
    levels: Annotated[tuple[Level, ...], Meta(min_length=1)]
    """From the inside out."""

    @property
    def num_devices(self) -> int:
        """Devices in the group."""
        return math.prod(level.size for level in self.levels)

    @property
    def domain(self) -> int:
        """Devices that scale-up links join: those of the innermost level, and of levels above it that are at least
        half as fast."""
        size, innermost = 1, device_bandwidth(self.levels, 0)
        for i, level in enumerate(self.levels):
            if 2 * device_bandwidth(self.levels, i) < innermost:
                break
            size *= level.size
        return size


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins the groups of a cluster."""

    latency_s: PositiveFloat
    """Time of the smallest message between devices of two groups."""
    bandwidth: PositiveFloat
    """Bytes per second one way that a device gets while all devices of its group send."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of cluster.toml. Devices are numbered group by group, inside a group from the inside out."""

    name: str
    fingerprint: str
    """Identity of the hardware: traces of other hardware are not mixed with this one's."""
    groups: Annotated[tuple[Group, ...], Meta(min_length=1)]
    between: Link | None = None
    """What joins the groups, where there are several."""
    call_s: NonNegative
    """Time between telling a worker to do something and its starting."""
    process_start_s: NonNegative
    """Time from asking for a worker process until it answers."""

    def __post_init__(self) -> None:
        where, names = f"cluster {self.name}", [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise InputError(f"{where}: groups", "must have different names", ", ".join(names))
        if len(names) > 1 and self.between is None:
            raise InputError(where, "must say in `between` what joins its groups", f"{len(names)} groups")
        if len(names) == 1 and self.between is not None:
            raise InputError(where, "must have several groups where it has `between`", "1 group")

    @property
    def device(self) -> Device:
        """The device of the first group."""
        return self.groups[0].device

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of the first group, from the inside out."""
        return self.groups[0].levels

    @property
    def num_devices(self) -> int:
        """Devices in the whole cluster."""
        return sum(group.num_devices for group in self.groups)

    @property
    def is_uniform(self) -> bool:
        """Whether there is one group, so that all devices are of one kind."""
        return len(self.groups) == 1

    def devices_of(self, group: str) -> range:
        """Numbers of the devices of the group with this name.

        Raises:
            InputError: there is no such group.
        """
        first = 0
        for found in self.groups:
            if found.name == group:
                return range(first, first + found.num_devices)
            first += found.num_devices
        known = ", ".join(found.name for found in self.groups)
        raise InputError(f"cluster {self.name}", f"must have the group, one of {known}", group)
