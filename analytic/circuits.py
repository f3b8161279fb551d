"""The cycles of an event graph that can be its longest, for all durations at once.

Within a step the graph has no cycles, so that every cycle is made of arcs between steps,
joined by paths within one. Paths and cycles whose times are contained in another's are
dropped: what is left is small, and found once for each structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from analytic.events import Arc, Shape, Term, Times, arcs_of

Ways = Mapping[str, Mapping[str, list[int]]]
"""Packed times of the longest paths within a step, from node to node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """A cycle of arcs: its times over its steps are a lower bound of the period."""

    name: str
    times: Times
    steps: int
    per_staleness: int


BITS = 8
"""Of a packed time for each term: how often it occurs, and a bit to borrow from."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """Times as whole numbers, which add up as times follow each other."""

    terms: tuple[Term, ...]

    @staticmethod
    def of(arcs: Iterable[Arc]) -> _Packed:
        """Of all terms of some arcs."""
        return _Packed(tuple(sorted({term for arc in arcs for term in arc.times})))

    def pack(self, times: Times) -> int:
        """As a number."""
        return sum(1 << BITS * self.terms.index(term) for term in times)

    def unpack(self, packed: int) -> Times:
        """As terms."""
        counts = packed.to_bytes(len(self.terms), "little")
        return tuple(term for term, count in zip(self.terms, counts, strict=True) for _ in range(count))

    @property
    def borrow(self) -> int:
        """The highest bit of each term."""
        return sum(1 << BITS * i + BITS - 1 for i in range(len(self.terms)))


@cache
def cycles_of(shape: Shape) -> tuple[Cycle, ...]:
    """The cycles of which one is the longest whatever the times are; others are left out."""
    arcs = arcs_of(shape)
    packed = _Packed.of(arcs)
    graph = _Graph(arcs=arcs, times={arc: packed.pack(arc.times) for arc in arcs}, borrow=packed.borrow)
    paths = {arc.target: graph.paths(arc.target) for arc in arcs if arc.steps}
    found = {
        _cycle(shape, walk, packed.unpack(times))
        for walk in _rounds(arcs, paths)
        for times in graph.rounds(walk, paths)
    }
    return tuple(sorted(_longest(found), key=lambda c: (c.per_staleness, c.steps, c.name, c.times)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """Arcs with packed times."""

    arcs: tuple[Arc, ...]
    times: Mapping[Arc, int]
    borrow: int

    def maximal(self, times: Iterable[int]) -> list[int]:
        """Without those that another contains."""
        kept, borrow = list[int](), self.borrow
        # What contains another is the larger number.
        for one in sorted(set(times), reverse=True):
            if not any(((other | borrow) - one) & borrow == borrow for other in kept):
                kept.append(one)
        return kept

    def paths(self, first: str) -> dict[str, list[int]]:
        """The longest ways from a node to every other within a step."""
        inside = [arc for arc in self.arcs if not arc.steps]
        found = {first: [0]}
        for node in _ordered(inside):
            ways = [way + self.times[arc] for arc in inside if arc.target == node for way in found.get(arc.source, [])]
            if ways:
                found[node] = self.maximal(found.get(node, []) + ways)
        return found

    def rounds(self, walk: tuple[Arc, ...], paths: Ways) -> list[int]:
        """The times of cycles through these arcs, joined by paths within steps; none where one is missing."""
        sums = [0]
        for arc, following in zip(walk, (*walk[1:], walk[0]), strict=True):
            ways = paths[arc.target].get(following.source, [])
            sums = self.maximal(done + self.times[arc] + way for done in sums for way in ways)
        return sums


def _ordered(arcs: list[Arc]) -> list[str]:
    """Nodes, sources before targets."""
    left, order = {node for arc in arcs for node in (arc.source, arc.target)}, list[str]()
    while left:
        free = sorted(node for node in left if not any(a.target == node and a.source in left for a in arcs))
        assert free, "within a step, nothing waits for itself"
        order, left = order + free, left - set(free)
    return order


def _rounds(arcs: tuple[Arc, ...], paths: Ways) -> Iterator[tuple[Arc, ...]]:
    """Sequences of different arcs between steps that can follow each other, each beginning with its first."""
    between = [arc for arc in arcs if arc.steps]

    def extend(walk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield walk
        reached = paths[between[walk[-1]].target]
        for following in range(walk[0] + 1, len(between)):
            if following not in walk and between[following].source in reached:
                yield from extend((*walk, following))

    for first in range(len(between)):
        for walk in extend((first,)):
            yield tuple(between[i] for i in walk)


def _cycle(shape: Shape, walk: tuple[Arc, ...], times: Times) -> Cycle:
    sync = shape.sync
    pools = {shape.visits[i].pool for kind, i in times if not (kind == "busy" and i == sync)}
    pools |= {shape.visits[sync].pool} if any(arc.per_staleness for arc in walk) else set()
    several = len({visit.pool for visit in shape.visits}) > 1
    if len(pools) <= 1:
        name = f"{pools.pop()} pool" if several and pools else "pool"
    elif shape.colocated:
        name = "step"
    else:
        name = "staleness circuit" if any(arc.per_staleness for arc in walk) else "exchange between pools"
    return Cycle(
        name=name,
        times=times,
        steps=sum(arc.steps for arc in walk),
        per_staleness=sum(arc.per_staleness for arc in walk),
    )


def _longest(cycles: set[Cycle]) -> list[Cycle]:
    """Without those that another contains, or two others together: one of the two is then as long."""
    order = sorted(cycles, key=lambda c: (c.steps, c.per_staleness, -len(c.times), c.times))
    terms = sorted({term for cycle in order for term in cycle.times})
    times = np.array([[cycle.times.count(term) for term in terms] for cycle in order], dtype=np.int8)
    steps = np.array([(cycle.steps, cycle.per_staleness) for cycle in order])
    before = np.triu(np.ones((len(order), len(order)), dtype=bool), 1)
    alone = (times[:, None] >= times).all(axis=2) & (steps[:, None] <= steps).all(axis=2) & before
    left = np.flatnonzero(~alone.any(axis=0))
    kept = list[Cycle]()
    for count, i in enumerate(left.tolist()):
        known = left[:count]
        one, other = (known[rows] for rows in np.triu_indices(count))
        short = (steps[one] + steps[other] <= steps[i]).all(axis=1)
        if not (times[one[short]] + times[other[short]] >= times[i]).all(axis=1).any():
            kept.append(order[i])
    return kept
