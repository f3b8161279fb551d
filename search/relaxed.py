"""Better bounds on partial plans: what the room that is left allows the sections that have no layout yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ir.graph import Op
from search.fronts import ROUNDING
from search.options import distinct
from search.rooted import Block, Rooted

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
    _least_cost: dict[Op, Float] = field(default_factory=dict)
    """See `_price_room`, float64[roots, prices]."""

    def _least_that_fits(self, op: Op) -> Float:
        """What no layout of a section is below that fits with the others, float64[roots, 5]; infinite where none
        fits."""
        pool, column = self.roots.family.pool_of[op], self._column[op]
        members = [i for other, i in self._column.items() if self.roots.family.pool_of[other] == pool and i != column]
        slack = self._room[pool] - self.roots.least[:, members, 2].sum(axis=1)
        moving = self.roots.least[:, members, 3].max(axis=1, initial=0.0)
        first, last = self._spans(op, np.arange(len(slack)))
        apart = self._apart(op, np.arange(len(slack)))
        rows, back = distinct(first, last, slack, moving, apart)
        found = np.full((len(rows), 5), np.inf)
        for i, row in enumerate(rows.tolist()):
            options = self._front(op, bool(apart[row])).options
            if options is not None and last[row] > first[row]:
                some = options.parts[first[row] : last[row]]
                some = some[some[:, 2] + np.maximum(some[:, 3], moving[row]) <= slack[row]]
                found[i] = some.min(axis=0, initial=np.inf)
        return found[back]

    def _price_room(self) -> None:
        """For each section, root and price of a byte: the least of seconds and what the bytes that stay cost."""
        known = self.record.most
        self._prices = np.outer(known / self._room, 2.0 ** np.arange(*PRICES)) if np.isfinite(known) else None
        if self._prices is None:
            return
        everything = np.arange(len(self.roots.variant))
        for op in self.sections:
            first, last = self._spans(op, everything)
            prices = self._prices[self.roots.family.pool_of[op]]
            least = np.full((len(everything), len(prices)), np.inf)
            for front, rows in self._by_front(op, everything):
                spans, back = distinct(first[rows], last[rows])
                for i, at in enumerate(rows[spans].tolist()):
                    some = front.take(np.arange(first[at], last[at]))
                    cost = some.seconds[:, None] + some.resident[:, None] * prices
                    least[rows[back == i]] = cost.min(axis=0, initial=np.inf)
            self._least_cost[op] = least

    def _affordable(self, block: Block, op: Op) -> Block:
        """Those whose pool is not busy for too long whatever its other sections' layouts: with any price on bytes, what
        they save of their seconds must pay for the room that is left (Lagrange's relaxation of the room)."""
        if self._prices is None or len(block) == 0 or op not in self._least_cost:
            return block
        pool = self.roots.family.pool_of[op]
        members = [other for other in self.sections if self.roots.family.pool_of[other] == pool]
        later = [o for o in members if self.sections.index(o) > self.sections.index(op)]
        if not later:
            return block
        chosen = [self._column[o] for o in members if o not in later]
        moving = block.parts[:, [self._column[o] for o in members], 3].max(axis=1)
        left = self._room[pool] - block.parts[:, chosen, 2].sum(axis=1) - moving
        cost = sum(self._least_cost[o][block.root] for o in later) - left[:, None] * self._prices[pool]
        busy = block.parts[:, chosen, 0].sum(axis=1) + cost.max(axis=1)
        if pool == self.roots.family.pool_of[Op.UPDATE_ACTOR]:
            busy = busy + block.sync
        return block.take(busy < self._limit(block))

    def _tightened(self, block: Block, op: Op) -> Block:
        """Better bounds on the pool's sections that have no layout yet, which must fit beside those that have one."""
        pool = self.roots.family.pool_of[op]
        members = [self._column[other] for other in self.sections if self.roots.family.pool_of[other] == pool]
        held = block.parts[:, members, 2].sum(axis=1)
        for other in self.sections[self.sections.index(op) + 1 :]:
            if self.roots.family.pool_of[other] != pool or len(block) == 0:
                continue
            column = self._column[other]
            left = self._room[pool] - held + block.parts[:, column, 2]
            first, last = self._spans(other, block.root)
            least = np.zeros(len(block))
            for front, rows in self._by_front(other, block.root):
                least[rows] = front.least_within(first[rows], last[rows], left[rows])
            block.parts[:, column, 0] = np.maximum(block.parts[:, column, 0], least)
        return block.take(np.asarray(np.isfinite(block.parts[:, :, 0]).all(axis=1)))

    def _limit(self, block: Block) -> Float:
        devices, staleness = self.roots.devices[block.root], self.roots.staleness[block.root]
        return self.record.limit(devices, staleness) * (1.0 - ROUNDING / 10.0)
