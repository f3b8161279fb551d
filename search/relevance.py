"""Which axes the model's stage times depend on, read off the times themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ir.errors import InputError
from space.axes import Levels, Space

Floats = NDArray[np.float64]

MAX_ROWS = 20_000
"""Plans compared per axis; enough that an axis which matters shows, and a fraction of a second."""

_HASH = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio: multiplying by it spreads neighbouring numbers (Knuth, vol. 3, 6.4)."""
_RELATIVE = 1e-9
"""Differences below are rounding."""


def mixed_radix(levels: Levels, space: Space) -> NDArray[np.int64]:
    """Rows of levels int64[n, axes] as numbers int64[n], in lexicographic order.

    Raises:
        InputError: the space is too large to number.
    """
    if space.num_combinations >= 1 << 62:
        raise InputError("space", "must have fewer than 2^62 combinations", space.num_combinations)
    return levels @ strides(space)


def strides(space: Space) -> NDArray[np.int64]:
    """What one level of each axis adds to a plan's number, int64[axes]."""
    sizes = np.array([len(axis.values) for axis in space.axes], dtype=np.int64)
    return np.append(np.cumprod(sizes[:0:-1])[::-1], 1).astype(np.int64)


def relevance_from(space: Space, levels: Levels, stage_seconds: Floats) -> NDArray[np.bool_]:
    """Whether a stage depends on an axis, bool[S, axes].

    It does if two plans that differ in that axis alone have different seconds of the stage.

    Args:
        space: The axes of `levels`.
        levels: int64[n, axes], no two rows alike.
        stage_seconds: float64[n, S], modelled.
    """
    keys = mixed_radix(levels, space)
    columns = [_depends(keys - levels[:, axis] * stride, stage_seconds) for axis, stride in enumerate(strides(space))]
    return np.stack(columns, axis=1)


def _depends(group: NDArray[np.int64], seconds: Floats) -> NDArray[np.bool_]:
    """Whether each stage differs within some group of plans, bool[S].

    Sorted by group, a group in which anything differs has neighbours that do.
    """
    rows = _whole_groups(group)
    rows = rows[np.argsort(group[rows], kind="stable")]
    together = group[rows][1:] == group[rows][:-1]
    before, after = seconds[rows][:-1], seconds[rows][1:]
    differ = np.abs(after - before) > _RELATIVE * np.maximum(after, before)
    found: NDArray[np.bool_] = (differ & together[:, None]).any(axis=0)
    return found


def _whole_groups(group: NDArray[np.int64]) -> NDArray[np.intp]:
    """About `MAX_ROWS` rows, chosen by a hash of their group so that no group is torn apart."""
    share = MAX_ROWS / max(len(group), 1)
    if share >= 1:
        return np.arange(len(group))
    mixed = (group.astype(np.uint64) + np.uint64(1)) * _HASH
    return np.flatnonzero(mixed < np.uint64(share * 2.0**64))
