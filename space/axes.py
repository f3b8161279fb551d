"""Axes of the design space: each is a column of `PlanBatch` with the values it may take.

An axis belongs to a section of the plan, or to the plan's structure, and is active where
its owner is. A plan's *levels* are the indices of its values on the axes, 0 on axes that
are not active. Encoding plans as levels and back is a bijection on the space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.batch import COLUMNS, PlanBatch, owner_of
from ir.errors import InputError
from ir.graph import Op
from ir.plan import SECTIONS

Levels = NDArray[np.int64]

VERSION = "2"
"""Version of the axes in traces; a change that old rows cannot be read under needs a new one."""

ADDED = ("shard", "schedule", "draft_tokens")
"""Fields that plans of this version did not have at first: rows without them are of plans that have 0 there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One degree of freedom."""

    name: str
    """A column of `PlanBatch`."""
    values: tuple[int, ...]
    """Ascending."""
    ordered: bool
    """Whether neighbouring values behave alike; otherwise they are mere labels."""

    @property
    def is_added(self) -> bool:
        """Whether older traces lack it."""
        return self.name.rpartition(".")[2] in ADDED

    @property
    def owner(self) -> Op | None:
        """The section it belongs to, None for the plan's structure."""
        return owner_of(self.name)

    def active(self, batch: PlanBatch) -> NDArray[np.bool_]:
        """Where its owner is there, bool[n]: the section, or the role that is placed."""
        if self.owner is not None:
            return batch.has(self.owner)
        what, _, role = self.name.partition(".")
        if what in ("place", "group", "devices"):
            return np.asarray(batch[f"devices.{role}"] > 0)
        return np.ones(len(batch), dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The free axes in the order of `COLUMNS`, and the columns that have just one value."""

    axes: tuple[Axis, ...]
    constants: Mapping[str, int]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        assert names == sorted(names, key=COLUMNS.index), "axes must be in the order of the columns"

    def __getitem__(self, name: str) -> tuple[int, ...]:
        """Values of a column; (0,) where it is no part of the space."""
        for axis in self.axes:
            if axis.name == name:
                return axis.values
        return (self.constants.get(name, 0),)

    @property
    def num_combinations(self) -> int:
        """All combinations of values, legal or not."""
        total = 1
        for axis in self.axes:
            total *= len(axis.values)
        return total

    def holds(self, batch: PlanBatch) -> NDArray[np.bool_]:
        """Which plans have levels, bool[n]."""
        values = {axis.name: axis.values for axis in self.axes}
        held = np.ones(len(batch), dtype=np.bool_)
        for name in COLUMNS:
            if name in values or name in self.constants or name in batch.columns:
                axis = Axis(name=name, values=values.get(name, (self.constants.get(name, 0),)), ordered=False)
                held &= ~axis.active(batch) | np.isin(batch[name], axis.values)
        return held

    def encode(self, batch: PlanBatch) -> Levels:
        """Levels int64[n, axes] of plans.

        Raises:
            InputError: a value that its column does not have here.
        """
        free = {axis.name for axis in self.axes}
        for name in COLUMNS:
            if name not in free and (name in self.constants or name in batch.columns):
                self._check_constant(batch, name)
        columns = [self._levels(axis, batch) for axis in self.axes]
        return np.stack(columns, axis=1) if columns else np.zeros((len(batch), 0), dtype=np.int64)

    def _levels(self, axis: Axis, batch: PlanBatch) -> Levels:
        values = np.asarray(axis.values)
        column = np.where(axis.active(batch), batch[axis.name], values[0])
        level = np.minimum(np.searchsorted(values, column), len(values) - 1)
        if not np.array_equal(values[level], column):
            got = int(column[values[level] != column][0])
            raise InputError(f"axis {axis.name}", f"must be one of {list(axis.values)}", got)
        return np.asarray(level, dtype=np.int64)

    def _check_constant(self, batch: PlanBatch, name: str) -> None:
        wanted, column = self.constants.get(name, 0), batch[name]
        active = Axis(name=name, values=(wanted,), ordered=False).active(batch)
        wrong = active & (column != wanted)
        if wrong.any():
            raise InputError(f"axis {name}", f"must be {wanted} in this space", int(column[wrong][0]))

    def decode(self, levels: Levels) -> PlanBatch:
        """Plans of levels int64[n, axes]."""
        n = len(levels)
        columns = {name: np.full(n, value, dtype=np.int32) for name, value in self.constants.items()}
        for i, axis in enumerate(self.axes):
            columns[axis.name] = np.asarray(axis.values, dtype=np.int32)[levels[:, i]]
        return blank_inactive(PlanBatch(n, {name: columns[name] for name in COLUMNS if name in columns}))


def blank_inactive(batch: PlanBatch) -> PlanBatch:
    """The same plans with 0 in the columns of sections that they do not have."""
    absent = {op: ~batch.has(op) for op in SECTIONS}
    columns = dict(batch.columns)
    for name, column in batch.columns.items():
        op = owner_of(name)
        if op is not None and absent[op].any():
            columns[name] = np.where(absent[op], np.int32(0), column)
    return PlanBatch(len(batch), columns)
