"""Settings by dotted key, from YAML or from `key=value` arguments, with references between them resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from executor.imports.shell import words
from executor.imports.source import Source
from executor.imports.texts import decoded, flat, mapping, override
from ir.errors import InputError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MAX_DEPTH = 8
"""References to references that are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Source):
    """What a configuration sets."""

    values: Mapping[str, Any]
    """By dotted key; lists are values, and a mapping without entries is None."""

    def took(self, key: str, text: str) -> None:
        """Note what was taken for a key."""
        self.note(f"{key}: {text}")

    def has(self, section: str) -> bool:
        """Whether anything below a key is set."""
        return any(key.startswith(f"{section}.") for key in self.values)

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the framework's own default."""
        return self.values.get(key, default)

    def number(self, key: str, default: float) -> float:
        """A number, or the default where it is not set or null.

        Raises:
            InputError: it is no number.
        """
        value = self.values.get(key)
        return default if value is None else self.as_number(key, value)

    def whole(self, key: str, default: int, *, least: int = 1) -> int:
        """A whole number, or the default where it is not set or null.

        Raises:
            InputError: it is none, or less than the least.
        """
        value = self.values.get(key)
        return default if value is None else self.as_whole(key, value, least=least)

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether a switch is on, or the default where it is not set or null.

        Raises:
            InputError: it is no switch.
        """
        value = self.values.get(key)
        return default if value is None else self.as_flag(key, value)

    def required(self, key: str) -> Any:
        """A value that must be there.

        Raises:
            InputError: it is not set.
        """
        value = self.values.get(key)
        if value is None or value == "":
            raise self.error(key, "must be set")
        return value

    def required_whole(self, key: str) -> int:
        """A whole number that must be there.

        Raises:
            InputError: it is not set, or none.
        """
        return self.as_whole(key, self.required(key))


def read_settings(text: str, *, where: str) -> Settings:
    """Settings of a YAML document, of a launch script, or of a list of `key=value` lines.

    Raises:
        InputError: it is none of them.
    """
    if (document := mapping(text)) is not None:
        values = dict(flat(document))
    else:
        values = {}
        for key, value in filter(None, map(override, words(text, where))):
            values |= dict(flat(decoded(value) if value else None, key))
    if not values:
        raise InputError(where, "must be a YAML mapping, or hold `key=value` arguments")
    return Settings(values=_resolved(values), where=where)


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """The values with `${other.key}` replaced; a reference to a section stands for all that is set there."""
    for _ in range(_MAX_DEPTH):
        found = dict(pair for key, value in values.items() for pair in _followed(key, value, values))
        if found == values:
            break
        values = found
    return values


def _followed(key: str, value: Any, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, str):
        yield key, value
    elif (whole := _REFERENCE.fullmatch(value)) is not None:
        target = whole[1]
        section = f"{target}."
        below = {key + other[len(target) :]: found for other, found in values.items() if other.startswith(section)}
        yield from below.items() if below else ((key, values.get(target, value)),)
    else:
        yield key, _REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), value)
