"""What reading a configuration has in common: its name for errors, what was noted, and values of a kind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ir.errors import InputError
from ir.quantities import MOST

MAX_PERCENT = 98
"""Largest share of memory that a plan may give an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A configuration that is read."""

    where: str
    """Its name, for errors."""
    notes: list[str] = field(default_factory=list)
    """What it does not say and was taken, a line each, once each."""

    def note(self, line: str) -> None:
        """Tell what was taken, once."""
        if line not in self.notes:
            self.notes.append(line)

    def error(self, key: str, rule: str, got: object = None) -> InputError:
        """The error that a key breaks a rule."""
        return InputError(f"{self.where}: {key}", rule, got)

    def as_number(self, key: str, value: Any) -> float:
        """The value of a key as a number that is not negative; texts such as "1e-5", which is none in YAML, are read.

        Raises:
            InputError: it is none.
        """
        number = _number(value)
        if number is None or number < 0:
            raise self.error(key, "must be a number" if number is None else "must be at least 0", repr(value))
        return number

    def as_whole(self, key: str, value: Any, *, least: int = 1) -> int:
        """The value of a key as a whole number.

        Raises:
            InputError: it is none, or less than the least, or more than `MOST`.
        """
        number = _number(value)
        if number is None or not number.is_integer():
            raise self.error(key, "must be a whole number", repr(value))
        if not least <= number <= MOST:
            bound = f"at least {least}" if number < least else f"at most {MOST}"
            raise self.error(key, f"must be a whole number of {bound}", repr(value))
        return int(number)

    def percent(self, key: str, share: float) -> int:
        """An engine's share of memory as plans have it: whole percents, of which a part is left to others.

        Raises:
            InputError: it is no share.
        """
        if not 0 < share <= 1:
            raise self.error(key, "must be above 0 and at most 1", share)
        return min(max(round(100 * share), 1), MAX_PERCENT)

    def as_flag(self, key: str, value: Any) -> bool:
        """The value of a key as a switch.

        Raises:
            InputError: it is neither true nor false.
        """
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", repr(value))
        return value


def _number(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
