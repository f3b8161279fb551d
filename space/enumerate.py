"""Enumeration of the legal plans of a space into arrays, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ir.batch import PlanBatch
from ir.rules import Setting, legal
from space.axes import Levels, Space

BLOCK = 1 << 16
"""Combinations decoded at a time: a few MB of columns, so that memory does not grow with the space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalPlans:
    """All legal plans of a space."""

    space: Space
    levels: Levels
    """int64[n, axes], in lexicographic order."""
    batch: PlanBatch


def enumerate_legal(space: Space, setting: Setting) -> LegalPlans:
    """Every legal plan of the space."""
    blocks = [levels[legal(space.decode(levels), setting)] for levels in _blocks(space)]
    levels = np.concatenate(blocks)
    return LegalPlans(space=space, levels=levels, batch=space.decode(levels))


def _blocks(space: Space) -> Iterator[Levels]:
    shape = tuple(len(axis.values) for axis in space.axes)
    for start in range(0, space.num_combinations, BLOCK):
        rows = np.arange(start, min(start + BLOCK, space.num_combinations))
        yield np.stack(np.unravel_index(rows, shape), axis=1)
