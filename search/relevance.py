"""Which axes the model's stage times depend on, read off the times themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from space.axes import Levels

Floats = NDArray[np.float64]

MAX_ROWS = 20_000
"""Plans compared per axis; enough that an axis which matters shows, and a fraction of a second."""

_HASH = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio: multiplying by it spreads neighbouring numbers (Knuth, vol. 3, 6.4)."""
_RELATIVE = 1e-9
"""Differences below are rounding."""


def plan_keys(levels: Levels) -> NDArray[np.uint64]:
    """Rows of levels int64[n, axes] as numbers uint64[n]: equal for equal rows, unequal else but for a chance of
    n^2 / 2^65. Linear in the levels modulo 2^64, so that an axis can be taken out by subtracting its part."""
    return np.asarray(levels.astype(np.uint64) @ multipliers(levels.shape[1]), dtype=np.uint64)


def multipliers(num_axes: int) -> NDArray[np.uint64]:
    """What one level of each axis adds to a plan's key, uint64[axes]: the splitmix64 sequence (Steele et al., OOPSLA
    2014), the same on every machine."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, num_axes + 1, dtype=np.uint64)) * _HASH
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray((z ^ (z >> np.uint64(31))) | np.uint64(1), dtype=np.uint64)


def relevance_from(levels: Levels, stage_seconds: Floats) -> NDArray[np.bool_]:
    """Whether a stage depends on an axis, bool[S, axes].

    It does if two plans that differ in that axis alone, and in axes that it determines, have different seconds of the
    stage.

    Args:
        levels: int64[n, axes], no two rows alike.
        stage_seconds: float64[n, S], modelled.
    """
    keys, each = plan_keys(levels), multipliers(levels.shape[1])
    parts, tied = levels.astype(np.uint64) * each, determines(levels) | np.eye(len(each), dtype=bool)
    own = [parts[:, together].sum(axis=1, dtype=np.uint64) for together in tied]
    return np.stack([_depends(keys - part, stage_seconds) for part in own], axis=1)


def determines(levels: Levels) -> NDArray[np.bool_]:
    """Whether the level of axis i says that of axis j in every plan, bool[i, j], of levels int64[n, axes]. Of two axes
    that determine each other, the first one does."""
    sizes = levels.max(axis=0, initial=0) + 1
    num_axes = levels.shape[1]
    found = np.zeros((num_axes, num_axes), dtype=bool)
    for i in range(num_axes):
        for j in range(num_axes):
            seen = np.zeros(sizes[i] * sizes[j], dtype=bool)
            seen[levels[:, i] * sizes[j] + levels[:, j]] = True
            found[i, j] = i != j and bool((seen.reshape(sizes[i], sizes[j]).sum(axis=1) <= 1).all())
    return np.asarray(found & ~np.tril(found & found.T))


def _depends(group: NDArray[np.uint64], seconds: Floats) -> NDArray[np.bool_]:
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


def _whole_groups(group: NDArray[np.uint64]) -> NDArray[np.intp]:
    """About `MAX_ROWS` rows, chosen by a hash of their group so that no group is torn apart."""
    share = MAX_ROWS / max(len(group), 1)
    if share >= 1:
        return np.arange(len(group))
    mixed = (group + np.uint64(1)) * _HASH
    return np.flatnonzero(mixed < np.uint64(share * 2.0**64))
