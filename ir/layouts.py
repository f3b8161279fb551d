"""Kinds of sections, and how many devices, replicas and micro-batches their layouts make."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.plan import SECTIONS, Generate, Pass, Update
from ir.setting import Columns, Section

ENGINES = tuple(op for op, kind in SECTIONS.items() if kind is Generate)
PASSES = tuple(op for op, kind in SECTIONS.items() if kind is Pass)
UPDATES = tuple(op for op, kind in SECTIONS.items() if kind is Update)
FILLING = (*ENGINES, *PASSES)
"""Sections whose replicas fill the pool."""
TRAINERS = (*PASSES, *UPDATES)
ALL = tuple(SECTIONS)
Array = NDArray[Any]


def replica(x: Columns, s: Section) -> Array:
    """Devices of one replica."""
    return np.asarray(x["tp"].astype(np.int64) * x["pp"] * (1 if s.op in ENGINES else x["cp"]))


def replicas(x: Columns, s: Section) -> Array:
    """Replicas on the pool; at least 1, so that other rules can be judged on plans that do not fit."""
    return np.asarray(x["dp"]) if s.op in UPDATES else np.maximum(x["devices"] // replica(x, s), 1)


def micro_batches(x: Columns, s: Section) -> Array:
    """Micro-batches of a replica, where they are counted in sequences."""
    return np.asarray(-(-s.sequences // (replicas(x, s).astype(np.int64) * np.maximum(x["micro_batch"], 1))))
