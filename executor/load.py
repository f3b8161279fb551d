"""How busy other processes keep the cores that this one may use: what runs beside a measurement makes it longer."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSeconds:
    """Up to a moment, in seconds since some earlier one."""

    available: float
    """Of all cores."""
    busy: float
    """Of these, those in which a core was not idle."""
    own: float
    """Those of this process and of all that it started."""


def core_seconds() -> CoreSeconds:
    """Up to now, of the cores that this process may use."""
    cores = os.sched_getaffinity(0)
    found = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    busy = sum(t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in found)
    return CoreSeconds(available=time.monotonic() * len(cores), busy=busy, own=_own())


def _own() -> float:
    """With what was used by processes that have ended, which their parents are charged with."""
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def others_share(since: CoreSeconds, until: CoreSeconds) -> float:
    """Share of the cores' time between two moments that other processes took, 0 to 1."""
    others = (until.busy - since.busy) - (until.own - since.own)
    return min(max(others / (until.available - since.available), 0.0), 1.0)
