"""Kernels, collectives and expert exchanges against measured tables, on shapes that no table of the model was made from.

Files may have a column `held_out`; its rows alone are then reported. Without it all rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import pyarrow.parquet as pq
from accuracy import Evaluation, constant_rate
from measured_kernels import (
    decode_tables,
    experts_tables,
    gemm_tables,
    latent_decode_tables,
    latent_prefill_tables,
    prefill_tables,
    uneven_experts_tables,
)
from measured_links import collective_tables, custom_tables, exchange_tables
from measured_shapes import Shapes
from numpy.typing import NDArray


def _evaluation(found: Iterator[tuple[str, Shapes]], keep: Callable[[Shapes], NDArray[np.bool_]]) -> Evaluation | None:
    picked = [shapes.take(keep(shapes)) for _, shapes in found]
    picked = [shapes for shapes in picked if len(shapes.measured)]
    if not picked:
        return None
    predicted, measured, work = (
        np.concatenate([getattr(shapes, name) for shapes in picked]) for name in ("predicted", "measured", "work")
    )
    groups = [group for shapes in picked for group in [shapes.group] * len(shapes.measured)]
    return Evaluation(
        predicted=predicted, measured=measured, groups=groups, baseline=constant_rate(work, measured, groups)
    )


def _reported(shapes: Shapes, folder: Path, file: str) -> NDArray[np.bool_]:
    """Held-out rows of a file that says which they are, else all."""
    path = accuracy.find(folder, file)
    marked = path is not None and "held_out" in pq.read_schema(path).names
    return shapes.held_out if marked else np.ones(len(shapes.measured), dtype=bool)


def _set(
    tables: Callable[[Path], Iterator[tuple[str, Shapes]]], file: str, which: str = "",
    keep: Callable[[Shapes], NDArray[np.bool_]] = lambda shapes: np.ones(len(shapes.measured), dtype=bool),
    left_out: LeftOut | None = None,
) -> Callable[[Path], Evaluation | None]:  # fmt: skip
    def evaluate(folder: Path) -> Evaluation | None:
        found = ((name, shapes) for name, shapes in tables(folder) if which in name)
        made = _evaluation(found, lambda shapes: keep(shapes) & _reported(shapes, folder, file))
        if made is None or left_out is None:
            return made
        return replace(made, left_out=_count(folder, file, left_out.rows), why_left_out=left_out.why)

    return evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows of the same kind that are not priced."""

    rows: dict[str, list[Any]]
    """By column, the values that these have."""
    why: str


def _count(folder: Path, file: str, rows: dict[str, list[Any]]) -> int:
    path = accuracy.find(folder, file)
    assert path is not None
    table = pq.read_table(path, filters=[(name, "in", values) for name, values in rows.items()])
    held = "held_out" not in table.column_names or table["held_out"]
    return int(np.sum(np.ones(len(table), dtype=bool) & np.asarray(held)))


def _rows_of(at_least: float) -> Callable[[Shapes], NDArray[np.bool_]]:
    return lambda shapes: shapes.coordinates[0] >= at_least


_FP8 = LeftOut(
    rows={"dtype": ["fp8", "fp8_block"], "framework": ["sglang"]},
    why="SGLang's kernels, of which the model has no tables; rows of any m",
)
_SLOW_HOST = LeftOut(
    rows={"gpu": ["L40S"], "lib": ["nccl"], "gpus": [4, 8]}, why="L40S over 4 and 8: one host's outlier"
)
_ABSORBED = LeftOut(
    rows={"framework": ["sglang"], "kv_dtype": ["bfloat16"]}, why="SGLang takes the absorbed form always"
)
_OTHER_KERNELS = LeftOut(
    rows={"mode": ["deepep_ht", "deepep_v2_context", "deepep_v2_generation", "trtllm_deepep_ht", "trtllm_deepep_ll"]},
    why="other implementations than DeepEP's own",
)
_UNEVEN = LeftOut(rows={"routing": ["power_law_1.01", "power_law_1.2"]}, why="uneven routing, see experts_uneven")


SETS: dict[str, Callable[[Path], Evaluation | None]] = {
    "gemm_bf16": _set(gemm_tables, "gemm.parquet", "/bf16", _rows_of(1024)),
    "gemm_bf16_small": _set(gemm_tables, "gemm.parquet", "/bf16", lambda s: s.coordinates[0] < 1024),
    "gemm_fp8": _set(gemm_tables, "gemm.parquet", "/fp8", _rows_of(1024), _FP8),
    "prefill": _set(prefill_tables, "attention_prefill.parquet", keep=_rows_of(2048)),
    "decode": _set(decode_tables, "attention_decode.parquet"),
    "mla_prefill": _set(latent_prefill_tables, "attention_mla.parquet", keep=_rows_of(2048), left_out=_ABSORBED),
    "mla_decode": _set(latent_decode_tables, "attention_mla.parquet", left_out=_ABSORBED),
    "experts": _set(experts_tables, "moe_experts.parquet", left_out=_UNEVEN),
    "experts_uneven": _set(uneven_experts_tables, "moe_experts.parquet"),
    "collectives": _set(collective_tables, "collectives.parquet", left_out=_SLOW_HOST),
    "collectives_int8": _set(lambda folder: collective_tables(folder, dtype="int8"), "collectives.parquet"),
    "collectives_other_sources": _set(lambda folder: collective_tables(folder, "vidur"), "collectives.parquet"),
    "engine_all_reduce": _set(custom_tables, "collectives.parquet"),
    "ep_alltoall": _set(exchange_tables, "ep_alltoall.parquet", left_out=_OTHER_KERNELS),
}
