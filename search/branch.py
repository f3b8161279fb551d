"""The plans of a family by branch and bound: a layout is chosen section by section, for many plans at once.

What is not chosen yet counts with the least it can take, so a bound on a plan's step only
grows. Blocks of partial plans are expanded depth first, the most promising ones ahead;
those that no longer beat what is known are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import stage_seconds_of
from analytic.training import training
from ir.batch import PlanBatch, concatenate
from ir.graph import Op
from search.layouts import SENT
from search.options import Options, distinct, ranges
from search.relaxed import Relaxed
from search.rooted import Block

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Rows = NDArray[np.intp] | NDArray[np.bool_]

FIRST_BLOCK, LARGEST_BLOCK = 1 << 9, 1 << 15
"""Partial plans that are looked at together: few until a whole plan is found."""

WHOLE, WORK_WHOLE = 32, 100
"""Whole plans that are priced together, and the partial plans that take as long as one."""


@dataclass(kw_only=True)
class Branch(Relaxed):
    """The search of one family."""

    looks: bool = False
    """Whether a few plans will do, so that better bounds do not pay."""
    work: int = 0
    """Partial plans that were looked at."""
    size: int = FIRST_BLOCK

    def run(self, most: float = np.inf) -> None:
        """Price every plan that is news; or only some, if more than `most` partial plans were looked at before the end.

        Raises:
            OutOfWorkError: the search may not do so much.
        """
        stack = [self._start()]
        while stack:
            block = self._news(stack.pop())
            if len(block) == 0:
                continue
            if self.work > most:
                return
            depth = int((block.picks[0] >= 0).sum())
            if depth == len(self.sections):
                head, rest = block.take(slice(WHOLE)), block.take(slice(WHOLE, None))
                self._spend(WORK_WHOLE * len(head))
                self.record.add(concatenate(list(self._plans(head))), head.bound)
                self.size = LARGEST_BLOCK
                stack.append(rest)
                continue
            op = self.sections[depth]
            pool = self.family.pool_of[op]
            count = self._choices(block, pool) if block.sizes[0, pool] == 0 else self._num_options(block, op)
            head, rest = self._split(block, count)
            stack += [rest, self._sized(head, pool) if block.sizes[0, pool] == 0 else self._expand(head, op)]
            self.size = min(2 * self.size, LARGEST_BLOCK)

    def _spend(self, count: int) -> None:
        self.work += count
        self.tables.work.spend(count)

    def _news(self, block: Block) -> Block:
        return block.take(block.bound < self._limit(block))

    def _start(self) -> Block:
        """One partial plan a root, with nothing chosen, that no section's own layouts rule out."""
        block = self._judged(self._untouched())
        lead = [op for op in self.sections if self.family.pool_of[op] not in self.family.sides]
        for op in lead:
            self._span(block, op)
        # Some twice, since what the others hold is known only then. A look does with few.
        for op in SENT if self.looks else (*lead, *SENT):
            # What fits beside the least that the pool's other sections hold is often slower than the fastest.
            block.parts[:, self._column[op]] = self._least_that_fits(block, op)
        block = self._judged(block)
        if len(block) == 0:
            return block
        if not self.looks:
            self._price_room()
        block = self._judged(replace(block, sync=self._least_sync(block)))
        if len(block):
            self._choose_ends(block)
        return block

    def _untouched(self) -> Block:
        n = len(self.roots.variant)
        return Block(
            root=np.arange(n),
            sizes=self.roots.sizes,
            picks=np.full((n, len(self.sections)), -1, dtype=np.int64),
            parts=self.roots.least.copy(),
            sync=np.zeros(n),
            bound=np.zeros(n),
        )

    def _split(self, block: Block, count: Int) -> tuple[Block, Block]:
        """As many of the first as have together a block's worth of what follows each, and the rest."""
        few = max(int(np.searchsorted(np.cumsum(count), self.size)), 1)
        return block.take(slice(few)), block.take(slice(few, None))

    # Sizes of pools

    def _choices(self, block: Block, pool: int) -> Int:
        """Sizes that an open pool may have, from the smallest on."""
        room = self.tables.room(self.family, self.roots.sides, block.sizes)
        return self.roots.sides[pool].place(room[:, pool]) + 1

    def _sized(self, block: Block, pool: int) -> Block:
        """All sizes of an open pool for partial plans."""
        side, count = self.roots.sides[pool], self._choices(block, pool)
        place = ranges(np.zeros_like(count), count)
        children = block.take(np.repeat(np.arange(len(block)), count))
        children.sizes[:, pool] = side.sizes[place]
        columns = [self._column[op] for op in self.family.members[pool]]
        children.parts[:, columns] = side.least[place]
        self._spend(len(children))
        # Pools that are still open have less room now.
        room = self.tables.room(self.family, self.roots.sides, children.sizes)
        children, room = children.take(room.min(axis=1) >= 0), room[room.min(axis=1) >= 0]
        left = [p for p in self.family.sides if len(children) and children.sizes[0, p] == 0]
        for other in left:
            open_side = self.roots.sides[other]
            least = open_side.upto[open_side.place(room[:, other])]
            children.parts[:, self._columns[other], 0] = least
            children.parts[:, self._columns[other], 1] = least
        if not left:
            children = children.take(self.tables.legal.fit(self.family.case, children.sizes))
        return self._judged(children)

    # Layouts

    def _places(self, op: Op, block: Block) -> tuple[Int, Int]:
        """First and one past the last option of a section for each partial plan, or place in its menu."""
        if op not in self._place:
            return self._spans(op, block)
        return self._place[op][0, block.root], self._place[op][1, block.root]

    def _num_options(self, block: Block, op: Op) -> Int:
        first, last = self._places(op, block)
        return last - first

    def _expand(self, block: Block, op: Op) -> Block:
        """All layouts of a section for partial plans that have none of it."""
        parent, option, floor = self._hopeful(block, op)
        children = block.take(parent)
        if op is Op.UPDATE_ACTOR:
            children.sync[:] = floor
        parts = children.parts
        for front, rows in self._by_front(op, children.root):
            chosen = front.take(option[rows])
            again = self._laid_out_anew(children.take(rows), op, chosen)
            mine = chosen.parts
            mine[:, 0] += again * chosen.reshard
            mine[:, 3] += again * chosen.resharded
            parts[rows, self._column[op]] = mine
        children.picks[:, self.sections.index(op)] = option
        self._spend(len(children))
        children = self._affordable(children.take(self._fits(children)), op)
        children = children if self.looks else self._tightened(children, op)
        children = self._judged(children)
        if op is Op.GENERATE and len(children):
            children = self._judged(replace(children, sync=self._sync(children)))
        return self._unbeaten(children, op)

    def _hopeful(self, block: Block, op: Op) -> tuple[NDArray[np.intp], Int, Float]:
        """Pairs of a partial plan and an option, as numbers, with which the section's pool is not busy for too long;
        and the least seconds of synchronisation with them."""
        first, last = self._places(op, block)
        parent, place = np.repeat(np.arange(len(block)), last - first), ranges(first, last - first)
        option = self._menu[op][place] if op in self._menu else place
        floor = self._floors[place] if op is Op.UPDATE_ACTOR else block.sync[parent]
        pool, others = self.family.pool_of[op], self._others(op)
        left = self._limit(block) - block.parts[:, others, 0].sum(axis=1)
        room = self._room[pool] - block.parts[:, others, 2].sum(axis=1)
        beside = block.parts[:, others, 3].max(axis=1, initial=0.0)
        kept = np.zeros(len(option), dtype=bool)
        for front, rows in self._by_front(op, block.root[parent]):
            of, some = parent[rows], option[rows]
            busy = front.made.seconds[some]
            if pool == self.family.pool_of[Op.UPDATE_ACTOR]:
                busy = busy + floor[rows]
            held = front.made.resident[some] + np.maximum(front.made.transient[some], beside[of])
            kept[rows] = (busy < left[of]) & (held <= room[of])
        return parent[kept], option[kept], floor[kept]

    def _laid_out_anew(self, block: Block, op: Op, chosen: Options) -> NDArray[np.bool_]:
        """Whether weights must be laid out anew for a pass over what is trained."""
        return np.asarray(self._trained_degrees(block, op) != chosen.degrees)

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
        rollout = self.family.pool_of[Op.GENERATE]
        for pool, (_, group) in enumerate(self.family.case.pools):
            members = self._columns[pool]
            moving = block.parts[:, members, 3]
            if pool == rollout and not self.tables.setup.machines[group].is_host:
                # The engine sleeps while others work, and both copies of the weights are there while they travel.
                awake = np.array([self._column[Op.GENERATE] == i for i in members])
                moving = moving + np.where(awake, 0.0, training().asleep_bytes)
                if self.family.pool_of[Op.UPDATE_ACTOR] == pool:
                    sync = block.parts[:, members, 4].sum(axis=1) + 2.0 * training().sync_bucket_bytes
                    moving = np.column_stack([moving, sync])
            fits &= block.parts[:, members, 2].sum(axis=1) + moving.max(axis=1, initial=0.0) <= self._room[pool]
        return fits

    def _bounds(self, block: Block) -> Float:
        """Seconds of a step by the model's composition."""
        per_op: dict[Op, Float] = {op: block.parts[:, i, 0] for op, i in self._column.items()}
        per_op[Op.SYNC_WEIGHTS] = block.sync
        per_op.setdefault(Op.REWARD, self._verifying[block.root])
        seconds = np.zeros((len(block), len(self.example.stages)))
        for stage in self.example.structures[0].stages:
            if stage.key in self.example.stages:
                seconds[:, self.example.stages.index(stage.key)] = stage_seconds_of(stage, per_op)
        variants = self.family.variants[self.roots.variant[block.root]].astype(np.int32)
        composed = replace(
            self.example,
            batch=PlanBatch(len(block), {"staleness": variants[:, 0], "in_flight": variants[:, 1]}),
            stage_seconds=seconds,
            latency_ratio=block.parts[:, self._column[Op.GENERATE], 1] / per_op[Op.GENERATE],
            structure=np.zeros(len(block), dtype=np.intp),
        )
        return composed.step_seconds

    def _sync(self, block: Block) -> Float:
        """Seconds of weight synchronisation, each different case once."""
        picks, kinds = [block.picks[:, self.sections.index(op)] for op in SENT], []
        for op, options in zip(SENT, picks, strict=True):
            kind = np.zeros(len(block), dtype=np.int64)
            for front, rows in self._by_front(op, block.root):
                kind[rows] = front.take(options[rows]).kind
            kinds.append(kind)
        first, back = distinct(block.root, *kinds)
        return self._sync_seconds(block.root[first], picks[0][first], picks[1][first])[back]

    def _plans(self, block: Block) -> Iterator[PlanBatch]:
        """Whole plans."""
        for i, root in enumerate(block.root.tolist()):
            structure = int(self.family.variants[self.roots.variant[root], 3])
            factor = self.tables.legal.factor(structure, tuple(block.sizes[i].tolist()))
            layouts = {
                op: self._front(op, bool(self._apart(op, block.root[i : i + 1])[0])).numbers(block.picks[i : i + 1, at])
                for at, op in enumerate(self.sections)
            }
            yield factor.combine(layouts, 1)
