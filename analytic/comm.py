"""Collectives: time by size and ranks, from measured points where there are any."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ir.cluster import Level

Float = NDArray[np.float64]


def collective_seconds(
    level: Level, op: Literal["all_reduce", "broadcast"], size: float, ranks: NDArray[np.int64]
) -> Float:
    """Seconds of a collective of `size` bytes over each number of ranks; 0 for one rank.

    Between measured sizes log-log interpolation, beyond them alpha-beta (Hockney 1994) from the nearest point;
    a number of ranks that was not measured takes the nearest below it, scaled by the wire traffic.
    """
    distinct, inverse = np.unique(ranks, return_inverse=True)
    values = np.array([_seconds(level, op, size, int(n)) for n in distinct])
    return values[inverse.reshape(-1)]


def _seconds(level: Level, op: str, size: float, ranks: int) -> float:
    if ranks < 2:
        return 0.0
    measured = sorted({p.ranks for p in level.collectives if p.op == op})
    if not measured:
        return level.latency_s + _traffic(op, ranks) * size / level.bandwidth
    nearest = max([n for n in measured if n <= ranks] or [measured[0]])
    points = sorted((p.bytes, p.seconds) for p in level.collectives if p.op == op and p.ranks == nearest)
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    if size > sizes[-1]:
        base = float(seconds[-1]) * size / float(sizes[-1])
    else:
        base = float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(seconds))))
    return base * _traffic(op, ranks) / _traffic(op, nearest)


def _traffic(op: str, ranks: int) -> float:
    """Bytes a rank sends, over the tensor's size: ring all-reduce, and a broadcast along a tree."""
    return 2.0 * (ranks - 1) / ranks if op == "all_reduce" else float(np.ceil(np.log2(ranks)))
