"""From stage seconds to the step: the steady-state cycle of the RPEG.

A step's period is the largest ratio of time to tokens over the cycles of its event
graph. For the structures of this space these are the turns that stages take on a
pool, and the circuit generate - train - synchronise, which carries one token plus one
per unit of staleness. A streamed stage overlaps generation but for its last group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.graph import Op, Rpeg

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds, arrays of one shape."""

    generate: Float
    """Busy per step."""
    latency: Float
    """Of a step's generation, first to last."""
    streamed: Float
    """Stages fed group by group."""
    serial: Float
    """All other stages of the training pool."""
    calls: Float
    """Turn-around between controller and workers."""
    staleness: NDArray[np.int64]


def period(rpeg: Rpeg, t: Terms) -> dict[str, Float]:
    """Seconds per step of each cycle; the step takes as long as the longest."""
    last_group = t.streamed / rpeg.job.workload.prompts_per_step
    overlapped = np.maximum(t.latency, t.streamed) + np.minimum(last_group, t.latency)
    circuit = np.where(t.streamed > 0, overlapped, t.latency) + t.serial + t.calls
    if rpeg.colocated:
        return {"pool": t.generate + t.streamed + t.serial + t.calls}
    return {
        "rollout pool": t.generate,
        "training pool": t.streamed + t.serial + t.calls,
        "staleness circuit": circuit / (1.0 + t.staleness),
    }


def is_streamed(rpeg: Rpeg, key: str) -> bool:
    """Whether the stage of that key is fed group by group."""
    stage = next(stage for stage in rpeg.stages if stage.key == key)
    return all(op in rpeg.streamed for op in stage.ops)


def num_visits(rpeg: Rpeg) -> int:
    """Calls to workers that a step waits for, one after the other."""
    return sum(Op.GENERATE not in stage.ops for stage in rpeg.stages) + 1
