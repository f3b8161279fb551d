"""The event graph of a step: when each stage may start, and the cycles that bound how soon the next step can.

A node is the start of a stage in a step, an arc says "not before that long after another
start, so many steps ago". Arcs come from data (same step), from state (an earlier step;
new weights as many steps ago as staleness allows), and from pools, whose stages take
turns in the order of the RPEG. The longest cycle, in time over steps, is the period of
the steady state (Baccelli et al., Synchronization and Linearity, theorem 2.28).

Times stay symbols here (`Term`), so that one analysis serves all plans of a structure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ir.graph import Op, Rpeg, State, StateEdge

Term = tuple[str, int]
"""What a time is made of, and of which stage: `busy`; of generation `latency` from its first sequence to its last,
`group` until its first group and `piece` until its first mini-batch; of other stages `last`, for the last group, and
`end`, for the last mini-batch."""

Times = tuple[Term, ...]
"""Terms added up, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What matters of a stage."""

    pool: str
    generates: bool
    syncs: bool
    streamed: bool
    """Whether it is fed group by group while another pool generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What plans of one structure have in common, with stages by their index; can be hashed."""

    visits: tuple[Visit, ...]
    data: tuple[tuple[int, int], ...]
    """(source, target) within a step."""
    state: tuple[tuple[int, int], ...]
    """(source, target), target one step later."""
    pieces: bool
    """Whether the training pool is handed mini-batches as they are finished."""

    @property
    def generate(self) -> int:
        """The stage that generates."""
        return next(i for i, visit in enumerate(self.visits) if visit.generates)

    @property
    def sync(self) -> int:
        """The stage that brings new weights."""
        return next(i for i, visit in enumerate(self.visits) if visit.syncs)

    @property
    def colocated(self) -> bool:
        """Whether generation and training share a pool."""
        return self.visits[self.generate].pool == self.visits[self.sync].pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Arc:
    """The target starts at least `times` after the source did, `steps` + `per_staleness` x staleness steps ago."""

    source: str
    target: str
    times: Times
    steps: int = 0
    per_staleness: int = 0


def shape_of(rpeg: Rpeg, *, pieces: bool) -> Shape:
    """The shape of a structure. Mini-batches can be handed over where all training stages are on one pool."""
    pools = {stage.pool for stage in rpeg.stages if Op.GENERATE not in stage.ops}
    pieces = pieces and len(pools) == 1 and not rpeg.colocated
    rollout = rpeg.stage(Op.GENERATE).pool
    visits = tuple(
        Visit(
            pool=stage.pool,
            generates=Op.GENERATE in stage.ops,
            syncs=Op.SYNC_WEIGHTS in stage.ops,
            streamed=not pieces
            and stage.pool != rollout
            and all(op in rpeg.streamed for op in stage.ops if op not in stage.riders),
        )
        for stage in rpeg.stages
    )
    at = {op: i for i, stage in enumerate(rpeg.stages) for op in stage.ops}
    data = {(at[edge.source], at[edge.target]) for edge in rpeg.data} | {(at[Op.UPDATE_ACTOR], at[Op.SYNC_WEIGHTS])}
    state = {(at[e.source], at[e.target]) for e in rpeg.state if _waits_a_step(e) and {e.source, e.target} <= set(at)}
    # Within a pool, a step follows the other anyway.
    state = {(s, t) for s, t in state if visits[s].pool != visits[t].pool}
    return Shape(
        visits=visits, data=tuple(sorted((s, t) for s, t in data if s != t)), state=tuple(sorted(state)), pieces=pieces
    )


def _waits_a_step(edge: StateEdge) -> bool:
    """State that its reader waits for; new weights and experience are bounded by staleness instead."""
    return edge.state is not State.EXPERIENCE and edge.source is not Op.SYNC_WEIGHTS


# Arcs


def _start(i: int) -> str:
    return f"start {i:02}"


def _finish(i: int) -> str:
    """Of a streamed stage, when its last group is done."""
    return f"finish {i:02}"


def arcs_of(shape: Shape) -> tuple[Arc, ...]:
    """All arcs of a structure's graph."""
    made = [arc for source, target in shape.data for arc in _data_arcs(shape, source, target)]
    made += [
        Arc(source=_start(i), target=_finish(i), times=(("busy", i),)) for i, v in enumerate(shape.visits) if v.streamed
    ]
    made += [arc for pool in dict.fromkeys(v.pool for v in shape.visits) for arc in _turns(shape, pool)]
    made += [
        Arc(source=node, target=_start(target), times=times, steps=1)
        for source, target in shape.state
        for node, times in (_end(shape, source),)
    ]
    weights = Arc(
        source=_start(shape.sync),
        target=_start(shape.generate),
        times=(("busy", shape.sync),),
        steps=1,
        per_staleness=1,
    )
    return (*made, weights)


def _end(shape: Shape, i: int) -> tuple[str, Times]:
    """From which node, and how long after it, a stage is done."""
    return (_finish(i), ()) if shape.visits[i].streamed else (_start(i), (("busy", i),))


def _data_arcs(shape: Shape, source: int, target: int) -> Iterator[Arc]:
    generates, streams = shape.visits[source].generates, shape.visits[target].streamed
    last = (("last", target),)
    if streams and (generates or shape.visits[source].streamed):
        # The first group, and after the last one it still has to do that.
        first, node = ("group" if generates else "last", source), _start(source) if generates else _finish(source)
        yield Arc(source=_start(source), target=_start(target), times=(first,))
        yield Arc(source=node, target=_finish(target), times=((("latency", source), *last) if generates else last))
    elif generates and shape.pieces:
        yield Arc(source=_start(source), target=_start(target), times=(("piece", source),))
        ends = tuple(("end", i) for i, v in enumerate(shape.visits) if not v.generates and not v.syncs)
        yield Arc(source=_start(source), target=_start(shape.sync), times=joined(ends, (("latency", source),)))
    else:
        node, times = (_start(source), (("latency", source),)) if generates else _end(shape, source)
        yield Arc(source=node, target=_start(target), times=times)


def _turns(shape: Shape, pool: str) -> Iterator[Arc]:
    """Stages of a pool in turn, those first that work while another pool generates; the first of the next step after
    the last."""
    members = sorted(
        (i for i, visit in enumerate(shape.visits) if visit.pool == pool), key=lambda i: not shape.visits[i].streamed
    )
    for here, then in zip(members, [*members[1:], members[0]], strict=True):
        steps = int(then == members[0])
        node, times = _end(shape, here)
        if shape.visits[here].generates and not shape.colocated:
            # Engines stand still while they take new weights.
            times = joined(times, (("busy", shape.sync),))
        if not steps and shape.visits[here].streamed and shape.visits[then].streamed:
            # They take turns group by group.
            yield Arc(source=_start(here), target=_start(then), times=(("busy", here),))
            yield Arc(source=node, target=_finish(then), times=(("last", then),))
        else:
            yield Arc(source=node, target=_start(then), times=times, steps=steps)


def joined(*parts: Times) -> Times:
    """Times one after the other."""
    return tuple(sorted(term for part in parts for term in part))
