"""A plan with other layouts of one of its sections."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ir.batch import COLUMNS, HOME, PlanBatch
from ir.graph import Op
from space.enumerate import LegalSpace

LAYOUTS = 8192
"""Layouts of a section that are looked at, those with fewest changes."""


def relaid(legal: LegalSpace, plan: PlanBatch) -> Iterator[PlanBatch]:
    """A plan, a batch of one, with every other layout of one of its sections, those with fewest changes."""
    for op in legal.setting.sections:
        if plan.has(op)[0]:
            rows = _layouts(legal, plan, op)
            n = len(next(iter(rows.values())))
            yield PlanBatch(n, {name: np.repeat(plan[name], n) for name in COLUMNS} | rows)


def _layouts(legal: LegalSpace, plan: PlanBatch, op: Op) -> dict[str, NDArray[np.int32]]:
    """Columns of a section's layouts on its pool."""
    table, home = legal.tables[op], HOME[op]
    first, last = table.rows_of(
        int(plan[f"group.{home}"][0]), int(plan[f"devices.{home}"][0]), int(plan["staleness"][0])
    )
    here = np.array([plan[f"{op}.{name}"][0] for name in table.fields])
    rows = table.rows[first:last]
    rows = rows[np.argsort((rows != here).sum(axis=1), kind="stable")[: max(LAYOUTS // table.num_free, 1)]]
    columns = {f"{op}.{name}": np.repeat(rows[:, i], table.num_free) for i, name in enumerate(table.fields)}
    grid = np.meshgrid(*(np.asarray(values, dtype=np.int32) for _, values in table.free), indexing="ij")
    free = {f"{op}.{name}": values.reshape(-1) for (name, _), values in zip(table.free, grid, strict=True)}
    return columns | {name: np.tile(values, len(rows)) for name, values in free.items()}
