"""Collectives: seconds by size and ranks, over any number of levels.

A group of ranks is laid over the hierarchy by integer division: ranks that are `stride`
devices apart fill a level's members from the inside out. A collective then runs level by
level, each on the share that the levels below have left; libraries of accelerators cut it
into chunks, so that levels work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analytic.device import knee
from analytic.distinct import largest
from analytic.grids import grid, kernel_facts
from ir.cluster import CollectiveFit, Level, device_bandwidth

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Own = Literal["vllm", "sglang", "trtllm"]
"""Inference engines that bring an all-reduce of their own; FlashInfer hands that of TensorRT-LLM to the others."""

Levels = tuple[Level, ...]

_RINGS = ("all_reduce", "all_gather", "reduce_scatter")
_SIZES = np.exp2(np.arange(0.0, 48.0, 0.25))
"""Bytes at which a fit is tabulated: quarters of octaves err by far less than the fit."""


def collective_seconds(
    levels: Levels, op: Kind, size: ArrayLike, ranks: Int, stride: ArrayLike = 1, *, engine: Own | None = None
) -> Float:
    """Seconds of a collective, 0 for one rank.

    Args:
        levels: From the inside out.
        op: What is done. `send` is to a neighbour in the group.
        size: Bytes: of the whole tensor; for `all_to_all` and `send`, those that a rank sends.
        ranks: Members of the group, int64[n].
        stride: Devices from one member to the next.
        engine: Whose all-reduce is taken where it is faster than the library's; None for the library alone.

    Measured points are interpolated in log-log and extended in proportion; else fitted knees are used, else
    latency and bandwidth. A number of ranks without a figure lies between its neighbours, in log-log.
    """
    sizes, members, strides = np.broadcast_arrays(np.asarray(size, dtype=float), ranks, np.asarray(stride))
    result, several = np.zeros(members.size), np.flatnonzero(members.reshape(-1) > 1)
    if len(several):
        n, apart = (values.reshape(-1)[several].astype(np.int64) for values in (members, strides))
        result[several] = _seconds(levels, op, sizes.reshape(-1)[several], (n, apart), engine)
    return result.reshape(members.shape)


def members_by_level(levels: Levels, ranks: int, stride: int) -> list[int]:
    """How many members of the level below a group has at each level; their product is at least `ranks`."""
    return [int(members) for members in _by_level(levels, np.asarray(ranks), np.asarray(stride))]


def _by_level(levels: Levels, ranks: Int, stride: Int) -> list[Int]:
    """As `members_by_level`, of groups of int64[n] ranks."""
    inside, below, found = np.ones_like(ranks), 1, list[Int]()
    for index, level in enumerate(levels):
        below *= level.size
        reached = ranks if index == len(levels) - 1 else np.minimum(np.maximum(below // stride, 1), ranks)
        found.append(-(-reached // inside))
        inside = np.maximum(inside, reached)
    return found


def domain_of(levels: Levels) -> int:
    """Levels from the inside out that scale-up links join: those at least half as fast as the innermost."""
    fast = [2 * device_bandwidth(levels, index) >= device_bandwidth(levels, 0) for index in range(len(levels))]
    return fast.index(False) if False in fast else len(levels)


def nodes_of(levels: Levels, ranks: int, stride: int = 1) -> int:
    """Scale-up domains that a group spans."""
    return int(np.prod(members_by_level(levels, ranks, stride)[domain_of(levels) :], dtype=np.int64))


def overlap_of(levels: Levels, ranks: Int, stride: ArrayLike = 1) -> Float:
    """Share of messages between a group's neighbours that hides under products: scale-up links take processors and
    memory from them, network cards hardly any. For `analytic.device.overlapped`."""
    reach, size = np.asarray(ranks) * np.asarray(stride), 1
    found = np.zeros(reach.shape)
    for index, level in enumerate(levels):
        # The outermost level that a group reaches is its slowest.
        found = np.where((reach > size) | (index == 0), _hidden(levels, index), found)
        size *= level.size
    return found


def collective_overlap(levels: Levels, ranks: Int, stride: ArrayLike = 1) -> Float:
    """The same of a ring collective: levels work at the same time, but what each takes from products adds up, so a
    group that spans nodes hides less than its network traffic alone would. By the bandwidth of large messages."""
    members, strides = np.broadcast_arrays(np.asarray(ranks), np.asarray(stride))
    inside, size = np.ones(members.shape), 1
    taken, longest = np.zeros(members.shape), np.full(members.shape, 1e-30)
    for index, level in enumerate(levels):
        size *= level.size
        reached = members if index == len(levels) - 1 else np.minimum(np.maximum(size // strides, 1), members)
        here = np.maximum(np.ceil(reached / inside), 1.0)
        seconds = (here > 1) * (1.0 - 1.0 / (here * inside)) / inside / device_bandwidth(levels, index)
        taken = taken + (1.0 - _hidden(levels, index)) * seconds
        longest, inside = np.maximum(longest, seconds), np.maximum(inside, reached)
    alone = np.where(members > 1, taken / longest, 1.0 - _hidden(levels, 0))
    return np.asarray(np.maximum(1.0 - alone, 0.0))


def _hidden(levels: Levels, index: int) -> float:
    """Share of a level's traffic that hides under products."""
    share = kernel_facts()["overlap"]
    usual = float(share["scale_up"] if index < domain_of(levels) else share["network"])
    own = levels[index].overlap
    return usual if own is None else own


def _seconds(levels: Levels, op: Kind, size: Float, group: tuple[Int, Int], engine: Own | None) -> Float:
    """Of groups of several ranks, arrays of one length."""
    ranks, stride = group
    members, described = _by_level(levels, ranks, stride), bool(levels[0].fits)
    # Scale-up links of several levels are the same ports of a device: one flat collective.
    flat = domain_of(levels) if described else 1
    inside, one = np.prod(members[:flat], axis=0, dtype=np.int64), np.ones_like(ranks)
    near, alone = _share(op, size, one, inside, ranks), members[0] == inside
    first = _where((inside > 1) & alone, partial(_level_seconds, levels, 0, op), near, inside, one)
    if flat > 1:
        first = first + _where((inside > 1) & ~alone, partial(_flat, levels, op), near, inside)
    if engine is not None and op == "all_reduce":
        own = inside == ranks
        first = np.where(own, _where(own, partial(_engine_all_reduce, levels[0], engine), near, inside, first), first)
    parts = [first]
    for index, here in enumerate(members[flat:], start=flat):
        far = _share(op, size, inside, here, ranks)
        parts.append(_where(here > 1, partial(_level_seconds, levels, index, op), far, here, inside))
        inside = np.where(here > 1, inside * here, inside)
    return _over_levels(op, size, parts, described=described)


def _where(some: NDArray[np.bool_], seconds: Callable[..., Float], *arrays: NDArray[Any]) -> Float:
    """A function of arrays where it is asked for, 0 elsewhere."""
    at = np.flatnonzero(some)
    if len(at) == len(some):
        return seconds(*arrays)
    result = np.zeros(len(some))
    if len(at):
        result[at] = seconds(*(values[at] for values in arrays))
    return result


def _for_each(ranks: Int, seconds: Callable[..., Float], *arrays: Float) -> Float:
    """A function of a number of ranks and arrays, for each different number: few have tables."""
    numbers = np.unique(ranks).tolist()
    if len(numbers) == 1:
        return seconds(numbers[0], *arrays)
    result = np.zeros(len(ranks))
    for number in numbers:
        at = np.flatnonzero(ranks == number)
        result[at] = seconds(number, *(values[at] for values in arrays))
    return result


def _flat(levels: Levels, op: Kind, size: Float, ranks: Int) -> Float:
    """Over all levels of the scale-up domain at once, as fast as the slowest of them."""
    last = domain_of(levels) - 1
    latency = levels[last].latency_s * np.log2(2 * ranks) / 2.0
    wire = traffic(op, ranks) * size / device_bandwidth(levels, last)
    return knee(latency, wire, kernel_facts()["domain"]["p"])


def _over_levels(op: Kind, size: Float, parts: list[Float], *, described: bool) -> Float:
    slowest = largest(parts)
    # A message to a neighbour, and a broadcast that is cut in pieces, take as long as their slowest link.
    if op in ("send", "broadcast") or len(parts) == 1:
        return slowest
    rest = np.asarray(sum(parts)) - slowest
    if not described:
        return np.asarray(slowest + rest)
    ring = kernel_facts()["ring"]
    return np.asarray(slowest + rest / np.clip(size / ring["chunk_bytes"], 1.0, ring["chunks"]))


def _share(op: Kind, size: Float, inside: Int, here: Int, ranks: Int) -> Float:
    """Bytes that a level handles: what the levels below have left of a tensor, or what is bound beyond them."""
    if op in ("send", "broadcast"):
        return size
    if op == "all_to_all":
        return np.asarray(size * np.minimum((here - 1) * inside / ranks * here / np.maximum(here - 1, 1), 1.0))
    return size / inside


def _level_seconds(levels: Levels, index: int, op: Kind, size: Float, here: Int, inside: Int) -> Float:
    """Of a level's `here` members, each of which holds `inside` ranks of the group."""
    level = levels[index]
    if any(point.op == op for point in level.collectives):
        return _for_each(here, partial(_measured, level, op), size)
    if op in ("all_gather", "reduce_scatter") and any(point.op == "all_reduce" for point in level.collectives):
        # An all-reduce is the one after the other.
        return _for_each(here, partial(_measured, level, "all_reduce"), size) / 2.0
    fits = sorted((fit for fit in level.fits if fit.op == op), key=lambda fit: fit.ranks)
    if fits:
        return _for_each(here, partial(_fitted, level, fits), size)
    bandwidth, latency = device_bandwidth(levels, index), level.latency_s * np.log2(2 * here) / 2.0
    # Libraries of accelerators pass a broadcast on in chunks: each link carries it once.
    wire = (1.0 if op == "broadcast" and levels[0].fits else traffic(op, here)) * size / bandwidth
    if not levels[0].fits or op not in _RINGS:
        return np.asarray(latency + wire)
    # A ring over all ranks: what each sends grows with them, and it hands on once a rank.
    wire = traffic(op, here * inside) * size / bandwidth
    ring = wire + _ring_latency(op, here, inside) + latency
    return np.asarray(np.minimum(ring, _tree(level, wire, here)) if op == "all_reduce" else ring)


def _tree(level: Level, wire: Float, nodes: Int) -> Float:
    """An all-reduce of few bytes goes up a tree of nodes and down again, a message for each generation, in packets that
    carry their own flags and need no handshake but reach a part of the bandwidth."""
    share = float(kernel_facts()["tree"]["share"])
    return np.asarray(2.0 * np.log2(nodes) * level.latency_s + wire / share)


def _ring_latency(op: Kind, nodes: Int, inside: Int) -> Float:
    """All-gathers and reduce-scatters go round a ring; an all-reduce goes up and down a tree where that is shorter,
    whose latency is that of the ring over two nodes."""
    hop = float(kernel_facts()["ring"]["hop"])
    if op == "all_reduce":
        return np.asarray(2.0 * hop * np.minimum(nodes * inside - 1.0, 2.0 * inside * np.log2(nodes)))
    return np.asarray(hop * (nodes * inside - 1.0))


def _fitted(level: Level, fits: list[CollectiveFit], ranks: int, size: Float) -> Float:
    """Between the next smaller and larger numbers of ranks that were fitted."""
    smaller = max((fit for fit in fits if fit.ranks <= ranks), key=lambda fit: fit.ranks, default=fits[0])
    larger = min((fit for fit in fits if fit.ranks >= ranks), key=lambda fit: fit.ranks, default=fits[-1])
    low = _of_fit(smaller, size, ranks)
    if smaller.ranks == larger.ranks:
        # Beyond the last, latency grows by half a message for each doubling.
        return low + 0.5 * level.latency_s * max(float(np.log2(ranks / smaller.ranks)), 0.0)
    high = _of_fit(larger, size, ranks)
    share = np.log(ranks / smaller.ranks) / np.log(larger.ranks / smaller.ranks)
    return np.asarray(low ** (1.0 - share) * high**share)


def _of_fit(fit: CollectiveFit, size: Float, ranks: int) -> Float:
    """A fit at the size that gives its own number of ranks as much traffic."""
    scale = traffic(fit.op, ranks) / traffic(fit.op, fit.ranks)
    return np.asarray(np.exp(np.interp(np.log2(np.maximum(size * scale, 1.0)), np.log2(_SIZES), _curve(fit))))


@lru_cache(maxsize=1024)
def _curve(fit: CollectiveFit) -> Float:
    """Logarithm of seconds at `_SIZES`: the closed form times what was measured over it."""
    seconds = closed_seconds(fit, _SIZES)
    found = grid(f"collective/{fit.table}/{fit.op}/{fit.ranks}") if fit.table else None
    return np.log(seconds if found is None else seconds * found.factor(_SIZES))


def closed_seconds(fit: CollectiveFit, size: Float) -> Float:
    """The closed form alone, which the tables of collectives correct."""
    wire = traffic(fit.op, fit.ranks) * size / fit.bandwidth
    return np.asarray((fit.latency_s**fit.p + wire**fit.p) ** (1.0 / fit.p))


def _engine_all_reduce(level: Level, engine: Own, size: Float, ranks: Int, library: Float) -> Float:
    """The faster of the library and an engine's own kernel."""
    return _for_each(ranks, partial(_own_all_reduce, level, engine), size, library)


def _own_all_reduce(level: Level, engine: Own, ranks: int, size: Float, library: Float) -> Float:
    """One- and two-shot kernels under CUDA graphs, where they are faster; of the next larger group measured."""
    for fit in sorted(level.fits, key=lambda fit: fit.ranks):
        name = f"custom/{engine}/{fit.table}/{fit.ranks}"
        if fit.op == "all_reduce" and fit.ranks >= ranks and (own := grid(name)):
            return np.minimum(library, closed_seconds(fit, size) * own.factor(size))
    return library


def _measured(level: Level, op: str, ranks: int, size: Float) -> Float:
    measured = sorted({p.ranks for p in level.collectives if p.op == op})
    nearest = max([n for n in measured if n <= ranks] or [measured[0]])
    points = sorted((p.bytes, p.seconds) for p in level.collectives if p.op == op and p.ranks == nearest)
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    inside = np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(sizes), np.log(seconds)))
    base = np.where(size > sizes[-1], seconds[-1] * size / sizes[-1], inside)
    return np.asarray(base * traffic(op, ranks) / traffic(op, nearest))


def traffic(op: str, ranks: Int | int) -> Float | float:
    """Bytes a rank sends over the tensor's size: ring collectives, and a broadcast along a tree."""
    match op:
        case "all_reduce":
            return np.asarray(2.0 * (ranks - 1) / ranks)
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return np.asarray((ranks - 1) / ranks)
        case "broadcast":
            return np.asarray(np.ceil(np.log2(ranks)))
    return 1.0
