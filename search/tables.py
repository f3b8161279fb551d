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
from search.families import Family, Roots, Within
from search.fronts import SectionFronts
from search.layouts import MOST_DEVICES, room_of
from search.meetings import Ends, Meeting
from search.options import ranges
from search.records import Reached, Record, most
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
    by_memory: bool = False
    """Whether plans are looked for that leave memory free."""
    work: Work = field(default_factory=lambda: Work(np.inf))
    """What the search may still do."""
    within: Within
    """What the plans that are looked for may use, of what the job allows; may change, for all else is bounds."""
    meetings: dict[tuple[int, ...], Meeting] = field(default_factory=dict)
    """By the pools of both sections and the structure."""
    ends: dict[tuple[tuple[int, ...], bool], Ends] = field(default_factory=dict)
    """What is worth trying of a meeting, by whether other sections depend on the degrees of the update."""
    _fronts: dict[tuple[Op, bool, bool], SectionFronts] = field(default_factory=dict)
    _least: dict[tuple[Op, bool, bool], tuple[int, Float]] = field(default_factory=dict)
    _sides: dict[tuple[object, ...], Side] = field(default_factory=dict)
    """What is known of pools before their options are."""
    _ready: dict[tuple[object, ...], Side] = field(default_factory=dict)
    _floors: dict[tuple[object, int], float] = field(default_factory=dict)
    _old: dict[tuple[object, int], float] = field(default_factory=dict)
    """Floors that were found before more was learnt."""
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

    @cached_property
    def sizes(self) -> Int:
        """Numbers of devices that some pool may have, ascending, int64[sizes]."""
        legal = self.legal
        return np.unique(np.concatenate([np.array(legal.space[f"devices.{role}"]) for role in legal.setting.roles]))

    def least(self, op: Op, *, apart: bool, adapter: bool) -> Float:
        """Seconds and latency below which no layout is by group, staleness and number of devices, float64[groups,
        staleness + 1, sizes, 2]; infinite where there is none."""
        front = self.front(op, apart=apart, adapter=adapter)
        key = (op, front.apart, front.adapter)
        if key not in self._least or self._least[key][0] != front.asked:
            groups, stale = len(self.legal.setting.groups), max(self.legal.space["staleness"]) + 1
            table = np.full((groups, stale, len(self.sizes), 2), np.inf)
            at = {devices: place for place, devices in enumerate(self.sizes.tolist())}
            for (group, devices, staleness), found in front.least_of.items():
                table[group, staleness if front.table.by_staleness else slice(None), at[devices]] = found
            self._least[key] = (front.asked, table)
        return self._least[key][1]

    def _least_of(self, family: Family, op: Op) -> Float:
        """The same for a section of a family, by age and number of devices, float64[ages, sizes, 2]."""
        group, found = family.case.pools[family.pool_of[op]][1], list[Float]()
        for staleness, in_flight in family.ages:
            apart = not in_flight if op is Op.GENERATE else family.is_streamed(op)
            found.append(self.least(op, apart=apart, adapter=family.is_adapter)[group, staleness])
        return np.stack(found)

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
            room = float(room_of(self.setup)[group])
            # A larger pool has more memory, and may be what an exact number of devices asks for.
            thrifty = not self.by_memory and limits.devices is None
            most, largest = max(most, known.below), max(largest, known.largest)
            known = side_of(rough, fronts, group, room, most=most, largest=largest, thrifty=thrifty)
            self._ready[key] = known
        return known

    def floor(self, family: Family, enough: float = np.inf) -> float:
        """Seconds for which some pool of any of a family's plans is busy at least; or less, if that is known to be
        `enough`."""
        asked = sum(front.asked for front in self.fronts)
        if asked != self._asked:
            # Something was learnt of a section, so that floors may be higher now.
            self._old, self._floors, self._curves, self._asked = self._old | self._floors, {}, {}, asked
        key = (family.loads, self.within.devices)
        if self._old.get(key, -np.inf) >= enough:
            return self._old[key]
        if key not in self._floors:
            curves = [self._curve(family, pool) for pool in range(len(family.case.pools))]
            seconds = np.sort(np.concatenate(curves))
            used = np.zeros((len(self._available), len(seconds)), dtype=np.int64)
            for (_, group), curve in zip(family.case.pools, curves, strict=True):
                # The fewest devices with which each pool is done in so many seconds; too many if it never is.
                used[group] += self._fewest[np.searchsorted(-curve, -seconds)]
            fits = (used <= self._available).all(axis=0) & (used.sum(axis=0) <= self.within.devices)
            first = int(np.argmax(fits))
            self._floors[key] = float(seconds[first]) if fits[first] else np.inf
        return self._floors[key]

    @cached_property
    def _available(self) -> Int:
        """Devices of each group, int64[groups, 1]."""
        return np.array([[group.count] for group in self.legal.setting.groups])

    @cached_property
    def _fewest(self) -> Int:
        """The sizes, and more than there are."""
        return np.append(self.sizes, MOST_DEVICES)

    def _curve(self, family: Family, pool: int) -> Float:
        """Seconds for which a pool is busy at least by the most devices it may have, float64[sizes]."""
        key = family.loads[pool]
        if key not in self._curves:
            self._curves[key] = np.minimum.accumulate(self._busy(family, pool).min(axis=0))
        return self._curves[key]

    def _busy(self, family: Family, pool: int) -> Float:
        """Seconds for which a pool is busy at least, by age and its devices, float64[ages, sizes]."""
        parts = [family.times(op) * self._least_of(family, op)[..., 0] for op in family.members[pool]]
        return np.asarray(sum(parts))

    def roots(self, family: Family, record: Record) -> Roots:
        """Choices of variants and sizes whose pools are each busy for less than is known."""
        below = most(record, family)
        sides = {pool: self._side(family, pool, below, 0) for pool in family.sides}
        variant, sizes, busy = self._sizes(family, sides, record, below)
        if len(variant) and sides:
            room = self.room(family, sides, sizes).max(axis=0)
            sides = {pool: self._side(family, pool, below, int(room[pool])) for pool in family.sides}
            variant, sizes, busy = self._sizes(family, sides, record, below)
        least = self._least_parts(family, sides, variant, sizes)
        return Roots(family=family, sides=sides, variant=variant, sizes=sizes, least=least, busy=busy)

    def _sizes(self, family: Family, sides: dict[int, Side], record: Record, below: float) -> tuple[Int, Int, Float]:
        """See `Roots`: variant, sizes and busy."""
        age, sizes, busy = self._ends(family, sides, below)
        staleness = np.array(family.ages)[age, 0]
        news = np.flatnonzero(busy < record.limit(Reached(family=family, sizes=sizes, staleness=staleness)))
        row, variant = np.nonzero(age[news, None] == family.age_of)
        return variant, sizes[news][row], busy[news][row]

    def _ends(self, family: Family, sides: dict[int, Side], most: float) -> tuple[Int, Int, Float]:
        """Ages, and sizes of the pools that generate and train the actor, with which no pool is busy for `most`
        seconds, and the seconds of the busiest."""
        age = np.arange(len(family.ages))
        sizes, longest = np.zeros((len(age), len(family.case.pools)), dtype=np.int64), np.zeros(len(age))
        for pool in (pool for pool in range(len(family.case.pools)) if pool not in sides):
            busy = self._busy(family, pool)
            of, place = np.nonzero(busy < most)
            count, first = np.bincount(of, minlength=len(busy)), np.searchsorted(of, np.arange(len(busy)))
            place = place[ranges(first[age], count[age])]
            before = np.repeat(np.arange(len(age)), count[age])
            age, sizes, longest = age[before], sizes[before], longest[before]
            longest, sizes[:, pool] = np.maximum(longest, busy[age, place]), self.sizes[place]
        room = self.room(family, sides, sizes)
        fits = room.min(axis=1) >= 0
        age, sizes, longest, room = age[fits], sizes[fits], longest[fits], room[fits]
        for pool, side in sides.items():
            longest = np.maximum(longest, side.busy[side.place(room[:, pool])])
        legal = np.ones(len(sizes), dtype=bool) if sides else self.legal.fit(family.case, sizes)
        return age[legal], sizes[legal], longest[legal]

    def _least_parts(self, family: Family, sides: dict[int, Side], variant: Int, sizes: Int) -> Float:
        """See `Roots.least`."""
        least = np.zeros((len(variant), len(family.case.sections), 5))
        room, age = self.room(family, sides, sizes), family.age_of[variant]
        for i, op in enumerate(family.case.sections):
            pool = family.pool_of[op]
            if pool in sides:
                side = sides[pool]
                least[:, i, :2] = side.upto[side.place(room[:, pool]), family.members[pool].index(op)][:, None]
                continue
            least[:, i, :2] = self._least_of(family, op)[age, np.searchsorted(self.sizes, sizes[:, pool])]
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
        spare = self.within.devices - counted.sum(axis=1)
        left = [
            np.minimum(setting.groups[group].count - counted[:, group_of == group].sum(axis=1), spare)
            for group in group_of.tolist()
        ]
        both = np.stack(left, axis=1)
        return np.where(both < 0, -1, both + np.where(sizes > 0, 0, smallest))
