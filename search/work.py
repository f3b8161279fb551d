"""How much a search may do."""

from __future__ import annotations

from dataclasses import dataclass


class OutOfWorkError(Exception):
    """A search would have to do more than it may."""


@dataclass(slots=True)
class Work:
    """What a search may still do, in partial plans that it looks at: unlike seconds, the same on every machine."""

    left: float
    reserve: float = 0.0
    """What must be left for later."""

    def spend(self, count: int) -> None:
        """Account for some.

        Raises:
            OutOfWorkError: that is more than there is.
        """
        if count > self.left - self.reserve:
            raise OutOfWorkError
        self.left -= count
