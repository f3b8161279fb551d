"""cluster.toml: the machine, measured or described: groups of equal devices and the levels that join them.

Levels go from the inside out: the first joins devices, each further one joins members of the level below it.
A group has one kind of device; a machine with several kinds has several groups.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ir.device import (
    MIN_PRODUCTS,
    PRECISIONS,
    SCALED,
    Device,
    Gemm,
    Host,
    KernelPoint,
    MatmulPoint,
    MeasuredPass,
    StageScale,
)
from ir.errors import InputError
from ir.quantities import MOST, Bytes, NonNegative, Positive, PositiveFloat

__all__ = [
    "MIN_PRODUCTS",
    "MOST_DEVICES",
    "PRECISIONS",
    "SCALED",
    "Cluster",
    "CollectiveFit",
    "CollectivePoint",
    "Device",
    "Gemm",
    "Group",
    "Host",
    "KernelPoint",
    "Level",
    "Link",
    "MatmulPoint",
    "MeasuredPass",
    "NonNegative",
    "Positive",
    "PositiveFloat",
    "StageScale",
    "device_bandwidth",
]


MOST_DEVICES = 1 << 21
"""Of a cluster: what is computed for every number of devices shall fit into memory."""


class CollectivePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured collective."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
    ranks: Annotated[int, Meta(ge=2, le=MOST)]
    bytes: Bytes
    """Of the whole tensor; for `all_to_all` and `send`, those that a rank sends."""
    seconds: PositiveFloat


class CollectiveFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closed form of a collective: `(latency_s^p + (wire / bandwidth)^p)^(1/p)` seconds, where `wire` is what a rank
    sends: `2 (n-1)/n` of the tensor for all_reduce, `(n-1)/n` for all_gather, reduce_scatter and all_to_all."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
    ranks: Annotated[int, Meta(ge=2, le=MOST)]
    """n, members of the collective inside one member of the level."""
    latency_s: PositiveFloat
    bandwidth: PositiveFloat
    """Bytes per second on the wire (bus bandwidth) of a rank."""
    p: PositiveFloat
    """Below 1: middle sizes cost more than latency and transfer together, as is seen on NVLink."""
    table: str = ""
    """Name of the measured tables that the model corrects this form by; empty: there are none."""


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
    overlap: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the shorter of a product and a collective over this level that is hidden under the longer, measured;
    None: not measured."""


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
        if self.num_devices > MOST_DEVICES:
            raise InputError(where, f"must have at most {MOST_DEVICES} devices", self.num_devices)
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
