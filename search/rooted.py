"""The roots of a family: their sections' options, and what the two sections between which weights travel need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate
from analytic.scales import scales_at
from analytic.transfer import reward_seconds, sync_seconds
from ir.batch import ROLES, PlanBatch
from ir.graph import Op
from search.families import Family, Roots
from search.fronts import ROUNDING, SectionFronts
from search.layouts import SENT, room_of
from search.meetings import Ends, Meeting
from search.options import Kinds, distinct
from search.records import Reached, Record
from search.tables import Tables
from space.tables import KEYS

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Rows = NDArray[np.intp] | NDArray[np.bool_]

ORDER = (
    Op.UPDATE_ACTOR, Op.GENERATE, Op.OLD_LOGPROB, Op.REFERENCE_LOGPROB, Op.TEACHER_LOGPROB, Op.UPDATE_CRITIC,
    Op.VALUES, Op.REWARD,
)  # fmt: skip
"""In which sections get their layout: those first that take longest; passes after the update of their weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Partial plans of one depth, arrays of one length; most promising first."""

    root: Int
    """Number of the choice of variant and of the sizes of the pools that generate and train the actor."""
    sizes: Int
    """int64[n, pools], 0 where open."""
    picks: Int
    """int64[n, sections], options of the sections that have a layout; -1 for the others."""
    parts: Float
    """float64[n, sections, 5], see `search.options.Options.parts`; of other sections the least they can be."""
    sync: Float
    """Seconds of the weights' way to the engines; 0 until both ends have a layout."""
    bound: Float
    """Seconds of a step, at least."""

    def __len__(self) -> int:
        return len(self.root)

    def take(self, rows: Rows | slice) -> Block:
        """The given ones."""
        return Block(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(kw_only=True)
class Rooted:
    """Roots of a family with the options of their sections."""

    tables: Tables
    roots: Roots
    example: Estimate
    """Of any plan of its graph."""
    record: Record
    _range: dict[Op, Int] = field(default_factory=dict)
    """First and one past the last of a section's options for each root, int64[2, roots], if roots have its size."""
    _menu: dict[Op, Int] = field(default_factory=dict)
    """Options of sections of which only some are worth trying, one root after the other."""
    _place: dict[Op, Int] = field(default_factory=dict)
    """First and one past the last place in `_menu` of each root, int64[2, roots]."""
    _floors: Float = field(default_factory=lambda: np.zeros(0))
    """Least seconds of synchronisation for each place of the update's menu."""

    @property
    def family(self) -> Family:
        """Of all roots."""
        return self.roots.family

    @cached_property
    def sections(self) -> tuple[Op, ...]:
        """In the order in which they get layouts: pools whose size a root has, then the others, one by one."""
        return tuple(sorted((op for op in ORDER if op in self._rank), key=lambda op: self._rank[op]))

    @cached_property
    def _rank(self) -> dict[Op, int]:
        """Number of a section's pool among those whose sizes are open, from 1; 0 where a root has the size."""
        sides = self.family.sides
        return {op: sides.index(pool) + 1 if pool in sides else 0 for op, pool in self.family.pool_of.items()}

    @cached_property
    def _column(self) -> dict[Op, int]:
        """Where a section is among those of the case."""
        return {op: i for i, op in enumerate(self.family.case.sections)}

    @cached_property
    def _columns(self) -> list[list[int]]:
        """Those of each pool."""
        return [[self._column[op] for op in members] for members in self.family.members]

    @cached_property
    def _room(self) -> Float:
        """Bytes that a plan may take of a device of each pool."""
        return room_of(self.tables.setup, self.tables.within.memory)[[group for _, group in self.family.case.pools]]

    def _front(self, op: Op, apart: bool) -> SectionFronts:
        return self.tables.front(op, apart=apart, adapter=self.family.is_adapter)

    def _apart(self, op: Op, root: Int) -> NDArray[np.bool_]:
        """For which roots a section is priced apart, see `SectionFronts.apart`."""
        if op is Op.GENERATE:
            return np.asarray(self.family.variants[self.roots.variant[root], 1] == 0)
        return np.full(len(root), self.family.is_streamed(op))

    def _by_front(self, op: Op, root: Int) -> Iterator[tuple[SectionFronts, NDArray[np.intp]]]:
        apart = self._apart(op, root)
        for special in (False, True):
            rows = np.flatnonzero(apart == special)
            if len(rows):
                yield self._front(op, special), rows

    def _others(self, op: Op) -> list[int]:
        """Columns of the other sections of a section's pool."""
        return [i for i in self._columns[self.family.pool_of[op]] if i != self._column[op]]

    def _limit(self, block: Block) -> Float:
        """Seconds that no step may reach."""
        reached = Reached(family=self.family, sizes=block.sizes, staleness=self.roots.staleness[block.root])
        return self.record.limit(reached) * (1.0 - ROUNDING / 10.0)

    def _span(self, block: Block, op: Op) -> None:
        """Make a section's options ready where the size of its pool is known, and find each root's."""
        pool = self.family.pool_of[op]
        group = self.family.case.pools[pool][1]
        limit = self._limit(block) - block.parts[:, self._others(op), 0].sum(axis=1)
        found = self._range.setdefault(op, np.zeros((2, len(self.roots.variant)), dtype=np.int64))
        for front, rows in self._by_front(op, block.root):
            sizes, ages = block.sizes[rows, pool], self.roots.staleness[block.root[rows]]
            first, back = distinct(sizes, ages)
            most = np.full(len(first), -np.inf)
            np.maximum.at(most, back, limit[rows])
            keys = [front.key(group, n, k) for n, k in zip(sizes[first].tolist(), ages[first].tolist(), strict=True)]
            asked = dict.fromkeys(keys, -np.inf)
            for key, seconds in zip(keys, most.tolist(), strict=True):
                asked[key] = max(asked[key], seconds)
            front.ask(asked)
            spans = np.array([front.span.get(key, (0, 0)) for key in keys], dtype=np.int64)
            found[:, block.root[rows]] = spans[back].T

    def _spans(self, op: Op, block: Block) -> tuple[Int, Int]:
        """First and one past the last option of a section for each partial plan."""
        pool = self.family.pool_of[op]
        if pool not in self.family.sides:
            return self._range[op][0, block.root], self._range[op][1, block.root]
        side, i = self.roots.sides[pool], self.family.members[pool].index(op)
        place = side.place(block.sizes[:, pool])
        return side.first[place, i], side.last[place, i]

    def _structure(self, root: Int) -> dict[str, NDArray[np.int32]]:
        """Columns of the structure of roots and the sizes that they have."""
        columns = {flag: np.broadcast_to(np.int32(value), len(root)) for flag, value in self.family.flags.items()}
        variants = self.family.variants[self.roots.variant[root]].astype(np.int32)
        columns |= {name: variants[:, i] for i, name in enumerate(("staleness", "in_flight", "sync"))}
        for pool, (roles, group) in enumerate(self.family.case.pools):
            for role in roles:
                columns[f"place.{role}"] = np.broadcast_to(np.int32(ROLES.index(roles[0])), len(root))
                columns[f"group.{role}"] = np.broadcast_to(np.int32(group), len(root))
                columns[f"devices.{role}"] = self.roots.sizes[root, pool].astype(np.int32)
        return columns

    @cached_property
    def _verifying(self) -> Float:
        """Seconds of a verifier for each root."""
        root = np.arange(len(self.roots.variant))
        s, batch = self.tables.setup, PlanBatch(len(root), self._structure(root))
        return np.asarray(reward_seconds(s, batch) * scales_at(s.cluster, Op.REWARD, batch["group.actor"]))

    def _sync_seconds(self, root: Int, actor: Int, rollout: Int) -> Float:
        """Seconds of weight synchronisation between options of the update and of generation."""
        columns, s = self._structure(root), self.tables.setup
        for op, options in zip(SENT, (actor, rollout), strict=True):
            for front, rows in self._by_front(op, root):
                for name, found in front.columns_of(options[rows]).items():
                    if name not in KEYS:
                        columns.setdefault(f"{op}.{name}", np.zeros(len(root), dtype=np.int32))[rows] = found
        batch = PlanBatch(len(root), columns)
        return np.asarray(sync_seconds(s, batch) * scales_at(s.cluster, Op.SYNC_WEIGHTS, batch["group.actor"]))

    def _least_sync(self, block: Block) -> Float:
        """Least seconds that weights travel between any options, float64[n]."""
        keys, back = self._met(block)
        return np.array([self.tables.meetings[key].floor for key in keys])[back]

    def _choose_ends(self, block: Block) -> None:
        """Find what is worth trying of the two sections between which weights travel, root by root."""
        keys, back = self._met(block)
        ends = [self._ends(key) for key in keys]
        for op, name in zip(SENT, ("actor", "rollout"), strict=True):
            menus = [getattr(one, name) for one in ends]
            edges = np.concatenate([[0], np.cumsum([len(menu) for menu in menus])])
            self._menu[op] = np.concatenate(menus)
            self._place[op] = np.zeros_like(self._range[op])
            self._place[op][:, block.root] = np.stack([edges[:-1], edges[1:]])[:, back]
        self._floors = np.concatenate([one.floors for one in ends])

    def _ends(self, key: tuple[int, ...]) -> Ends:
        trained, known = Op.OLD_LOGPROB in self.sections, self.tables.ends
        if (key, trained) not in known:
            known[key, trained] = self.tables.meetings[key].ends(by_degrees=trained)
        return known[key, trained]

    def _met(self, block: Block) -> tuple[list[tuple[int, ...]], NDArray[np.intp]]:
        """Make the meetings of the sections between which weights travel known; the different ones, and each row's."""
        pools = [self.family.pool_of[op] for op in SENT]
        spans = [column for op in SENT for column in self._spans(op, block)]
        variant = self.family.variants[self.roots.variant[block.root], :3]
        columns = (*spans, *(block.sizes[:, pool] for pool in pools), *variant.T)
        first, back = distinct(*columns)
        groups, known = [self.family.case.pools[pool][1] for pool in pools], self.tables.meetings
        keys = [(pools[0] == pools[1], *groups, *key) for key in np.stack(columns, axis=1)[first].tolist()]
        news = [i for i, key in enumerate(keys) if key not in known]
        if news:
            met = self._meetings(block.root[first[news]])
            known |= {keys[i]: meeting for i, meeting in zip(news, met, strict=True)}
        return keys, back

    def _meetings(self, root: Int) -> list[Meeting]:
        """The meeting of each root."""
        actor, rollout = (self._kinds(op, root) for op in SENT)
        count = [len(a.first) * len(b.first) for a, b in zip(actor, rollout, strict=True)]
        pairs = [np.meshgrid(a.first, b.first, indexing="ij") for a, b in zip(actor, rollout, strict=True)]
        picks = [np.concatenate([pair[i].reshape(-1) for pair in pairs]) for i in range(2)]
        seconds = np.split(self._sync_seconds(np.repeat(root, count), *picks), np.cumsum(count)[:-1])
        return [
            Meeting(actor=a, rollout=b, seconds=part.reshape(len(a.first), len(b.first)))
            for a, b, part in zip(actor, rollout, seconds, strict=True)
        ]

    def _kinds(self, op: Op, root: Int) -> list[Kinds]:
        """Of a section's options for each root."""
        found = dict[int, Kinds]()
        for front, rows in self._by_front(op, root):
            found |= {row: front.kinds(*self._range[op][:, root[row]].tolist()) for row in rows.tolist()}
        return [found[row] for row in range(len(root))]
