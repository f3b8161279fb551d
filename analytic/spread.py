"""Records of a pass: how a model is spread, what goes through it, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from analytic.priors import priors

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a model is spread, int64[n] each; those that a section lacks are 1."""

    tp: Int
    pp: Int
    cp: Int
    ep: Int
    etp: Int
    dp: Int
    shard: Int
    """Ranks among which ZeRO divides state; 0: among all that hold the same."""
    fp8: NDArray[np.bool_]

    @property
    def speed(self) -> Float:
        """Gain in the products' FLOP/s."""
        return np.where(self.fp8, priors().fp8_speed, 1.0)


def spread_of(x: Mapping[str, NDArray[np.int32]], dp: Int) -> Spread:
    """From a section's columns and its replicas."""
    one = np.ones(len(dp), dtype=np.int64)
    degrees = {name: x[name].astype(np.int64) if name in x else one for name in ("tp", "pp", "cp", "ep", "etp")}
    shard = x["shard"].astype(np.int64) if "shard" in x else np.zeros(len(dp), dtype=np.int64)
    fp8 = x["precision"] == 1 if "precision" in x else np.zeros(len(dp), dtype=bool)
    return Spread(**degrees, dp=dp, shard=shard, fp8=fp8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a replica passes through a model, float64[n] each."""

    tokens: Float
    squares: Float
    """Sum over sequences of the squared length: what attention to earlier tokens takes; 0: the core is priced
    elsewhere and only launched here."""
    head_tokens: Float
    """Tokens that go through the output head."""

    def scaled(self, factor: Float | float) -> Work:
        """So many times the work."""
        return Work(tokens=self.tokens * factor, squares=self.squares * factor, head_tokens=self.head_tokens * factor)


def _nothing() -> Float:
    return np.zeros(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Seconds of one forward pass over all layers and the head, on the device that is longest at it."""

    kernels: Float
    collectives: Float
    memory: Float = field(default_factory=_nothing)
    """Of `kernels`, those that take their time for memory traffic."""
    attention: Float = field(default_factory=_nothing)
    """Of `kernels`, the cores of attention."""
    head: Float = field(default_factory=_nothing)
    """Of `kernels`, the output head and its softmax."""
    tensor: Float = field(default_factory=_nothing)
    """Of `collectives`, those of tensor parallelism."""

    @property
    def compute(self) -> Float:
        """Of `kernels`, those that take it for arithmetic."""
        return self.kernels - self.memory

    @property
    def seconds(self) -> Float:
        """Kernels and collectives."""
        return self.kernels + self.collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts' tokens are sent and spread; the defaults are those of training under a learnt router."""

    imbalance: float | None = None
    """Load of the fullest device over the mean; None: as measured under power-law routing; 1: force-balanced."""
    engine: bool = False
    """Whether an inference engine runs it: its all-reduce for small tensors, and low latency for few tokens."""
