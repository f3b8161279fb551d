"""Conditions of frameworks whose trainer is DeepSpeed."""

from __future__ import annotations

import numpy as np

from ir.graph import Op
from ir.setting import Columns, LayoutRule, Mask, Section


def _splits(x: Columns, s: Section) -> Mask:
    whole = s.shape.moe is None and (s.shape.mla is not None or s.shape.kv_heads % x["tp"] == 0)
    return np.asarray((x["tp"] == 1) | whole)


def auto_tp(*ops: Op) -> LayoutRule:
    """AutoTP (deepspeed/module_inject/auto_tp.py of 0.19.8) divides layers as they are, and must do so evenly."""
    return LayoutRule(
        name="auto-tp-divides-evenly",
        ops=ops,
        path="tp",
        reads=("tp",),
        holds=_splits,
        message="must be 1 for models with experts and divide the KV heads of others, for DeepSpeed's AutoTP",
    )
