"""Ends every process of a fleet when its tuner is gone, however it went.

Ray notices the death of its driver, but some of its agents take minutes. A fleet has a
folder of its own for Ray's logs and sockets, so its processes are found by the files
they hold, whoever started them (their environment is not readable: Ray overwrites it).
Run as a process, this waits for the tuner's end of a pipe to close.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path


def members(folder: Path) -> list[int]:
    """Processes of Ray that hold files below `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _is_of_ray(process) and any(_is_below(file, folder) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _is_of_ray(process: Path) -> bool:
    """By the command: a person's `tail -f` of a log is left alone."""
    return b"ray" in (process / "cmdline").read_bytes() and int(process.name) != os.getpid()


def _is_below(link: Path, folder: Path) -> bool:
    with suppress(OSError):
        return os.readlink(link).startswith(f"{folder}/")
    return False


def end(folder: Path) -> None:
    """Kill the processes of a fleet, and those they started meanwhile; remove its folder."""
    while pids := members(folder):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # Ctrl-C in a terminal reaches the whole process group: this process must outlive the tuner.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(Path(sys.argv[1]))
