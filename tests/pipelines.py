"""Exact event simulation of pipeline schedules, the judge of the closed forms in `analytic/stages.py`.

Ranks pass on what they have done at once. Every rank has a fixed order of forward passes (F), gradients of inputs (B)
and gradients of weights (W), and waits for what an entry needs from its neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

Entry = tuple[str, int]
"""What is done, and of which micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A step of a pipeline of like ranks."""

    ranks: int
    batches: int
    forward: float
    inputs: float
    """Seconds of gradients of inputs."""
    weights: float
    """Seconds of gradients of weights."""
    zero_bubble: bool = False
    """Whether rank i, counted from 0, puts gradients of weights off for i micro-batches (ZB-H1); else they follow those
    of inputs and the rank before waits for both (1F1B)."""

    @property
    def seconds(self) -> dict[str, float]:
        """By what is done."""
        return {"F": self.forward, "B": self.inputs, "W": self.weights}


def order(p: Pipeline, rank: int) -> list[Entry]:
    """All that a rank does."""
    delay = rank if p.zero_bubble else 0
    first = min(p.ranks - rank, p.batches)
    entries = [("F", i) for i in range(first)]
    for i in range(p.batches):
        entries.append(("B", i))
        entries += [("W", i - delay)] if i >= delay else []
        entries += [("F", i + first)] if i + first < p.batches else []
    return entries + [("W", i) for i in range(max(p.batches - delay, 0), p.batches)]


def makespan(p: Pipeline) -> float:
    """Seconds until the last rank is done."""
    waiting = [order(p, rank) for rank in range(p.ranks)]
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * p.ranks
    while any(waiting):
        before = len(done)
        for rank, entries in enumerate(waiting):
            while entries and (start := _start(p, done, rank, entries[0])) is not None:
                kind, batch = entries.pop(0)
                free[rank] = max(free[rank], start) + p.seconds[kind]
                done[kind, rank, batch] = free[rank]
        assert len(done) > before, "every rank waits for another"
    return max(free)


def _start(p: Pipeline, done: dict[tuple[str, int, int], float], rank: int, entry: Entry) -> float | None:
    """When a rank has what an entry needs from its neighbour; None if that is not known yet."""
    kind, batch = entry
    if kind == "F" and rank > 0:
        return done.get(("F", rank - 1, batch))
    if kind == "B" and rank < p.ranks - 1:
        return done.get(("B" if p.zero_bubble else "W", rank + 1, batch))
    return 0.0


def in_flight(p: Pipeline, rank: int) -> tuple[int, int]:
    """(most micro-batches of which a rank keeps anything, most of them whose weight gradients are put off)."""
    forward = inputs = weights = whole = late = 0
    for kind, _ in order(p, rank):
        forward, inputs, weights = forward + (kind == "F"), inputs + (kind == "B"), weights + (kind == "W")
        whole, late = max(whole, forward - weights), max(late, inputs - weights)
    return whole, late
