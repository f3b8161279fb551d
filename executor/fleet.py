"""Ray processes of this machine: pools as placement groups, devices as pinned worker actors, kept warm between runs.

A pool that another run needs in the same shape is reused as it is. An idle pool
takes memory but no core, so on CPUs several pools may share the devices as long as
only one run's pools work; GPUs are held exclusively, and an idle pool that is in
the way is ended.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executor import watchdog
from executor.actor import DeviceActor
from executor.gpus import gpus_here
from ir.graph import PoolSpan
from ir.job import Job, Lengths

WARM_POOLS_PER_DEVICE = 4
"""Warm worker processes that may be pinned to one CPU device: colocated, rollout and training pools of a few
shapes. Each occupies some hundred MB while idle."""

START_TIMEOUT_S = 120.0
"""Longest wait for a worker process to come up: imports on a cold disk take most of it."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Workers are given their GPUs here: Ray knows AMD's only where ROCm is installed beside torch, which has its own.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(slots=True)
class Pool:
    """A placement group and its workers, in rank order."""

    span: PoolSpan
    group: PlacementGroup
    workers: list[ActorHandle[DeviceActor]]
    pids: list[int]
    start_seconds: float
    """From asking for the processes until all answered."""
    idle_bytes: int
    """Largest memory of a worker before it held a model."""
    last_used: float = field(default_factory=time.monotonic)


class Fleet:
    """The worker processes of one tuner. Use as a context manager: leaving it ends every process."""

    def __init__(self, devices: int, kind: str = "cpu") -> None:
        self._devices = devices
        self._kind = kind
        self._gpus = gpus_here() if kind != "cpu" else None
        self._pools: dict[tuple[str, tuple[int, ...]], Pool] = {}
        # Short: the paths of Ray's sockets below it must not exceed 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="steptune-"))

    def __enter__(self) -> Fleet:
        command = [sys.executable, watchdog.__file__, str(self._folder)]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ.update(RAY_ENVIRONMENT)
        if self._gpus is not None:
            # Ray refuses ROCR_VISIBLE_DEVICES unless HIP's variable is set too.
            os.environ.update(self._gpus.variables(*range(self._devices)))
        logical = self._devices * (WARM_POOLS_PER_DEVICE if self._kind == "cpu" else 1)
        ray.init(
            address="local",
            num_cpus=logical,
            num_gpus=0 if self._kind == "cpu" else self._devices,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self._folder),
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that was started, at once if need be."""
        for pool in self._pools.values():
            _kill(pool.pids)
        self._pools.clear()
        ray.shutdown()
        watchdog.end(self._folder)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()

    def acquire(self, spans: Sequence[PoolSpan]) -> tuple[list[Pool], bool]:
        """The pools of a run, and whether all of them were warm."""
        keys = [(span.name, span.device_ids) for span in spans]
        warm = all(key in self._pools for key in keys)
        for key, span in zip(keys, spans, strict=True):
            if key not in self._pools:
                self._make_room(span, keep=keys)
                self._pools[key] = self._start(span)
            self._pools[key].last_used = time.monotonic()
        return [self._pools[key] for key in keys], warm

    def sample_lengths(self, job: Job, model_path: str) -> Lengths:
        """Prompt and response lengths of a few hundred samples of the model."""
        (pool,), _ = self.acquire([PoolSpan(name="all", first_device=0, devices=self._devices)])
        reply: Any = pool.workers[0].call.remote("sample_lengths", job.workload, model_path)
        lengths: Lengths = ray.get(reply)
        return lengths

    def discard(self, pools: Sequence[Pool]) -> None:
        """End pools after a failure: the state of their workers is unknown."""
        for pool in pools:
            _kill(pool.pids)
            remove_placement_group(pool.group)
            self._pools = {key: kept for key, kept in self._pools.items() if kept is not pool}

    def _make_room(self, span: PoolSpan, keep: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """End the longest idle pools while too many processes share a device of `span`."""
        limit = WARM_POOLS_PER_DEVICE if self._kind == "cpu" else 1
        for device in span.device_ids:
            sharing = [(k, p) for k, p in self._pools.items() if device in k[1]]
            idle = sorted((p for k, p in sharing if k not in keep), key=lambda p: p.last_used)
            self.discard(idle[: max(len(sharing) + 1 - limit, 0)])

    def _start(self, span: PoolSpan) -> Pool:
        begun = time.monotonic()
        resource = "CPU" if self._kind == "cpu" else "GPU"
        bundles = [{resource: 1.0} for _ in span.device_ids]
        group = placement_group(bundles, strategy="PACK")
        ray.get(group.ready(), timeout=START_TIMEOUT_S)
        workers = [self._worker(group, rank, device) for rank, device in enumerate(span.device_ids)]
        replies: list[tuple[int, int]] = ray.get(
            [worker.call.remote("ready") for worker in workers], timeout=START_TIMEOUT_S
        )
        took = time.monotonic() - begun
        address = f"127.0.0.1:{_free_port()}"
        ray.get(
            [w.call.remote("join", rank=rank, size=len(workers), address=address) for rank, w in enumerate(workers)],
            timeout=START_TIMEOUT_S,
        )
        return Pool(
            span=span,
            group=group,
            workers=workers,
            pids=[pid for pid, _ in replies],
            start_seconds=took,
            idle_bytes=max(size for _, size in replies),
        )

    def _worker(self, group: PlacementGroup, rank: int, device: int) -> ActorHandle[DeviceActor]:
        given = self._gpus.variables(device) if self._gpus is not None else {}
        options: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            "num_cpus": 1 if self._kind == "cpu" else 0,
            "num_gpus": 0 if self._kind == "cpu" else 1,
            "max_restarts": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | given},
        }
        cores = [device_core(device)] if self._kind == "cpu" else []
        actor: Any = ray.remote(DeviceActor).options(**options)
        handle: ActorHandle[DeviceActor] = actor.remote(device_id=device, cores=cores, kind=self._kind)
        return handle


def device_core(device: int) -> int:
    """The core that a CPU device is: the device-th that this process may use. More devices than cores share them."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[device % len(cores)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
