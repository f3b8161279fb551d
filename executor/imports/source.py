"""What reading a configuration has in common: its name for errors, what was noted, and values of a kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ir.errors import InputError


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
        """The value of a key as a number; texts such as "1e-5", which is none in YAML, are read.

        Raises:
            InputError: it is no number.
        """
        if (number := _number(value)) is None:
            raise self.error(key, "must be a number", repr(value))
        return number

    def as_whole(self, key: str, value: Any, *, least: int | None = None) -> int:
        """The value of a key as a whole number.

        Raises:
            InputError: it is none, or less than the least.
        """
        number = _number(value)
        if number is None or not number.is_integer() or (least is not None and number < least):
            bound = "" if least is None else f" of at least {least}"
            raise self.error(key, f"must be a whole number{bound}", repr(value))
        return int(number)

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
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
