"""How well an accelerator that is in no table is known once its kernels were measured: the shapes of `tune.py
calibrate` are looked up in measured tables, constants are fitted to them alone, and all other shapes are predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accuracy
import msgspec
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from accuracy import Evaluation, constant_rate
from numpy.typing import NDArray

from analytic.kernelfit import fit_kernels, kernel_seconds
from ir.cluster import Gemm, Group, KernelPoint
from ir.systems import system

Float = NDArray[np.float64]

PRODUCTS = [
    (m, k, n)
    for m in (1, 16, 64, 256, 1024, 4096, 16384)
    for k, n in ((1024, 3072), (2048, 2048), (4096, 4096), (4096, 14336), (8192, 10240), (14336, 4096))
]
PREFILL = [(b, s, h, 128) for b, s in ((1, 512), (8, 512), (1, 2048), (4, 2048), (1, 8192), (2, 8192)) for h in (8, 32)]
DECODE = [(b, s, 8, 4, 128) for b in (1, 16, 64, 256) for s in (512, 2048, 4096, 16384) if b * s <= 1 << 20]
"""As `executor.kernels.GRIDS`, which loads torch."""

NEAR = 1.0
"""Sum of the axes' distances in octaves within which a measured shape stands for one of the grid."""

MOST = 4000
"""Rows reported of a device."""


def _columns(path: Path, gpu: str, wanted: dict[str, str]) -> dict[str, Any]:
    table = pq.read_table(path)
    for name, value in {"gpu": gpu, **wanted}.items():
        table = table.filter(pc.equal(table[name], value))
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.schema.names}


def _gemm(path: Path, gpu: str) -> tuple[NDArray[np.int64], Float]:
    x = _columns(path, gpu, {"dtype": "bfloat16"})
    return np.stack([x["m"], x["k"], x["n"]], axis=1), x["latency_us"] / 1e6


def _prefill(path: Path, gpu: str) -> tuple[NDArray[np.int64], Float]:
    x = _columns(path, gpu, {"attn_dtype": "bfloat16", "kv_dtype": "bfloat16", "framework": "vllm"})
    keep = x["seq"] > 1
    return np.stack([x["batch"], x["seq"], x["q_heads"], x["head_dim"]], axis=1)[keep], x["latency_us"][keep] / 1e6


def _decode(path: Path, gpu: str) -> tuple[NDArray[np.int64], Float]:
    """FlashInfer's older decode kernel is left out, as for the model's tables."""
    x = _columns(path, gpu, {"kv_dtype": "bfloat16", "framework": "vllm"})
    keep = x["kernel"] != "vllm_flashinfer_fidecode"
    sizes = np.stack([x["batch"], x["kv_len"], x["kv_heads"], x["q_heads"] // x["kv_heads"], x["head_dim"]], axis=1)
    return sizes[keep], x["latency_us"][keep] / 1e6


def _work(kind: str, sizes: NDArray[np.int64]) -> Float:
    x = sizes.astype(np.float64).T
    if kind == "product":
        return 2.0 * x[0] * x[1] * x[2]
    return 2.0 * x[0] * x[2] * x[3] * x[1] ** 2 if kind == "prefill" else 4.0 * x[0] * x[1] * x[2] * x[4]


def _nearest(sizes: NDArray[np.int64], grid: list[tuple[int, ...]]) -> NDArray[np.intp]:
    logs = np.log2(sizes)
    found = set()
    for shape in grid:
        apart = np.abs(logs - np.log2(shape)).sum(axis=1)
        if apart.min() <= NEAR:
            found.add(int(apart.argmin()))
    return np.array(sorted(found), dtype=np.intp)


def _rough(kind: str, sizes: NDArray[np.int64], seconds: Float, points: tuple[KernelPoint, ...]) -> Group:
    """A device of no table, its figures the best rates of its own points."""
    group = system("dgx-h100", 8, where="").groups[0]
    rate, launch = float((_work(kind, sizes) / seconds).max()), float(seconds.min())
    figures: dict[str, Any] = {"name": "in no table", "kernels": points}
    if kind == "product":
        m, k, n = sizes.astype(np.float64).T
        traffic = 2.0 * (m * k + k * n + m * n)
        figures["gemm"] = Gemm(flops=rate, bandwidth=float((traffic / seconds).max()), launch_s=launch, p=2.0)
    elif kind == "prefill":
        figures |= {"attention_flops": rate, "attention_launch_s": launch}
    else:
        figures |= {"kv_bandwidth": rate, "kv_launch_s": launch}
    return msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, **figures))


def _points(kind: Any, sizes: NDArray[np.int64], seconds: Float) -> tuple[KernelPoint, ...]:
    return tuple(
        KernelPoint(kind=kind, precision="bf16", sizes=tuple(int(v) for v in size), seconds=float(t))
        for size, t in zip(sizes, seconds, strict=True)
    )


def _one(
    kind: str, sizes: NDArray[np.int64], seconds: Float, grid: list[tuple[int, ...]], wanted: NDArray[np.bool_]
) -> tuple[Float, Float, Float]:
    """(predicted, measured, work) of the wanted shapes that nothing was fitted to; the same shape by another library is
    none of them."""
    used = _nearest(sizes, grid)
    group = _rough(kind, sizes[used], seconds[used], _points(kind, sizes[used], seconds[used]))
    known = (sizes[:, None, :] == sizes[used][None]).all(axis=2).any(axis=1)
    rest = np.flatnonzero(~known & wanted)
    rest = rest[:: max(len(rest) // MOST, 1)]
    device = fit_kernels(group)
    predicted = kernel_seconds(msgspec.structs.replace(group, device=device), _points(kind, sizes[rest], seconds[rest]))
    return predicted, seconds[rest], _work(kind, sizes[rest])


def _set(
    kind: str,
    file: str,
    read: Callable[[Path, str], tuple[NDArray[np.int64], Float]],
    grid: list[tuple[int, ...]],
    keep: Callable[[NDArray[np.int64]], NDArray[np.bool_]] = lambda sizes: np.ones(len(sizes), dtype=bool),
) -> Callable[[Path], Evaluation | None]:
    def rows(path: Path) -> Iterator[tuple[str, tuple[Float, Float, Float]]]:
        for gpu in sorted(set(pq.read_table(path, columns=["gpu"])["gpu"].to_pylist())):
            sizes, seconds = read(path, gpu)
            if len(seconds) and len(_nearest(sizes, grid)) >= len(grid) // 2:
                yield gpu, _one(kind, sizes, seconds, grid, keep(sizes))

    def evaluate(folder: Path) -> Evaluation | None:
        path = accuracy.find(folder, file)
        found = list(rows(path)) if path is not None else []
        if not found:
            return None
        predicted, measured, work = (np.concatenate([part[i] for _, part in found]) for i in range(3))
        groups = [gpu for gpu, part in found for _ in part[0]]
        return Evaluation(
            predicted=predicted, measured=measured, groups=groups, baseline=constant_rate(work, measured, groups)
        )

    return evaluate


SETS: dict[str, Callable[[Path], Evaluation | None]] = {
    "calibration_gemm": _set("product", "gemm.parquet", _gemm, PRODUCTS),
    "calibration_prefill": _set(
        "prefill", "attention_prefill.parquet", _prefill, PREFILL, lambda sizes: sizes[:, 1] >= 2048
    ),
    "calibration_prefill_short": _set(
        "prefill", "attention_prefill.parquet", _prefill, PREFILL, lambda sizes: sizes[:, 1] < 2048
    ),
    "calibration_decode": _set("decode", "attention_decode.parquet", _decode, DECODE),
}
