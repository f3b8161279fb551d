"""What real runs taught of a device: modelled seconds of a kind of stage are multiplied by a factor.

It is the stage as a whole that is scaled. Which of its kernels, launches and waits are wrong, stage times do not tell;
scaling one physical figure would change other stages too, which may have been right.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from analytic.costs import Cost
from analytic.steps import steps
from ir.cluster import Cluster, Device
from ir.graph import Op

KIND_OF: dict[str, str] = {
    Op.GENERATE: "generate",
    Op.REFERENCE_LOGPROB: "passes",
    Op.OLD_LOGPROB: "passes",
    Op.TEACHER_LOGPROB: "passes",
    Op.VALUES: "passes",
    Op.REWARD: "reward",
    Op.UPDATE_ACTOR: "update",
    Op.UPDATE_CRITIC: "update",
    Op.SYNC_WEIGHTS: "sync",
}
"""Kind of a stage by what it does."""


def kind_of(stage: str) -> str | None:
    """The kind of a stage by its key, which names operations joined by `+`; None if it has no scale."""
    return KIND_OF.get(stage.partition("+")[0])


def scale_of(device: Device, op: Op) -> float:
    """Factor of a stage's seconds: what was learnt of the device, else what frameworks take over their kernels on
    accelerators, else 1."""
    kind = KIND_OF.get(op, "")
    found = (device.scales or {}).get(kind)
    if found is not None:
        return found.factor
    return assumed(device, kind)


def assumed(device: Device, kind: str) -> float:
    """Factor of a kind of stage before any run was measured."""
    return 1.0 if device.kind == "cpu" else steps().framework_factors.get(kind, 1.0)


def scales_at(cluster: Cluster, op: Op, groups: NDArray[np.int32]) -> NDArray[np.float64]:
    """Factors float64[n] of a stage that runs on these groups of the cluster, int[n]."""
    return np.array([scale_of(group.device, op) for group in cluster.groups])[groups]


def scaled(cost: Cost, factor: float) -> Cost:
    """So many times the seconds. Laying out weights anew is no part of the stage, nor is memory."""
    if factor == 1.0:
        return cost
    kinds = {kind: factor * seconds for kind, seconds in cost.kinds.items()}
    return replace(cost, seconds=factor * cost.seconds, latency=factor * cost.latency, kinds=kinds)
