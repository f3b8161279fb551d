"""Frameworks whose trainer is Megatron-LM: its names of degrees, and conditions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ir.frameworks.common import TRAINERS, UPDATES
from ir.setting import LayoutRule

NAMES: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Degrees of a section in Megatron-Core's configuration (megatron/core/model_parallel_config.py)."""

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
