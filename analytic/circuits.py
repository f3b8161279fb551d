"""The cycles of an event graph that can be its longest, for all durations at once.

Within a step the graph has no cycles, so that every cycle is made of arcs between steps,
joined by paths within one. Paths and cycles whose times are contained in another's are
dropped: what is left is small, and found once for each structure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from analytic.events import Arc, Shape, Times, arcs_of, joined

Ways = Mapping[str, Mapping[str, list[Times]]]
"""The longest paths within a step, from node to node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """A cycle of arcs: its times over its steps are a lower bound of the period."""

    name: str
    times: Times
    steps: int
    per_staleness: int


@cache
def cycles_of(shape: Shape) -> tuple[Cycle, ...]:
    """The cycles of which one is the longest whatever the times are; others are left out."""
    arcs = arcs_of(shape)
    paths = {arc.target: _paths(arc.target, arcs) for arc in arcs if arc.steps}
    found = {_cycle(shape, walk, times) for walk in _rounds(arcs, paths) for times in _times(walk, paths)}
    return tuple(sorted(_longest(found), key=lambda c: (c.per_staleness, c.steps, c.name, c.times)))


def _within(less: Times, more: Times) -> bool:
    """Whether the one can never be longer than the other."""
    if len(less) > len(more):
        return False
    have = Counter(more)
    return all(have[term] >= count for term, count in Counter(less).items())


def _maximal(times: Iterable[Times]) -> list[Times]:
    """Without those that another contains."""
    kept = list[Times]()
    for one in sorted(set(times), key=len, reverse=True):
        if not any(_within(one, other) for other in kept):
            kept.append(one)
    return kept


def _paths(first: str, arcs: tuple[Arc, ...]) -> dict[str, list[Times]]:
    """The longest ways from a node to every other within a step."""
    inside = [arc for arc in arcs if not arc.steps]
    order = _ordered(inside)
    found: dict[str, list[Times]] = {first: [()]}
    for node in order:
        ways = [joined(way, arc.times) for arc in inside if arc.target == node for way in found.get(arc.source, [])]
        if ways:
            found[node] = _maximal(found.get(node, []) + ways)
    return found


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


def _times(walk: tuple[Arc, ...], paths: Ways) -> list[Times]:
    """The times of cycles through these arcs, joined by paths within steps; none where one is missing."""
    sums: list[Times] = [()]
    for arc, following in zip(walk, (*walk[1:], walk[0]), strict=True):
        ways = paths[arc.target].get(following.source, [])
        sums = _maximal(joined(done, arc.times, way) for done in sums for way in ways)
    return sums


def _cycle(shape: Shape, walk: tuple[Arc, ...], times: Times) -> Cycle:
    pools = {shape.visits[i].pool for kind, i in times if not (kind == "busy" and i == shape.sync)}
    pools |= {shape.visits[shape.sync].pool} if any(arc.per_staleness for arc in walk) else set()
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
    times = np.array([[cycle.times.count(term) for term in terms] for cycle in order])
    steps = np.array([(cycle.steps, cycle.per_staleness) for cycle in order])
    known, kept = list[int](), list[Cycle]()
    for i, cycle in enumerate(order):
        if (times[known] >= times[i]).all(axis=1)[(steps[known] <= steps[i]).all(axis=1)].any():
            continue
        both = (steps[known, None] + steps[known] <= steps[i]).all(axis=2)
        if not ((times[known, None] + times[known] >= times[i]).all(axis=2) & both).any():
            kept.append(cycle)
        known.append(i)
    return kept
