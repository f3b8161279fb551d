"""Calibration: what this machine's devices and the links between them do, as a cluster document."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import ray

from executor.fleet import Fleet, Pool
from executor.machine import device_name, hardware_fingerprint
from executor.microbench import DeviceFigures, merge_figures
from ir.cluster import Cluster, CollectivePoint, Device, Group, Level
from ir.graph import PoolSpan

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the collectives measured."""

MEMORY_SHARE = 0.9
"""Of the host's memory that was available, what the devices together may occupy."""

Progress = Callable[[str], None]


def calibrate(fleet: Fleet, kind: str, devices: int, progress: Progress) -> Cluster:
    """Measure for at most half a minute. All devices measure at the same time, as they work in a run."""
    progress("starting workers")
    (pool,), _ = fleet.acquire([PoolSpan(name="all", first_device=0, devices=devices)])
    progress("products, memory traffic and launches")
    figures = merge_figures(ray.get([worker.call.remote("measure") for worker in pool.workers]))
    progress("collectives")
    points = _collectives(pool) if devices > 1 else ()
    call_s = _call(pool)
    device = _device(kind, devices, figures, pool.idle_bytes)
    level = _level(devices, points, call_s=call_s, bandwidth=figures.memory_bandwidth)
    return Cluster(
        name=f"this machine ({platform.node()})",
        fingerprint=hardware_fingerprint(kind, devices),
        groups=(Group(name=platform.node() or "machine", device=device, levels=(level,)),),
        call_s=call_s,
        process_start_s=pool.start_seconds,
    )


def _device(kind: str, devices: int, figures: DeviceFigures, idle_bytes: int) -> Device:
    return Device(
        kind="cuda" if kind == "cuda" else "cpu",
        name=device_name(kind),
        memory_bytes=figures.memory_bytes or _host_memory(devices),
        base_memory_bytes=idle_bytes,
        memory_bandwidth=figures.memory_bandwidth,
        attention_flops=figures.attention_flops,
        kv_bandwidth=figures.kv_bandwidth,
        host=figures.host,
        matmul=figures.matmul,
        passes=figures.passes,
    )


def _level(devices: int, points: tuple[CollectivePoint, ...], *, call_s: float, bandwidth: float) -> Level:
    """What joins the devices: `call_s` and `bandwidth` stand in where one device has no collectives."""
    small = [p.seconds for p in points if p.op == "broadcast" and p.bytes == SIZES[0]]
    large = [p for p in points if p.op == "broadcast" and p.bytes == SIZES[-1]]
    return Level(
        name="machine",
        size=devices,
        latency_s=min(small, default=call_s),
        bandwidth=max((p.bytes / p.seconds for p in large), default=bandwidth),
        collectives=points,
    )


def _collectives(pool: Pool) -> tuple[CollectivePoint, ...]:
    size = len(pool.workers)
    worlds = sorted({1 << i for i in range(1, size.bit_length())} | {size})
    points = []
    for ranks in worlds:
        ray.get([worker.call.remote("form", ranks) for worker in pool.workers])
        for op in ("all_reduce", "broadcast"):
            for bytes_ in SIZES:
                calls = [w.call.remote("collective", op=op, size=bytes_, ranks=ranks) for w in pool.workers[:ranks]]
                seconds = float(np.median(ray.get(calls)))
                points.append(CollectivePoint(op=op, ranks=ranks, bytes=bytes_, seconds=seconds))
    return tuple(points)


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
