"""Makes `analytic/data/grids.parquet` from a folder of measured kernel tables: python tests/make_grids.py DIR.
With a second folder, writes there the rows that the tests keep.

Each table is a regression on multilinear basis functions of log2 coordinates, robust, and smooth where shapes are
few. Only shapes of the fitted two thirds are used (see `measured_shapes.is_held_out`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import spsolve

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
import accuracy  # noqa: E402
import measured_kernels  # noqa: E402
import measured_links  # noqa: E402
from measured_shapes import SHAPES, is_held_out  # noqa: E402

from analytic.grids import DATA  # noqa: E402

Float = NDArray[np.float64]
Axes = Sequence[Float]


def fit_grid(coordinates: Sequence[Float], log_ratio: Float, axes: Axes, stiffness: float = 0.3) -> Float:
    """Values at the points of a grid of log2 axes, by iteratively reweighted least squares (close to least absolute
    deviations beyond 3 %), with a penalty on curvature, and a slight one on slope."""
    design, penalty = _design([np.log2(c) for c in coordinates], axes), _penalty(axes, stiffness)
    normal = penalty.T @ penalty
    weights = np.ones(len(log_ratio))
    for _ in range(6):
        left = design.T @ sp.diags_array(weights) @ design + normal
        values = spsolve(left.tocsc(), design.T @ (weights * log_ratio))
        weights = 0.1 / np.maximum(np.abs(log_ratio - design @ values), 0.03)
    return np.asarray(values)


def _design(coordinates: Sequence[Float], axes: Axes) -> sp.csr_array:
    rows = len(coordinates[0])
    column, weight = np.zeros((rows, 1), dtype=np.int64), np.ones((rows, 1))
    for at, axis in zip(coordinates, axes, strict=True):
        inside = np.clip(at, axis[0], axis[-1])
        index = np.clip(np.searchsorted(axis, inside, side="right") - 1, 0, len(axis) - 2)
        share = ((inside - axis[index]) / (axis[index + 1] - axis[index]))[:, None]
        low = column * len(axis) + index[:, None]
        column, weight = np.hstack([low, low + 1]), np.hstack([weight * (1 - share), weight * share])
    shape = (rows, int(np.prod([len(axis) for axis in axes])))
    return sp.csr_array((weight.ravel(), (np.repeat(np.arange(rows), weight.shape[1]), column.ravel())), shape=shape)


def _penalty(axes: Axes, stiffness: float) -> sp.csr_array:
    sizes, parts = [len(axis) for axis in axes], []
    for along, size in enumerate(sizes):
        slope = sp.diags_array([1.0, -1.0], offsets=[0, 1], shape=(size - 1, size), dtype=np.float64)
        parts.append(0.2 * stiffness * _along(slope, along, sizes))
        if size > 2:
            bend = sp.diags_array([1.0, -2.0, 1.0], offsets=[0, 1, 2], shape=(size - 2, size), dtype=np.float64)
            parts.append(stiffness * _along(bend, along, sizes))
    return sp.vstack(parts).tocsr()


def _along(matrix: sp.dia_array, along: int, sizes: list[int]) -> sp.coo_array:
    made = sp.eye_array(1)
    for dimension, size in enumerate(sizes):
        made = sp.kron(made, matrix if dimension == along else sp.eye_array(size))
    return made


def grids(folder: Path) -> Iterator[tuple[str, Axes, Float]]:
    """(name, axes, values) of every table that the folder's files give."""
    for kernel in measured_kernels.KERNELS + measured_links.KERNELS:
        for name, shapes in kernel.tables(folder):
            fitted = shapes.take(~shapes.held_out)
            if len(fitted.measured):
                ratio = np.log(fitted.measured / fitted.closed)
                yield name, kernel.axes, fit_grid(fitted.coordinates, ratio, kernel.axes, kernel.stiffness)


SAMPLES = {"gemm": 24000, "attention_prefill": 4000, "attention_decode": 4000, "attention_mla": 4000,
           "moe_experts": 5000, "collectives": 30000, "ep_alltoall": 6000}  # fmt: skip
"""Rows of each file that the tests keep, drawn at random."""


def write_samples(folder: Path, out: Path, rows: dict[str, int]) -> None:
    """Some rows of each file, with whether their shapes are held out."""
    for file, most in rows.items():
        table = pq.read_table(accuracy.find(folder, f"{file}.parquet"))
        shape = [table[name].to_numpy() for name in SHAPES[file]]
        table = table.append_column("held_out", pa.array(is_held_out(*shape)))
        picked = np.sort(np.random.default_rng(0).permutation(len(table))[:most])
        pq.write_table(table.take(pa.array(picked)), out / f"{file}.parquet", compression="zstd", compression_level=19)


def main() -> None:
    if len(sys.argv) > 2:
        write_samples(Path(sys.argv[1]), Path(sys.argv[2]), SAMPLES)
    else:
        write_grids(Path(sys.argv[1]))


def write_grids(folder: Path) -> None:
    """The model's data file."""
    rows = []
    for name, axes, values in grids(folder):
        rows.append({"name": name, "axes": [axis.tolist() for axis in axes], "milli_log": np.round(1e3 * values)})
        print(name, len(values), flush=True)
    schema = pa.schema(
        [
            ("name", pa.string()),
            ("axes", pa.list_(pa.list_(pa.float32()))),
            ("milli_log", pa.list_(pa.int16())),
        ]
    )
    made = pa.table(
        {
            "name": [row["name"] for row in rows],
            "axes": [row["axes"] for row in rows],
            "milli_log": [row["milli_log"].astype(np.int16).tolist() for row in rows],
        },
        schema=schema,
    )
    pq.write_table(made, DATA / "grids.parquet", compression="zstd", compression_level=19)


if __name__ == "__main__":
    main()
