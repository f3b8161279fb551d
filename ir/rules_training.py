"""Rules on how training runs a pipeline and divides state among replicas."""

from __future__ import annotations

from ir.layouts import TRAINERS, UPDATES, micro_batches, replicas
from ir.setting import LayoutRule

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
)
