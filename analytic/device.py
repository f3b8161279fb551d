"""A device's curves: time of matrix products and memory traffic, described or fitted to what was measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.cluster import Device, MatmulPoint

Float = NDArray[np.float64]


def knee(x: Float, y: Float, p: float) -> Float:
    """`(x^p + y^p)^(1/p)`: two times that overlap in part; 1 adds them, large p takes the larger."""
    if p == 1.0:
        return x + y
    if p == 2.0:
        return np.sqrt(x * x + y * y)
    high, low = np.maximum(x, y), np.minimum(x, y)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1.0 + ratio**p) ** (1.0 / p))


def overlapped(x: Float, y: Float, w: Float | float) -> Float:
    """Two activities on one device: the longer, and the part 1 - w of the shorter that does not hide under it."""
    return np.asarray(np.maximum(x, y) + (1.0 - w) * np.minimum(x, y))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Seconds of a product: compute and traffic joined by a knee, and a launch. Where they were measured they are
    added (p = 1), as fits small shapes on CPUs best; that is linear in the rows, so sums over varying m are exact."""

    seconds_per_flop: float
    seconds_per_byte: float
    launch_s: float
    bytes_per_value: int
    p: float = 1.0

    def matmul(self, m: Float, k: Float | float, n: Float | float, *, speed: Float | float = 1.0) -> Float:
        """Seconds of [m, k] x [k, n] without the launch; `speed` is the gain in FLOP/s of a narrower format, whose
        bytes shrink by as much at most to a half."""
        values = m * (k + n) + np.asarray(k * n) / np.minimum(speed, 2.0)
        compute = 2.0 * m * k * n * self.seconds_per_flop / speed
        return knee(np.asarray(compute), np.asarray(values * self.bytes_per_value * self.seconds_per_byte), self.p)


def roofline_of(device: Device) -> Roofline:
    """The device's closed form if it has one, else fitted."""
    gemm = device.gemm
    if gemm is None:
        return fit_roofline(device)
    return Roofline(
        seconds_per_flop=1.0 / gemm.flops,
        seconds_per_byte=1.0 / gemm.bandwidth,
        launch_s=gemm.launch_s,
        bytes_per_value=device.bytes_per_value,
        p=gemm.p,
    )


def fit_roofline(device: Device) -> Roofline:
    """Non-negative least squares of relative errors over the measured products."""
    from scipy.optimize import nnls

    points = device.matmul
    width = device.bytes_per_value
    seconds = np.array([p.seconds for p in points])
    columns = np.array([[2.0 * p.m * p.k * p.n, _values(p) * width, 1.0] for p in points])
    solution, _ = nnls(columns / seconds[:, None], np.ones(len(points)))
    per_flop, per_byte, launch = (float(v) for v in solution)
    return Roofline(seconds_per_flop=per_flop, seconds_per_byte=per_byte, launch_s=launch, bytes_per_value=width)


def fit_error(roofline: Roofline, points: Sequence[MatmulPoint]) -> float:
    """Median relative error over measured products."""
    predicted = [float(roofline.matmul(np.array(float(p.m)), p.k, p.n)) + roofline.launch_s for p in points]
    return float(np.median([abs(t / p.seconds - 1.0) for t, p in zip(predicted, points, strict=True)]))


def _values(point: MatmulPoint) -> float:
    return point.m * point.k + point.k * point.n + point.m * point.n
