"""Collectives: seconds by size and ranks, over any number of levels.

A group of ranks is laid over the hierarchy by integer division: ranks that are `stride`
devices apart fill a level's members from the inside out. A collective then runs level by
level, each on the share that the levels below have left.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analytic.device import knee
from ir.cluster import Level, device_bandwidth

Float = NDArray[np.float64]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

Levels = tuple[Level, ...]


def collective_seconds(
    levels: Levels, op: Kind, size: ArrayLike, ranks: NDArray[np.int64], stride: ArrayLike = 1
) -> Float:
    """Seconds of a collective, 0 for one rank.

    Args:
        levels: From the inside out.
        op: What is done. `send` is to a neighbour in the group.
        size: Bytes: of the whole tensor; for `all_to_all` and `send`, those that a rank sends.
        ranks: Members of the group, int64[n].
        stride: Devices from one member to the next.

    Measured points are interpolated in log-log and extended in proportion; else fitted knees are used, else
    latency and bandwidth. A number of ranks without a figure takes the nearest, scaled by the traffic.
    """
    sizes, members, strides = np.broadcast_arrays(np.asarray(size, dtype=float), ranks, np.asarray(stride))
    pairs, inverse = np.unique(np.stack([members, strides], axis=-1).reshape(-1, 2), axis=0, return_inverse=True)
    result, flat, which = np.zeros(members.size), sizes.reshape(-1), inverse.reshape(-1)
    for index, (n, step) in enumerate(pairs.tolist()):
        here = which == index
        if n > 1:
            result[here] = _seconds(levels, op, flat[here], n, step)
    return result.reshape(members.shape)


def members_by_level(levels: Levels, ranks: int, stride: int) -> list[int]:
    """How many members of the level below a group has at each level; their product is at least `ranks`."""
    inside, below, found = 1, 1, []
    for index, level in enumerate(levels):
        below *= level.size
        reached = ranks if index == len(levels) - 1 else min(max(below // stride, 1), ranks)
        found.append(-(-reached // inside))
        inside = max(inside, reached)
    return found


def _seconds(levels: Levels, op: Kind, size: Float, ranks: int, stride: int) -> Float:
    members, inside, total = members_by_level(levels, ranks, stride), 1, np.zeros_like(size)
    for index, here in enumerate(members):
        if here > 1:
            seconds = _level_seconds(levels, index, op, _share(op, size, inside, here, ranks), here)
            # A message to a neighbour, and a broadcast that is cut in pieces, take as long as their slowest link.
            total = np.maximum(total, seconds) if op in ("send", "broadcast") else total + seconds
            inside *= here
    return total


def _share(op: Kind, size: Float, inside: int, here: int, ranks: int) -> Float:
    """Bytes that a level handles: what the levels below have left of a tensor, or what is bound beyond them."""
    if op in ("send", "broadcast"):
        return size
    if op == "all_to_all":
        return size * min((here - 1) * inside / ranks * here / max(here - 1, 1), 1.0)
    return size / inside


def _level_seconds(levels: Levels, index: int, op: Kind, size: Float, ranks: int) -> Float:
    level = levels[index]
    if any(point.op == op for point in level.collectives):
        return _measured(level, op, size, ranks)
    if op in ("all_gather", "reduce_scatter") and any(point.op == "all_reduce" for point in level.collectives):
        # An all-reduce is the one after the other.
        return _measured(level, "all_reduce", size, ranks) / 2.0
    fits = [fit for fit in level.fits if fit.op == op]
    if fits:
        fit = min(fits, key=lambda f: (abs(np.log(f.ranks / ranks)), f.ranks))
        wire = traffic(op, ranks) * size / fit.bandwidth
        return np.asarray((fit.latency_s**fit.p + wire**fit.p) ** (1.0 / fit.p))
    wire = traffic(op, ranks) * size / device_bandwidth(levels, index)
    return knee(np.full_like(size, level.latency_s * np.log2(2 * ranks) / 2.0), wire, 1.0)


def _measured(level: Level, op: str, size: Float, ranks: int) -> Float:
    measured = sorted({p.ranks for p in level.collectives if p.op == op})
    nearest = max([n for n in measured if n <= ranks] or [measured[0]])
    points = sorted((p.bytes, p.seconds) for p in level.collectives if p.op == op and p.ranks == nearest)
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    inside = np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(sizes), np.log(seconds)))
    base = np.where(size > sizes[-1], seconds[-1] * size / sizes[-1], inside)
    return np.asarray(base * traffic(op, ranks) / traffic(op, nearest))


def traffic(op: str, ranks: int) -> float:
    """Bytes a rank sends over the tensor's size: ring collectives, and a broadcast along a tree."""
    match op:
        case "all_reduce":
            return 2.0 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (ranks - 1) / ranks
        case "broadcast":
            return float(np.ceil(np.log2(ranks)))
    return 1.0
