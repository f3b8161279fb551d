"""How much of what an engine's rank needs lies where the trainer left it: the overlap of two shardings of a model.

Devices of a pool are numbered; ranks are laid out tensor parallel first, then context, data
and pipeline for a trainer, tensor and pipeline for an engine. A rank's part is an interval of
the layers times an interval of every matrix, and of experts an interval of those; ZeRO-3
leaves a share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.batch import PlanBatch
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]

SAMPLED = 32
"""Devices that stand for a pool: parts repeat, so that few show the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Degrees of the trainer and, beginning with `engine`, of the rollout, int64[n] each."""

    devices: Int
    tp: Int
    cp: Int
    dp: Int
    pp: Int
    ep: Int
    etp: Int
    over: Int
    """Devices over which ZeRO-3 divides each part; 1 without."""
    engine_tp: Int
    engine_pp: Int
    engine_ep: Int

    @staticmethod
    def of(b: PlanBatch) -> Sharding:
        """Of plans that train and generate on one pool."""
        update = {name: np.maximum(b[f"update_actor.{name}"], 1).astype(np.int64) for name in _DEGREES}
        engine = {
            f"engine_{name}": np.maximum(b[f"generate.{name}"], 1).astype(np.int64) for name in ("tp", "pp", "ep")
        }
        shard = b["update_actor.shard"].astype(np.int64)
        over = np.where(shard > 0, shard, update["dp"] * update["cp"])
        over = np.where(b["update_actor.zero"] == 3, over, 1)
        return Sharding(devices=b["devices.actor"].astype(np.int64), over=over, **update, **engine)


_DEGREES = ("tp", "cp", "dp", "pp", "ep", "etp")


def lacking(shape: ModelShape, s: Sharding) -> Float:
    """Parameters, float64[n], that a device lacks of what its rank of an engine needs, the mean over the pool."""
    device = np.arange(SAMPLED, dtype=np.int64) * (s.devices[:, None] - 1) // max(SAMPLED - 1, 1)
    trains = device < (s.tp * s.cp * s.dp * s.pp)[:, None]
    pp, tp, ep = _(s.engine_pp), _(s.engine_tp), _(s.engine_ep)
    layers = trains * _overlap(device // _(s.tp * s.cp * s.dp), _(s.pp), device // tp % pp, pp)
    dense = layers * _overlap(device % _(s.tp), _(s.tp), device % tp, tp) / _(s.over)
    over = np.where(s.over > 1, np.maximum(s.over * s.tp // (s.ep * s.etp), 1), 1)
    experts = _overlap(device // _(s.etp) % _(s.ep), _(s.ep), device % ep, ep) / _(s.etp) / _(over)
    routed = float(shape.expert_parameters)
    missing = (shape.parameters - routed) / tp * (1.0 - dense) + routed / ep * (1.0 - layers * experts)
    return np.asarray((missing / pp).mean(axis=1))


def node_share(s: Sharding, node: float) -> Float:
    """Share, float64[n], of the model that the devices of a node hold between them: the pipeline's stages and the
    shards of ZeRO-3 that lie in it."""
    stages = np.minimum(np.maximum(node / (s.tp * s.cp * s.dp), 1.0) / s.pp, 1.0)
    shards = np.minimum(np.maximum(node / (s.tp * s.cp), 1.0) * s.cp / np.maximum(s.over, 1), 1.0)
    return np.asarray(stages * np.where(s.over > 1, shards, 1.0))


def _(degree: Int) -> Int:
    return degree[:, None]


def _overlap(have: Int, of: Int, want: Int, parts: Int) -> Float:
    """Share of the interval [want, want + 1] / parts that lies in [have, have + 1] / of."""
    low = np.maximum(have / of, want / parts)
    high = np.minimum((have + 1) / of, (want + 1) / parts)
    return np.asarray(np.maximum(high - low, 0.0) * parts)
