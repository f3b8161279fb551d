"""Rules on how training runs a pipeline and divides state among replicas."""

from __future__ import annotations

import numpy as np

from ir.layouts import TRAINERS, UPDATES, micro_batches, replicas
from ir.setting import Columns, LayoutRule, Mask, Section


def _groups_of_replicas(x: Columns, s: Section) -> Mask:
    ranks, shard = replicas(x, s).astype(np.int64) * x["cp"], np.maximum(x["shard"], 1)
    return np.asarray((x["shard"] == 0) | ((shard > 1) & (shard < ranks) & (ranks % shard == 0)))


def _fills_a_domain(x: Columns, s: Section) -> Mask | bool:
    whole = x["shard"].astype(np.int64) * x["tp"] == s.of_group(x["group"], "domain")
    return s.is_fixed("shard") or np.asarray((x["shard"] == 0) | whole)


TRAINING_RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        name="interleaving-needs-a-pipeline",
        ops=UPDATES,
        path="vpp",
        reads=("pp", "vpp"),
        holds=lambda x, s: (x["vpp"] == 1) | (x["pp"] > 1),
        message="must be 1 without a pipeline: pp above 1",
    ),
    LayoutRule(
        name="interleaving-divides-the-layers",
        ops=UPDATES,
        path="vpp",
        reads=("pp", "vpp"),
        holds=lambda x, s: (x["vpp"] == 1) | (s.shape.layers % (x["pp"] * x["vpp"]) == 0),
        message="times pp must divide the model's layers",
    ),
    LayoutRule(
        name="interleaving-runs-in-rounds",
        ops=UPDATES,
        path="vpp",
        reads=("pp", "vpp", "dp", "micro_batch"),
        holds=lambda x, s: (x["vpp"] == 1) | ((x["micro_batch"] > 0) & (micro_batches(x, s) % x["pp"] == 0)),
        message="above 1 needs micro-batches by sequences, as many as a multiple of pp",
    ),
    LayoutRule(
        name="zero-bubble-needs-a-pipeline",
        ops=UPDATES,
        path="schedule",
        reads=("pp", "vpp", "schedule"),
        holds=lambda x, s: (x["schedule"] == 0) | ((x["pp"] > 1) & (x["vpp"] == 1)),
        message="must be 1f1b without a pipeline, pp above 1, and with interleaved pieces, vpp above 1",
    ),
    LayoutRule(
        name="pipeline-is-filled",
        ops=UPDATES,
        path="pp",
        reads=("pp", "dp", "micro_batch"),
        holds=lambda x, s: (x["pp"] == 1) | (x["micro_batch"] == 0) | (micro_batches(x, s) >= x["pp"]),
        message="must not exceed a replica's micro-batches: the pipeline would never be full",
    ),
    LayoutRule(
        name="zero-needs-replicas",
        ops=TRAINERS,
        path="zero",
        reads=("zero", "devices", "tp", "pp", "cp", "dp"),
        holds=lambda x, s: (x["zero"] == 0) | (replicas(x, s) * x["cp"] > 1),
        message="must be 0 without replicas to divide over: replicas x cp above 1",
    ),
    LayoutRule(
        name="zero-excludes-a-pipeline",
        ops=TRAINERS,
        path="zero",
        reads=("zero", "pp"),
        holds=lambda x, s: (x["pp"] == 1) | (x["zero"] <= 1),
        message="above 1 excludes a pipeline, whose micro-batches would gather or reduce every time",
    ),
    LayoutRule(
        name="hybrid-sharding-needs-zero",
        ops=TRAINERS,
        path="shard",
        reads=("zero", "shard"),
        holds=lambda x, s: (x["shard"] == 0) | (x["zero"] >= 2),
        message="must be 0 where zero is below 2: nothing is divided for each micro-batch",
    ),
    LayoutRule(
        name="hybrid-sharding-groups-the-replicas",
        ops=TRAINERS,
        path="shard",
        reads=("shard", "devices", "tp", "pp", "cp", "dp"),
        holds=_groups_of_replicas,
        message="must be 0, or above 1 and divide replicas x cp into several groups",
    ),
    LayoutRule(
        name="hybrid-sharding-fills-a-domain",
        ops=TRAINERS,
        path="shard",
        reads=("shard", "tp", "group"),
        holds=_fills_a_domain,
        message="times tp must be the devices that the fastest links join: fewer hold more, and more wait for others",
    ),
)
