"""Constants of a whole step, from `data/steps.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConstants:
    """How weights travel; the data file has each constant's unit and source."""

    tensors: float
    buckets: float
    everyone: float
    reads: float
    point_to_point: float
    begin_s: float
    pieces: int
    tensor_s: float
    copy: float
    disk: float
    pause_s: float
    gathered: float
    handle_s: float
    wake_s: float
    changed: float
    place_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """All constants of a step."""

    sync: SyncConstants
    framework_factors: Mapping[str, float]
    """Seconds of a kind of stage over the sum of its kernels, on accelerators of which no run was measured."""
    errors: Mapping[str, float]
    """Relative standard deviation by kind of cost."""
    framework: float
    """Relative standard deviation of what a framework adds, before a run of it was measured."""
    models: float
    """Relative standard deviation between models, once a run of the framework was measured."""
    noise: float
    """Relative standard deviation between runs of one plan."""
    shared: float
    """Correlation of the errors of two stages' equal kinds."""


@cache
def steps() -> Steps:
    """The constants, read once."""
    data: dict[str, Any] = tomllib.loads((Path(__file__).parent / "data" / "steps.toml").read_text(encoding="utf-8"))
    errors = dict(data["errors"])
    apart = {name: errors.pop(name) for name in ("framework", "models", "noise", "shared")}
    return Steps(sync=SyncConstants(**data["sync"]), framework_factors=data["framework"], errors=errors, **apart)
