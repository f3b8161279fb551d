"""Which of many points few others beat: the skyline, or the first few skylines, of groups of points."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

PIVOTS = 16
"""Points that all others of a group are compared with first: most are beaten by one of them."""

TILE = 1 << 20
"""Pairs compared at a time."""


def beaten_by_few(points: Float, *groups: Int, count: int) -> NDArray[np.intp]:
    """Numbers of the points that fewer than `count` others of their group beat, in no order.

    A point beats another if it is nowhere larger; of equal ones the earlier beats the later. So
    whatever is chosen of what is left out, `count` kept points are at least as good.

    Args:
        points: float64[n, d].
        groups: Arrays int64[n] that are alike for points of one group.
        count: At least 1.
    """
    if len(points) == 0:
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((*points.T[::-1], *groups))
    edges = np.zeros(len(order), dtype=bool)
    edges[0] = True
    for group in groups:
        edges[1:] |= group[order][1:] != group[order][:-1]
    firsts = np.flatnonzero(edges)
    lasts = np.append(firsts[1:], len(order))
    sorted_points = points[order]
    varying = np.flatnonzero((sorted_points != sorted_points[0]).any(axis=0))
    sorted_points = np.ascontiguousarray(sorted_points[:, varying])
    kept = [
        order[first + _few(sorted_points[first:last], count)]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]
    return np.concatenate(kept)


def _few(points: Float, count: int) -> NDArray[np.intp]:
    """The same for one group in lexicographic order, in which nothing beats an earlier one."""
    rows = np.arange(len(points))
    if len(rows) <= count:
        return rows
    if len(rows) > 2 * PIVOTS:
        beats = np.zeros(len(rows), dtype=np.int64)
        for pivot in _pivots(points):
            beats += (points[pivot] <= points).all(axis=1) & (rows > pivot)
        rows = rows[beats < count]
    left = points[rows]
    beaten = np.zeros(len(left), dtype=np.int64)
    step = max(TILE // len(left), 1)
    for first in range(0, len(left), step):
        some = left[first : first + step]
        last = first + len(some)
        before = np.arange(last)[:, None] < np.arange(first, last)[None, :]
        for column in range(left.shape[1]):
            before &= left[:last, None, column] <= some[None, :, column]
        beaten[first:last] = before.sum(axis=0)
    return rows[beaten < count]


def _pivots(points: Float) -> list[int]:
    """Points that are likely to beat many: small in all coordinates alike."""
    scale = points.max(axis=0)
    total = (points / np.where(scale > 0, scale, 1.0)).sum(axis=1)
    return np.argpartition(total, PIVOTS)[:PIVOTS].tolist() if len(points) > PIVOTS else list(range(len(points)))
