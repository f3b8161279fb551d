"""Layouts of a section and their price: a row of its table with a combination of the fields that no rule reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.costs import RESHARDED, Columns, Cost
from analytic.estimate import section_cost
from analytic.memory import TRAINED_BY
from analytic.setup import Setup
from ir.batch import CODES
from ir.graph import ROLE_OF, Op
from ir.plan import SECTIONS, Update
from search.options import Options, distinct
from search.work import Work
from space.tables import KEYS, SectionTable

Float = NDArray[np.float64]
Int = NDArray[np.int64]

FASTEST = {
    "recompute": tuple(CODES["recompute"].index(name) for name in ("none", "selective")),
    "offload": (CODES["offload"].index("none"),),
}
"""Values of fields that no other is faster than: what the others save is memory. Selective recomputation may save a
little time where experts' exchanges hide under it."""

AT_REST = CODES["offload"].index("none")
"""What keeps nothing elsewhere."""

WITHIN_CLASS = (
    "concurrency", "memory_percent", "prefill_tokens", "draft_tokens", "micro_batch", "micro_tokens", "vpp", "schedule",
    "recompute", "offload",
)  # fmt: skip
"""Fields that nothing outside a section depends on."""

DEGREES = ("tp", "pp", "ep")
"""Fields that must agree, and how weights are sharded, for a pass to find weights laid out as they are trained."""

SENT = (Op.UPDATE_ACTOR, Op.GENERATE)
"""Sections between which weights travel."""

WHILE_SENT = {Op.UPDATE_ACTOR: "weights", Op.GENERATE: "rollout weights"}
"""What of them comes and goes, and must be there meanwhile."""

MOST_DEVICES = 1 << 17
"""More than any degree."""

BLOCK = 1 << 14
"""Layouts priced at a time, so that temporaries stay in the cache."""

WORK_LAYOUT = 4
"""Partial plans that are looked at while a layout is priced, about."""


@dataclass(kw_only=True)
class Layouts:
    """All legal layouts of one section."""

    table: SectionTable
    setup: Setup
    op: Op
    apart: bool
    """Of a pass, whether its batch comes in small pieces; of generation, whether engines finish all sequences before
    they take new weights, as if nothing were stale."""
    adapter: bool
    """Whether its weights are another section's."""
    work: Work

    @cached_property
    def keys(self) -> NDArray[np.int32]:
        """Pool of each row of the table, int32[m, 3]."""
        keys = np.empty((len(self.table.rows), len(KEYS)), dtype=np.int32)
        for key, (begin, end) in self.table.span.items():
            keys[begin:end] = key
        return keys

    @cached_property
    def room(self) -> Float:
        """Bytes of a device for each row."""
        return room_of(self.setup)[self.keys[:, 0]]

    @cached_property
    def least(self) -> Float:
        """Seconds below which no layout of a row is, float64[m]; infinite where none can fit."""
        levels = _fastest(self.table, self.setup.job.models[ROLE_OF[self.op]].is_moe)
        first, back = self._different
        least, rows = np.full(len(first), np.inf), np.flatnonzero(self._may_fit[first])
        for some in _blocks(rows, BLOCK // len(levels)):
            cost = self._price(self.columns(np.repeat(first[some], len(levels)), np.tile(levels, len(some))))
            least[some] = cost.seconds.reshape(len(some), -1).min(axis=1)
        return least[back]

    @property
    def _different(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """First of all rows of one price, and each row's price: engines that finish all sequences are never stale."""
        if self.apart and self.op is Op.GENERATE:
            return distinct(*self.table.rows.T, *self.keys[:, :-1].T)
        every = np.arange(len(self.keys))
        return every, every

    @cached_property
    def _may_fit(self) -> NDArray[np.bool_]:
        """Rows whose state alone fits. An update's is the same however a batch is cut, and has to be on the device at
        some time even if some of it waits elsewhere."""
        if SECTIONS[self.op] is not Update or len(self.table.rows) == 0:
            return np.ones(len(self.table.rows), dtype=bool)
        _, first, back = np.unique(self._outside_row, return_index=True, return_inverse=True)
        state = self.priced(first, np.full(len(first), self.levels[0][0])).resident
        return np.asarray(state[back.reshape(-1)] <= self.room)

    @cached_property
    def levels(self) -> tuple[Int, Int]:
        """Combinations of the free fields with which an update has all its state on the device, and what is added to
        their numbers for each way to keep some of it elsewhere; all combinations of another section, and nothing."""
        every, step = np.arange(self.table.num_free), self.table.num_free
        for name, values in self.table.free:
            step //= len(values)
            if name == "offload" and SECTIONS[self.op] is Update and values[0] == AT_REST:
                return every[every // step % len(values) == 0], step * np.arange(1, len(values))
        return every, np.zeros(0, dtype=np.int64)

    def columns(self, rows: Int, free: Int, *, without: tuple[str, ...] = ()) -> Columns:
        """Layouts as columns: rows of the table with combinations of the free fields; some fields may be left out."""
        x = {name: self.table.rows[rows, i] for i, name in enumerate(self.table.fields) if name not in without}
        for name, values in reversed(self.table.free):
            free, level = np.divmod(free, len(values))
            if name not in without:
                x[name] = np.asarray(values, dtype=np.int32)[level]
        return x | {name: self.keys[rows, i] for i, name in enumerate(KEYS)}

    def _price(self, x: Columns) -> Cost:
        count = len(x["devices"])
        self.work.spend(WORK_LAYOUT * count)
        if self.apart and self.op is Op.GENERATE:
            return section_cost(self.setup, self.op, {**x, "staleness": np.zeros(count, dtype=np.int32)})
        return section_cost(self.setup, self.op, x, streamed=np.full(count, True) if self.apart else None)

    def priced(self, rows: Int, free: Int) -> Options:
        """What layouts cost, as options of no order."""
        every = np.arange(len(rows))
        return Options.concatenate([self._priced(rows[some], free[some]) for some in _blocks(every, BLOCK)])

    def _priced(self, rows: Int, free: Int) -> Options:
        x = self.columns(rows, free)
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
            kind=self._kinds(rows, free, x),
            row=rows,
            free=free,
        )

    def _kinds(self, rows: Int, free: Int, x: Columns) -> Int:
        if self.op in SENT:
            return self.outside(rows, free)
        trained = self.op in TRAINED_BY or self.op in TRAINED_BY.values()
        return _degrees(x) if trained else np.zeros(len(rows), dtype=np.int64)

    def outside(self, rows: Int, free: Int) -> Int:
        """A number for the pool and all fields that something outside the section may depend on."""
        return np.asarray(self._outside_row[rows] * self.table.num_free + self._outside_level[free])

    @cached_property
    def _outside_row(self) -> Int:
        fields = [i for i, name in enumerate(self.table.fields) if name not in WITHIN_CLASS]
        return distinct(*self.table.rows[:, fields].T, *self.keys.T)[1].astype(np.int64)

    @cached_property
    def _outside_level(self) -> Int:
        levels = np.arange(self.table.num_free)
        x = self.columns(np.zeros_like(levels), levels)
        return distinct(levels * 0, *(x[name] for name, _ in self.table.free if name not in WITHIN_CLASS))[1].astype(
            np.int64
        )

    def numbers(self, rows: Int, free: Int) -> Int:
        """Of layouts among those that are legal on their pool."""
        return np.asarray((rows - self._first[rows]) * self.table.num_free + free)

    @cached_property
    def _first(self) -> Int:
        """First row of each row's pool."""
        first = np.empty(len(self.table.rows), dtype=np.int64)
        for begin, end in self.table.span.values():
            first[begin:end] = begin
        return first


def _blocks(rows: NDArray[np.intp], size: int) -> list[NDArray[np.intp]]:
    """Rows in parts of about one size."""
    return np.array_split(rows, -(-len(rows) // max(size, 1))) if len(rows) else []


def _degrees(x: Columns) -> Int:
    code = np.zeros(len(x["tp"]), dtype=np.int64)
    if "zero" in x:
        code = np.where(x["zero"] == 3, 1 + x["shard"].astype(np.int64), 0)
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


def room_of(s: Setup, most: float = 1.0) -> Float:
    """Bytes that a plan may take of a device of each group, or less if it may take `most` of the memory, what every
    worker needs left out."""
    margin = min(1.0 - s.job.limits.memory_margin, most)
    room = [m.device.memory_bytes * margin - m.device.base_memory_bytes for m in s.machines]
    # A byte's rounding is no reason to leave a layout out: whole plans are judged again.
    return np.array(room) + 1.0
