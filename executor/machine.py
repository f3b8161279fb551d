"""This machine: its devices and their identity, found without loading what runs on them."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from executor.gpus import gpus_here
from ir.documents import digest

PACKAGES = ("steptune", "torch", "transformers", "ray", "reasoning-gym", "numpy")
"""Packages whose versions a measurement depends on."""


def devices_here() -> tuple[str, int]:
    """(kind, number) of devices of this machine: the GPUs it may use if there are any, else the cores."""
    gpus = gpus_here()
    return (gpus.kind, len(gpus.ids)) if gpus else ("cpu", len(os.sched_getaffinity(0)))


def hardware_fingerprint(kind: str, devices: int) -> str:
    """Identity of the hardware, the same at every start on the same machine."""
    memory = round(psutil.virtual_memory().total / 2**30)
    facts = [platform.machine(), device_name(kind), str(devices), f"{memory} GiB"]
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:12]


def device_name(kind: str) -> str:
    """What the device calls itself."""
    if kind != "cpu" and (gpus := gpus_here()) is not None:
        return gpus.name
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip() + " core"
    return platform.processor() or "unknown core"


def software_fingerprint() -> str:
    """Identity of what runs: a trace of other versions is not mixed with this one's."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return digest(found)[:12]
