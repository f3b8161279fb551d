"""Measured kernels as arrays of shapes: read from files, by device, with what the model predicts beside them.

A third of the shapes is held out: no table of the model is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from analytic.fit import machine_of
from analytic.setup import Machine
from ir.systems import system

Float = NDArray[np.float64]
Columns = dict[str, Any]

SYSTEMS = {
    "A100-SXM4-80GB": ("dgx-a100", 8, "a100"),
    "H100-SXM5-80GB": ("dgx-h100", 8, "h100"),
    "H200-SXM5-141GB": ("dgx-h200", 8, "h200"),
    "B200-SXM6-180GB": ("hgx-b200", 8, "b200"),
    "B300-SXM6": ("hgx-b300", 8, "b300"),
    "GB200-NVL72": ("gb200-nvl72", 4, "gb200"),
    "GB300-NVL72": ("gb300-nvl72", 4, "gb300"),
    "L40S": ("l40s", 8, "l40s"),
    "RTX-PRO-6000-Server": ("rtx-pro-6000", 8, "rtx-pro-6000"),
}
"""By the measurements' name of a device: a system that has it, devices of its innermost level, its tables' name."""

PRECISIONS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Measured shapes of one table, arrays of one length."""

    coordinates: tuple[Float, ...]
    """Of the table."""
    closed: Float
    """Seconds of the closed form."""
    predicted: Float
    measured: Float
    work: Float
    """What a constant rate would divide by."""
    held_out: NDArray[np.bool_]
    group: str

    def take(self, rows: NDArray[np.bool_]) -> Shapes:
        """Some of them."""
        picked = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name not in ("coordinates", "group")}
        return Shapes(coordinates=tuple(c[rows] for c in self.coordinates), group=self.group, **picked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A family of tables."""

    tables: Callable[[Path], Iterator[tuple[str, Shapes]]]
    """(name, shapes) of each."""
    axes: tuple[Float, ...]
    stiffness: float = 0.3


def is_held_out(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """A third of the shapes, by a multiplicative hash of what they are."""
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed = mixed * np.uint64(1000003) + np.asarray(column).astype(np.uint64)
    return np.asarray((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) % np.uint64(3) == 0


@cache
def machine(gpu: str, devices: int | None = None) -> Machine:
    """A known machine with this device."""
    name, node, _ = SYSTEMS[gpu]
    return machine_of(system(name, devices or node, where=gpu).groups[0])


def parts(folder: Path, file: str, by: Sequence[str], **only: Any) -> Iterator[tuple[tuple[Any, ...], Columns]]:
    """(values of `by`, columns) of the rows of a file whose columns have given values (a list: one of them)."""
    path = accuracy.find(folder, file)
    if path is None:
        return
    table = pq.read_table(path)
    for name, value in only.items():
        table = table.filter(pc.is_in(table[name], pa.array(value if isinstance(value, list) else [value])))
    columns = {name: _plain(table[name]) for name in table.column_names}
    if not len(table):
        return
    keys = np.array([str(key) for key in zip(*(columns[name].tolist() for name in by), strict=True)])
    for key in np.unique(keys):
        rows = np.flatnonzero(keys == key)
        part = {name: column[rows] for name, column in columns.items()}
        if part.get("gpu", [""])[0] in SYSTEMS:
            yield tuple(part[name][0] for name in by), part


def _plain(column: pa.ChunkedArray) -> NDArray[Any]:
    values = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found


SHAPES = {
    "gemm": ("n", "k"),
    "attention_prefill": ("batch", "q_heads", "kv_heads", "seq"),
    "attention_decode": ("batch", "q_heads", "kv_heads", "kv_len"),
    "attention_mla": ("batch", "seq", "past", "heads"),
    "moe_experts": ("hidden", "inter", "moe_tp", "moe_ep", "experts"),
    "collectives": ("gpus", "bytes"),
    "ep_alltoall": ("tokens_per_gpu", "hidden", "topk", "experts"),
}
"""By file, the columns that make a shape: all of its rows are held out, or none."""


def held(part: Columns, file: str) -> NDArray[np.bool_]:
    return np.asarray(part["held_out"]) if "held_out" in part else is_held_out(*(part[c] for c in SHAPES[file]))


def floats(part: Columns, *names: str) -> list[Float]:
    return [np.asarray(part[name], dtype=np.float64) for name in names]


def log2(*values: float) -> Float:
    return np.log2(np.array(values, dtype=np.float64))
