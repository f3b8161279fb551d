"""The plans of a family by branch and bound: a layout is chosen section by section, for many plans at once.

What is not chosen yet counts with the least it can take, so a bound on a plan's step only
grows. Blocks of partial plans are expanded depth first, the most promising ones ahead;
those that no longer beat what is known are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate, _stage_seconds
from analytic.memory import TRAINED_BY
from analytic.training import training
from analytic.transfer import reward_seconds, sync_seconds
from ir.batch import ROLES, PlanBatch, concatenate
from ir.graph import Op
from search.families import Ends, Record, Roots, Tables
from search.fronts import ROUNDING, SENT, Options, SectionFronts, distinct, ranges, room_of
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

FIRST_BLOCK, LARGEST_BLOCK = 1 << 9, 1 << 15
"""Partial plans that are looked at together: few until a whole plan is found."""

MOST_PARTNERS = 6
"""Different partners in weight synchronisation up to which layouts of different degrees are compared."""

WHOLE, WORK_WHOLE = 32, 100
"""Whole plans that are priced together, and the partial plans that take as long as one."""


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
class Branch:
    """The search of one family."""

    tables: Tables
    roots: Roots
    example: Estimate
    """Of any plan of its graph."""
    record: Record
    looks: bool = False
    """Whether a few plans will do, so that pricing all layouts of all sections for better bounds does not pay."""
    work: int = 0
    """Partial plans that were looked at."""
    size: int = field(default=FIRST_BLOCK)
    _verifying: Float = field(default_factory=lambda: np.zeros(0))
    _ends: list[Ends] = field(default_factory=list)
    """Of each root."""
    _menu: dict[Op, Int] = field(default_factory=dict)
    """Options of sections of which only some are worth trying, root by root."""
    _place: dict[Op, NDArray[np.int64]] = field(default_factory=dict)
    """First and one past the last place in `_menu` of each root, int64[2, roots]."""
    _floors: Float = field(default_factory=lambda: np.zeros(0))
    """Least seconds of synchronisation for each place of the update's menu."""

    def run(self, most: int) -> bool:
        """Price every plan that is news; False if more than `most` partial plans were looked at before the end."""
        stack = [self._start()]
        while stack:
            block = self._news(stack.pop())
            if len(block) == 0:
                continue
            if self.work > most:
                return False
            depth = int((block.picks[0] >= 0).sum())
            if depth == len(self.sections):
                head, rest = block.take(slice(WHOLE)), block.take(slice(WHOLE, None))
                self.work += WORK_WHOLE * len(head)
                self.record.add(concatenate(list(self._plans(head))), head.bound)
                self.size = LARGEST_BLOCK
            else:
                head, rest = self._split(block, self.sections[depth])
            stack.append(rest)
            if depth < len(self.sections):
                stack.append(self._expand(head, self.sections[depth]))
                self.size = min(2 * self.size, LARGEST_BLOCK)
        return True

    @cached_property
    def sections(self) -> tuple[Op, ...]:
        """In the order in which they get layouts."""
        return tuple(op for op in ORDER if op in self.roots.family.case.sections)

    @cached_property
    def _column(self) -> dict[Op, int]:
        """Where a section is among those of the case."""
        return {op: i for i, op in enumerate(self.roots.family.case.sections)}

    def _front(self, op: Op, staleness: int) -> SectionFronts:
        flags = self.roots.family.flags
        streamed = bool(flags["fusions.stream"]) and staleness == 0
        return self.tables.front(op, streamed=streamed, adapter=bool(flags["sharing.reference_adapter"]))

    def _limit(self, block: Block) -> Float:
        devices, staleness = self.roots.devices[block.root], self.roots.staleness[block.root]
        return self.record.limit(devices, staleness) * (1.0 - ROUNDING / 10.0)

    def _news(self, block: Block) -> Block:
        return block.take(block.bound < self._limit(block))

    # From roots to whole plans

    def _start(self) -> Block:
        """One partial plan a root, with nothing chosen, that no section's own layouts rule out."""
        self._verifying = self._verified()
        block = self._judged(self._untouched())
        # Some twice, since what the others hold is known only then. A look does with few.
        for op in SENT if self.looks else (*self.sections, *SENT):
            if len(block) == 0:
                return block
            # What fits beside the least that the pool's other sections hold is often slower than the fastest.
            self._keep(block)
            self.roots.least[:, self._column[op]] = self._least_that_fits(op)
            block = self._judged(self._untouched())
        if len(block) == 0:
            return block
        self._keep(block)
        self._meet()
        return self._judged(replace(self._untouched(), sync=np.array([ends.floor for ends in self._ends])))

    def _untouched(self) -> Block:
        n = len(self.roots.variant)
        return Block(
            root=np.arange(n),
            picks=np.full((n, len(self.sections)), -1, dtype=np.int64),
            parts=self.roots.least.copy(),
            sync=np.zeros(n),
            bound=np.zeros(n),
        )

    def _least_that_fits(self, op: Op) -> Float:
        """What no layout of a section is below that fits with the others, float64[roots, 5]; infinite where none
        fits."""
        pool, column = self.roots.family.pool_of[op], self._column[op]
        members = [i for other, i in self._column.items() if self.roots.family.pool_of[other] == pool and i != column]
        slack = self._room[pool] - self.roots.least[:, members, 2].sum(axis=1)
        moving = self.roots.least[:, members, 3].max(axis=1, initial=0.0)
        first, last = self._spans(op, np.arange(len(slack)))
        piecemeal = self.roots.staleness == 0
        rows, back = distinct(first, last, slack, moving, piecemeal)
        found = np.full((len(rows), 5), np.inf)
        for i, row in enumerate(rows.tolist()):
            options = self._front(op, 0 if piecemeal[row] else 1).options
            if options is not None and last[row] > first[row]:
                some = options.parts[first[row] : last[row]]
                some = some[some[:, 2] + np.maximum(some[:, 3], moving[row]) <= slack[row]]
                found[i] = some.min(axis=0, initial=np.inf)
        return found[back]

    @cached_property
    def _room(self) -> Float:
        """Bytes that a plan may take of a device of each pool."""
        return room_of(self.tables.setup)[[group for _, group in self.roots.family.case.pools]]

    def _split(self, block: Block, op: Op) -> tuple[Block, Block]:
        """As many of the first as have together a block's worth of options, and the rest."""
        first, last = self._places(op, block.root)
        few = max(int(np.searchsorted(np.cumsum(last - first), self.size)), 1)
        return block.take(slice(few)), block.take(slice(few, None))

    def _places(self, op: Op, root: Int) -> tuple[Int, Int]:
        """First and one past the last option of a section for each root, or place in its menu."""
        if op not in self._place:
            return self._spans(op, root)
        return self._place[op][0, root], self._place[op][1, root]

    def _spans(self, op: Op, root: Int) -> tuple[Int, Int]:
        """First and one past the last option of a section for each root."""
        pool = self.roots.family.pool_of[op]
        group = self.roots.family.case.pools[pool][1]
        first, back = distinct(self.roots.sizes[root, pool], self.roots.staleness[root])
        asked = np.stack([self.roots.sizes[root, pool][first], self.roots.staleness[root][first]])
        front_of = [self._front(op, int(k)) for k in asked[1]]
        limits = np.zeros(len(first))
        np.maximum.at(limits, back, self._left(op, root))
        keys = [front.key(group, int(n), int(k)) for front, n, k in zip(front_of, *asked, strict=True)]
        for front in dict.fromkeys(map(id, front_of)):
            members = [i for i, one in enumerate(front_of) if id(one) == front]
            front_of[members[0]].ask({keys[i]: float(limits[i]) for i in members})
        spans = [front.span.get(key, (0, 0)) for front, key in zip(front_of, keys, strict=True)]
        both = np.array(spans, dtype=np.int64)[back]
        return both[:, 0], both[:, 1]

    def _left(self, op: Op, root: Int) -> Float:
        """Seconds that a section may take, since the others of its pool take turns with it."""
        pool = self.roots.family.pool_of[op]
        others = [i for other, i in self._column.items() if self.roots.family.pool_of[other] == pool and other is not op]
        known = self.record.limit(self.roots.devices[root], self.roots.staleness[root])
        return known - self.roots.least[root][:, others, 0].sum(axis=1)

    def _expand(self, block: Block, op: Op) -> Block:
        """All layouts of a section for partial plans that have none of it."""
        parent, option, floor = self._hopeful(block, op)
        children = block.take(parent)
        if op is Op.UPDATE_ACTOR:
            children.sync[:] = floor
        parts = children.parts
        for front, rows in self._by_front(op, children.root):
            assert front.options is not None
            chosen = front.options.take(option[rows])
            again = self._laid_out_anew(children.take(rows), op, chosen)
            mine = chosen.parts
            mine[:, 0] += again * chosen.reshard
            mine[:, 3] += again * chosen.resharded
            parts[rows, self._column[op]] = mine
        children.picks[:, self.sections.index(op)] = option
        self.work += len(children)
        children = self._judged(children)
        if op is Op.GENERATE and len(children):
            children = self._judged(replace(children, sync=self._sync(children)))
        return children

    def _hopeful(self, block: Block, op: Op) -> tuple[NDArray[np.intp], Int, Float]:
        """Pairs of a partial plan and an option, as numbers, with which the section's pool is not busy for too long;
        and the least seconds of synchronisation with them."""
        first, last = self._places(op, block.root)
        parent, place = np.repeat(np.arange(len(block)), last - first), ranges(first, last - first)
        option = self._menu[op][place] if op in self._menu else place
        floor = self._floors[place] if op is Op.UPDATE_ACTOR else block.sync[parent]
        seconds = np.empty(len(option))
        for front, rows in self._by_front(op, block.root[parent]):
            seconds[rows] = front.options.seconds[option[rows]] if front.options is not None else np.inf
        pool = self.roots.family.pool_of[op]
        others = [i for other, i in self._column.items() if self.roots.family.pool_of[other] == pool and other is not op]
        busy = seconds + block.parts[:, others, 0].sum(axis=1)[parent]
        if pool == self.roots.family.pool_of[Op.UPDATE_ACTOR]:
            busy = busy + floor
        kept = busy < self._limit(block)[parent]
        return parent[kept], option[kept], floor[kept]

    def _by_front(self, op: Op, root: Int) -> Iterator[tuple[SectionFronts, NDArray[np.intp]]]:
        fresh = self.roots.staleness[root] == 0
        for staleness, rows in ((0, np.flatnonzero(fresh)), (1, np.flatnonzero(~fresh))):
            if len(rows):
                yield self._front(op, staleness), rows

    def _laid_out_anew(self, block: Block, op: Op, chosen: Options) -> NDArray[np.bool_]:
        """Whether weights must be laid out anew for a pass over what is trained."""
        update = TRAINED_BY.get(op)
        if update is None or update not in self.sections:
            return np.ones(len(block), dtype=bool)
        options = self._front(update, 0).options
        assert options is not None
        return np.asarray(options.degrees[block.picks[:, self.sections.index(update)]] != chosen.degrees)

    def _judged(self, block: Block) -> Block:
        """Those that fit and are news, most promising first."""
        block = block.take(self._fits(block))
        if len(block) == 0:
            return block
        block = self._news(replace(block, bound=self._bounds(block)))
        held = block.parts[:, :, 2].sum(axis=1)
        return block.take(np.lexsort((held, self.roots.staleness[block.root], block.bound)))

    def _fits(self, block: Block) -> NDArray[np.bool_]:
        """Whether what stays, and the most of what comes and goes, has room on every pool."""
        fits = np.ones(len(block), dtype=bool)
        rollout = self.roots.family.pool_of[Op.GENERATE]
        for pool, (_, group) in enumerate(self.roots.family.case.pools):
            members = [self._column[op] for op in self.sections if self.roots.family.pool_of[op] == pool]
            moving = block.parts[:, members, 3]
            if pool == rollout and not self.tables.setup.machines[group].is_host:
                # The engine sleeps while others work, and both copies of the weights are there while they travel.
                awake = np.array([self._column[Op.GENERATE] == i for i in members])
                moving = moving + np.where(awake, 0.0, training().asleep_bytes)
                if self.roots.family.pool_of[Op.UPDATE_ACTOR] == pool:
                    sync = block.parts[:, members, 4].sum(axis=1) + 2.0 * training().sync_bucket_bytes
                    moving = np.column_stack([moving, sync])
            fits &= block.parts[:, members, 2].sum(axis=1) + moving.max(axis=1) <= self._room[pool]
        return fits

    def _bounds(self, block: Block) -> Float:
        """Seconds of a step by the model's composition."""
        per_op: dict[Op, Float] = {op: block.parts[:, i, 0] for op, i in self._column.items()}
        per_op[Op.SYNC_WEIGHTS] = block.sync
        per_op.setdefault(Op.REWARD, self._verifying[block.root])
        seconds = np.zeros((len(block), len(self.example.stages)))
        for stage in self.example.structures[0].stages:
            if stage.key in self.example.stages:
                seconds[:, self.example.stages.index(stage.key)] = _stage_seconds(stage, per_op)
        variants = self.roots.family.variants[self.roots.variant[block.root]].astype(np.int32)
        composed = replace(
            self.example,
            batch=PlanBatch(len(block), {"staleness": variants[:, 0], "in_flight": variants[:, 1]}),
            stage_seconds=seconds,
            latency_ratio=block.parts[:, self._column[Op.GENERATE], 1] / per_op[Op.GENERATE],
            structure=np.zeros(len(block), dtype=np.intp),
        )
        return composed.step_seconds

    # Between sections

    def _keep(self, block: Block) -> None:
        """Go on with the roots of a block only."""
        self.roots = self.roots.take(np.sort(block.root))
        self._verifying = self._verified()

    def _verified(self) -> Float:
        """Seconds of a verifier for each root."""
        root = np.arange(len(self.roots.variant))
        return reward_seconds(self.tables.setup, PlanBatch(len(root), self._structure(root)))

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
        fronts = [self._front(op, 0) for op in SENT]
        parts = [front.options.take(some) for front, some in zip(fronts, options, strict=True)]
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

    def _sync_seconds(self, root: Int, actor: Int, rollout: Int) -> Float:
        """Seconds of weight synchronisation between options of the update and of generation."""
        columns = self._structure(root)
        for op, options in zip(SENT, (actor, rollout), strict=True):
            found = self._front(op, 0).columns_of(options)
            columns |= {f"{op}.{name}": c for name, c in found.items() if name not in KEYS}
        return sync_seconds(self.tables.setup, PlanBatch(len(root), columns))

    def _sync(self, block: Block) -> Float:
        """Seconds of weight synchronisation, each different case once."""
        picks = [block.picks[:, self.sections.index(op)] for op in SENT]
        kinds = [self._front(op, 0).options.kind[some] for op, some in zip(SENT, picks, strict=True)]
        first, back = distinct(block.root, *kinds)
        return self._sync_seconds(block.root[first], picks[0][first], picks[1][first])[back]

    def _plans(self, block: Block) -> Iterator[PlanBatch]:
        """Whole plans."""
        for i, root in enumerate(block.root.tolist()):
            structure = int(self.roots.family.variants[self.roots.variant[root], 3])
            factor = self.tables.legal.factor(structure, tuple(self.roots.sizes[root].tolist()))
            layouts = {
                op: self._front(op, int(self.roots.staleness[root])).numbers(block.picks[i : i + 1, at])
                for at, op in enumerate(self.sections)
            }
            yield factor.combine(layouts, 1)
