"""The Ray actor of a device. It loads torch in its own process only, so that the tuner's stays light."""

from __future__ import annotations

from collections.abc import Sequence


class DeviceActor:
    """Hands calls on to a `DeviceWorker`, one at a time."""

    def __init__(self, *, device_id: int, cores: Sequence[int], kind: str) -> None:
        from executor.worker import DeviceWorker

        self._worker = DeviceWorker(device_id=device_id, cores=cores, kind=kind)

    def call(self, method: str, *args: object, **kwargs: object) -> object:
        """Call a public method of the worker."""
        return getattr(self._worker, method)(*args, **kwargs)
