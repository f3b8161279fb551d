"""Better bounds on partial plans: what the room that is left allows the sections that have no layout yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.compose import occurrences
from analytic.memory import TRAINED_BY
from ir.graph import Op
from search.fronts import OPEN
from search.options import distinct
from search.records import most
from search.rooted import Block, Rooted
from search.skyline import skyline

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Rows = NDArray[np.intp] | NDArray[np.bool_]

PRICES = (-8, 5)
"""Exponents of two of the prices of a byte, in the longest step for a whole device."""


@dataclass(kw_only=True)
class Relaxed(Rooted):
    """Roots with what their sections cost if bytes have a price."""

    _prices: Float | None = None
    """Seconds that a byte costs, float64[pools, prices]."""
    _costs: dict[tuple[int, int, int, int], Float] = field(default_factory=dict)
    """See `_least_cost`, by front, options and pool."""

    def _least_that_fits(self, block: Block, op: Op) -> Float:
        """What no layout of a section is below that fits with the others, float64[n, 5]; infinite where none fits."""
        pool, others = self.family.pool_of[op], self._others(op)
        slack = self._room[pool] - block.parts[:, others, 2].sum(axis=1)
        moving = block.parts[:, others, 3].max(axis=1, initial=0.0)
        first, last = self._spans(op, block)
        found = np.empty((len(block), 5))
        for front, rows in self._by_front(op, block.root):
            found[rows] = front.made.least_beside(first[rows], last[rows], slack[rows], moving[rows])
        return found

    def _price_room(self) -> None:
        """Set prices of a byte, by what is known."""
        known = most(self.record, self.family)
        if np.isfinite(known):
            self._prices = np.outer(known / self._room, 2.0 ** np.arange(*PRICES))

    def _least_cost(self, block: Block, op: Op, prices: Float) -> Float:
        """For each price of a byte, the least of a section's seconds and what the bytes that stay cost, float64[n,
        prices]."""
        pool, least = self.family.pool_of[op], np.empty((len(block), len(prices)))
        first, last = self._spans(op, block)
        for front, rows in self._by_front(op, block.root):
            spans, back = distinct(first[rows], last[rows])
            found = np.empty((len(spans), len(prices)))
            for i, at in enumerate(rows[spans].tolist()):
                key = (id(front), int(first[at]), int(last[at]), pool)
                if key not in self._costs:
                    some = slice(*key[1:3])
                    cost = front.made.seconds[some, None] + front.made.resident[some, None] * prices
                    self._costs[key] = cost.min(axis=0, initial=np.inf)
                found[i] = self._costs[key]
            least[rows] = found[back]
        return least

    def _affordable(self, block: Block, op: Op) -> Block:
        """Those whose pool is not busy for too long whatever its other sections' layouts: with any price on bytes, what
        they save of their seconds must pay for the room that is left (Lagrange's relaxation of the room)."""
        pool = self.family.pool_of[op]
        members = self.family.members[pool]
        later = [o for o in members if self.sections.index(o) > self.sections.index(op)]
        if self._prices is None or len(block) == 0 or not later:
            return block
        prices = self._prices[pool]
        chosen = [self._column[o] for o in members if o not in later]
        moving = block.parts[:, self._columns[pool], 3].max(axis=1)
        left = self._room[pool] - block.parts[:, chosen, 2].sum(axis=1) - moving
        cost = sum(self._least_cost(block, o, prices) for o in later) - left[:, None] * prices
        busy = block.parts[:, chosen, 0].sum(axis=1) + cost.max(axis=1)
        if pool == self.family.pool_of[Op.UPDATE_ACTOR]:
            busy = busy + block.sync
        return block.take(busy < self._limit(block))

    def _tightened(self, block: Block, op: Op) -> Block:
        """Better bounds on the pool's sections that have no layout yet, which must fit beside those that have one."""
        pool = self.family.pool_of[op]
        held = block.parts[:, self._columns[pool], 2].sum(axis=1)
        for other in self.sections[self.sections.index(op) + 1 :]:
            if self.family.pool_of[other] != pool or len(block) == 0:
                continue
            column = self._column[other]
            left = self._room[pool] - held + block.parts[:, column, 2]
            first, last = self._spans(other, block)
            least, degrees = np.zeros(len(block)), self._trained_degrees(block, other)
            for front, rows in self._by_front(other, block.root):
                least[rows] = front.least_within(first[rows], last[rows], left[rows], degrees[rows])
            block.parts[:, column, 0] = np.maximum(block.parts[:, column, 0], least)
        return block.take(np.asarray(np.isfinite(block.parts[:, :, 0]).all(axis=1)))

    def _trained_degrees(self, block: Block, op: Op) -> Int:
        """How the weights of a pass are laid out where they are trained: 0 if they are not, `OPEN` if it is not known
        yet."""
        update = TRAINED_BY.get(op)
        if update not in self.sections:
            return np.zeros(len(block), dtype=np.int64)
        picks = block.picks[:, self.sections.index(update)]
        return np.where(picks >= 0, self._front(update, False).made.degrees[picks], OPEN)

    @cached_property
    def _alike(self) -> dict[int, list[tuple[list[int], Float]]]:
        """Columns of the sections of each rank and how often each counts, those together of which only the sum does."""
        graph, found = self.example.structures[0], dict[int, dict[tuple[float, ...], list[Op]]]()
        counts = occurrences(graph)
        for op in self.sections:
            stage = next(stage for stage in graph.stages if op in stage.ops and op not in stage.riders)
            found.setdefault(self._rank[op], {}).setdefault(counts[stage.key], []).append(op)
        return {
            rank: [
                ([self._column[op] for op in ops], np.array([self.family.times(op) for op in ops]))
                for ops in alike.values()
            ]
            for rank, alike in found.items()
        }

    def _unbeaten(self, block: Block, op: Op) -> Block:
        """Those that no other beats, once all sections of the pools up to that of `op` have layouts: their seconds are
        all that later sections and other pools see of them."""
        pool, at = self.family.pool_of[op], self.sections.index(op)
        now, following = self._rank[op], self.sections[at + 1 : at + 2]
        if len(block) < 2 or (following and self._rank[following[0]] == now):
            return block
        seconds = np.column_stack([block.parts[:, columns, 0] @ times for columns, times in self._alike[now]])
        if now == 0:
            groups = [block.root]
            seconds = np.column_stack([seconds, block.parts[:, self._column[Op.GENERATE], 1], block.sync])
        else:
            before = [i for i, other in enumerate(self.sections) if self._rank[other] < now]
            groups = [distinct(block.root, block.sizes[:, pool], *block.picks[:, before].T)[1]]
        return block.take(np.sort(skyline(seconds, *groups)))
