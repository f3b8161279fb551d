"""The roots of a family: their sections' options, and what the two sections between which weights travel need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import STREAMED, Estimate
from analytic.scales import scales_at
from analytic.transfer import reward_seconds, sync_seconds
from ir.batch import ROLES, PlanBatch
from ir.graph import Op
from search.families import Ends, Record, Roots, Tables
from search.fronts import SENT, SectionFronts, room_of
from search.options import Options, distinct
from search.skyline import beaten_by_few
from space.tables import KEYS

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Rows = NDArray[np.intp] | NDArray[np.bool_]

ORDER = (
    Op.UPDATE_ACTOR, Op.GENERATE, Op.OLD_LOGPROB, Op.REFERENCE_LOGPROB, Op.TEACHER_LOGPROB, Op.UPDATE_CRITIC,
    Op.VALUES, Op.REWARD,
)  # fmt: skip
"""In which sections get their layout: those first that take longest; passes after the update of their weights."""

MOST_PARTNERS = 6
"""Different partners in weight synchronisation up to which layouts of different degrees are compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Partial plans of one depth, arrays of one length; most promising first."""

    root: Int
    """Number of the choice of variant and sizes."""
    picks: Int
    """int64[n, sections], options of the sections that have a layout; -1 for the others."""
    parts: Float
    """float64[n, sections, 5], see `search.fronts.Options.parts`; of other sections the least they can be."""
    sync: Float
    """Seconds of the weights' way to the engines; 0 until both ends have a layout."""
    bound: Float
    """Seconds of a step, at least."""

    def __len__(self) -> int:
        return len(self.root)

    def take(self, rows: Rows | slice) -> Block:
        """The given ones."""
        return Block(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


def _worth(options: Options, sync: Float, kind: Int, count: int) -> NDArray[np.intp]:
    """Rows of options that few others beat, the seconds of synchronisation with every partner float64[n, partners]
    included; fastest first."""
    columns = {column.tobytes(): column for column in np.ascontiguousarray(sync.T)}
    different = np.stack(list(columns.values()), axis=1)
    if different.shape[1] > MOST_PARTNERS:
        kept = beaten_by_few(options.points, options.kind, count=count)
    else:
        kept = beaten_by_few(np.column_stack([options.points, different]), kind, count=count)
    return np.sort(kept)


@dataclass(kw_only=True)
class Rooted:
    """Choices of variant and sizes of a family with the options of their sections."""

    tables: Tables
    roots: Roots
    example: Estimate
    """Of any plan of its graph."""
    record: Record
    _ends: list[Ends] = field(default_factory=list)
    """Of each root."""
    _menu: dict[Op, Int] = field(default_factory=dict)
    """Options of sections of which only some are worth trying, root by root."""
    _place: dict[Op, NDArray[np.int64]] = field(default_factory=dict)
    """First and one past the last place in `_menu` of each root, int64[2, roots]."""
    _floors: Float = field(default_factory=lambda: np.zeros(0))
    """Least seconds of synchronisation for each place of the update's menu."""

    @cached_property
    def sections(self) -> tuple[Op, ...]:
        """In the order in which they get layouts."""
        return tuple(op for op in ORDER if op in self.roots.family.case.sections)

    @cached_property
    def _column(self) -> dict[Op, int]:
        """Where a section is among those of the case."""
        return {op: i for i, op in enumerate(self.roots.family.case.sections)}

    @cached_property
    def _room(self) -> Float:
        """Bytes that a plan may take of a device of each pool."""
        return room_of(self.tables.setup)[[group for _, group in self.roots.family.case.pools]]

    def _front(self, op: Op, apart: bool) -> SectionFronts:
        return self.tables.front(op, apart=apart, adapter=bool(self.roots.family.flags["sharing.reference_adapter"]))

    def _apart(self, op: Op, root: Int) -> NDArray[np.bool_]:
        """For which roots a section is priced apart, see `SectionFronts.apart`."""
        if op is Op.GENERATE:
            return np.asarray(self.roots.family.variants[self.roots.variant[root], 1] == 0)
        streams = op in STREAMED and bool(self.roots.family.flags["fusions.stream"])
        return np.asarray((self.roots.staleness[root] == 0) & streams)

    def _by_front(self, op: Op, root: Int) -> Iterator[tuple[SectionFronts, NDArray[np.intp]]]:
        apart = self._apart(op, root)
        for special in (False, True):
            rows = np.flatnonzero(apart == special)
            if len(rows):
                yield self._front(op, special), rows

    def _spans(self, op: Op, root: Int) -> tuple[Int, Int]:
        """First and one past the last option of a section for each root."""
        pool = self.roots.family.pool_of[op]
        group = self.roots.family.case.pools[pool][1]
        apart = self._apart(op, root)
        first, back = distinct(self.roots.sizes[root, pool], self.roots.staleness[root], apart)
        asked = np.stack([self.roots.sizes[root, pool][first], self.roots.staleness[root][first]])
        front_of = [self._front(op, special) for special in apart[first].tolist()]
        limits = np.zeros(len(first))
        np.maximum.at(limits, back, self._left(op, root))
        keys = [front.key(group, int(n), int(k)) for front, n, k in zip(front_of, *asked, strict=True)]
        for front in dict.fromkeys(map(id, front_of)):
            members = [i for i, one in enumerate(front_of) if id(one) == front]
            front_of[members[0]].ask({keys[i]: float(limits[i]) for i in members})
        spans = [front.span.get(key, (0, 0)) for front, key in zip(front_of, keys, strict=True)]
        both = np.array(spans, dtype=np.int64)[back]
        return both[:, 0], both[:, 1]

    def _others(self, op: Op) -> list[int]:
        """Columns of the other sections of a section's pool."""
        pools = self.roots.family.pool_of
        return [i for other, i in self._column.items() if pools[other] == pools[op] and other is not op]

    def _left(self, op: Op, root: Int) -> Float:
        """Seconds that a section may take, since the others of its pool take turns with it."""
        known = self.record.limit(self.roots.devices[root], self.roots.staleness[root])
        return np.asarray(known - self.roots.least[root][:, self._others(op), 0].sum(axis=1))

    def _structure(self, root: Int) -> dict[str, NDArray[np.int32]]:
        """Columns of the structure and pool sizes of roots."""
        family = self.roots.family
        columns = {flag: np.full(len(root), value, dtype=np.int32) for flag, value in family.flags.items()}
        variants = family.variants[self.roots.variant[root]].astype(np.int32)
        columns |= {name: variants[:, i] for i, name in enumerate(("staleness", "in_flight", "sync"))}
        for pool, (roles, group) in enumerate(family.case.pools):
            for role in roles:
                columns[f"place.{role}"] = np.full(len(root), ROLES.index(roles[0]), dtype=np.int32)
                columns[f"group.{role}"] = np.full(len(root), group, dtype=np.int32)
                columns[f"devices.{role}"] = self.roots.sizes[root, pool].astype(np.int32)
        return columns

    def _verified(self) -> Float:
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

    def _meet(self) -> None:
        """Find what is worth trying of the two sections between which weights travel, root by root."""
        self._ends = []
        actor, rollout = (self._spans(op, np.arange(len(self.roots.variant))) for op in SENT)
        for root in range(len(self.roots.variant)):
            spans = [(int(first[root]), int(last[root])) for first, last in (actor, rollout)]
            where = [self.roots.sizes[root, self.roots.family.pool_of[op]] for op in SENT]
            variant = self.roots.family.variants[self.roots.variant[root], :3]
            pools = [self.roots.family.case.pools[self.roots.family.pool_of[op]] for op in SENT]
            trained = Op.OLD_LOGPROB in self.sections
            key = (*spans, *where, *variant.tolist(), pools[0] == pools[1], pools[0][1], pools[1][1], trained)
            if key not in self.tables.ends:
                self.tables.ends[key] = self._ends_of(root, spans, trained)
            self._ends.append(self.tables.ends[key])
        for op, name in zip(SENT, ("actor", "rollout"), strict=True):
            menus = [getattr(ends, name) for ends in self._ends]
            edges = np.concatenate([[0], np.cumsum([len(menu) for menu in menus])])
            self._menu[op], self._place[op] = np.concatenate(menus), np.stack([edges[:-1], edges[1:]])
        self._floors = np.concatenate([ends.floors for ends in self._ends])

    def _ends_of(self, root: int, spans: list[tuple[int, int]], trained: bool) -> Ends:
        options = [np.arange(*span) for span in spans]
        fronts = [self._front(op, bool(self._apart(op, np.array([root]))[0])) for op in SENT]
        parts = [front.take(some) for front, some in zip(fronts, options, strict=True)]
        (one, a), (other, b) = (np.unique(part.kind, return_index=True, return_inverse=True)[1:] for part in parts)
        pair = np.meshgrid(one, other, indexing="ij")
        picks = [some[at.reshape(-1)] for some, at in zip(options, pair, strict=True)]
        seconds = self._sync_seconds(np.full(picks[0].size, root), *picks).reshape(len(one), len(other))
        rows = [
            _worth(parts[0], seconds[a.reshape(-1)], parts[0].degrees if trained else a * 0, self.tables.count),
            _worth(parts[1], seconds.T[b.reshape(-1)], b * 0, self.tables.count),
        ]
        floors = seconds.min(axis=1, initial=np.inf)[a.reshape(-1)[rows[0]]]
        return Ends(
            actor=options[0][rows[0]],
            rollout=options[1][rows[1]],
            floors=floors,
            floor=float(floors.min(initial=np.inf)),
        )
