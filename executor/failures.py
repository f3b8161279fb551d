"""What goes wrong in workers, as a few kinds: a run ends with one of them as its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from executor.records import OutOfDeviceMemory


class Failure(Exception):
    """A run's end: its kind, `oom`, `timeout`, `worker-died` or `crash`, and what was reported."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


@contextmanager
def failures(seconds: float) -> Iterator[None]:
    """What Ray reports while waiting for at most so many seconds, as `Failure`."""
    try:
        yield
    except (OutOfMemoryError, OutOfDeviceMemory) as error:
        raise Failure("oom", _last_line(error)) from error
    except GetTimeoutError as error:
        raise Failure("timeout", f"no answer for {seconds:.0f} s") from error
    except RayActorError as error:
        raise Failure("worker-died", _last_line(error)) from error
    except RayTaskError as error:
        raise Failure("oom" if _is_memory(error) else "crash", _last_line(error)) from error


def _is_memory(error: RayTaskError) -> bool:
    cause = error.cause
    return isinstance(cause, (OutOfDeviceMemory, MemoryError)) or "can't allocate memory" in str(cause)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
