"""What one worker measures of its device.

A core measures what the model of a core uses: products in float32, traffic, and whole passes
of the project's own runtime. An accelerator measures its kernels by themselves, since other
runtimes than this one are planned for it; what a runtime adds to them, real runs tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import torch

from executor import kernels
from executor.hostbench import host_costs, kv_bandwidth, whole_passes
from executor.kernels import GRIDS, Grids, memory_bandwidth
from executor.timing import median_seconds
from ir.cluster import Host, KernelPoint, MatmulPoint, MeasuredPass

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
WIDTHS = ((64, 64), (128, 128), (128, 384), (384, 128), (256, 256), (512, 1024))
"""(k, n): what the projections of small models have."""

TRAFFIC_VALUES = 1 << 20
"""Values of an elementwise operation on a core: 4 MiB each, what the activations of a micro-batch occupy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """What one worker measured. Figures of an accelerator stand apart; a core has the others."""

    memory_bandwidth: float
    host: Host
    matmul: tuple[MatmulPoint, ...] = ()
    attention_flops: float = 0.0
    kv_bandwidth: float = 0.0
    passes: tuple[MeasuredPass, ...] = ()
    accelerator: Accelerator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What an accelerator says of itself, and its kernels."""

    kind: Literal["cuda", "rocm"]
    name: str
    memory_bytes: int
    processors: int
    cache_bytes: int
    """0 where the library does not say."""
    host_link: float
    """Bytes per second one way to pinned host memory."""
    kernels: tuple[KernelPoint, ...]


def measure_device(device: torch.device) -> DeviceFigures:
    """All figures of a device: of a core in about ten seconds, of an accelerator in about one minute."""
    return measure_accelerator(device) if device.type == "cuda" else _measure_core(device)


def _measure_core(device: torch.device) -> DeviceFigures:
    return DeviceFigures(
        matmul=tuple(_matmul(device, m, k, n) for m in ROWS for k, n in WIDTHS),
        memory_bandwidth=memory_bandwidth(device, TRAFFIC_VALUES),
        attention_flops=_attention(device),
        kv_bandwidth=kv_bandwidth(device),
        host=host_costs(device),
        passes=whole_passes(device),
    )


def measure_accelerator(device: torch.device, grids: Grids = GRIDS) -> DeviceFigures:
    """Kernels first, while the device is cool and nothing else has taken memory."""
    measured = kernels.measure_kernels(device, grids)
    return DeviceFigures(
        memory_bandwidth=memory_bandwidth(device, grids.traffic_values),
        host=host_costs(device),
        accelerator=_about(device, measured, kernels.host_link(device, grids.copies)),
    )


def _about(device: torch.device, measured: tuple[KernelPoint, ...], link: float) -> Accelerator:
    """On a core, where this only runs in tests, the device says nothing of itself."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Accelerator(
        kind="rocm" if torch.version.hip else "cuda",
        name=getattr(properties, "name", "core"),
        memory_bytes=getattr(properties, "total_memory", 1 << 30),
        processors=getattr(properties, "multi_processor_count", 1),
        # Of AMD's it says the second level, behind which is a larger one.
        cache_bytes=0 if torch.version.hip else getattr(properties, "L2_cache_size", 0),
        host_link=link,
        kernels=measured,
    )


def _matmul(device: torch.device, m: int, k: int, n: int) -> MatmulPoint:
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    with torch.inference_mode():
        seconds = median_seconds(lambda: torch.nn.functional.linear(a, b), budget_s=0.03)
    return MatmulPoint(m=m, k=k, n=n, seconds=seconds)


def _attention(device: torch.device) -> float:
    batch, heads, length, width = 8, 4, 128, 32
    q, k, v = (torch.randn(batch, heads, length, width, device=device) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    seconds = median_seconds(lambda: attention(q, k, v, is_causal=True), budget_s=0.2)
    return 2.0 * batch * heads * width * length**2 / seconds


def merge_figures(figures: Sequence[DeviceFigures]) -> DeviceFigures:
    """Medians over workers that measured at the same time."""
    first = figures[0]
    host = {name: _median([getattr(f.host, name) for f in figures]) for name in first.host.__struct_fields__}
    points = zip(*(f.matmul for f in figures), strict=True)
    passes = zip(*(f.passes for f in figures), strict=True)
    accelerators = [f.accelerator for f in figures if f.accelerator is not None]
    return DeviceFigures(
        matmul=tuple(msgspec.structs.replace(p[0], seconds=_median([q.seconds for q in p])) for p in points),
        memory_bandwidth=_median([f.memory_bandwidth for f in figures]),
        kv_bandwidth=_median([f.kv_bandwidth for f in figures]),
        attention_flops=_median([f.attention_flops for f in figures]),
        host=Host(**host),
        passes=tuple(msgspec.structs.replace(p[0], seconds=_median([q.seconds for q in p])) for p in passes),
        accelerator=_merged(accelerators) if accelerators else None,
    )


def _merged(accelerators: Sequence[Accelerator]) -> Accelerator:
    """A kernel that some devices had no room for is left out."""
    by_shape: dict[tuple[object, ...], list[KernelPoint]] = {}
    for point in (point for a in accelerators for point in a.kernels):
        by_shape.setdefault((point.kind, point.precision, point.sizes), []).append(point)
    whole = [points for points in by_shape.values() if len(points) == len(accelerators)]
    first = accelerators[0]
    return Accelerator(
        kind=first.kind,
        name=first.name,
        memory_bytes=min(a.memory_bytes for a in accelerators),
        processors=first.processors,
        cache_bytes=first.cache_bytes,
        host_link=_median([a.host_link for a in accelerators]),
        kernels=tuple(msgspec.structs.replace(p[0], seconds=_median([q.seconds for q in p])) for p in whole),
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
