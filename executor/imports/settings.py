"""Settings by dotted key, from YAML or from `key=value` arguments, with references between them resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from executor.imports.shell import words
from ir.errors import InputError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MAX_DEPTH = 8
"""References to references that are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a configuration sets."""

    values: Mapping[str, Any]
    """By dotted key; lists are values, and a mapping without entries is None."""
    where: str
    """Name of the configuration, for errors."""
    notes: list[str] = field(default_factory=list)
    """What is assumed while it is read, a line each, once each."""

    def note(self, key: str, text: str) -> None:
        """Note what was taken for a key."""
        if (line := f"{key}: {text}") not in self.notes:
            self.notes.append(line)

    def error(self, key: str, rule: str, got: object = None) -> InputError:
        """The error that a key breaks a rule."""
        return InputError(f"{self.where}: {key}", rule, got)

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
        if value is None:
            return default
        try:
            return float(value)  # "1e-5" is a text in YAML.
        except (TypeError, ValueError) as error:
            raise self.error(key, "must be a number", repr(value)) from error

    def whole(self, key: str, default: int) -> int:
        """A whole number, or the default where it is not set or null.

        Raises:
            InputError: it is no whole number.
        """
        value = self.number(key, default)
        if value != int(value):
            raise self.error(key, "must be a whole number", value)
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether a switch is on, or the default where it is not set or null.

        Raises:
            InputError: it is no switch.
        """
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise self.error(key, "must be true or false", repr(value))

    def required(self, key: str) -> Any:
        """A value that must be there.

        Raises:
            InputError: it is not set.
        """
        value = self.values.get(key)
        if value is None or value == "":
            raise self.error(key, "must be set")
        return value


def read_settings(text: str, *, where: str) -> Settings:
    """Settings of a YAML document, of a launch script, or of a list of `key=value` lines.

    Raises:
        InputError: it is none of them.
    """
    document = _decoded(text)
    if isinstance(document, dict):
        values = dict(_flat(document, ""))
    else:
        pairs = [word.lstrip("+").partition("=") for word in words(text, where) if "=" in word]
        values = {}
        for key, _, value in pairs:
            values |= dict(_flat(_decoded(value) if value else None, key))
    if not values:
        raise InputError(where, "must be a YAML mapping, or hold `key=value` arguments")
    return Settings(values=_resolved(values), where=where)


def _decoded(text: str) -> Any:
    """A text as YAML, itself if it is none."""
    try:
        return msgspec.yaml.decode(text)
    except msgspec.DecodeError:
        return text


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, None if node == {} else node


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
