"""Rows of a batch by what they have in common: layouts repeat, and each needs to be priced once only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]

_TABLE = 1 << 18
"""Most codes that a table is made of, which then stays in the cache."""

_FEW = 1 << 11
"""Rows that are sorted sooner than a table is filled."""


def distinct(columns: Iterable[NDArray[Any]], num_rows: int) -> tuple[Rows, Rows]:
    """First row of every different combination of columns [num_rows] of any type, intp[k], and each row's combination,
    intp[num_rows]. Combinations are ordered by the first column, then by the next."""
    code, span = np.zeros(num_rows, dtype=np.intp), 1
    most = _TABLE if num_rows > _FEW else 1 << 62
    for column in columns:
        level, levels = _offsets(column)
        if levels > 1 and span * levels > most:
            (code, span), (level, levels) = _renumbered(code, span), _renumbered(level, levels)
        if levels > 1:
            code, span = (code * levels + level if span > 1 else level), span * levels
    inverse, count = _renumbered(code, span)
    first = np.empty(count, dtype=np.intp)
    # Of equal places the last written stays, so rows are written from the end.
    first[inverse[::-1]] = np.arange(num_rows - 1, -1, -1)
    return first, inverse


Arrays = TypeVar("Arrays", bound=Any)


def at_rows(record: Arrays, rows: Rows) -> Arrays:
    """A record of arrays, at some of their rows."""
    found: Arrays = type(record)(**{field.name: getattr(record, field.name)[rows] for field in fields(record)})
    return found


def grouped(numbers: Rows) -> Iterator[tuple[int, Rows]]:
    """Each different number of a row, intp[n] from 0, and the rows that have it, in order."""
    counts = np.bincount(numbers)
    # Short integers are sorted by counting.
    narrow = np.min_scalar_type(max(len(counts) - 1, 0))
    order = np.argsort(numbers.astype(narrow), kind="stable")
    for number, end in enumerate(np.cumsum(counts).tolist()):
        if counts[number]:
            yield number, order[end - counts[number] : end]


def largest(arrays: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Elementwise, of arrays of one shape, none of which is copied."""
    return reduce(np.maximum, arrays)


def _offsets(column: NDArray[Any]) -> tuple[Rows, int]:
    """Numbers from 0 in the order of a column's values, and how many there may be."""
    if not len(column) or column.strides[0] == 0:
        return np.zeros(len(column), dtype=np.intp), 1
    if column.dtype.kind == "b":
        return column.astype(np.intp), 2
    if column.dtype.kind in "iu":
        low, high = int(column.min()), int(column.max())
        return np.subtract(column, low, dtype=np.intp), high - low + 1
    if (column == column[0]).all():
        return np.zeros(len(column), dtype=np.intp), 1
    return _sorted(column)


def _renumbered(code: Rows, span: int) -> tuple[Rows, int]:
    """Codes below `span` without gaps, in the same order, and how many there are."""
    if span > _TABLE or len(code) <= _FEW:
        return _sorted(code)
    met = np.zeros(span, dtype=bool)
    met[code] = True
    place = np.cumsum(met, dtype=np.intp) - 1
    return place[code], int(place[-1]) + 1


def _sorted(column: NDArray[Any]) -> tuple[Rows, int]:
    values, level = np.unique(column, return_inverse=True)
    return level.reshape(-1), len(values)
