"""Calibration: what this machine's devices and the links between them do, as a cluster document."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import psutil
import ray

from executor.fleet import Fleet, Pool
from executor.known import seed
from executor.machine import device_name, hardware_fingerprint
from executor.microbench import Accelerator, DeviceFigures, merge_figures
from ir.cluster import Cluster, CollectivePoint, Device, Group, Level
from ir.graph import PoolSpan

Op = Literal["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"]

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the collectives measured between cores."""

OPS: tuple[Op, ...] = ("all_reduce", "broadcast")
"""What cores do together."""

ACCELERATOR_SIZES = (*SIZES, 1 << 26, 1 << 28)
ACCELERATOR_OPS: tuple[Op, ...] = (*OPS, "all_gather", "reduce_scatter", "all_to_all", "send")

OVERLAP_BYTES = 1 << 26
"""Of the all-reduce that is measured beside products: a bucket of gradients."""

MEMORY_SHARE = 0.9
"""Of the host's memory that was available, what the devices together may occupy."""

Progress = Callable[[str], None]


def calibrate(fleet: Fleet, kind: str, devices: int, progress: Progress) -> Cluster:
    """Measure: cores for at most half a minute, accelerators for at most three. All devices measure at the same time,
    as they work in a run.

    Of an accelerator the constants are those of the tables, or rough ones; `analytic.calibrate.fitted` fits them to the
    kernels that stand beside them.
    """
    progress("starting workers")
    (pool,), _ = fleet.acquire([PoolSpan(name="all", first_device=0, devices=devices)])
    progress("products, memory traffic and launches")
    figures = merge_figures(ray.get([worker.call.remote("measure") for worker in pool.workers]))
    progress("collectives")
    points = _collectives(pool, figures.accelerator is not None) if devices > 1 else ()
    overlap = _overlap(pool) if devices > 1 and figures.accelerator is not None else None
    call_s = _call(pool)
    device = device_of(figures, kind, devices, pool.idle_bytes)
    level = level_of(devices, points, call_s=call_s, bandwidth=figures.memory_bandwidth, overlap=overlap)
    return Cluster(
        name=f"this machine ({platform.node()})",
        fingerprint=hardware_fingerprint(kind, devices),
        groups=(Group(name=platform.node() or "machine", device=device, levels=(level,)),),
        call_s=call_s,
        process_start_s=pool.start_seconds,
    )


def device_of(figures: DeviceFigures, kind: str, devices: int, idle_bytes: int) -> Device:
    """The device that so many workers measured, each occupying `idle_bytes` before it holds a model."""
    if figures.accelerator is not None:
        return _accelerator(figures, figures.accelerator, devices)
    return Device(
        kind="cpu",
        name=device_name(kind),
        memory_bytes=_host_memory(devices),
        base_memory_bytes=idle_bytes,
        memory_bandwidth=figures.memory_bandwidth,
        attention_flops=figures.attention_flops,
        kv_bandwidth=figures.kv_bandwidth,
        host=figures.host,
        matmul=figures.matmul,
        passes=figures.passes,
    )


def _accelerator(figures: DeviceFigures, about: Accelerator, devices: int) -> Device:
    """What was measured outright replaces the tables' figures; what is fitted waits for the model."""
    start = seed(figures, about)
    return msgspec.structs.replace(
        start,
        kind=about.kind,
        memory_bytes=about.memory_bytes,
        memory_bandwidth=figures.memory_bandwidth,
        host=figures.host,
        processors=about.processors,
        cache_bytes=about.cache_bytes or start.cache_bytes,
        host_link=about.host_link,
        host_memory_bytes=_host_memory(devices),
        kernels=about.kernels,
    )


def level_of(
    devices: int,
    points: tuple[CollectivePoint, ...],
    *,
    call_s: float,
    bandwidth: float,
    overlap: float | None = None,
) -> Level:
    """What joins the devices: messages between two of them, or broadcasts where none were measured; `call_s` and
    `bandwidth` stand in where one device has no collectives."""
    messages = [p for p in points if p.op == "send"] or [p for p in points if p.op == "broadcast"]
    smallest, largest = min((p.bytes for p in messages), default=0), max((p.bytes for p in messages), default=0)
    return Level(
        name="machine",
        size=devices,
        latency_s=min((p.seconds for p in messages if p.bytes == smallest), default=call_s),
        bandwidth=max((p.bytes / p.seconds for p in messages if p.bytes == largest), default=bandwidth),
        collectives=points,
        overlap=overlap,
    )


def _collectives(pool: Pool, accelerators: bool) -> tuple[CollectivePoint, ...]:
    size = len(pool.workers)
    worlds = sorted({1 << i for i in range(1, size.bit_length())} | {size})
    ops, sizes = (ACCELERATOR_OPS, ACCELERATOR_SIZES) if accelerators else (OPS, SIZES)
    points = []
    for ranks in worlds:
        ray.get([worker.call.remote("form", ranks) for worker in pool.workers])
        for op in ops:
            for bytes_ in sizes:
                calls = [w.call.remote("collective", op=op, size=bytes_, ranks=ranks) for w in pool.workers[:ranks]]
                seconds = float(np.median(ray.get(calls)))
                points.append(CollectivePoint(op=op, ranks=ranks, bytes=bytes_, seconds=seconds))
    return tuple(points)


def _overlap(pool: Pool) -> float:
    ranks = len(pool.workers)
    calls = [
        worker.call.remote("collective", op="all_reduce", size=OVERLAP_BYTES, ranks=ranks, beside=True)
        for worker in pool.workers
    ]
    return float(np.median(ray.get(calls)))


def _call(pool: Pool) -> float:
    """Median seconds from calling a worker until its answer is here."""
    seconds: list[float] = []
    for _ in range(50):
        begun = time.perf_counter()
        ray.get(pool.workers[0].call.remote("ready"))
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))


def _host_memory(devices: int) -> int:
    available = min(psutil.virtual_memory().available, _cgroup_limit())
    return int(MEMORY_SHARE * available / devices)


def _cgroup_limit() -> int:
    """What a container allows, if there is one."""
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.exists() and os.access(path, os.R_OK) else "max"
    return psutil.virtual_memory().total if text == "max" else int(text)
