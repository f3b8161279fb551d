"""Layouts of a section that can be part of a best plan: those that few others beat in time and memory.

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

from analytic.costs import RESHARDED, Columns, Cost
from analytic.estimate import section_cost
from analytic.memory import TRAINED_BY
from analytic.setup import Setup
from ir.batch import CODES
from ir.graph import ROLE_OF, Op
from search.options import Options, distinct, nothing, ranges
from search.skyline import beaten_by_few
from space.enumerate import LegalSpace
from space.tables import KEYS, Key, SectionTable

Float = NDArray[np.float64]
Int = NDArray[np.int64]

FASTEST = {
    "recompute": tuple(CODES["recompute"].index(name) for name in ("none", "selective")),
    "offload": (CODES["offload"].index("none"),),
}
"""Values of fields that no other is faster than: what the others save is memory. Selective recomputation may save a
little time where experts' exchanges hide under it."""

WITHIN_CLASS = (
    "concurrency", "memory_percent", "prefill_tokens", "draft_tokens", "micro_batch", "micro_tokens", "vpp", "schedule",
    "recompute", "offload",
)  # fmt: skip
"""Fields that nothing outside a section depends on."""

DEGREES = ("tp", "pp", "ep")
"""Fields that must agree, and whether weights are sharded, for a pass to find weights laid out as they are trained."""

SENT = (Op.UPDATE_ACTOR, Op.GENERATE)
"""Sections between which weights travel."""

WHILE_SENT = {Op.UPDATE_ACTOR: "weights", Op.GENERATE: "rollout weights"}
"""What of them comes and goes, and must be there meanwhile."""

MOST_DEVICES = 1 << 17
"""More than any degree."""

OPEN = -1
"""Degrees that are not chosen yet."""

SPARE = 1.05
"""How far above what is asked for layouts are kept."""

ROUNDING = 1e-9
"""Relative; floats that are sums of the same terms in another order differ by less."""


WORK_LAYOUT = 4
"""Partial plans that are looked at while a layout is priced, about."""


class OutOfWorkError(Exception):
    """A search would have to do more than it may."""


@dataclass(slots=True)
class Work:
    """What a search may still do, in partial plans that it looks at: unlike seconds, the same on every machine."""

    left: float

    def spend(self, count: int) -> None:
        """Account for some.

        Raises:
            OutOfWorkError: that is more than there is.
        """
        if count > self.left:
            raise OutOfWorkError
        self.left -= count


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
    count: int
    """Layouts that so many others beat in everything are left out."""
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
    def keys(self) -> NDArray[np.int32]:
        """Pool of each row of the table, int32[m, 3]."""
        keys = np.empty((len(self.table.rows), len(KEYS)), dtype=np.int32)
        for key, (begin, end) in self.table.span.items():
            keys[begin:end] = key
        return keys

    @cached_property
    def _least(self) -> Float:
        """Seconds below which no layout of a row is, float64[m]."""
        rows, levels = (
            np.arange(len(self.table.rows)),
            _fastest(self.table, self.setup.job.models[ROLE_OF[self.op]].is_moe),
        )
        if len(rows) == 0:
            return np.zeros(0)
        cost = self._price(self._columns(np.repeat(rows, len(levels)), np.tile(levels, len(rows))))
        return np.asarray(cost.seconds.reshape(len(rows), -1).min(axis=1))

    @cached_property
    def least_of(self) -> dict[Key, float]:
        """Seconds below which no layout on a pool is."""
        return {key: float(self._least[first:last].min()) for key, (first, last) in self.table.span.items()}

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
        hopeful = self._least[rows] < limit[pool]
        found, pool = self._options(rows[hopeful], pool[hopeful], limit)
        start = 0 if self.options is None else len(self.options.seconds)
        edges = start + np.searchsorted(pool, np.arange(len(wanted) + 1))
        self.options = found if self.options is None else Options.concatenate([self.options, found])
        for i, key in enumerate(wanted):
            first, last = self.span[key] = (int(edges[i]), int(edges[i + 1]))
            # What fits is often slower than what does not, and nothing else takes less than was asked for.
            least = float(found.seconds[first - start]) if last > first else self.limit_of[key]
            self.least_of[key] = max(self.least_of[key], min(least, self.limit_of[key]))
        self.asked += 1

    def _options(self, rows: Int, pool: Int, limit: Float) -> tuple[Options, Int]:
        """Options among rows of the table, and the pool of each, in the order of the pools."""
        if len(rows) == 0:
            return nothing(), pool
        levels = np.arange(self.table.num_free)
        lines, free = np.repeat(np.arange(len(rows)), len(levels)), np.tile(levels, len(rows))
        rows, pool = rows[lines], pool[lines]
        options = self._priced(rows, free)
        above = (options.seconds >= self._least[rows] * (1.0 - ROUNDING)) & (options.latency >= options.seconds)
        self.is_sound = self.is_sound and bool(above.all())
        room = room_of(self.setup)[self.keys[rows, 0]]
        good = np.flatnonzero((options.seconds < limit[pool]) & (options.resident + options.transient <= room))
        options, pool = options.take(good), pool[good]
        kept = beaten_by_few(options.points, pool, options.kind, count=self.count)
        options, pool = options.take(kept), pool[kept]
        order = np.lexsort((options.seconds, pool))
        return options.take(order), pool[order]

    def _columns(self, rows: Int, free: Int) -> Columns:
        """Layouts as columns: rows of the table with combinations of the free fields."""
        x = {name: self.table.rows[rows, i] for i, name in enumerate(self.table.fields)}
        for name, values in reversed(self.table.free):
            free, level = np.divmod(free, len(values))
            x[name] = np.asarray(values, dtype=np.int32)[level]
        return x | {name: self.keys[rows, i] for i, name in enumerate(KEYS)}

    def _price(self, x: Columns) -> Cost:
        count = len(x["devices"])
        self.work.spend(WORK_LAYOUT * count)
        if self.apart and self.op is Op.GENERATE:
            return section_cost(self.setup, self.op, {**x, "staleness": np.zeros(count, dtype=np.int32)})
        return section_cost(self.setup, self.op, x, streamed=np.full(count, True) if self.apart else None)

    def _priced(self, rows: Int, free: Int) -> Options:
        x = self._columns(rows, free)
        cost, zero = self._price(x), np.zeros(len(rows))
        gone = {RESHARDED} | ({"weights"} if self.adapter else set())
        if any(machine.is_host for machine in self.setup.machines):
            # There, engine and trainer of a pool use the same weights.
            gone.add("rollout weights")
        return Options(
            seconds=cost.seconds,
            latency=cost.latency,
            reshard=cost.reshard,
            resident=sum((v for name, v in cost.resident.items() if name not in gone), zero),
            transient=sum((v for name, v in cost.transient.items() if name not in gone), zero),
            resharded=cost.transient.get(RESHARDED, zero),
            sent=cost.transient.get(WHILE_SENT[self.op], zero) if self.op in SENT else zero,
            degrees=_degrees(x),
            kind=self._kinds(x),
            row=rows,
            free=free,
        )

    def _kinds(self, x: Columns) -> Int:
        if self.op in SENT:
            fields = [name for name in x if name not in (*WITHIN_CLASS, *KEYS)]
            return distinct(*(x[name] for name in fields))[1].astype(np.int64)
        trained = self.op in TRAINED_BY or self.op in TRAINED_BY.values()
        return _degrees(x) if trained else np.zeros(len(x["devices"]), dtype=np.int64)

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

    def columns_of(self, options: Int) -> Columns:
        """Columns of options, without the section's prefix."""
        assert self.options is not None
        return self._columns(self.options.row[options], self.options.free[options])

    def numbers(self, options: Int) -> Int:
        """Of options among the layouts that are legal on their pool."""
        assert self.options is not None
        rows = self.options.row[options]
        return np.asarray((rows - self._first[rows]) * self.table.num_free + self.options.free[options])

    @cached_property
    def _first(self) -> Int:
        """First row of each row's pool."""
        first = np.empty(len(self.table.rows), dtype=np.int64)
        for begin, end in self.table.span.values():
            first[begin:end] = begin
        return first


def _degrees(x: Columns) -> Int:
    code = (x["zero"] == 3).astype(np.int64) if "zero" in x else np.zeros(len(x["tp"]), dtype=np.int64)
    for name in DEGREES:
        code = code * MOST_DEVICES + x[name]
    return code


def _fastest(table: SectionTable, is_moe: bool) -> Int:
    """Combinations of the free fields among which are the fastest."""
    code = np.zeros(1, dtype=np.int64)
    for name, values in table.free:
        some = np.arange(len(values))
        fastest = [value for value in FASTEST.get(name, ())[: 1 + is_moe] if value in values]
        if fastest:
            some = np.array([values.index(value) for value in fastest])
        elif name == "memory_percent":
            # A cache of all slots at their longest, or the largest share of memory.
            some = np.unique(some[[0, -1]])
        code = (code[:, None] * len(values) + some[None, :]).reshape(-1)
    return code


def room_of(s: Setup) -> Float:
    """Bytes that a plan may take of a device of each group, what every worker needs left out."""
    margin = 1.0 - s.job.limits.memory_margin
    room = [m.device.memory_bytes * margin - m.device.base_memory_bytes for m in s.machines]
    # A byte's rounding is no reason to leave a layout out: whole plans are judged again.
    return np.array(room) + 1.0
