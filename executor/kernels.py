"""Kernels of an accelerator, measured over grids: products by precision, attention over whole sequences and over a
cache, grouped products of experts; and memory traffic, launches and copies from and to the host.

Nothing here needs an accelerator: on a core the same code runs with small grids. Tensors hold normal noise, since
zeros draw less power and so run faster than data does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from executor.timing import Call, kernel_seconds, median_seconds
from ir.cluster import KernelPoint

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Kind = Literal["product", "prefill", "decode", "experts"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grids:
    """Shapes to measure, sizes as in `ir.cluster.KernelPoint`."""

    products: tuple[Shape, ...]
    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    experts: tuple[Shape, ...]
    """Experts, tokens of all, k, n: each is measured with balanced and with skewed loads."""
    rotated_bytes: int
    """What the tensors that calls take turns with occupy together: several times the last level of cache."""
    traffic_values: int
    """Values of an elementwise operation."""
    copies: tuple[int, ...]
    """Bytes copied from and to the host."""
    budget_s: float
    """Repeats of a kernel."""


GRIDS = Grids(
    products=tuple(
        (m, k, n)
        for m in (1, 16, 64, 256, 1024, 4096, 16384)
        for k, n in ((1024, 3072), (2048, 2048), (4096, 4096), (4096, 14336), (8192, 10240), (14336, 4096))
    ),
    prefill=tuple(
        (sequences, tokens, heads, 128)
        for sequences, tokens in ((1, 512), (8, 512), (1, 2048), (4, 2048), (1, 8192), (2, 8192))
        for heads in (8, 32)
    ),
    decode=tuple(
        (sequences, keys, 8, 4, 128)
        for sequences in (1, 16, 64, 256)
        for keys in (512, 2048, 4096, 16384)
        if sequences * keys <= 1 << 20
    ),
    experts=tuple((32, tokens, 2048, 1536) for tokens in (64, 256, 1024, 4096, 16384, 65536)),
    rotated_bytes=256 << 20,
    traffic_values=1 << 27,
    copies=(1 << 20, 1 << 24, 1 << 26, 1 << 28),
    budget_s=0.03,
)
"""What a data-centre GPU measures, in about half a minute."""

MOST_COPIES = 32
"""Tensors that calls take turns with."""

LAUNCHES = 500
"""Empty kernels asked for one after the other."""

_WIDTH: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Formats whose products the device measures, the one that models are held in first."""
    if device.type != "cuda":
        return ("fp32",)
    wanted: tuple[Precision, ...] = ("bf16", "fp16", "fp8")
    return tuple(precision for precision in wanted if multiplies(device, precision)) or ("fp32",)


def multiplies(device: torch.device, precision: Precision) -> bool:
    """Whether a product of this format works here: tried, since neither the device nor the library says; but for bf16,
    which older devices do in software."""
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return False
    try:
        _products(device, precision, (16, 64, 64), copies=1)[0]()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def measure_kernels(device: torch.device, grids: Grids = GRIDS) -> tuple[KernelPoint, ...]:
    """All kernels of the grids."""
    found = precisions(device)
    wanted: list[tuple[Kind, Precision, Shape]] = [("product", p, sizes) for p in found for sizes in grids.products]
    wanted += [("prefill", found[0], sizes) for sizes in grids.prefill]
    wanted += [("decode", found[0], sizes) for sizes in grids.decode]
    wanted += [("experts", found[0], sizes) for sizes in _loaded(grids.experts)]
    with torch.inference_mode():
        points = [_point(device, grids, *one) for one in wanted]
    launch = KernelPoint(kind="launch", precision=found[0], sizes=(1,), seconds=launch_seconds(device))
    return (*(point for point in points if point is not None), launch)


def _point(device: torch.device, grids: Grids, kind: Kind, precision: Precision, sizes: Shape) -> KernelPoint | None:
    """None where the tensors do not fit."""
    copies = min(max(grids.rotated_bytes // max(_read_bytes(kind, sizes), 1), 1), MOST_COPIES)
    make = {"product": _products, "prefill": _prefill, "decode": _decode, "experts": _experts}[kind]
    try:
        seconds = kernel_seconds(make(device, precision, sizes, copies=copies), device, budget_s=grids.budget_s)
    except torch.OutOfMemoryError:
        return None
    return KernelPoint(kind=kind, precision=precision, sizes=sizes, seconds=seconds)


def _read_bytes(kind: str, sizes: Shape) -> int:
    """About what a call reads that the one before should not have left in the cache: weights, and cached keys."""
    match kind:
        case "product":
            return 2 * sizes[1] * sizes[2]
        case "decode":
            return 4 * sizes[0] * sizes[1] * sizes[2] * sizes[4]
        case "experts":
            return 2 * sizes[0] * sizes[3] * sizes[4]
    return 6 * math.prod(sizes)


def _products(device: torch.device, precision: Precision, sizes: Shape, *, copies: int) -> list[Call]:
    m, k, n = sizes
    if precision == "fp8":
        return _fp8_products(device, sizes, copies=copies)
    a = _noise(device, precision, m, k)
    weights = [_noise(device, precision, n, k) for _ in range(copies)]
    return [lambda w=w: torch.nn.functional.linear(a, w) for w in weights]  # type: ignore[misc]


def _fp8_products(device: torch.device, sizes: Shape, *, copies: int) -> list[Call]:
    """With one scale a tensor, as trainers use it: of MI300's generation the format has no negative zero."""
    m, k, n = sizes
    old = torch.version.hip is not None and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName
    kind = torch.float8_e4m3fnuz if old else torch.float8_e4m3fn
    one = torch.ones((), device=device)
    a = _noise(device, "fp32", m, k).to(kind)
    weights = [_noise(device, "fp32", n, k).to(kind).t() for _ in range(copies)]

    def call(w: Tensor) -> Tensor:
        return torch._scaled_mm(a, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return [lambda w=w: call(w) for w in weights]  # type: ignore[misc]


def _prefill(device: torch.device, precision: Precision, sizes: Shape, *, copies: int) -> list[Call]:
    sequences, tokens, heads, width = sizes
    shape = (sequences, heads, tokens, width)
    inputs = [tuple(_noise(device, precision, *shape) for _ in range(3)) for _ in range(copies)]
    attention = torch.nn.functional.scaled_dot_product_attention
    return [lambda x=x: attention(*x, is_causal=True) for x in inputs]  # type: ignore[misc]


def _decode(device: torch.device, precision: Precision, sizes: Shape, *, copies: int) -> list[Call]:
    """The query heads of a KV head meet its keys as if they were so many queries."""
    sequences, keys, kv_heads, group, width = sizes
    q = _noise(device, precision, sequences, kv_heads, group, width)
    caches = [
        tuple(_noise(device, precision, sequences, kv_heads, keys, width) for _ in range(2)) for _ in range(copies)
    ]
    attention = torch.nn.functional.scaled_dot_product_attention
    return [lambda x=x: attention(q, *x) for x in caches]  # type: ignore[misc]


def _loaded(shapes: tuple[Shape, ...]) -> Iterator[Shape]:
    """Each with balanced loads, and skewed so that the fullest expert has four times its share."""
    for experts, tokens, k, n in shapes:
        for fullest in dict.fromkeys((-(-tokens // experts), min(4 * -(-tokens // experts), tokens))):
            yield experts, fullest, tokens, k, n


def expert_loads(experts: int, fullest: int, tokens: int) -> list[int]:
    """Tokens of each expert: they fall off geometrically from the fullest, as routers' loads do, and add up."""
    # The share kept from one expert to the next, by bisection: 1 is balanced.
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        total = sum(fullest * middle**i for i in range(experts))
        low, high = (middle, high) if total < tokens else (low, middle)
    bounds = np.cumsum([fullest * high**i for i in range(experts)])
    ends = np.round(bounds * tokens / bounds[-1]).astype(int)
    return [int(load) for load in np.diff(ends, prepend=0)]


def _experts(device: torch.device, precision: Precision, sizes: Shape, *, copies: int) -> list[Call]:
    """One grouped kernel where the library has it for this device, else one product an expert."""
    experts, fullest, tokens, k, n = sizes
    loads = expert_loads(experts, fullest, tokens)
    a = _noise(device, precision, tokens, k)
    weights = [_noise(device, precision, experts, k, n) for _ in range(copies)]
    ends = torch.tensor(np.cumsum(loads), dtype=torch.int32, device=device)

    def grouped(w: Tensor) -> object:
        return torch._grouped_mm(a, w, offs=ends)

    def one_by_one(w: Tensor) -> object:
        return [part @ w[i] for i, part in enumerate(a.split(loads)) if len(part)]

    call = grouped if _works(lambda: grouped(weights[0])) else one_by_one
    return [lambda w=w: call(w) for w in weights]  # type: ignore[misc]


def _works(call: Call) -> bool:
    try:
        call()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def memory_bandwidth(device: torch.device, values: int) -> float:
    """Bytes per second of an elementwise operation, read and written bytes together."""
    a, b = torch.randn(values, device=device), torch.randn(values, device=device)
    out = torch.empty_like(a)
    seconds = kernel_seconds([lambda: torch.add(a, b, out=out)], device, budget_s=0.2)
    return 3 * 4 * values / seconds


def launch_seconds(device: torch.device) -> float:
    """Seconds of an empty kernel, asked for from Python one after the other."""
    x = torch.zeros(1, device=device)

    def call() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    return median_seconds(call, budget_s=0.1) / LAUNCHES


def host_link(device: torch.device, sizes: tuple[int, ...]) -> float:
    """Bytes per second one way between pinned host memory and the device: the slope over sizes, of the slower way."""
    seconds = np.array([[_copy_seconds(device, size, away) for size in sizes] for away in (False, True)])
    steps = np.diff(seconds, axis=1) / np.diff(sizes)
    return float(1.0 / max(np.median(steps, axis=1).max(), 1e-15))


def _copy_seconds(device: torch.device, size: int, away: bool) -> float:
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    source, target = (there, here) if away else (here, there)
    return median_seconds(lambda: target.copy_(source, non_blocking=True), budget_s=0.1)


def _noise(device: torch.device, precision: Precision, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=_WIDTH[precision])
