"""Conditions of frameworks whose trainer is Megatron-LM."""

from __future__ import annotations

import numpy as np

from ir.frameworks.common import TRAINERS, UPDATES
from ir.setting import LayoutRule

EVEN_PIPELINE = LayoutRule(
    name="pipeline-divides-the-layers",
    ops=TRAINERS,
    path="pp",
    reads=("pp",),
    holds=lambda x, s: s.shape.layers % x["pp"] == 0,
    message="must divide the model's layers",
)

DISTRIBUTED_OPTIMIZER = LayoutRule(
    name="optimizer-is-distributed",
    ops=UPDATES,
    path="zero",
    reads=("dp", "cp", "zero"),
    holds=lambda x, s: (x["zero"] == 1) == (x["dp"].astype(np.int64) * x["cp"] > 1),
    message="must be 1 where there are replicas to divide over, for the optimizer is always distributed",
)
