"""What a section of a plan costs: seconds per step and bytes per device, by name, arrays over layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Columns = Mapping[str, NDArray[np.int32]]

RESHARDED = "resharded weights"


KINDS = ("compute", "memory", "communication", "bubble", "tail", "host", "other")
"""What seconds are made of: products, memory traffic, exposed collectives and transfers, waits in a pipeline or between
unequal replicas, decoding below the full batch at the end of a phase, launches and schedulers, and the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one stage, float64[n] each."""

    seconds: Float
    """Busy per RL step, on the device that is longest at it."""
    latency: Float
    """From its first sequence to its last; the same unless stages of other steps run in between."""
    reshard: Float
    """Seconds to lay weights that are trained otherwise out for it; 0 where it has its own."""
    kinds: dict[str, Float] = field(default_factory=dict)
    """Parts of `seconds` by `KINDS`, which they add up to; empty where they are not told apart."""
    resident: dict[str, Float] = field(default_factory=dict)
    """Bytes per device that stay for the whole step."""
    transient: dict[str, Float] = field(default_factory=dict)
    """Bytes per device while the stage runs; those called `RESHARDED` are not needed where it is laid out as the
    update is."""
