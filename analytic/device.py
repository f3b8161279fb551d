"""A device's curves: time of matrix products and memory traffic, fitted to what was measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ir.cluster import Device, MatmulPoint

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """`seconds = flop / rate + bytes / bandwidth + launch`: compute and traffic add up, as fits small shapes on
    CPUs best (the p-norm roofline with p = 1). Linear in the rows m, so sums over varying m are exact."""

    seconds_per_flop: float
    seconds_per_byte: float
    launch_s: float
    bytes_per_value: int

    def matmul(self, m: Float, k: int, n: int) -> Float:
        """Seconds of [m, k] x [k, n] without the launch."""
        values = m * (k + n) + k * n
        return 2.0 * m * k * n * self.seconds_per_flop + values * self.bytes_per_value * self.seconds_per_byte


def fit_roofline(device: Device) -> Roofline:
    """Non-negative least squares of relative errors over the measured products."""
    points = device.matmul
    width = device.bytes_per_value
    seconds = np.array([p.seconds for p in points])
    columns = np.array([[2.0 * p.m * p.k * p.n, _values(p) * width, 1.0] for p in points])
    solution, _ = nnls(columns / seconds[:, None], np.ones(len(points)))
    per_flop, per_byte, launch = (float(v) for v in solution)
    return Roofline(seconds_per_flop=per_flop, seconds_per_byte=per_byte, launch_s=launch, bytes_per_value=width)


def fit_error(roofline: Roofline, points: Sequence[MatmulPoint]) -> float:
    """Median relative error over measured products."""
    predicted = [float(roofline.matmul(np.array(p.m), p.k, p.n)) + roofline.launch_s for p in points]
    return float(np.median([abs(t / p.seconds - 1.0) for t, p in zip(predicted, points, strict=True)]))


def _values(point: MatmulPoint) -> float:
    return point.m * point.k + point.k * point.n + point.m * point.n
