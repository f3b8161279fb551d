"""Plans of one graph: structures that differ in staleness, sync and in-flight updates only, and their pool sizes.

A family's plans have the same stages on the same pools. Choices of pool sizes are joined
pool by pool and dropped as soon as a pool would be busy for longer than a known step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import STREAMED
from analytic.setup import Setup
from ir.batch import FLAGS, HOME, PlanBatch
from ir.graph import Op
from search.fronts import SectionFronts
from space.enumerate import Case, LegalSpace

Float = NDArray[np.float64]
Int = NDArray[np.int64]


APART = (Op.GENERATE, *STREAMED)
"""Sections whose price depends on more of the structure than staleness."""


class Record(Protocol):
    """What is known: plans that were priced, and which others would be news."""

    @property
    def most(self) -> float:
        """Seconds that no news may reach."""
        ...

    def limit(self, devices: Int, staleness: Int) -> Float:
        """Below how many seconds a step must be to be news, given the devices and staleness, float64[n]."""
        ...

    def add(self, batch: PlanBatch, bounds: Float) -> None:
        """Price whole plans, whose steps were expected to take `bounds` seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Structures of one graph."""

    case: Case
    """Its pools and sections; the staleness is one of several."""
    flags: dict[str, int]
    variants: Int
    """Staleness, whether updates are in flight, the sync method and the number of each structure, int64[v, 4]."""

    @property
    def pool_of(self) -> dict[Op, int]:
        """Number of each section's pool."""
        at = {role: i for i, (roles, _) in enumerate(self.case.pools) for role in roles}
        return {op: at[HOME[op]] for op in self.case.sections}

    @property
    def merges(self) -> bool:
        """Whether the reference's pass is made for two models."""
        return bool(self.flags["fusions.merge_logprobs"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roots:
    """Choices of variant and pool sizes of a family, arrays of one length, with bounds on all their plans."""

    family: Family
    variant: Int
    """Number of the variant."""
    sizes: Int
    """int64[n, pools]."""
    least: Float
    """float64[n, sections, 5], what no layout is below: see `search.fronts.Options.parts`."""
    busy: Float
    """Seconds of the pool that has most to do, at least."""

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Roots:
        """The given ones."""
        return Roots(
            family=self.family,
            variant=self.variant[rows],
            sizes=self.sizes[rows],
            least=self.least[rows],
            busy=self.busy[rows],
        )

    @property
    def staleness(self) -> Int:
        """int64[n]."""
        return np.asarray(self.family.variants[self.variant, 0])

    @property
    def devices(self) -> Int:
        """Of all pools together, int64[n]."""
        return np.asarray(self.sizes.sum(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ends:
    """Options of the two sections between which weights travel that are worth trying together."""

    actor: Int
    """Options of the update."""
    rollout: Int
    """Options of generation."""
    floors: Float
    """Least seconds of synchronisation for each option of the update."""
    floor: float
    """Least of all."""


@dataclass(kw_only=True)
class Tables:
    """Fronts of all sections, and what follows from them for pools and structures."""

    legal: LegalSpace
    setup: Setup
    count: int
    deadline: float = np.inf
    """Processor seconds of this process at which a search gives up."""
    ends: dict[tuple[object, ...], Ends] = field(default_factory=dict)
    """By the pools of both sections and the structure."""
    _fronts: dict[tuple[Op, bool, bool], SectionFronts] = field(default_factory=dict)
    _least: dict[tuple[Op, bool, bool], tuple[int, Float]] = field(default_factory=dict)

    def front(self, op: Op, *, apart: bool, adapter: bool) -> SectionFronts:
        """A section's, priced apart (see `SectionFronts.apart`) or with weights that are another section's."""
        key = (op, apart and op in APART, adapter and op is Op.REFERENCE_LOGPROB)
        if key not in self._fronts:
            self._fronts[key] = SectionFronts(
                legal=self.legal,
                setup=self.setup,
                op=op,
                apart=key[1],
                adapter=key[2],
                count=self.count,
                deadline=self.deadline,
            )
        return self._fronts[key]

    @property
    def fronts(self) -> tuple[SectionFronts, ...]:
        """Those that were asked for."""
        return tuple(self._fronts.values())

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """All structures by graph."""
        structures, setting = self.legal.structures, self.legal.setting
        names = [f"{what}.{role}" for what in ("place", "group") for role in setting.roles] + list(FLAGS)
        stacked = np.stack([structures[name] for name in names], axis=1)
        _, first, inverse = np.unique(stacked, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(inverse.reshape(-1), kind="stable")
        edges = np.searchsorted(inverse.reshape(-1)[order], np.arange(len(first) + 1))
        cases, case_of = self.legal.cases
        return tuple(
            Family(
                case=cases[int(case_of[row])],
                flags={flag: int(structures[flag][row]) for flag in FLAGS},
                variants=np.stack(
                    [*(structures[n][members] for n in ("staleness", "in_flight", "sync")), members], axis=1
                ).astype(np.int64),
            )
            for row, members in zip(first.tolist(), np.split(order, edges[1:-1]), strict=True)
        )

    # Bounds

    def least(self, op: Op, *, apart: bool, adapter: bool) -> Float:
        """Seconds below which no layout is by group, staleness and number of devices, float64[groups, staleness + 1,
        N + 1]; infinite where there is none."""
        front = self.front(op, apart=apart, adapter=adapter)
        key = (op, front.apart, front.adapter)
        if key not in self._least or self._least[key][0] != front.asked:
            setting = self.legal.setting
            most, groups = max(group.count for group in setting.groups), len(setting.groups)
            stale = max(self.legal.space["staleness"]) + 1
            table = np.full((groups, stale, most + 1), np.inf)
            for (group, devices, staleness), found in front.least_of.items():
                table[group, staleness if front.table.by_staleness else slice(None), devices] = found
            self._least[key] = (front.asked, table)
        return self._least[key][1]

    def _seconds(self, family: Family, op: Op) -> Float:
        """The same for a section of a family, twice that where its pass is made for two models."""
        adapter = bool(family.flags["sharing.reference_adapter"])
        table = self.least(op, apart=False, adapter=adapter)
        if op is Op.GENERATE:
            table = np.minimum(table, self.least(op, apart=True, adapter=adapter))
        elif family.flags["fusions.stream"] and op in STREAMED:
            # Only a pool that waits for generation takes its batch in small pieces.
            table = table.copy()
            table[:, 0] = self.least(op, apart=True, adapter=adapter)[:, 0]
        return table * (1.0 + (family.merges and op is Op.REFERENCE_LOGPROB))

    def roots(self, family: Family, record: Record) -> Roots:
        """Choices of sizes and variants whose pools are each busy for less than is known."""
        pools = len(family.case.pools)
        busy: list[Any] = [np.float64(0.0)] * pools
        for op, pool in family.pool_of.items():
            busy[pool] = busy[pool] + self._seconds(family, op)[family.case.pools[pool][1]]
        found = []
        for staleness in np.unique(family.variants[:, 0]).tolist():
            sizes = self._sizes(family, [np.flatnonzero(seconds[staleness] < record.most) for seconds in busy])
            longest = np.maximum.reduce([busy[pool][staleness, sizes[:, pool]] for pool in range(pools)])
            news = longest < record.limit(sizes.sum(axis=1), np.full(len(sizes), staleness))
            variants = np.flatnonzero(family.variants[:, 0] == staleness)
            found.append((sizes[news], longest[news], variants))
        return self._roots(family, found)

    def _roots(self, family: Family, found: list[tuple[Int, Float, Int]]) -> Roots:
        """Sizes with every variant of their staleness."""
        variant = np.concatenate([np.repeat(variants, len(sizes)) for sizes, _, variants in found])
        sizes = np.concatenate([np.tile(sizes, (len(variants), 1)) for sizes, _, variants in found])
        least = np.zeros((len(variant), len(family.case.sections), 5))
        for i, op in enumerate(family.case.sections):
            pool = family.pool_of[op]
            twice = 1.0 + (family.merges and op is Op.REFERENCE_LOGPROB)
            at = (family.case.pools[pool][1], family.variants[variant, 0], sizes[:, pool])
            least[:, i, :2] = self._seconds(family, op)[at][:, None] / twice
        busy = np.concatenate([np.tile(longest, len(variants)) for _, longest, variants in found])
        return Roots(family=family, variant=variant, sizes=sizes, least=least, busy=busy)

    def _sizes(self, family: Family, options: list[Int]) -> Int:
        """Choices among ascending sizes of pools that there is room for, int64[n, pools]."""
        room = np.array([group.count for group in self.legal.setting.groups])
        group_of = [group for _, group in family.case.pools]
        smallest = np.zeros((len(options) + 1, len(room)), dtype=np.int64)
        for pool in reversed(range(len(options))):
            smallest[pool] = smallest[pool + 1]
            if len(options[pool]) == 0:
                return np.zeros((0, len(options)), dtype=np.int64)
            smallest[pool, group_of[pool]] += options[pool][0]
        rows, used = np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(room)), dtype=np.int64)
        for pool, sizes in enumerate(options):
            before, now = np.repeat(np.arange(len(rows)), len(sizes)), np.tile(sizes, len(rows))
            used = used[before]
            used[:, group_of[pool]] += now
            fits = (used + smallest[pool + 1] <= room).all(axis=1)
            rows, used = np.column_stack([rows[before], now])[fits], used[fits]
        return rows[self.legal.fit(family.case, rows)] if len(rows) else rows
