"""Layouts of a section that can be part of a best plan: those that no other beats in time and memory.

All layouts of a section get a bound on their seconds; those that a known step rules out
are never priced. The others are, pool by pool as pools are asked for. They are compared
within a class of equal degrees only, since what lies between sections (weights that are
laid out anew, weights that travel to engines) depends on those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.costs import Columns
from analytic.setup import Setup
from ir.graph import Op
from search.layouts import WITHIN_CLASS, Layouts
from search.options import Kinds, Options, distinct, nothing, ranges
from search.skyline import skyline, staircase
from search.work import Work
from space.enumerate import LegalSpace
from space.tables import Key, SectionTable

Float = NDArray[np.float64]
Int = NDArray[np.int64]

OPEN = -1
"""Degrees that are not chosen yet."""

SPARE = 1.05
"""How far above what is asked for layouts are kept."""

ROUNDING = 1e-9
"""Relative; floats that are sums of the same terms in another order differ by less."""


@dataclass(kw_only=True)
class SectionFronts:
    """The layouts of one section that are worth trying, pool by pool as they are asked for."""

    legal: LegalSpace
    setup: Setup
    op: Op
    apart: bool
    """Of a pass, whether its batch comes in small pieces; of generation, whether engines finish all sequences before
    they take new weights, as if nothing were stale."""
    adapter: bool
    """Whether its weights are another section's."""
    work: Work = field(default_factory=lambda: Work(np.inf))
    asked: int = 0
    """How often options were made, so that `least_of` changed."""
    is_sound: bool = True
    """Whether no layout was faster than its bound."""
    options: Options | None = None
    span: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """First and one past the last option of the pools that were asked for."""
    _steps: dict[tuple[int, int, int], tuple[Float, Float]] = field(default_factory=dict)
    """Of options from one to another beside weights of some degrees: sizes, and the fastest among those up to each."""
    _kinds: dict[tuple[int, int], Kinds] = field(default_factory=dict)
    limit_of: dict[Key, float] = field(default_factory=dict)
    """Below which seconds their options are complete."""

    @property
    def table(self) -> SectionTable:
        """All its legal layouts."""
        return self.legal.tables[self.op]

    def key(self, group: int, devices: int, staleness: int) -> Key:
        """What its layouts depend on of a pool and a plan's staleness."""
        return group, devices, staleness if self.table.by_staleness else 0

    @cached_property
    def layouts(self) -> Layouts:
        """All of them, and their price."""
        return Layouts(
            table=self.table, setup=self.setup, op=self.op, apart=self.apart, adapter=self.adapter, work=self.work
        )

    @cached_property
    def least_of(self) -> dict[Key, tuple[float, float]]:
        """Seconds and latency below which no layout on a pool is."""
        least = self.layouts.least
        found = {key: float(least[first:last].min()) for key, (first, last) in self.table.span.items()}
        return {key: (seconds, seconds) for key, seconds in found.items()}

    def ask(self, limits: Mapping[Key, float]) -> None:
        """Make the options of pools ready that take less than so many seconds."""
        wanted = [k for k, limit in limits.items() if k in self.table.span and self.limit_of.get(k, 0.0) < limit]
        if not wanted:
            return
        # More than asked for, since what comes later may ask for a little more.
        for key in wanted:
            self.limit_of[key] = limits[key] * SPARE
        firsts = np.array([self.table.span[key][0] for key in wanted])
        counts = np.array([self.table.span[key][1] for key in wanted]) - firsts
        rows = ranges(firsts, counts)
        pool = np.repeat(np.arange(len(wanted)), counts)
        limit = np.array([self.limit_of[key] for key in wanted])
        hopeful = self.layouts.least[rows] < limit[pool]
        found, pool = self._options(rows[hopeful], pool[hopeful], limit)
        start = 0 if self.options is None else len(self.options.seconds)
        edges = start + np.searchsorted(pool, np.arange(len(wanted) + 1))
        self.options = found if self.options is None else Options.concatenate([self.options, found])
        for i, key in enumerate(wanted):
            first, last = self.span[key] = (int(edges[i]), int(edges[i + 1]))
            # What fits is often slower than what does not, and nothing else takes less than was asked for.
            made, (seconds, latency) = slice(first - start, last - start), self.least_of[key]
            self.least_of[key] = (
                max(seconds, float(found.seconds[made].min(initial=limit[i]))),
                max(latency, float(found.latency[made].min(initial=limit[i]))),
            )
        self.asked += 1

    def _options(self, rows: Int, pool: Int, limit: Float) -> tuple[Options, Int]:
        """Options among rows of the table, and the pool of each, in the order of the pools."""
        levels, moved = self.layouts.levels
        lines = np.repeat(np.arange(len(rows)), len(levels))
        options, pool = self._good(rows[lines], np.tile(levels, len(rows)), pool[lines], limit)
        if len(moved):
            # What state kept elsewhere costs and saves does not depend on how a batch is cut and what is recomputed: of
            # layouts that differ in nothing else, what one beats with all at rest it beats with any of it elsewhere.
            unbeaten = staircase(options.seconds, options.transient, self.layouts.outside(options.row, options.free))
            lines, step = np.repeat(unbeaten, len(moved)), np.tile(moved, len(unbeaten))
            more, of = self._good(options.row[lines], options.free[lines] + step, pool[lines], limit)
            options = Options.concatenate([options.take(unbeaten), more])
            pool = np.concatenate([pool[unbeaten], of])
        kept = skyline(options.points, pool, options.kind)
        options, pool = options.take(kept), pool[kept]
        order = np.lexsort((options.seconds, pool))
        return options.take(order), pool[order]

    def _good(self, rows: Int, free: Int, pool: Int, limit: Float) -> tuple[Options, Int]:
        """Layouts that fit and take less than the limits of their pools, and the pool of each."""
        if len(rows) == 0:
            return nothing(), pool
        options = self.layouts.priced(rows, free)
        above = (options.seconds >= self.layouts.least[rows] * (1.0 - ROUNDING)) & (options.latency >= options.seconds)
        self.is_sound = self.is_sound and bool(above.all())
        room = self.layouts.room[rows]
        good = np.flatnonzero((options.seconds < limit[pool]) & (options.resident + options.transient <= room))
        return options.take(good), pool[good]

    @property
    def made(self) -> Options:
        """All options so far."""
        return nothing() if self.options is None else self.options

    def take(self, options: Int) -> Options:
        """Options by number."""
        return self.made.take(options)

    def least_within(self, first: Int, last: Int, room: Float, degrees: Int) -> Float:
        """Seconds of the fastest of the options from `first` to `last` that fit in so many bytes, float64[n]; infinite
        if none does. Those of other degrees than `degrees`, unless these are open, lay weights out anew."""
        found = np.full(len(first), np.inf)
        cases, back = distinct(first, last, degrees)
        for i, row in enumerate(cases.tolist()):
            case = (int(first[row]), int(last[row]), int(degrees[row]))
            if case not in self._steps:
                some = self.take(np.arange(*case[:2]))
                again = (some.degrees != case[2]) & (case[2] != OPEN)
                size = some.resident + some.transient + again * some.resharded
                order = np.argsort(size)
                fastest = np.minimum.accumulate((some.seconds + again * some.reshard)[order])
                self._steps[case] = (size[order], np.concatenate([[np.inf], fastest]))
            sizes, fastest = self._steps[case]
            found[back == i] = fastest[np.searchsorted(sizes, room[back == i], side="right")]
        return found

    def kinds(self, first: int, last: int) -> Kinds:
        """Options from `first` to `last` by kind."""
        if (first, last) not in self._kinds:
            self._kinds[first, last] = Kinds.among(self.made, first, last)
        return self._kinds[first, last]

    def columns_of(self, options: Int) -> Columns:
        """Columns of options that something outside the section may depend on, without the section's prefix."""
        made = self.made
        return self.layouts.columns(made.row[options], made.free[options], without=WITHIN_CLASS)

    def numbers(self, options: Int) -> Int:
        """Of options among the layouts that are legal on their pool."""
        assert self.options is not None
        return self.layouts.numbers(self.options.row[options], self.options.free[options])
