"""From stage seconds to the step: the steady-state cycle of the RPEG.

A step's period is the largest ratio of time to tokens over the cycles of its event graph.
There is a cycle for each pool, whose stages take turns, and the circuit from generation
through everything that the next weights wait for and back, which carries one token plus
one per unit of staleness. A streamed stage overlaps generation but for its last group.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ir.graph import Op, Rpeg, Stage

Float = NDArray[np.float64]

SecondsOf = Callable[[Stage], Float]


def cycles(
    rpeg: Rpeg, seconds_of: SecondsOf, latency_ratio: Float, call_s: float, staleness: NDArray[np.int64]
) -> dict[str, Float]:
    """Seconds per step of each cycle; the step takes as long as the longest.

    Args:
        rpeg: The structure; its layouts are not looked at.
        seconds_of: Busy seconds of a stage per step.
        latency_ratio: Of generation, first sequence to last, over its busy seconds.
        call_s: Turn-around between controller and workers, for each visit.
        staleness: Of each plan.
    """
    busy: dict[str, Float] = {}
    for stage in rpeg.stages:
        seconds = seconds_of(stage) + _turnaround(rpeg, stage, call_s)
        busy[stage.pool] = busy[stage.pool] + seconds if stage.pool in busy else seconds
    found = {f"{name} pool" if len(busy) > 1 else "pool": seconds for name, seconds in busy.items()}
    if not rpeg.colocated:
        circuit = _circuit(rpeg, seconds_of, latency_ratio, call_s)
        found["staleness circuit"] = circuit / (1.0 + staleness)
    elif len(busy) > 1:
        found["step"] = _circuit(rpeg, seconds_of, latency_ratio, call_s)
    return found


def _turnaround(rpeg: Rpeg, stage: Stage, call_s: float) -> float:
    """Generation on a pool of its own goes on while others are told what to do."""
    return 0.0 if Op.GENERATE in stage.ops and not rpeg.colocated else call_s


def _circuit(rpeg: Rpeg, seconds_of: SecondsOf, latency_ratio: Float, call_s: float) -> Float:
    """Seconds from a step's first sequence until its weights are where they generate: the longest path through the
    stages, those of one pool in turn."""
    done: dict[Op, Float] = {}
    free: dict[str, Float] = {}
    for stage in rpeg.stages:
        seconds = seconds_of(stage) + call_s
        if Op.GENERATE in stage.ops:
            end = seconds_of(stage) * latency_ratio + call_s
        elif _is_streamed(rpeg, stage):
            end = _streamed_end(rpeg, stage, seconds, done, free)
        else:
            end = _latest([done[op] for op in _sources(rpeg, stage)] + _waits(free, stage.pool)) + seconds
        free[stage.pool] = end
        done |= dict.fromkeys(stage.ops, end)
    return np.asarray(done[Op.SYNC_WEIGHTS])


def _streamed_end(rpeg: Rpeg, stage: Stage, seconds: Float, done: dict[Op, Float], free: dict[str, Float]) -> Float:
    """A streamed stage works under generation and then on the last group; streamed stages of a pool take turns."""
    generated = done[Op.GENERATE]
    last = np.minimum(seconds / rpeg.job.workload.prompts_per_step, generated)
    begun = free.get(f"{stage.pool} streamed", np.zeros_like(generated))
    free[f"{stage.pool} streamed"] = begun + seconds
    return np.asarray(_latest([generated, begun + seconds, *_waits(free, stage.pool)]) + last)


def _is_streamed(rpeg: Rpeg, stage: Stage) -> bool:
    """Whether a stage is fed group by group while another pool generates."""
    apart = stage.pool != rpeg.stage(Op.GENERATE).pool
    return apart and all(op in rpeg.streamed for op in stage.ops if op not in stage.riders)


def _sources(rpeg: Rpeg, stage: Stage) -> list[Op]:
    """What a stage waits for: the data it takes, and for new weights their update."""
    sources = {edge.source for edge in rpeg.data if edge.target in stage.ops and edge.source not in stage.ops}
    if Op.SYNC_WEIGHTS in stage.ops:
        sources.add(Op.UPDATE_ACTOR)
    return sorted(sources)


def _waits(free: dict[str, Float], pool: str) -> list[Float]:
    return [free[pool]] if pool in free else []


def _latest(times: list[Float]) -> Float:
    assert times, "every stage but generation waits for something"
    return np.asarray(np.maximum.reduce(times))
