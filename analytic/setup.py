"""What all plans of a job on a cluster share: device curves, lengths, and scales from measured passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.device import Roofline
from analytic.lengths import LengthModel
from analytic.priors import Elementwise, priors
from ir.cluster import Cluster, Device, Level
from ir.job import Job

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One group of like devices."""

    device: Device
    levels: tuple[Level, ...]
    roofline: Roofline
    forward_scale: float = 1.0
    """Measured whole passes over the sum of their kernels."""
    train_scale: float = 1.0

    @property
    def is_host(self) -> bool:
        """Whether devices are processor cores: launches then take their own time, and every tensor is float32."""
        return self.device.kind == "cpu"

    @property
    def elementwise(self) -> Elementwise:
        """What elementwise kernels move and keep."""
        return priors().eager if self.is_host else priors().fused

    def with_launches(self, kernels: Float, launches: Float) -> Float:
        """Seconds of kernels and of the host's launches: one after the other on a core, side by side otherwise."""
        return kernels + launches if self.is_host else np.maximum(kernels, launches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all plans of a batch share, fitted once."""

    job: Job
    cluster: Cluster
    machines: tuple[Machine, ...]
    """One per group of the cluster."""
    lengths: LengthModel
