"""Corrections of closed forms: tables over logarithmic axes, made from measured kernels and interpolated in log space.

A kernel's seconds are a closed form times what its table says of it. A ratio varies far less than seconds do, so a few
hundred points hold a device's kernels; beyond the edges the nearest value stands and the closed form extrapolates.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Float = NDArray[np.float64]

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """Points of one coordinate."""

    points: Float
    """log2 of the coordinate, ascending."""
    step: float
    """Between points where they are evenly spaced, which arrays are found in fastest; else 0."""

    @staticmethod
    def of(points: list[float]) -> Axis:
        """From its points."""
        at = np.array(points, dtype=np.float64)
        even = np.ptp(np.diff(at)) < 1e-6
        return Axis(at, float(at[1] - at[0]) if even else 0.0)

    def cell(self, coordinate: Float | float) -> tuple[NDArray[np.int32], Float]:
        """(point below, share of the way to the next) of each coordinate; beyond the ends, the end."""
        at = np.log2(np.maximum(coordinate, 1e-30))
        last = len(self.points) - 2
        if self.step:
            way = np.clip((at - self.points[0]) / self.step, 0.0, last + 1.0)
            index = np.minimum(way.astype(np.int32), last)
            return index, way - index
        at = np.clip(at, self.points[0], self.points[-1])
        index = np.clip(np.searchsorted(self.points, at, side="right") - 1, 0, last).astype(np.int32)
        return index, (at - self.points[index]) / (self.points[index + 1] - self.points[index])


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Natural logarithms of measured over closed-form seconds at the points of a grid."""

    axes: tuple[Axis, ...]
    values: Float
    """One dimension an axis."""

    def factor(self, *coordinates: Float | float) -> Float:
        """What closed-form seconds are multiplied by: multilinear in the logarithms, clamped at the edges.

        Args:
            coordinates: One an axis, positive: arrays of one shape, or numbers, which cost next to nothing.
        """
        values, cells = self.values, list[tuple[NDArray[np.int32], Float]]()
        for axis, coordinate in zip(self.axes, coordinates, strict=True):
            index, share = axis.cell(coordinate)
            if np.ndim(coordinate):
                cells.append((index, share))
            else:
                values = _between(values, int(index), float(share), len(cells))
        return np.asarray(np.exp(_interpolated(values, cells)))


def _between(values: Float, index: int, share: float, dimension: int) -> Float:
    """The grid without one dimension, at a place along it."""
    low, high = values.take(index, axis=dimension), values.take(index + 1, axis=dimension)
    return np.asarray(low + share * (high - low))


def _interpolated(values: Float, cells: list[tuple[NDArray[np.int32], Float]]) -> Float:
    """At a cell and share along every dimension, the last one first: each step halves the corners that are left."""
    if not cells:
        return values
    first, offsets, flat = np.int32(0), [0], values.reshape(-1)
    for size, (index, _) in zip(values.shape, cells, strict=True):
        first = first * size + index
        offsets = [offset * size + step for offset in offsets for step in (0, 1)]
    found: list[Float] = [np.asarray(flat[offset:].take(first)) for offset in offsets]
    for _, share in reversed(cells):
        found = [np.asarray(low + share * (high - low)) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


@cache
def grid(name: str) -> Grid | None:
    """The table of this name, such as `gemm/h100/bf16`; None if nothing was measured."""
    table, rows = _file()
    if name not in rows:
        return None
    axes = tuple(Axis.of(axis) for axis in table["axes"][rows[name]].as_py())
    # Stored in thousandths: far below the noise of what was measured.
    values = table["milli_log"][rows[name]].values.to_numpy().astype(np.float64) / 1e3
    return Grid(axes, values.reshape([len(axis.points) for axis in axes]))


@cache
def _file() -> tuple[Any, dict[str, int]]:
    """The file's rows, and the number of each by name."""
    # A small file: neither data sets nor threads, which `read_table` prepares for.
    table = pq.ParquetFile(DATA / "grids.parquet").read(use_threads=False)  # type: ignore[no-untyped-call, unused-ignore]
    return table, {name: row for row, name in enumerate(table["name"].to_pylist())}


@cache
def kernel_facts() -> dict[str, Any]:
    """`data/kernels.toml`: which device's tables stand for which, and constants of kernels and links."""
    facts: dict[str, Any] = tomllib.loads((DATA / "kernels.toml").read_text(encoding="utf-8"))
    return facts


@cache
def tables_of(device: str) -> str | None:
    """The name under which a device's kernels, or those of its nearest relative, were measured."""
    found = kernel_facts()["tables"].get(device)
    return None if found is None else str(found)
