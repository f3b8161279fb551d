"""The cycles of an event graph that can be its longest, for all durations at once.

Within a step the graph has no cycles, so that every cycle is made of arcs between steps,
joined by paths within one. Paths and cycles whose times are contained in another's are
dropped: what is left is small, and found once for each structure.

Sets of times are compared many times, so that each is a whole number: its digits tell how
often each term occurs, and the two above them how many steps it spans, as negative counts. Numbers
then add up as arcs follow each other, and one contains another if no digit is smaller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

from analytic.events import Arc, Shape, Term, Times, arcs_of

Ways = Mapping[str, Mapping[str, list[int]]]
"""Numbers of the longest paths within a step, from node to node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """A cycle of arcs: its times over its steps are a lower bound of the period."""

    name: str
    times: Times
    steps: int
    per_staleness: int


Link = tuple[str, str, int]
"""An arc: source, target and number."""

BITS = 8
"""Of a digit: a count below 128 and a bit to borrow from."""


@dataclass(frozen=True, slots=True)
class _Digits:
    """Times and steps as whole numbers."""

    terms: tuple[Term, ...]

    @staticmethod
    def of(arcs: Iterable[Arc]) -> _Digits:
        """For all terms of some arcs."""
        return _Digits(tuple(sorted({term for arc in arcs for term in arc.times})))

    def link(self, arc: Arc) -> Link:
        """An arc with its number."""
        times = sum(1 << BITS * self.terms.index(term) for term in arc.times)
        return arc.source, arc.target, times - (arc.steps + (arc.per_staleness << BITS) << self._width)

    def read(self, number: int) -> tuple[Times, int, int]:
        """Times, steps, and steps per staleness."""
        counts = (number & (1 << self._width) - 1).to_bytes(len(self.terms), "little")
        per_staleness, steps = divmod(-(number >> self._width), 1 << BITS)
        times = tuple(term for term, count in zip(self.terms, counts, strict=True) for _ in range(count))
        return times, steps, per_staleness

    @property
    def borrow(self) -> int:
        """The highest bit of each digit."""
        return sum(1 << BITS * i + BITS - 1 for i in range(len(self.terms) + 2))

    @property
    def _width(self) -> int:
        return BITS * len(self.terms)


@cache
def cycles_of(shape: Shape) -> tuple[Cycle, ...]:
    """The cycles of which one is the longest whatever the times are; others are left out."""
    arcs = arcs_of(shape)
    digits = _Digits.of(arcs)
    graph = _Graph(
        inside=[digits.link(arc) for arc in arcs if not arc.steps],
        between=[digits.link(arc) for arc in arcs if arc.steps],
        borrow=digits.borrow,
    )
    cycles = [_cycle(shape, *digits.read(number)) for number in graph.longest()]
    return tuple(sorted(cycles, key=lambda c: (c.per_staleness, c.steps, c.name, c.times)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """Arcs with numbers."""

    inside: list[Link]
    """Of one step."""
    between: list[Link]
    """From a step to a later one."""
    borrow: int
    """See `_Digits.borrow`."""

    def longest(self) -> list[int]:
        """Numbers of all cycles but those that another contains, or two others together: one of the two is then as
        long."""
        order = _ordered(self.inside)
        paths = {target: self.paths(target, order) for target in {target for _, target, _ in self.between}}
        left = self.maximal(number for walk in _rounds(self.between, paths) for number in self.rounds(walk, paths))
        both = sorted({one + other for one, other in combinations_with_replacement(left, 2)})
        return [number for number in left if not self.is_within(number, both[bisect_left(both, number) :])]

    def is_within(self, one: int, others: Iterable[int]) -> bool:
        """Whether some of the others contain a number."""
        borrow = self.borrow
        # A digit that is smaller borrows the bit above it.
        less = borrow - one
        return any((other + less) & borrow == borrow for other in others)

    def maximal(self, numbers: Iterable[int]) -> list[int]:
        """Without those that another contains."""
        kept = list[int]()
        # What contains another is the larger number.
        for one in sorted(set(numbers), reverse=True):
            if not self.is_within(one, kept):
                kept.append(one)
        return kept

    def paths(self, first: str, order: list[str]) -> dict[str, list[int]]:
        """The longest ways from a node to every other within a step, whose nodes are in order."""
        found = {first: [0]}
        for node in order:
            into = [(source, link) for source, target, link in self.inside if target == node]
            ways = [way + link for source, link in into for way in found.get(source, [])]
            if ways:
                found[node] = self.maximal(found.get(node, []) + ways)
        return found

    def rounds(self, walk: tuple[Link, ...], paths: Ways) -> list[int]:
        """The cycles through these arcs, joined by paths within steps; none where one is missing."""
        sums = [0]
        for (_, target, link), (source, _, _) in zip(walk, (*walk[1:], walk[0]), strict=True):
            ways = paths[target].get(source, [])
            sums = self.maximal(done + link + way for done in sums for way in ways)
        return sums


def _ordered(links: list[Link]) -> list[str]:
    """Nodes, sources before targets."""
    left, order = {node for link in links for node in link[:2]}, list[str]()
    while left:
        free = sorted(left - {target for source, target, _ in links if source in left})
        assert free, "within a step, nothing waits for itself"
        order, left = order + free, left - set(free)
    return order


def _rounds(between: list[Link], paths: Ways) -> Iterator[tuple[Link, ...]]:
    """Sequences of different arcs between steps that can follow each other, each beginning with its first."""

    def extend(walk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield walk
        reached = paths[between[walk[-1]][1]]
        for following in range(walk[0] + 1, len(between)):
            if following not in walk and between[following][0] in reached:
                yield from extend((*walk, following))

    for first in range(len(between)):
        for walk in extend((first,)):
            yield tuple(between[i] for i in walk)


def _cycle(shape: Shape, times: Times, steps: int, per_staleness: int) -> Cycle:
    sync = shape.sync
    pools = {shape.visits[i].pool for kind, i in times if not (kind == "busy" and i == sync)}
    pools |= {shape.visits[sync].pool} if per_staleness else set()
    several = len({visit.pool for visit in shape.visits}) > 1
    if len(pools) <= 1:
        name = f"{pools.pop()} pool" if several and pools else "pool"
    elif shape.colocated:
        name = "step"
    else:
        name = "staleness circuit" if per_staleness else "exchange between pools"
    return Cycle(name=name, times=times, steps=steps, per_staleness=per_staleness)
