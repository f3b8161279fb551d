"""Constants of an accelerator fitted to kernels that were measured on it, pulled towards what is known of its kind.

Logarithms of seconds are fitted: an error of a tenth counts the same in a short kernel and in a long one. The loss is
quadratic near the fit and linear far from it, so that a few shapes for which a library chose badly do not bend it. A
device of the tables starts from their figures and leaves them only as far as its kernels make it; one that is in no
table follows its kernels. The model's own functions predict, so measured and described devices are priced alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from analytic.fit import machine_of
from analytic.kernels import decode_attention_seconds, gemm_seconds, prefill_seconds, table
from analytic.setup import Machine
from ir.cluster import Device, Gemm, Group, KernelPoint
from ir.shape import ModelShape
from ir.systems import KNOWN_DEVICES, known_device

Float = NDArray[np.float64]

MISFIT = 0.15
"""Standard deviation of the logarithm of a kernel's seconds around its closed form: 9-15 % mean error over the shapes
of published kernel tables (see ir/data/devices.toml)."""

RATE_DEVIATION, LAUNCH_DEVIATION = 0.1, 0.2
"""How far a device of the tables may be from their rates and launch times, in logarithms: the same chip under another
power limit or library."""
FREE = 3.0
"""The same of a device that is in no table, whose start is a guess."""

MIN_EXPERT_TOKENS = 128
"""Tokens of an expert from which on its product takes its time for arithmetic."""


def robust_fit(predict: Callable[[Float], Float], measured: Float, deviation: Float) -> Float:
    """Logarithms of the factors that constants are multiplied by, float64[c].

    Args:
        predict: Seconds float64[n] for such logarithms.
        measured: Seconds float64[n].
        deviation: Prior standard deviation of each logarithm around 0, float64[c].
    """

    def residuals(x: Float) -> Float:
        off = np.log(predict(x) / measured) / MISFIT
        softened = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off**2) - 1.0))
        return np.concatenate([softened, x / deviation])

    return np.asarray(least_squares(residuals, np.zeros(len(deviation))).x)


def fit_kernels(group: Group) -> Device:
    """The group's device with the constants of its measured kernels; as it is if none were measured."""
    start = _start(group.device)
    if not group.device.kernels:
        return group.device
    device = msgspec.structs.replace(start, gemm=_gemm(group, start))
    rate, launch = _attention(group, start, "prefill")
    device = msgspec.structs.replace(
        device, attention_flops=start.attention_flops * rate, attention_launch_s=start.attention_launch_s * launch
    )
    rate, launch = _attention(group, start, "decode")
    return msgspec.structs.replace(
        device,
        kv_bandwidth=start.kv_bandwidth * rate,
        kv_launch_s=start.kv_launch_s * launch,
        expert_efficiency=_expert_efficiency(device),
    )


def kernel_errors(group: Group) -> dict[str, float]:
    """Median relative error of the model over the measured kernels, by kind."""
    errors = {}
    for kind in _PREDICTED:
        points = _points(group.device, kind)
        if points:
            off = kernel_seconds(group, points) / _seconds(points) - 1.0
            errors[kind] = float(np.median(np.abs(off)))
    return errors


def kernel_seconds(group: Group, points: Sequence[KernelPoint]) -> Float:
    """Modelled seconds of kernels of one kind: products, or attention over sequences or a cache."""
    return _PREDICTED[points[0].kind](group, group.device, points)


def seed_of(device: Device) -> Device | None:
    """The device of the tables with this name, None if there is none."""
    known = (known_device(key, where="") for key in KNOWN_DEVICES)
    return next((found for found in known if found.name == device.name), None)


def _start(device: Device) -> Device:
    """The constants of the tables where the device has them there, so that fitting again starts where it did; a launch
    of 0 has no logarithm."""
    seed = seed_of(device) or device
    return msgspec.structs.replace(
        device,
        gemm=seed.gemm,
        attention_flops=seed.attention_flops,
        attention_launch_s=max(seed.attention_launch_s, 1e-6),
        kv_bandwidth=seed.kv_bandwidth,
        kv_launch_s=max(seed.kv_launch_s, 1e-6),
    )


def _gemm(group: Group, start: Device) -> Gemm:
    points, gemm = _points(start, "product"), start.gemm
    assert gemm is not None
    if not points:
        return gemm
    known = seed_of(start) is not None

    def at(x: Float) -> Gemm:
        flops, bandwidth, launch, knee = np.exp(np.append(x, 0.0)[:4]).tolist()
        return Gemm(
            flops=gemm.flops * flops,
            bandwidth=gemm.bandwidth * bandwidth,
            launch_s=gemm.launch_s * launch,
            p=1.0 + (gemm.p - 1.0) * knee,
        )

    def predict(x: Float) -> Float:
        return _product_seconds(group, msgspec.structs.replace(start, gemm=at(x)), points)

    # The knee's sharpness belongs to the kind of device; only of an unknown one is it found here.
    deviation = [RATE_DEVIATION, RATE_DEVIATION, LAUNCH_DEVIATION] if known else [FREE, FREE, FREE, 1.0]
    return at(robust_fit(predict, _seconds(points), np.array(deviation)))


def _attention(group: Group, start: Device, kind: str) -> tuple[float, float]:
    """Factors of the rate and the launch of an attention core; tables keep their launch."""
    points = _points(start, kind)
    if not points:
        return 1.0, 1.0
    measured, whole = _seconds(points), _PREDICTED[kind](group, start, points)
    tabled = table(_machine(group, start), kind) is not None
    launch = 0.0 if tabled else start.attention_launch_s if kind == "prefill" else start.kv_launch_s
    known = seed_of(start) is not None
    deviation = np.array([RATE_DEVIATION, LAUNCH_DEVIATION] if known else [FREE, FREE])

    def seconds(x: Float) -> Float:
        return np.asarray((whole - launch) / np.exp(x[0]) + launch * np.exp(x[1]))

    rate, longer = np.exp(robust_fit(seconds, measured, deviation))
    return float(rate), float(longer)


def _expert_efficiency(device: Device) -> float | None:
    """Median over products with many tokens an expert, balanced and skewed alike."""
    assert device.gemm is not None
    points = [p for p in _points(device, "experts") if p.sizes[2] >= MIN_EXPERT_TOKENS * p.sizes[0]]
    rates = [2.0 * p.sizes[2] * p.sizes[3] * p.sizes[4] / p.seconds for p in points]
    return float(np.median(rates)) / device.gemm.flops if rates else None


def _points(device: Device, kind: str) -> list[KernelPoint]:
    """Of the format that models are held in: the one that attention was measured in."""
    native = next((point.precision for point in device.kernels or () if point.kind != "product"), None)
    found = [point for point in device.kernels or () if point.kind == kind]
    return [point for point in found if point.precision == (native or found[0].precision)]


def _seconds(points: Sequence[KernelPoint]) -> Float:
    return np.array([point.seconds for point in points])


def _sizes(points: Sequence[KernelPoint]) -> list[Float]:
    return list(np.array([point.sizes for point in points], dtype=np.float64).T)


def _machine(group: Group, device: Device) -> Machine:
    return machine_of(msgspec.structs.replace(group, device=device))


def _product_seconds(group: Group, device: Device, points: Sequence[KernelPoint]) -> Float:
    m, k, n = _sizes(points)
    return np.asarray(gemm_seconds(_machine(group, device), m, k, n))


def _prefill_seconds(group: Group, device: Device, points: Sequence[KernelPoint]) -> Float:
    machine, total = _machine(group, device), np.zeros(len(points))
    sequences, tokens, heads, width = _sizes(points)
    flops, rows = 2.0 * sequences * heads * width * tokens**2, sequences * heads
    traffic = 4.0 * rows * tokens * width * device.bytes_per_value
    for head in np.unique(width):
        here = width == head
        total[here] = prefill_seconds(machine, flops[here], traffic[here], tokens[here], rows[here], int(head))
    return total


def _decode_seconds(group: Group, device: Device, points: Sequence[KernelPoint]) -> Float:
    """Shapes have heads of their own, so each different one is priced as a model of one layer."""
    machine, total = _machine(group, device), np.zeros(len(points))
    sequences, keys, *heads = _sizes(points)
    kinds = np.stack(heads, axis=-1)
    for kv_heads, shared, width in np.unique(kinds, axis=0):
        here = (kinds == (kv_heads, shared, width)).all(axis=-1)
        shape = ModelShape(
            layers=1, hidden=int(kv_heads * shared * width), heads=int(kv_heads * shared), kv_heads=int(kv_heads),
            head_dim=int(width), ffn=1, vocab=1, tied=True, qkv_bias=False, qk_norm=False,
        )  # fmt: skip
        total[here] = decode_attention_seconds(machine, shape, 1.0, sequences[here], keys[here])
    return total


_PREDICTED: dict[str, Callable[[Group, Device, Sequence[KernelPoint]], Float]] = {
    "product": _product_seconds,
    "prefill": _prefill_seconds,
    "decode": _decode_seconds,
}
