"""From stage seconds to the step: the longest cycle of its event graph.

`analytic.circuits` finds, once per structure, the cycles that can be the longest: one for
each pool, whose stages take turns; the circuit from generation through everything that
the next weights wait for and back, which spans one step plus one per unit of staleness;
and where pools wait for each other, what they exchange. Here they get their seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from analytic.circuits import Cycle, cycles_of
from analytic.events import Shape, Term, shape_of
from ir.graph import Rpeg, Stage

Float = NDArray[np.float64]

SecondsOf = Callable[[Stage], Float]


def cycles(
    rpeg: Rpeg,
    seconds_of: SecondsOf,
    latency_ratio: Float,
    call_s: float,
    staleness: NDArray[np.int64],
    in_flight: NDArray[np.bool_] | None = None,
) -> dict[str, Float]:
    """Seconds per step of each kind of cycle, float64[..., m]; the step takes as long as the longest.

    Args:
        rpeg: The structure; its layouts are not looked at.
        seconds_of: Busy seconds of a stage per step.
        latency_ratio: Of generation, first sequence to last, over its busy seconds.
        call_s: Turn-around between controller and workers, for each visit.
        staleness: Of each plan, int64[m].
        in_flight: Of each plan, bool[m]: whether engines never drain, so that the pool that trains is handed each
            mini-batch when it is finished. None for nowhere.
    """
    handed = np.zeros(len(staleness), dtype=bool) if in_flight is None else in_flight
    whole, pieces = shape_of(rpeg, pieces=False), shape_of(rpeg, pieces=rpeg.job.workload.minibatches > 1)
    terms = _Terms(rpeg, whole, seconds_of, latency_ratio, call_s)
    if not pieces.pieces or not handed.any():
        return _named(cycles_of(whole), terms, staleness)
    after, before = _named(cycles_of(pieces), terms, staleness), _named(cycles_of(whole), terms, staleness)
    none = np.zeros(terms.busy(0).shape)
    return {
        name: np.where(handed, after.get(name, none), before.get(name, none))
        for name in dict.fromkeys((*before, *after))
    }


def occurrences(rpeg: Rpeg) -> dict[str, tuple[float, ...]]:
    """How often the busy seconds of each stage, by its key, count in each cycle: stages that occur alike may be taken
    together, for only their sum is seen. Generation's latency is not counted."""
    workload = rpeg.job.workload
    parts = {"busy": 1.0, "last": 1.0 / workload.prompts_per_step, "end": 1.0 / workload.minibatches}
    found: dict[str, tuple[float, ...]] = {}
    circuits = [
        cycle for pieces in (False, workload.minibatches > 1) for cycle in cycles_of(shape_of(rpeg, pieces=pieces))
    ]
    for i, stage in enumerate(rpeg.stages):
        found[stage.key] = tuple(sum(parts.get(what, 0.0) for what, at in c.times if at == i) for c in circuits)
    return found


class _Terms:
    """Seconds of every term, each computed once."""

    def __init__(self, rpeg: Rpeg, shape: Shape, seconds_of: SecondsOf, latency_ratio: Float, call_s: float) -> None:
        self._rpeg, self._shape, self._seconds_of = rpeg, shape, seconds_of
        self._ratio, self._call = latency_ratio, call_s
        self._known: dict[Term, Float] = {}

    def __call__(self, term: Term) -> Float:
        if term not in self._known:
            self._known[term] = np.asarray(getattr(self, term[0])(term[1]))
        return self._known[term]

    def busy(self, i: int) -> Float:
        """Generation on a pool of its own goes on while others are told what to do."""
        apart = self._shape.visits[i].generates and not self._shape.colocated
        return self._seconds_of(self._rpeg.stages[i]) + (0.0 if apart else self._call)

    def latency(self, i: int) -> Float:
        """From generation's first sequence to its last."""
        return self._seconds_of(self._rpeg.stages[i]) * self._ratio + self._call

    def group(self, i: int) -> Float:
        """Until the first group is finished, as if groups came at an even pace."""
        return self.latency(i) / self._groups

    def last(self, i: int) -> Float:
        """A streamed stage on the last group."""
        return self.busy(i) / self._groups

    def piece(self, i: int) -> Float:
        """Until the first mini-batch is finished."""
        return self.latency(i) / self._minibatches

    def end(self, i: int) -> Float:
        """A stage on the last mini-batch."""
        return self.busy(i) / self._minibatches

    @property
    def _groups(self) -> int:
        return self._rpeg.job.workload.prompts_per_step

    @property
    def _minibatches(self) -> int:
        return self._rpeg.job.workload.minibatches


def _named(found: tuple[Cycle, ...], terms: _Terms, staleness: NDArray[np.int64]) -> dict[str, Float]:
    """The longest cycle of each name."""
    sums: dict[tuple[str, int, int], Float] = {}
    for cycle in found:
        key, seconds = (cycle.name, cycle.steps, cycle.per_staleness), np.asarray(sum(map(terms, cycle.times)))
        sums[key] = np.maximum(sums[key], seconds) if key in sums else seconds
    result: dict[str, Float] = {}
    for (name, steps, per_staleness), total in sums.items():
        seconds = total / (steps + per_staleness * staleness if per_staleness else steps)
        result[name] = np.maximum(result[name], seconds) if name in result else np.asarray(seconds)
    return result
