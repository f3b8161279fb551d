"""Which of many points no other beats: the skyline of groups of points."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

PIVOTS = 16
"""Points that all others of a group are compared with first: most are beaten by one of them."""

FEW, WORTH = 64, 32
"""Points that are compared pair by pair; and of how many one must beat one to be compared with all of them."""

TILE = 1 << 20
"""Pairs compared at a time."""


def skyline(points: Float, *groups: Int) -> NDArray[np.intp]:
    """Numbers of the points that no other of their group beats, in no order.

    A point beats another if it is nowhere larger; of equal ones the earlier beats the later. So
    whatever is chosen of what is left out, one that is kept is at least as good.

    Args:
        points: float64[n, d].
        groups: Arrays int64[n] that are alike for points of one group.
    """
    if len(points) == 0:
        return np.zeros(0, dtype=np.intp)
    varying = (points != points[0]).any(axis=0)
    varying[0] = True
    columns = points.T[varying]
    order = np.lexsort((*columns[::-1], *groups))
    columns = np.ascontiguousarray(columns[:, order])
    group = _numbered(order, groups)
    rows = _no_pivot_beats(columns, group)
    kept, edges = np.ones(len(rows), dtype=bool), np.searchsorted(group[rows], np.arange(int(group[-1]) + 2))
    # In a small group, each point was a pivot.
    for i in np.flatnonzero((np.bincount(group) > PIVOTS) & (np.diff(edges) > 1)).tolist():
        some = slice(*edges[i : i + 2].tolist())
        kept[some] = _unbeaten(columns[:, rows[some]])
    return np.asarray(order[rows[kept]])


def staircase(seconds: Float, size: Float, *groups: Int) -> NDArray[np.intp]:
    """Numbers of the points that no other of their group beats, see `skyline`, of two coordinates float64[n]."""
    if len(seconds) == 0:
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((size, seconds, *groups))
    group = _numbered(order, groups)
    level = np.unique(size, return_inverse=True)[1].reshape(-1)[order]
    # Levels of a later group are all lower, so that the least so far is of the same group.
    level -= group * (int(level.max()) + 1)
    least = np.minimum.accumulate(level)
    return np.asarray(order[np.append(True, level[1:] < least[:-1])])


def _numbered(order: NDArray[np.intp], groups: tuple[Int, ...]) -> Int:
    """Numbers of consecutive groups, ascending."""
    new = np.zeros(len(order), dtype=bool)
    for group in groups:
        sorted_group = group[order]
        new[1:] |= sorted_group[1:] != sorted_group[:-1]
    return np.cumsum(new)


def _no_pivot_beats(columns: Float, group: Int) -> NDArray[np.intp]:
    """Of points in lexicographic order within groups, float64[d, n], in which nothing beats an earlier one: those that
    none of their group's first few by size beats."""
    scale = np.abs(columns).max(axis=1, keepdims=True)
    by_size = np.lexsort(((columns / np.where(scale > 0, scale, 1.0)).sum(axis=0), group))
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    sizes = np.diff(np.append(first, len(group)))
    rows, beaten = np.flatnonzero(sizes[group] > 1), np.zeros(len(group), dtype=bool)
    for i in range(PIVOTS):
        rows = rows[sizes[group[rows]] > i]
        if len(rows) == 0:
            break
        pivot = by_size[first[group[rows]] + i]
        beats = rows > pivot
        for column in columns:
            beats &= column[pivot] <= column[rows]
        beaten[rows[beats]] = True
        rows = rows[~beats]
    return np.flatnonzero(~beaten)


def _unbeaten(columns: Float) -> Mask:
    """Which points of one group in that order no other beats."""
    left, kept = np.arange(columns.shape[1]), np.zeros(columns.shape[1], dtype=bool)
    while len(left) > FEW:
        # The first that is left is beaten by none.
        beaten = (columns[:, left[:1]] <= columns[:, left]).all(axis=0)
        if np.count_nonzero(beaten) * WORTH < len(left):
            break
        kept[left[0]] = True
        left = left[~beaten]
    kept[left[_none_beats(columns[:, left])]] = True
    return kept


def _none_beats(columns: Float) -> Mask:
    """The same, pair by pair."""
    n = columns.shape[1]
    beaten = np.zeros(n, dtype=bool)
    step = max(TILE // max(n, 1), 1)
    for first in range(0, n, step):
        last = min(first + step, n)
        before = np.arange(last)[:, None] < np.arange(first, last)[None, :]
        for column in columns:
            before &= column[:last, None] <= column[None, first:last]
        beaten[first:last] = before.any(axis=0)
    return ~beaten
