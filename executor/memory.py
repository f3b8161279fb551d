"""How much memory a worker occupies, and the limit that the cluster description sets for it."""

from __future__ import annotations

from pathlib import Path

import torch

from executor.records import OutOfDeviceMemory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Memory:
    """Current and peak bytes: resident memory of the process on a CPU, allocated memory on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._limit = 0

    def reset(self, limit: int) -> None:
        """Start a new peak. `limit` in bytes."""
        self._limit = limit
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            # "5" resets the peak of resident memory (proc(5)).
            _CLEAR.write_text("5")

    def now(self) -> int:
        """Bytes occupied."""
        return torch.cuda.memory_allocated() if self._cuda else _status("VmRSS")

    def peak(self) -> int:
        """Most bytes occupied since the last reset."""
        return torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM")

    def check(self) -> None:
        """Raise if the peak exceeds the limit: a process that grows past its share of the host endangers all."""
        if (peak := self.peak()) > self._limit:
            raise OutOfDeviceMemory(f"{peak / 2**20:.0f} MiB occupied, the device has {self._limit / 2**20:.0f} MiB")


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{field} is in /proc/self/status on Linux")
