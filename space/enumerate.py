"""Legal plans: counted without listing them, and listed in blocks of arrays.

For every structure and every choice of pool sizes the legal plans are the product of the
sections' tables, so a plan is a number in mixed radix and a block of plans is a few
gathers from the tables.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import accumulate, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from ir.batch import COLUMNS, HOME, REMOVED_BY, ROLES, PlanBatch, concatenate
from ir.errors import InputError
from ir.graph import Op
from ir.setting import Mask, Setting
from space.axes import Levels, Space
from space.tables import Columns, SectionTable, section_table, structure_table

BLOCK = 1 << 16
"""Plans listed at a time: a few MB of columns, so that memory does not grow with the space."""

Pool = tuple[tuple[str, ...], int]
"""Roles of a pool, first its leader, and its group of devices."""

PoolCase = tuple[Pool, int, tuple[Op, ...]]
"""A pool, the staleness where it matters, and the sections that run on it."""

Sizes = tuple[int, ...]
"""Devices of each pool, or those used of each group."""

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Case:
    """What the number of plans depends on in a structure."""

    pools: tuple[Pool, ...]
    staleness: int
    sections: tuple[Op, ...]
    """Those that the plan has."""


@dataclass(frozen=True, kw_only=True)
class LegalSpace:
    """The legal plans of a space, in factors."""

    space: Space
    setting: Setting
    structures: Columns
    """One row a structure."""
    tables: dict[Op, SectionTable]
    _pool_counts: dict[PoolCase, dict[int, int]] = field(default_factory=dict)
    _totals: dict[tuple[PoolCase, ...], dict[Sizes, int]] = field(default_factory=dict)
    _in_group: dict[tuple[PoolCase, ...], dict[int, int]] = field(default_factory=dict)
    _up_to: dict[tuple[PoolCase, ...], tuple[list[int], list[int]]] = field(default_factory=dict)

    @property
    def num_structures(self) -> int:
        """Structures that are legal, whether or not the devices suffice for them."""
        return len(self.structures["staleness"])

    @cached_property
    def cases(self) -> tuple[tuple[Case, ...], NDArray[np.intp]]:
        """The different cases, and each structure's."""
        names = [f"{what}.{role}" for what in ("place", "group") for role in self.setting.roles]
        flags = sorted({flag for op in self.setting.sections for flag in REMOVED_BY.get(op, ())})
        code = np.zeros(self.num_structures, dtype=np.int64)
        for column in (self.structures[name] for name in (*names, "staleness", *flags)):
            code = code * (int(column.max()) + 1) + column
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        roles, sections = self.setting.roles, self.setting.sections
        return tuple(self._case(row, roles, sections) for row in first.tolist()), inverse.reshape(-1)

    def _case(self, row: int, roles: tuple[str, ...], sections: tuple[Op, ...]) -> Case:
        leader = {role: ROLES[int(self.structures[f"place.{role}"][row])] for role in roles}
        pools = [
            (tuple(r for r in roles if leader[r] == lead), int(self.structures[f"group.{lead}"][row]))
            for lead in dict.fromkeys(leader.values())
        ]
        absent = [op for op, flags in REMOVED_BY.items() if any(self.structures[flag][row] for flag in flags)]
        return Case(
            pools=tuple(pools),
            staleness=int(self.structures["staleness"][row]),
            sections=tuple(op for op in sections if op not in absent),
        )

    @cached_property
    def num_plans(self) -> int:
        """How many legal plans there are, exactly."""
        cases, case_of = self.cases
        multiplicity = np.bincount(case_of, minlength=len(cases))
        return sum(int(times) * self.count(case) for case, times in zip(cases, multiplicity, strict=True))

    def count(self, case: Case) -> int:
        """Plans of one structure: the product of the pools' counts, summed over sizes that fit together."""
        pools = [self.pool_case(pool, case) for pool in case.pools]
        groups = [tuple(pool for pool in pools if pool[0][1] == group) for group in range(len(self.setting.groups))]
        # Groups share nothing but the sum of their devices.
        if not self._is_bounded:
            return prod(self._number_in_group(members) for members in groups)
        totals = reduce(_convolved, [self._count_in_group(members) for members in groups])
        sums = np.array(list(totals), dtype=np.int64)
        kept = self.setting.job.limits.allows(sums, self.setting.num_devices)
        return sum(count for count, good in zip(totals.values(), kept.tolist(), strict=True) if good)

    @property
    def _is_bounded(self) -> bool:
        """Whether the job's limits say more of the devices used than that there must be so many."""
        available = self.setting.num_devices
        return not bool(self.setting.job.limits.allows(np.arange(1, available + 1), available).all())

    def _count_in_group(self, pools: tuple[PoolCase, ...]) -> dict[int, int]:
        """Plans of pools that share a group of devices, by the devices used."""
        if not pools:
            return {0: 1}
        if pools not in self._in_group:
            room = self.setting.groups[pools[-1][0][1]].count
            both = _convolved(self.counts_by_size(pools[-1]), self._count_in_group(pools[:-1]))
            self._in_group[pools] = {used: count for used, count in both.items() if used <= room}
        return self._in_group[pools]

    def _number_in_group(self, pools: tuple[PoolCase, ...]) -> int:
        """Plans of pools that share a group of devices, however many they use."""
        if not pools:
            return 1
        if pools[:-1] not in self._up_to:
            before = sorted(self._count_in_group(pools[:-1]).items())
            self._up_to[pools[:-1]] = [used for used, _ in before], [0, *accumulate(count for _, count in before)]
        used, sums = self._up_to[pools[:-1]]
        room = self.setting.groups[pools[-1][0][1]].count
        return sum(
            count * sums[bisect_right(used, room - size)] for size, count in self.counts_by_size(pools[-1]).items()
        )

    def _allowed(self, pools: tuple[PoolCase, ...]) -> dict[Sizes, int]:
        """Plans of a structure by the devices used of each group, where the job's limits allow their sum."""
        totals, limits = self._count_by_devices(pools), self.setting.job.limits
        kept = limits.allows(np.array([sum(used) for used in totals], dtype=np.int64), self.setting.num_devices)
        return {used: count for (used, count), good in zip(totals.items(), kept.tolist(), strict=True) if good}

    def _count_by_devices(self, pools: tuple[PoolCase, ...]) -> dict[Sizes, int]:
        """Plans by the devices used of each group, for the first pools of a structure."""
        if not pools:
            return {(0,) * len(self.setting.groups): 1}
        if pools not in self._totals:
            (_, group), room = pools[-1][0], [devices.count for devices in self.setting.groups]
            result: dict[Sizes, int] = {}
            for used, before in self._count_by_devices(pools[:-1]).items():
                for size, count in self.counts_by_size(pools[-1]).items():
                    if used[group] + size <= room[group]:
                        now = (*used[:group], used[group] + size, *used[group + 1 :])
                        result[now] = result.get(now, 0) + before * count
            self._totals[pools] = result
        return self._totals[pools]

    def pool_case(self, pool: Pool, case: Case) -> PoolCase:
        """A pool with what its layouts depend on."""
        sections = tuple(op for op in case.sections if HOME[op] in pool[0])
        stale = case.staleness if any(self.tables[op].by_staleness for op in sections) else 0
        return pool, stale, sections

    def counts_by_size(self, pool_case: PoolCase) -> dict[int, int]:
        """Ways to lay out a pool's sections, by its size; sizes without any are left out."""
        if pool_case not in self._pool_counts:
            (roles, group), staleness, sections = pool_case
            sizes = set.intersection(*(set(self.space[f"devices.{role}"]) for role in roles))
            counts = {
                size: prod(self.tables[op].count(group, size, staleness) for op in sections) for size in sorted(sizes)
            }
            self._pool_counts[pool_case] = {size: count for size, count in counts.items() if count}
        return self._pool_counts[pool_case]

    def pool_sizes(self, case: Case) -> Iterator[Sizes]:
        """Every choice of pool sizes that has a plan, in lexicographic order."""
        options = [sorted(self.counts_by_size(self.pool_case(pool, case))) for pool in case.pools]
        yield from (sizes for sizes in product(*options) if self.fit(case, np.array([sizes]))[0])

    def fit(self, case: Case, sizes: NDArray[np.int64]) -> Mask:
        """Which pool sizes, int64[n, pools], the groups have room for and the job's limits allow."""
        group_of = np.array([group for _, group in case.pools])
        used = [sizes[:, group_of == i].sum(axis=1) <= group.count for i, group in enumerate(self.setting.groups)]
        allowed = self.setting.job.limits.allows(sizes.sum(axis=1), self.setting.num_devices)
        return np.asarray(np.logical_and.reduce([*used, allowed]))

    def factor(self, structure: int, sizes: Sizes) -> Factor:
        """The plans of one structure and choice of pool sizes."""
        cases, case_of = self.cases
        case = cases[int(case_of[structure])]
        constants = {name: int(column[structure]) for name, column in self.structures.items()}
        pools = zip(case.pools, sizes, strict=True)
        where = {role: (group, size) for (roles, group), size in pools for role in roles}
        constants |= {f"devices.{role}": size for role, (_, size) in where.items()}
        spans = {op: self.tables[op].rows_of(*where[HOME[op]], case.staleness) for op in case.sections}
        return Factor(constants=constants, tables=self.tables, spans=spans)

    def factors(self) -> Iterator[Factor]:
        """All of them, structure by structure."""
        cases, case_of = self.cases
        sizes: dict[int, list[Sizes]] = {}
        for structure, case in enumerate(case_of.tolist()):
            if case not in sizes:
                sizes[case] = list(self.pool_sizes(cases[case]))
            for choice in sizes[case]:
                yield self.factor(structure, choice)

    def blocks(self, size: int = BLOCK) -> Iterator[PlanBatch]:
        """All legal plans, about `size` at a time."""
        waiting: list[PlanBatch] = []
        for factor in self.factors():
            for start in range(0, factor.num_plans, size):
                waiting.append(factor.plans(np.arange(start, min(start + size, factor.num_plans), dtype=np.int64)))
                if sum(map(len, waiting)) >= size:
                    yield concatenate(waiting)
                    waiting = []
        if waiting:
            yield concatenate(waiting)

    def sample(self, n: int, rng: Rng) -> PlanBatch:
        """`n` legal plans, each drawn independently and uniformly from all of them.

        Raises:
            InputError: there is none.
        """
        if not self.num_plans:
            raise InputError("space", "must have a legal plan with what is fixed, the backend and the job's limits")
        cases, case_of = self.cases
        counts = [self.count(case) for case in cases]
        structures = _portions(rng, n, [counts[case] for case in case_of.tolist()])
        parts = [
            self.factor(structure, sizes).draw(number, rng)
            for structure in np.flatnonzero(structures).tolist()
            for sizes, number in self._draw_sizes(cases[int(case_of[structure])], int(structures[structure]), rng)
        ]
        return concatenate(parts).take(rng.permutation(n))

    def _draw_sizes(self, case: Case, n: int, rng: Rng) -> Iterator[tuple[Sizes, int]]:
        """How many of `n` plans of a structure have which pool sizes."""
        totals = self._allowed(pools := tuple(self.pool_case(pool, case) for pool in case.pools))
        for used, number in zip(totals, _portions(rng, n, list(totals.values())).tolist(), strict=True):
            yield from self._split(pools, used, number, rng)

    def _split(self, pools: tuple[PoolCase, ...], used: Sizes, n: int, rng: Rng) -> Iterator[tuple[Sizes, int]]:
        """The same, for the first pools of a structure and the devices that they use of each group."""
        if not pools or not n:
            yield from [((), n)] if n else []
            return
        group, sizes, before = pools[-1][0][1], self.counts_by_size(pools[-1]), self._count_by_devices(pools[:-1])
        rest = {size: (*used[:group], used[group] - size, *used[group + 1 :]) for size in sizes}
        weights = [count * before.get(rest[size], 0) for size, count in sizes.items()]
        for size, number in zip(sizes, _portions(rng, n, weights).tolist(), strict=True):
            for first, times in self._split(pools[:-1], rest[size], number, rng):
                yield (*first, size), times


def _portions(rng: Rng, n: int, weights: list[int]) -> NDArray[np.int64]:
    """How many of `n` draws fall to each of several parts, whose weights may exceed 64 bits."""
    total = sum(weights)
    shares = np.array([weight / total for weight in weights])
    return rng.multinomial(n, shares / shares.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The plans of one structure and choice of pool sizes: the product of the sections' tables."""

    constants: dict[str, int]
    """Structure and sizes."""
    tables: dict[Op, SectionTable]
    spans: dict[Op, tuple[int, int]]
    """Rows of each section's table."""

    @property
    def num_plans(self) -> int:
        """How many there are, exactly."""
        return prod(self.num_layouts(op) for op in self.spans)

    def num_layouts(self, op: Op) -> int:
        """How many layouts a section has."""
        first, last = self.spans[op]
        return (last - first) * self.tables[op].num_free

    def draw(self, n: int, rng: Rng) -> PlanBatch:
        """`n` plans, each section drawn on its own: their product may exceed 64 bits."""
        return self.combine({op: rng.integers(self.num_layouts(op), size=n) for op in self.spans}, n)

    def plans(self, numbers: NDArray[np.int64]) -> PlanBatch:
        """The plans of the given numbers, int64[n] from 0 to `num_plans`; the last section varies fastest."""
        rest, layouts = numbers, dict[Op, NDArray[np.int64]]()
        for op in reversed(self.spans):
            rest, layouts[op] = np.divmod(rest, self.num_layouts(op))
        return self.combine(layouts, len(numbers))

    def combine(self, layouts: dict[Op, NDArray[np.int64]], count: int) -> PlanBatch:
        """`count` plans from the number of each section's layout, int64[count] from 0 to its table's count."""
        columns = {name: np.full(count, value, dtype=np.int32) for name, value in self.constants.items()}
        for op, (first, last) in self.spans.items():
            table, layout = self.tables[op], layouts[op]
            for name, values in reversed(table.free):
                layout, level = np.divmod(layout, len(values))
                columns[f"{op}.{name}"] = np.asarray(values, dtype=np.int32)[level]
            rows = table.rows[first:last][layout]
            columns |= {f"{op}.{name}": rows[:, i] for i, name in enumerate(table.fields)}
        return PlanBatch(count, {name: columns[name] for name in COLUMNS if name in columns})


def _convolved(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    """Counts of sums from the counts of two independent numbers."""
    result: dict[int, int] = {}
    for a, times in one.items():
        for b, count in other.items():
            result[a + b] = result.get(a + b, 0) + times * count
    return result


def legal_space(space: Space, setting: Setting) -> LegalSpace:
    """Take a space apart into its factors.

    Raises:
        InputError: no structure is legal.
    """
    return LegalSpace(
        space=space,
        setting=setting,
        structures=structure_table(space, setting),
        tables={op: section_table(space, setting, op) for op in setting.sections},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalPlans:
    """Plans of a space, listed."""

    space: Space
    levels: Levels
    """int64[n, axes]."""
    batch: PlanBatch


def enumerate_legal(space: Space, setting: Setting) -> LegalPlans:
    """Every legal plan of a space that is small enough to list."""
    batch = concatenate(list(legal_space(space, setting).blocks()))
    return LegalPlans(space=space, levels=space.encode(batch), batch=batch)
