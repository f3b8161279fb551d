"""Which device of the tables an accelerator is, by its driver's name for it; and rough figures where it is none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from executor.microbench import Accelerator, DeviceFigures
from ir.cluster import PRECISIONS, Device, Gemm, KernelPoint
from ir.systems import KNOWN_DEVICES, known_device

MEMORY_DEVIATION = 0.15
"""What a driver reports and a data sheet says differ by less, variants of a device by more."""

OTHER_FORMS = frozenset({"pcie", "nvl", "mobile", "laptop", "maxq", "d"})
"""Words of a name that say another form factor or market: slower than what the tables have under the same name."""


def known_as(name: str, memory_bytes: int) -> str | None:
    """The key in the table of devices, None if the device is in it under no name.

    Args:
        name: As the driver gives it, such as `NVIDIA H100 80GB HBM3`.
        memory_bytes: Tells variants with the same name apart.
    """
    said = re.findall(r"[a-z0-9]+", name.lower())
    # Keys are written without the spaces and hyphens that drivers put in: RTX 4090.
    words = {*said, *(one + two for one, two in pairwise(said))}
    if words & OTHER_FORMS:
        return None
    unlike = {
        key: abs(memory_bytes / known_device(key, where="").memory_bytes - 1.0)
        for key in KNOWN_DEVICES
        if set(_named_by(key)) <= words
    }
    best = min(unlike, key=lambda key: (-len(_named_by(key)), unlike[key]), default=None)
    return best if best is not None and unlike[best] < MEMORY_DEVIATION else None


def _named_by(key: str) -> list[str]:
    """Words of a key without the gigabytes that tell variants apart."""
    return [part for part in key.split("-") if not (part.isdigit() and int(part) < 1000)]


def seed(figures: DeviceFigures, about: Accelerator) -> Device:
    """What the measurements start from: the device of the tables with all its figures, or else rough ones. It keeps
    the tables' name, by which the model finds what else is known of it."""
    key = known_as(about.name, about.memory_bytes)
    return known_device(key, where=about.name) if key else _rough(figures, about)


def _rough(figures: DeviceFigures, about: Accelerator) -> Device:
    """The best rates seen: nothing is known of the device but what was measured."""
    products = _of(about.kernels, "product")
    native = products[0].precision
    own = [point for point in products if point.precision == native]
    width = 4 if native == "fp32" else 2
    # Half precision stands for what models are held in where the device multiplies no bf16.
    names = {
        point.precision: "bf16" if point.precision == native and width == 2 else point.precision for point in products
    }
    rates: dict[str, float] = {
        name: max(_product_rates(products, p)) for p, name in names.items() if name in PRECISIONS
    }
    kv_bandwidth = max(width * 2.0 * _values(p.sizes) / p.seconds for p in _of(about.kernels, "decode"))
    return Device(
        kind=about.kind,
        name=about.name,
        memory_bytes=about.memory_bytes,
        bytes_per_value=width,
        # The same for all devices of the tables: context, libraries and a set of communicators.
        base_memory_bytes=known_device(KNOWN_DEVICES[0], where="").base_memory_bytes,
        memory_bandwidth=figures.memory_bandwidth,
        attention_flops=max(_attention_flops(p.sizes) / p.seconds for p in _of(about.kernels, "prefill")),
        kv_bandwidth=kv_bandwidth,
        host=figures.host,
        gemm=Gemm(
            flops=max(_product_rates(products, native)),
            bandwidth=max(kv_bandwidth, figures.memory_bandwidth),
            launch_s=min(point.seconds for point in own),
            p=2.0,
        ),
        peak_flops=rates,
        peak_bandwidth=max(kv_bandwidth, figures.memory_bandwidth),
    )


def _of(points: Iterable[KernelPoint], kind: str) -> list[KernelPoint]:
    return [point for point in points if point.kind == kind]


def _product_rates(points: Sequence[KernelPoint], precision: str) -> list[float]:
    return [2.0 * p.sizes[0] * p.sizes[1] * p.sizes[2] / p.seconds for p in points if p.precision == precision]


def _values(sizes: tuple[int, ...]) -> float:
    """Cached keys of all sequences, as many as cached values."""
    sequences, keys, kv_heads, _, width = sizes
    return float(sequences * keys * kv_heads * width)


def _attention_flops(sizes: tuple[int, ...]) -> float:
    """A causal core: two products over half of the square."""
    sequences, tokens, heads, width = sizes
    return 2.0 * sequences * heads * width * tokens**2
