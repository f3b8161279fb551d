"""Neighbours of a plan: what a local search may try next.

A move gives one axis another value. Where the plan would not be legal with it, the rest
gives way as little as possible: structure, pool sizes and layouts each become the nearest
legal ones that have the new value. Only moves of a role or of a pool change placements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.batch import COLUMNS, HOME, ROLES, PlanBatch, concatenate, fields_of
from ir.errors import InputError
from ir.graph import Op
from ir.plan import SECTIONS
from ir.setting import Setting
from space.axes import Space
from space.enumerate import Case, LegalSpace, legal_space

DEGREES = ("tp", "pp", "cp", "ep")
"""Fields that say how a model is cut up: a repair keeps them before all others."""

OUTWEIGHS = 64.0
"""More than all lesser differences together can add up to."""

GRID = 100_000
"""Choices of pool sizes that a repair looks at, those nearest to what is wanted."""

Indices = NDArray[np.intp]


def neighbours(space: Space, setting: Setting, batch: PlanBatch) -> PlanBatch:
    """The legal plans that one move makes of the only plan of `batch`, without itself.

    Raises:
        InputError: the plan is not a legal one of the space.
    """
    return neighbours_in(legal_space(space, setting), batch)


def neighbours_in(legal: LegalSpace, batch: PlanBatch) -> PlanBatch:
    """The same, in a space that was taken apart before."""
    here = _Here(
        legal=legal,
        plan=batch,
        now={name: int(batch[name][0]) for name in COLUMNS},
        ordered=frozenset(axis.name for axis in legal.space.axes if axis.ordered),
    )
    found = concatenate([batch, *here.relaid(), *here.resized(), *here.restructured()])
    _, first = np.unique(legal.space.encode(found), axis=0, return_index=True)
    return found.take(np.sort(first)[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """A plan and the space around it."""

    legal: LegalSpace
    plan: PlanBatch
    """A single one."""
    now: dict[str, int]
    """Its value in every column."""
    ordered: frozenset[str]
    """Columns whose values have an order."""

    def has(self, op: Op) -> bool:
        """Whether the plan has a section."""
        return bool(self.plan.has(op)[0])

    def steps(self, column: str, values: NDArray[np.int32]) -> Indices:
        """Which of the ascending values a move may go to: the next ones, or of mere labels all others."""
        now = self.now[column]
        if column not in self.ordered:
            return np.flatnonzero(values != now)
        below, above = np.flatnonzero(values < now), np.flatnonzero(values > now)
        return np.concatenate([below[-1:], above[:1]])

    # Layouts

    def relaid(self) -> Iterator[PlanBatch]:
        """Moves on the fields of one section."""
        for op in self.legal.setting.sections:
            if self.has(op):
                yield from self._relaid(op)

    def _relaid(self, op: Op) -> Iterator[PlanBatch]:
        table, home = self.legal.tables[op], HOME[op]
        first, last = table.rows_of(self.now[f"group.{home}"], self.now[f"devices.{home}"], self.now["staleness"])
        rows = table.rows[first:last]
        now = {name: self.now[f"{op}.{name}"] for name in table.fields}
        order = np.argsort(_distance(rows, now), kind="stable")
        for i, name in enumerate(table.fields):
            values, nearest = np.unique(rows[order, i], return_index=True)
            picked = rows[order[nearest[self.steps(f"{op}.{name}", values)]]]
            yield self._changed({f"{op}.{other}": picked[:, j] for j, other in enumerate(table.fields)}, len(picked))
        for name, options in table.free:
            values = np.asarray(options, dtype=np.int32)
            picked = values[self.steps(f"{op}.{name}", values)]
            yield self._changed({f"{op}.{name}": picked}, len(picked))

    def _changed(self, columns: dict[str, NDArray[np.int32]], n: int) -> PlanBatch:
        kept = {name: np.repeat(column, n) for name, column in self.plan.columns.items()}
        return PlanBatch(n, kept | columns)

    # Pools

    def resized(self) -> Iterator[PlanBatch]:
        """Moves on the size of one pool; others give way where the job fixes the sum."""
        structure, case = self._structure()
        sizes = [self.now[f"devices.{roles[0]}"] for roles, _ in case.pools]
        for i, pool in enumerate(case.pools):
            options = np.array(sorted(self.legal.counts_by_size(self.legal.pool_case(pool, case))), dtype=np.int32)
            for step in self.steps(f"devices.{pool[0][0]}", options):
                wanted = [*sizes[:i], int(options[step]), *sizes[i + 1 :]]
                yield from self._settled(structure, wanted, pinned=i)

    def _structure(self) -> tuple[int, Case]:
        """The plan's row among the structures, and its case."""
        columns = self.legal.structures
        same = np.logical_and.reduce([column == self.now[name] for name, column in columns.items()])
        if not same.any():
            raise InputError("neighbours", "must be of a legal plan of the space")
        row = int(np.flatnonzero(same)[0])
        cases, case_of = self.legal.cases
        return row, cases[int(case_of[row])]

    def restructured(self) -> Iterator[PlanBatch]:
        """Moves on placement, staleness, weight sync, fusions and shared models."""
        columns = self.legal.structures
        differs = {name: column != self.now[name] for name, column in columns.items()}
        placing = [name for name in columns if name.startswith(("place.", "group."))]
        moved = np.sum([differs[name] for name in placing], axis=0)
        distance = OUTWEIGHS * moved + np.sum([d for name, d in differs.items() if name not in placing], axis=0)
        found = [
            self._placed(name, distance) if name in placing else self._switched(name, np.where(moved, np.inf, distance))
            for name in columns
        ]
        cases, case_of = self.legal.cases
        for row in np.unique(np.concatenate(found)).tolist():
            yield from self._settled(row, self._wanted(cases[int(case_of[row])]))

    def _placed(self, name: str, distance: NDArray[np.float64]) -> Indices:
        """For every other pool (or group) that a role may go to, all the nearest structures."""
        column = self.legal.structures[name]
        rows = [np.flatnonzero(column == value) for value in np.unique(column) if value != self.now[name]]
        return np.concatenate([np.empty(0, np.intp), *(r[distance[r] == distance[r].min()] for r in rows)])

    def _switched(self, name: str, distance: NDArray[np.float64]) -> Indices:
        """The nearest structure for every value that a column may step to while pools stay."""
        rows = np.flatnonzero(np.isfinite(distance))
        rows = rows[np.argsort(distance[rows], kind="stable")]
        values, nearest = np.unique(self.legal.structures[name][rows], return_index=True)
        return rows[nearest[self.steps(name, values)]]

    def _wanted(self, case: Case) -> list[int]:
        """Sizes for the pools of another structure: a pool that is split is shared out evenly, one that is joined
        keeps its size."""
        origins = [self.now[f"place.{roles[0]}"] for roles, _ in case.pools]
        sizes = [self.now[f"devices.{ROLES[origin]}"] for origin in origins]
        return [max(size // origins.count(origin), 1) for origin, size in zip(origins, sizes, strict=True)]

    # Repair

    def _settled(self, structure: int, wanted: list[int], pinned: int | None = None) -> Iterator[PlanBatch]:
        """The plan nearest to this one with a structure, and the wanted pool sizes or the nearest to them."""
        cases, case_of = self.legal.cases
        case = cases[int(case_of[structure])]
        sizes = self._nearest_sizes(case, np.array(wanted), pinned)
        if sizes is None:
            return
        columns = {name: int(column[structure]) for name, column in self.legal.structures.items()}
        for (roles, group), size in zip(case.pools, sizes, strict=True):
            columns |= {f"devices.{role}": size for role in roles}
            for op in (op for op in case.sections if HOME[op] in roles):
                layout = self._layout(op, group, size, case.staleness)
                columns |= {f"{op}.{name}": value for name, value in layout.items()}
        yield PlanBatch(1, {name: np.array([value], dtype=np.int32) for name, value in columns.items()})

    def _nearest_sizes(self, case: Case, wanted: NDArray[np.int64], pinned: int | None) -> list[int] | None:
        """The sizes that fit, with fewest and smallest differences from those wanted; None if there are none."""
        most = max(int(GRID ** (1 / len(wanted))), 1)
        options = []
        for i, pool in enumerate(case.pools):
            sizes = np.array(sorted(self.legal.counts_by_size(self.legal.pool_case(pool, case))), dtype=np.int64)
            sizes = sizes[sizes == wanted[i]] if i == pinned else sizes
            options.append(sizes[np.argsort(abs(sizes - wanted[i]), kind="stable")][:most])
        grid = np.stack(np.meshgrid(*options, indexing="ij"), axis=-1).reshape(-1, len(wanted))
        grid = grid[self.legal.fit(case, grid)]
        if len(grid) == 0:
            return None
        cost = OUTWEIGHS * (grid != wanted).sum(axis=1) + _octaves(grid, wanted)
        return [int(size) for size in grid[np.argmin(cost)]]

    def _layout(self, op: Op, group: int, devices: int, staleness: int) -> dict[str, int]:
        """The legal layout of a section nearest to the one it has, or to a like section's where it is new."""
        table = self.legal.tables[op]
        first, last = table.rows_of(group, devices, staleness)
        model = self._model(op)
        free = {name: model[name] if model.get(name) in options else options[0] for name, options in table.free}
        rows = table.rows[first:last]
        start = {name: model.get(name, int(rows[0, i])) for i, name in enumerate(table.fields)}
        best = rows[int(np.argmin(_distance(rows, start)))]
        return free | {name: int(best[i]) for i, name in enumerate(table.fields)}

    def _model(self, op: Op) -> dict[str, int]:
        """Fields of the plan's section, or of the one most like it: of its kind, then of its pool."""
        likeness = {
            other: (other == op, SECTIONS[other] is SECTIONS[op], HOME[other] == HOME[op])
            for other in self.legal.setting.sections
            if self.has(other)
        }
        like = max(likeness, key=lambda other: likeness[other])
        return {name: self.now[f"{like}.{name}"] for name in fields_of(like)}


def _distance(rows: NDArray[np.int32], here: dict[str, int]) -> NDArray[np.float64]:
    """How unlike a layout others are: by the degrees that differ, then by other fields, then by how far they are."""
    target = np.array(list(here.values()), dtype=np.int64)
    weights = np.array([OUTWEIGHS if name in DEGREES else 1.0 for name in here])
    return np.asarray((rows != target) @ weights + _octaves(rows, target) / OUTWEIGHS**2)


def _octaves(rows: NDArray[np.integer], here: NDArray[np.integer]) -> NDArray[np.float64]:
    """Sum of the differences in powers of two."""
    return np.asarray(np.abs(np.log2((rows + 1) / (here + 1))).sum(axis=1))
