"""What is known of all sections, pools and families of a space while its best plan is looked for.

Choices of pool sizes are joined pool by pool and dropped as soon as a pool would be busy for
longer than a known step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.distinct import distinct, grouped
from analytic.estimate import STREAMED
from analytic.setup import Setup
from ir.batch import FLAGS
from ir.graph import Op
from search.families import Age, Family, Record, Roots
from search.fronts import SectionFronts
from search.layouts import MOST_DEVICES, room_of
from search.meetings import Ends, Meeting
from search.sides import Side, rough_side, side_of
from search.work import Work
from space.enumerate import LegalSpace

Float = NDArray[np.float64]
Int = NDArray[np.int64]


APART = (Op.GENERATE, *STREAMED)
"""Sections whose price depends on more of the structure than staleness."""


@dataclass(kw_only=True)
class Tables:
    """Fronts of all sections, and what follows from them for pools and structures."""

    legal: LegalSpace
    setup: Setup
    count: int
    work: Work = field(default_factory=lambda: Work(np.inf))
    """What the search may still do."""
    meetings: dict[tuple[int, ...], Meeting] = field(default_factory=dict)
    """By the pools of both sections and the structure."""
    ends: dict[tuple[tuple[int, ...], bool], Ends] = field(default_factory=dict)
    """What is worth trying of a meeting, by whether other sections depend on the degrees of the update."""
    _fronts: dict[tuple[Op, bool, bool], SectionFronts] = field(default_factory=dict)
    _least: dict[tuple[Op, bool, bool], tuple[int, Float]] = field(default_factory=dict)
    _sides: dict[tuple[object, ...], Side] = field(default_factory=dict)
    """What is known of pools before their options are."""
    _ready: dict[tuple[object, ...], Side] = field(default_factory=dict)
    _floors: dict[int, float] = field(default_factory=dict)
    _curves: dict[tuple[object, ...], Float] = field(default_factory=dict)
    _asked: int = 0
    """How often options had been made when the floors and curves were found."""

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
                work=self.work,
            )
        return self._fronts[key]

    @property
    def fronts(self) -> tuple[SectionFronts, ...]:
        """Those that were asked for."""
        return tuple(self._fronts.values())

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """All structures by graph and whether they are stale."""
        structures, setting = self.legal.structures, self.legal.setting
        names = [f"{what}.{role}" for what in ("place", "group") for role in setting.roles] + list(FLAGS)
        stale = structures["staleness"] > 0
        first, inverse = distinct((*(structures[name] for name in names), stale), len(stale))
        cases, case_of = self.legal.cases
        return tuple(
            Family(
                case=cases[int(case_of[row])],
                flags={flag: int(structures[flag][row]) for flag in FLAGS},
                variants=np.stack(
                    [*(structures[n][members] for n in ("staleness", "in_flight", "sync")), members], axis=1
                ).astype(np.int64),
            )
            for row, (_, members) in zip(first.tolist(), grouped(inverse), strict=True)
        )

    # Bounds

    def least(self, op: Op, *, apart: bool, adapter: bool) -> Float:
        """Seconds and latency below which no layout is by group, staleness and number of devices, float64[groups,
        staleness + 1, N + 1, 2]; infinite where there is none."""
        front = self.front(op, apart=apart, adapter=adapter)
        key = (op, front.apart, front.adapter)
        if key not in self._least or self._least[key][0] != front.asked:
            setting = self.legal.setting
            most, groups = max(group.count for group in setting.groups), len(setting.groups)
            stale = max(self.legal.space["staleness"]) + 1
            table = np.full((groups, stale, most + 1, 2), np.inf)
            for (group, devices, staleness), found in front.least_of.items():
                table[group, staleness if front.table.by_staleness else slice(None), devices] = found
            self._least[key] = (front.asked, table)
        return self._least[key][1]

    def _least_of(self, family: Family, op: Op, age: Age) -> Float:
        """The same for a section of a family, by number of devices, float64[N + 1, 2]."""
        group, (staleness, in_flight) = family.case.pools[family.pool_of[op]][1], age
        apart = not in_flight if op is Op.GENERATE else family.is_streamed(op)
        return np.asarray(self.least(op, apart=apart, adapter=family.is_adapter)[group, staleness])

    def _side(self, family: Family, pool: int, most: float, largest: int) -> Side:
        """A pool that neither generates nor trains the actor, where it is busy for less than `most`; a rough view of it
        if it may have no devices."""
        fronts = tuple(
            self.front(op, apart=family.is_streamed(op), adapter=family.is_adapter) for op in family.members[pool]
        )
        group, limits = family.case.pools[pool][1], self.legal.setting.job.limits
        key = (group, *((front.op, front.apart, front.adapter) for front in fronts))
        if key not in self._sides:
            self._sides[key] = rough_side(fronts, group)
        rough = self._sides[key]
        known = self._ready.get(key, rough) if largest else rough
        if (known.below < most and largest) or known.largest < largest:
            room, count = float(room_of(self.setup)[group]), self.count if limits.devices is None else 0
            most, largest = max(most, known.below), max(largest, known.largest)
            known = side_of(rough, fronts, group, room, most=most, largest=largest, count=count)
            self._ready[key] = known
        return known

    def floor(self, family: Family) -> float:
        """Seconds for which some pool of any of a family's plans is busy at least."""
        asked = sum(front.asked for front in self.fronts)
        if asked != self._asked:
            # Something was learnt of a section.
            self._floors, self._curves, self._asked = {}, {}, asked
        if id(family) not in self._floors:
            curves = [self._curve(family, pool) for pool in range(len(family.case.pools))]
            seconds = np.unique(np.concatenate(curves))
            seconds = seconds[np.isfinite(seconds)]
            groups, limits = self.legal.setting.groups, self.legal.setting.job.limits
            used = np.zeros((len(groups), len(seconds)), dtype=np.int64)
            for (_, group), curve in zip(family.case.pools, curves, strict=True):
                # The fewest devices with which each pool is done in so many seconds.
                used[group] += np.searchsorted(-curve, -seconds)
            fits = (used <= np.array([group.count for group in groups])[:, None]).all(axis=0)
            fits &= used.sum(axis=0) <= limits.most_devices(self.legal.setting.num_devices)
            self._floors[id(family)] = float(seconds[fits].min(initial=np.inf))
        return self._floors[id(family)]

    def _curve(self, family: Family, pool: int) -> Float:
        """Seconds for which a pool is busy at least by the most devices it may have, float64[N + 1]."""
        group = family.case.pools[pool][1]
        sections = ((op, family.times(op), family.is_streamed(op)) for op in family.members[pool])
        key = (group, family.is_adapter, *family.ages, *sections)
        if key not in self._curves:
            least = np.minimum.reduce([self._busy(family, pool, age) for age in family.ages])
            self._curves[key] = np.minimum.accumulate(least)
        return self._curves[key]

    def _busy(self, family: Family, pool: int, age: Age) -> Float:
        """Seconds for which a pool is busy at least, by its devices and given the staleness, float64[N + 1]."""
        parts = [family.times(op) * self._least_of(family, op, age)[:, 0] for op in family.members[pool]]
        return np.asarray(sum(parts))

    def roots(self, family: Family, record: Record) -> Roots:
        """Choices of variants and sizes whose pools are each busy for less than is known."""
        sides = {pool: self._side(family, pool, record.most, 0) for pool in family.sides}
        variant, sizes, busy = self._sizes(family, sides, record)
        if len(variant) and sides:
            room = self.room(family, sides, sizes).max(axis=0)
            sides = {pool: self._side(family, pool, record.most, int(room[pool])) for pool in family.sides}
            variant, sizes, busy = self._sizes(family, sides, record)
        least = self._least_parts(family, sides, variant, sizes)
        return Roots(family=family, sides=sides, variant=variant, sizes=sizes, least=least, busy=busy)

    def _sizes(self, family: Family, sides: dict[int, Side], record: Record) -> tuple[Int, Int, Float]:
        """See `Roots`: variant, sizes and busy."""
        found = list[tuple[Int, Int, Float]]()
        for age in family.ages:
            sizes, longest = self._ends(family, sides, age, record.most)
            news = longest < record.limit(sizes.sum(axis=1), np.full(len(sizes), age[0]))
            sizes, longest = sizes[news], longest[news]
            variants = np.flatnonzero((family.variants[:, :2] == age).all(axis=1))
            again = (len(variants), 1)
            found.append((np.repeat(variants, len(sizes)), np.tile(sizes, again), np.tile(longest, again[0])))
        variant, sizes, busy = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return variant, sizes, busy

    def _ends(self, family: Family, sides: dict[int, Side], age: Age, most: float) -> tuple[Int, Float]:
        """Sizes of the pools that generate and train the actor, with which no pool is busy for `most` seconds, and the
        seconds of the busiest."""
        sizes, longest = np.zeros((1, len(family.case.pools)), dtype=np.int64), np.zeros(1)
        for pool in range(len(family.case.pools)):
            if pool in sides:
                continue
            busy = self._busy(family, pool, age)
            options = np.flatnonzero(busy < most)
            before = np.repeat(np.arange(len(sizes)), len(options))
            options = np.tile(options, len(sizes))
            sizes, longest = sizes[before], np.maximum(longest[before], busy[options])
            sizes[:, pool] = options
        room = self.room(family, sides, sizes)
        fits = room.min(axis=1) >= 0
        sizes, longest, room = sizes[fits], longest[fits], room[fits]
        for pool, side in sides.items():
            longest = np.maximum(longest, side.busy[side.place(room[:, pool])])
        legal = np.ones(len(sizes), dtype=bool) if sides else self.legal.fit(family.case, sizes)
        return sizes[legal], longest[legal]

    def _least_parts(self, family: Family, sides: dict[int, Side], variant: Int, sizes: Int) -> Float:
        """See `Roots.least`."""
        least = np.zeros((len(variant), len(family.case.sections), 5))
        room, ages = self.room(family, sides, sizes), family.variants[variant, :2]
        for i, op in enumerate(family.case.sections):
            pool = family.pool_of[op]
            if pool in sides:
                side = sides[pool]
                least[:, i, :2] = side.upto[side.place(room[:, pool]), family.members[pool].index(op)][:, None]
                continue
            for age in family.ages:
                rows = np.flatnonzero((ages == age).all(axis=1))
                least[rows, i, :2] = self._least_of(family, op, age)[sizes[rows, pool]]
        return least

    def room(self, family: Family, sides: dict[int, Side], sizes: Int) -> Int:
        """Devices that each open pool may have, int64[n, pools], less than 0 where there is no room for all; what is
        left of the others' groups."""
        smallest = np.zeros(len(family.case.pools), dtype=np.int64)
        for pool, side in sides.items():
            # One that is nowhere finished in time has no room.
            smallest[pool] = side.sizes[0] if len(side.sizes) else MOST_DEVICES
        counted = np.where(sizes > 0, sizes, smallest)
        group_of = np.array([group for _, group in family.case.pools])
        setting = self.legal.setting
        spare = setting.job.limits.most_devices(setting.num_devices) - counted.sum(axis=1)
        left = [
            np.minimum(setting.groups[group].count - counted[:, group_of == group].sum(axis=1), spare)
            for group in group_of.tolist()
        ]
        both = np.stack(left, axis=1)
        return np.where(both < 0, -1, both + np.where(sizes > 0, 0, smallest))
