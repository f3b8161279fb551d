"""Layouts of a section that can be part of a best plan: those that no other beats in time and memory.

A section's layouts are priced all, for all pools at once, but for what a bound rules out:
a stage that alone takes longer than a known step is in no faster plan. Layouts are
compared within a class of equal degrees only, since what lies between sections (weights
that are laid out anew, weights that travel to engines) depends on those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import STREAMED, section_cost
from analytic.setup import Setup
from ir.batch import CODES
from ir.graph import Op
from ir.plan import SECTIONS, Update
from space.enumerate import LegalSpace
from space.tables import KEYS, Key, SectionTable

Float = NDArray[np.float64]
Rows = NDArray[np.int64]

FASTEST = {"recompute": CODES["recompute"].index("none"), "offload": CODES["offload"].index("none")}
"""Values of free fields that no other is faster than: what they save is memory."""

BEST = {"precision": CODES["precision"].index("fp8")}
"""Values of free fields that no other is faster or smaller than."""

CLASS = ("tp", "pp", "ep", "zero")
"""Fields that costs between sections depend on."""

PIVOTS = 24
"""Layouts that all others are compared with first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Layouts of a section on one pool, fastest first; arrays of one length."""

    seconds: Float
    """Least that the stage can take: weights laid out anew where they lie are not counted."""
    latency: Float
    resident: Float
    """Bytes that stay, and that come and go, resharded weights not counted: the least that they can be."""
    transient: Float
    numbers: Rows
    """Of the layouts among those that are legal on the pool."""

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Front:
        """The given ones."""
        return Front(
            seconds=self.seconds[rows],
            latency=self.latency[rows],
            resident=self.resident[rows],
            transient=self.transient[rows],
            numbers=self.numbers[rows],
        )


@dataclass(frozen=True, kw_only=True)
class Fronts:
    """The fronts of every section and pool, for plans that are faster than `bound` seconds a step."""

    legal: LegalSpace
    setup: Setup
    bound: float
    _found: dict[tuple[Op, bool], dict[Key, Front]] = field(default_factory=dict)

    def of(self, op: Op, key: Key, *, streamed: bool) -> Front | None:
        """The front of a section on a pool, None if no layout is fast and small enough."""
        table = self.legal.tables[op]
        # Only a pool that waits for generation takes its batch in small pieces.
        piecemeal = streamed and op in STREAMED and key[2] == 0
        if (op, piecemeal) not in self._found:
            self._found[(op, piecemeal)] = self._all(table, piecemeal)
        return self._found[(op, piecemeal)].get((*key[:2], key[2] if table.by_staleness else 0))

    def _all(self, table: SectionTable, streamed: bool) -> dict[Key, Front]:
        """Fronts of all pools of a section."""
        if len(table.rows) == 0:
            return {}
        keys = np.empty((len(table.rows), len(KEYS)), dtype=np.int32)
        first = np.empty(len(table.rows), dtype=np.int64)
        for key, (begin, end) in table.span.items():
            keys[begin:end], first[begin:end] = key, begin
        fast = _free_levels(table, self.legal, fastest=True)
        rows = np.arange(len(table.rows))
        plain = self._price(table, keys, rows, np.zeros(len(rows), dtype=np.int64) + fast[0], streamed)
        hopeful = rows[plain.seconds < self.bound]
        levels = _free_levels(table, self.legal, fastest=False)
        rows, free = np.repeat(hopeful, len(levels)), np.tile(levels, len(hopeful))
        priced = self._price(table, keys, rows, free, streamed)
        numbers = (rows - first[rows]) * table.num_free + free
        good = (priced.seconds < self.bound) & (priced.resident + priced.transient <= self._room(keys[rows, 0]))
        return _by_pool(keys[rows][good], _classes(table)[rows][good], _numbered(priced, numbers).take(good))

    def _room(self, group: NDArray[np.int32]) -> Float:
        """Bytes that a plan may take of a device, what every worker needs left out."""
        margin = 1.0 - self.setup.job.limits.memory_margin
        machines = self.setup.machines
        room = [m.device.memory_bytes * margin - m.device.base_memory_bytes for m in machines]
        return np.asarray(np.array(room)[group])

    def _price(self, table: SectionTable, keys: NDArray[np.int32], rows: Rows, free: Rows, streamed: bool) -> Front:
        x = {name: table.rows[rows, i] for i, name in enumerate(table.fields)}
        for name, values in reversed(table.free):
            free, level = np.divmod(free, len(values))
            x[name] = np.asarray(values, dtype=np.int32)[level]
        x |= {name: keys[rows, i] for i, name in enumerate(KEYS)}
        mask = np.full(len(rows), True) if streamed else None
        cost = section_cost(self.setup, table.op, x, streamed=mask)
        zero = np.zeros(len(rows))
        transient = {name: size for name, size in cost.transient.items() if not name.startswith("resharded")}
        return Front(
            seconds=cost.seconds,
            latency=cost.latency,
            resident=sum(cost.resident.values(), zero),
            transient=sum(transient.values(), zero),
            numbers=rows,
        )


def _numbered(front: Front, numbers: Rows) -> Front:
    return Front(
        seconds=front.seconds,
        latency=front.latency,
        resident=front.resident,
        transient=front.transient,
        numbers=numbers,
    )


def _classes(table: SectionTable) -> NDArray[np.int64]:
    """A number for each row's class."""
    names = [name for name in CLASS if name in table.fields]
    code = np.zeros(len(table.rows), dtype=np.int64)
    for name in names:
        code = code * 4096 + table.rows[:, table.fields.index(name)]
    return code


def _free_levels(table: SectionTable, legal: LegalSpace, *, fastest: bool) -> Rows:
    """Combinations of the free fields that are worth pricing; only the fastest of all if asked."""
    code = np.zeros(1, dtype=np.int64)
    for name, values in table.free:
        code = (code[:, None] * len(values) + _levels(table.op, name, values, fastest)[None, :]).reshape(-1)
    return code


def _levels(op: Op, name: str, values: tuple[int, ...], fastest: bool) -> Rows:
    if name in BEST and BEST[name] in values:
        return np.array([values.index(BEST[name])])
    if fastest and SECTIONS[op] is Update and FASTEST.get(name) in values:
        return np.array([values.index(FASTEST[name])])
    if fastest:
        # The one with the most memory to use; for a pass, weights that stay.
        return np.array([0 if name == "offload" else len(values) - 1])
    return np.arange(len(values))


def _by_pool(keys: NDArray[np.int32], classes: NDArray[np.int64], layouts: Front) -> dict[Key, Front]:
    """Split layouts by pool and keep, class by class, those that no other beats."""
    if len(keys) == 0:
        return {}
    _, code = np.unique(keys, axis=0, return_inverse=True)
    order = np.lexsort((layouts.seconds, classes, code.reshape(-1)))
    code, classes, keys, layouts = code.reshape(-1)[order], classes[order], keys[order], layouts.take(order)
    edges = np.flatnonzero(np.append(True, code[1:] != code[:-1]))
    found: dict[Key, Front] = {}
    for begin, end in zip(edges.tolist(), [*edges[1:].tolist(), len(code)], strict=True):
        part = layouts.take(np.arange(begin, end))
        kept = part.take(_unbeaten(classes[begin:end], part))
        group, devices, staleness = keys[begin].tolist()
        found[(group, devices, staleness)] = kept.take(np.argsort(kept.seconds, kind="stable"))
    return found


def _unbeaten(classes: NDArray[np.int64], layouts: Front) -> NDArray[np.bool_]:
    """Which layouts no other of their class beats in everything. Classes are consecutive, fastest first."""
    keep = np.ones(len(classes), dtype=bool)
    points = np.stack([layouts.seconds, layouts.latency, layouts.resident, layouts.transient], axis=1)
    edges = np.flatnonzero(np.append(True, classes[1:] != classes[:-1]))
    for begin, end in zip(edges.tolist(), [*edges[1:].tolist(), len(classes)], strict=True):
        keep[begin:end] = _front(points[begin:end])
    return keep


def _front(points: Float) -> NDArray[np.bool_]:
    """Rows of points float64[n, d], sorted by the first coordinate, that no earlier or equal row beats."""
    alive = np.ones(len(points), dtype=bool)
    for row in range(len(points)):
        if alive[row]:
            beaten = (points[row + 1 :] >= points[row]).all(axis=1)
            alive[row + 1 :] &= ~beaten
    return alive
