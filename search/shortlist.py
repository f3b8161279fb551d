"""Plans worth pricing in a space too large to list: found by the model section by section.

Sections couple through their pool's memory and the step's structure only. So for every pool
each section's layouts are cut down to those that no other beats in both time and memory,
sections of a pool are combined while they fit together, pool sizes are shared out by
dynamic programming on the time of the busiest pool, and the best of all structures are
priced as whole plans. Two things are not exact: a section keeps a limited number of
layouts, and structures are compared by a simple sum before they are priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import section_cost
from analytic.setup import Setup
from ir.batch import CODES, PlanBatch, concatenate
from ir.graph import Op
from space.enumerate import Case, Factor, LegalSpace, PoolCase
from space.tables import Key, SectionTable

Float = NDArray[np.float64]
Rows = NDArray[np.int64]

LAYOUTS = 12
"""Layouts that a section keeps for a pool."""

COMBINATIONS = 48
"""Combinations of sections that are carried on while a pool is put together."""

CHOICES = 2
"""Combinations of a pool that are tried in whole plans."""

STRUCTURES = 300
"""Pairs of a case and pool sizes that are priced with every structure of the case."""

PLAIN = {"recompute": CODES["recompute"].index("full"), "memory_percent": 80}
"""Values of free fields that layouts are first compared with; 0 for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Layouts of a section on a pool, or combinations of several sections', fastest first; arrays of one length."""

    seconds: Float
    resident: Float
    transient: Float
    layouts: dict[Op, Rows]
    """Number of each section's layout among those that are legal on the pool."""

    @property
    def bytes(self) -> Float:
        """Resident and transient together."""
        return self.resident + self.transient

    def take(self, rows: NDArray[np.intp]) -> Options:
        """The given ones."""
        return Options(
            seconds=self.seconds[rows],
            resident=self.resident[rows],
            transient=self.transient[rows],
            layouts={op: numbers[rows] for op, numbers in self.layouts.items()},
        )


def shortlist(legal: LegalSpace, s: Setup) -> PlanBatch:
    """Plans among which the model's best should be, to be priced whole; empty if none fits in memory."""
    finder = _Finder(legal=legal, setup=s)
    cases, case_of = legal.cases
    ranked = sorted(
        ((score, index, sizes) for index, case in enumerate(cases) for score, sizes in finder.shares(case)),
        key=lambda found: found[0],
    )
    batches = []
    for _, index, sizes in ranked[:STRUCTURES]:
        layouts = finder.layouts(cases[index], sizes)
        for structure in np.flatnonzero(case_of == index).tolist():
            factor: Factor = legal.factor(structure, sizes)
            batches += [factor.combine(numbers, len(next(iter(numbers.values())))) for numbers in layouts]
    return concatenate(batches) if batches else PlanBatch(0)


@dataclass(frozen=True, kw_only=True)
class _Finder:
    """Tables, each computed when it is first needed."""

    legal: LegalSpace
    setup: Setup
    _sections: dict[tuple[Op, Key], Options] = field(default_factory=dict)
    _pools: dict[tuple[PoolCase, int], Options] = field(default_factory=dict)
    _plain: dict[Op, tuple[Float, Float]] = field(default_factory=dict)

    def shares(self, case: Case) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(approximate step seconds, pool sizes) of a case: for every size of the pool that generates, the sizes of the
        others under which the busiest of them is least busy."""
        pools = [self.legal.pool_case(pool, case) for pool in case.pools]
        times = [self._times(pool) for pool in pools]
        if not all(times):
            return
        yield from _share_out([pool[0][1] for pool in pools], times, case.staleness, self.legal)

    def _times(self, pool: PoolCase) -> dict[int, float]:
        """Seconds of the fastest combination that fits, by size."""
        found = {size: self.pool(pool, size) for size in self.legal.counts_by_size(pool)}
        return {size: float(options.seconds[0]) for size, options in found.items() if len(options.seconds)}

    def layouts(self, case: Case, sizes: tuple[int, ...]) -> list[dict[Op, Rows]]:
        """Combinations of layouts that are tried, one array element a plan."""
        options = [
            self.pool(self.legal.pool_case(pool, case), size) for pool, size in zip(case.pools, sizes, strict=True)
        ]
        best = [min(len(o.seconds), CHOICES) for o in options]
        grid = np.meshgrid(*(np.arange(n) for n in best), indexing="ij")
        merged: dict[Op, Rows] = {}
        for option, rows in zip(options, grid, strict=True):
            merged |= option.take(rows.reshape(-1)).layouts
        return [merged]

    def pool(self, pool_case: PoolCase, size: int) -> Options:
        """Combinations of a pool's sections that fit in its memory, fastest first."""
        key = (pool_case, size)
        if key not in self._pools:
            (_, group), staleness, sections = pool_case
            device = self.setup.machines[group].device
            room = device.memory_bytes * (1.0 - self.setup.job.limits.memory_margin) - device.base_memory_bytes
            one = np.zeros(1)
            found = Options(seconds=one, resident=one, transient=one, layouts={})
            for op in sections:
                found = _fitting(_combined(found, self.section(op, (group, size, staleness))), room)
            self._pools[key] = found
        return self._pools[key]

    def section(self, op: Op, key: Key) -> Options:
        """Layouts of a section on a pool that no other beats in time and memory."""
        table = self.legal.tables[op]
        key = (*key[:2], key[2] if table.by_staleness else 0)
        if (op, key) not in self._sections:
            first, last = table.rows_of(*key)
            seconds, size = self._plain_cost(table)
            rows = first + _front(seconds[first:last], size[first:last], LAYOUTS)
            numbers = ((rows - first)[:, None] * table.num_free + np.arange(table.num_free)).reshape(-1)
            options = self._priced(table, key, numbers, first)
            self._sections[(op, key)] = options.take(_front(options.seconds, options.bytes, LAYOUTS))
        return self._sections[(op, key)]

    def _priced(self, table: SectionTable, key: Key, numbers: Rows, first: int) -> Options:
        """Price layouts given by number."""
        rows, free = np.divmod(numbers, table.num_free)
        x = {name: table.rows[first + rows, i] for i, name in enumerate(table.fields)}
        for name, values in reversed(table.free):
            free, level = np.divmod(free, len(values))
            x[name] = np.asarray(values, dtype=np.int32)[level]
        for name, value in zip(("group", "devices", "staleness"), key, strict=True):
            x[name] = np.full(len(numbers), value, dtype=np.int32)
        return self._options(table.op, x, numbers)

    def _options(self, op: Op, x: dict[str, NDArray[np.int32]], numbers: Rows) -> Options:
        cost = section_cost(self.setup, op, x)
        zero = np.zeros(len(numbers))
        return Options(
            seconds=cost.seconds + cost.reshard,
            resident=sum(cost.resident.values(), zero),
            transient=sum(cost.transient.values(), zero),
            layouts={op: numbers},
        )

    def _plain_cost(self, table: SectionTable) -> tuple[Float, Float]:
        """(seconds, bytes) of every row of a table with plain values of the free fields."""
        if table.op not in self._plain:
            keys = np.empty((len(table.rows), 3), dtype=np.int32)
            for key, (first, last) in table.span.items():
                keys[first:last] = key
            x = {name: table.rows[:, i] for i, name in enumerate(table.fields)}
            x |= {name: keys[:, i] for i, name in enumerate(("group", "devices", "staleness"))}
            for name, values in table.free:
                value = PLAIN.get(name, 0) if PLAIN.get(name, 0) in values else values[0]
                x[name] = np.full(len(table.rows), value, dtype=np.int32)
            options = self._options(table.op, x, np.arange(len(table.rows)))
            self._plain[table.op] = (options.seconds, options.bytes)
        return self._plain[table.op]


def _share_out(
    groups: list[int], times: list[dict[int, float]], staleness: int, legal: LegalSpace
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """See `_Finder.shares`. Pools of several groups of devices share each group's devices among themselves."""
    room = [devices.count for devices in legal.setting.groups]
    limits, everything = legal.setting.job.limits, legal.setting.num_devices
    most = limits.most_devices(everything)
    for first, seconds in times[0].items():
        left = list(room)
        left[groups[0]] -= first
        if left[groups[0]] < 0:
            continue
        sizes, busiest = [first], 0.0
        for group in sorted(set(groups[1:])):
            members = [i for i in range(1, len(groups)) if groups[i] == group]
            spare = min(left[group], most - first)
            found = _least_busy([times[i] for i in members], spare)
            if found is None:
                break
            sizes += found[1]
            busiest = max(busiest, found[0])
        else:
            order = [0, *(i for group in sorted(set(groups[1:])) for i in range(1, len(groups)) if groups[i] == group)]
            chosen = tuple(size for _, size in sorted(zip(order, sizes, strict=True)))
            if limits.allows(np.array([sum(chosen)]), everything)[0]:
                yield max(seconds, busiest, (seconds + busiest) / (1 + staleness)), chosen


def _least_busy(times: list[dict[int, float]], room: int) -> tuple[float, list[int]] | None:
    """(seconds of the busiest, sizes) of pools that share `room` devices, by dynamic programming over what is used;
    None where they do not find room."""
    if room < 0:
        return None
    best = np.zeros(room + 1)
    chosen: list[NDArray[np.int64]] = []
    for pool in times:
        after = np.full(room + 1, np.inf)
        choice = np.zeros(room + 1, dtype=np.int64)
        for size, seconds in pool.items():
            if size <= room:
                with_it = np.full(room + 1, np.inf)
                with_it[size:] = np.maximum(best[: room + 1 - size], seconds)
                choice = np.where(with_it < after, size, choice)
                after = np.minimum(after, with_it)
        best = after
        chosen.append(choice)
    if not np.isfinite(best[room]):
        return None
    sizes, used = [], room
    for choice in reversed(chosen):
        sizes.append(int(choice[used]))
        used -= sizes[-1]
    return float(best[room]), sizes[::-1]


def _combined(one: Options, other: Options) -> Options:
    """Every pair: seconds and what stays add up, what comes and goes shares its place."""
    a = np.repeat(np.arange(len(one.seconds)), len(other.seconds))
    b = np.tile(np.arange(len(other.seconds)), len(one.seconds))
    layouts = {op: numbers[a] for op, numbers in one.layouts.items()}
    return Options(
        seconds=one.seconds[a] + other.seconds[b],
        resident=one.resident[a] + other.resident[b],
        transient=np.maximum(one.transient[a], other.transient[b]),
        layouts=layouts | {op: numbers[b] for op, numbers in other.layouts.items()},
    )


def _fitting(options: Options, room: float) -> Options:
    """Those that fit and that few others beat, fastest first."""
    kept = options.take(np.flatnonzero(options.bytes <= room))
    return kept.take(_front(kept.seconds, kept.bytes, COMBINATIONS))


def _front(seconds: Float, size: Float, count: int) -> NDArray[np.intp]:
    """Rows that no other beats in both, fastest first; at most `count`, spread over the front."""
    order = np.lexsort((size, seconds))
    least = np.minimum.accumulate(size[order]) if len(order) else size
    new = np.append(True, least[1:] < least[:-1]) if len(order) else np.zeros(0, dtype=bool)
    front = order[new]
    if len(front) <= count:
        return np.asarray(front)
    return np.asarray(front[np.unique(np.linspace(0, len(front) - 1, count).round().astype(np.intp))])
