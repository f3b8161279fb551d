"""Known devices and systems: a machine described by `NAME:DEVICES` instead of measured.

The data files keep figures in the units of their sources (GB/s, TFLOP/s, us, fractions of a peak); here they become
the documents of `ir.cluster` in SI units.
"""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from ir.cluster import (
    MOST_DEVICES,
    Cluster,
    CollectiveFit,
    Device,
    Gemm,
    Group,
    Host,
    Level,
    Link,
    Positive,
    PositiveFloat,
    device_bandwidth,
)
from ir.documents import digest, from_data, plain, read_document
from ir.errors import InputError

DATA = Path(__file__).parent / "data"

FORM = "must be a cluster.toml or NAME:DEVICES, as in dgx-h100:64 or h20:64+dgx-h100:64"

_PART = re.compile(r"(?P<name>[^:+\s]+):(?P<devices>[0-9]+)")


class _Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: tuple[str, ...]
    """Keys of the file's [sources]."""


class _GemmFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    eta: PositiveFloat
    beta: PositiveFloat
    launch_us: PositiveFloat
    p: PositiveFloat


class _AttentionFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    eta: PositiveFloat
    launch_us: PositiveFloat
    beta: PositiveFloat
    kv_launch_us: PositiveFloat


class _DeviceFacts(_Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    kind: Literal["cuda", "rocm"]
    memory_gb: PositiveFloat
    memory_gb_s: PositiveFloat
    peak_tflops: dict[str, PositiveFloat]
    processors: Positive
    cache_mb: PositiveFloat
    scale_up_gb_s: PositiveFloat | None = None
    host_link_gb_s: PositiveFloat
    watts: PositiveFloat
    host: str
    host_memory_gb: PositiveFloat
    gemm: _GemmFacts
    attention: _AttentionFacts
    price_per_hour: PositiveFloat | None = None
    price_date: str | None = None


class _DeviceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes_per_value: Positive
    base_memory_gb: PositiveFloat
    elementwise: PositiveFloat
    """Of the data sheet's bandwidth, what elementwise kernels reach."""
    sources: dict[str, str]
    hosts: dict[str, Host]
    devices: dict[str, _DeviceFacts]


_Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
_Row = tuple[Positive, PositiveFloat, PositiveFloat, PositiveFloat]
"""Ranks, latency in us, bus bandwidth in GB/s, p."""


class _FitFacts(_Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rows: dict[_Op, tuple[_Row, ...]]


class _LevelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    size: Positive | None = None
    """None: as many as are asked for."""
    latency_us: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    links: Positive = 1
    """Of a member that is full."""
    fits: str | None = None
    whole: bool = True
    """Whether a job takes whole ones of this level; else it takes the fewest equal parts."""


class _SystemFacts(_Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    device: str
    levels: tuple[_LevelFacts, ...]


class _SystemFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    call_s: PositiveFloat
    process_start_s: PositiveFloat
    fits: dict[str, _FitFacts]
    systems: dict[str, _SystemFacts]


@cache
def _device_file() -> _DeviceFile:
    return read_document(DATA / "devices.toml", _DeviceFile)


@cache
def _system_file() -> _SystemFile:
    return read_document(DATA / "systems.toml", _SystemFile)


KNOWN_DEVICES = tuple(_device_file().devices)
KNOWN_SYSTEMS = tuple(_system_file().systems)


def known_device(name: str, *, where: str) -> Device:
    """The device of this name in the tables.

    Raises:
        InputError: there is none; names the closest.
    """
    _check_known(name, "device", KNOWN_DEVICES, where)
    return _device(_device_file().devices[name], _device_file())


def _device(facts: _DeviceFacts, file: _DeviceFile) -> Device:
    bandwidth, peak = 1e9 * facts.memory_gb_s, 1e12 * facts.peak_tflops["bf16"]
    gemm, attention = facts.gemm, facts.attention
    return Device(
        kind=facts.kind,
        name=facts.name,
        memory_bytes=round(1e9 * facts.memory_gb),
        bytes_per_value=file.bytes_per_value,
        base_memory_bytes=round(1e9 * file.base_memory_gb),
        memory_bandwidth=file.elementwise * bandwidth,
        attention_flops=attention.eta * peak,
        attention_launch_s=attention.launch_us / 1e6,
        kv_bandwidth=attention.beta * bandwidth,
        kv_launch_s=attention.kv_launch_us / 1e6,
        host=file.hosts[facts.host],
        gemm=Gemm(flops=gemm.eta * peak, bandwidth=gemm.beta * bandwidth, launch_s=gemm.launch_us / 1e6, p=gemm.p),
        peak_flops={precision: 1e12 * tflops for precision, tflops in facts.peak_tflops.items()},
        peak_bandwidth=bandwidth,
        processors=facts.processors,
        cache_bytes=round(1e6 * facts.cache_mb),
        scale_up_link=1e9 * facts.scale_up_gb_s if facts.scale_up_gb_s else None,
        host_link=1e9 * facts.host_link_gb_s,
        host_memory_bytes=round(1e9 * facts.host_memory_gb),
        watts=facts.watts,
        price_per_hour=facts.price_per_hour,
        price_date=facts.price_date,
    )


def system(name: str, devices: int, *, where: str) -> Cluster:
    """`devices` devices of a known system; fewer than its innermost level holds make that level smaller.

    Raises:
        InputError: the system is not known, or the devices do not fill whole nodes or racks.
    """
    return _described(f"{name}:{devices}", (_group(name, devices, where),))


def load_cluster(text: str) -> Cluster:
    """The cluster of a cluster.toml, where a group's device may be the name of a known one, or of `NAME:DEVICES`,
    or of several such joined by `+`: groups with the slowest of their networks between them.

    Raises:
        InputError: names the file or the text, the rule and what was got.
    """
    path = Path(text)
    if path.suffix == ".toml" or path.is_file():
        return _read_cluster(path)
    parts = [_PART.fullmatch(part) for part in text.split("+")]
    found = [(part["name"], int(part["devices"])) for part in parts if part]
    if len(found) < len(parts):
        raise InputError("cluster", FORM, text)
    return _described(text, tuple(_group(name, devices, text) for name, devices in found))


def _read_cluster(path: Path) -> Cluster:
    data = read_document(path, dict[str, Any])
    groups = data.get("groups")
    for i, group in enumerate(groups if isinstance(groups, list) else []):
        if isinstance(group, dict) and isinstance(group.get("device"), str):
            group["device"] = plain(known_device(group["device"], where=f"{path}: groups[{i}].device"))
    return from_data(data, Cluster, where=str(path))


def _described(name: str, groups: tuple[Group, ...]) -> Cluster:
    between = _between(groups) if len(groups) > 1 else None
    return Cluster(
        name=name,
        fingerprint=digest({"groups": groups, "between": between}),
        groups=groups,
        between=between,
        call_s=_system_file().call_s,
        process_start_s=_system_file().process_start_s,
    )


def _between(groups: tuple[Group, ...]) -> Link:
    """The slowest of the networks that whole systems of these groups have."""
    networks = [_levels(group.name, [level.size or 1 for level in _facts(group.name).levels]) for group in groups]
    return Link(
        latency_s=max(levels[-1].latency_s for levels in networks),
        bandwidth=min(device_bandwidth(levels, len(levels) - 1) for levels in networks),
    )


def _group(name: str, devices: int, where: str) -> Group:
    _check_known(name, "system", KNOWN_SYSTEMS, where)
    facts = _facts(name)
    sizes = _sizes(facts.levels, devices, where)
    return Group(name=name, device=known_device(facts.device, where=where), levels=_levels(name, sizes))


def _facts(name: str) -> _SystemFacts:
    return _system_file().systems[name]


def _sizes(levels: tuple[_LevelFacts, ...], devices: int, where: str) -> list[int]:
    """Members at each level that `devices` devices reach, from the inside out."""
    if not 1 <= devices <= MOST_DEVICES:
        bound = "at least 1 device" if devices < 1 else f"at most {MOST_DEVICES} devices"
        raise InputError(where, f"must have {bound}", devices)
    left, sizes = devices, list[int]()
    for level in levels:
        size = _members(level, left)
        if left % size:
            whole = math.prod(sizes) * size
            raise InputError(where, f"must be a multiple of the {whole} devices of a {level.name}, or fewer", devices)
        sizes.append(size)
        left //= size
        if left == 1:
            break
    return sizes


def _members(level: _LevelFacts, left: int) -> int:
    if level.size is None or left <= level.size:
        return left
    if level.whole:
        return level.size
    return next(left // parts for parts in range(-(-left // level.size), left + 1) if left % parts == 0)


def _levels(name: str, sizes: list[int]) -> tuple[Level, ...]:
    """Levels of these sizes. A member that the job takes in part brings only its part of the links."""
    made, taken, full = list[Level](), 1, 1
    for facts, size in zip(_facts(name).levels, sizes, strict=False):
        level = Level(
            name=facts.name,
            size=size,
            latency_s=facts.latency_us / 1e6,
            bandwidth=1e9 * facts.bandwidth_gb_s,
            links=max(1, facts.links * taken // full),
            fits=_fits(facts.fits, size) if facts.fits else (),
        )
        made.append(level)
        taken, full = taken * size, full * (facts.size or size)
    return tuple(made)


def _fits(name: str, most: int) -> tuple[CollectiveFit, ...]:
    return tuple(
        CollectiveFit(op=op, ranks=ranks, latency_s=latency / 1e6, bandwidth=1e9 * bandwidth, p=p, table=name)
        for op, rows in _system_file().fits[name].rows.items()
        for ranks, latency, bandwidth, p in rows
        if ranks <= most
    )


def _check_known(name: str, what: str, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        closest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise InputError(where, f"must be a known {what}, the closest is {closest}", name)
