"""The values that a verl configuration gives, by key: Hydra overrides or YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from executor.imports.shell import words
from executor.imports.source import Source
from executor.imports.texts import flat, override, yaml_mapping
from ir.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Source):
    """Values by dotted key, and what was made of them."""

    values: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def has(self, prefix: str) -> bool:
        """Whether any key begins so."""
        return any(key.startswith(prefix) for key in self.values)

    def given(self, *keys: str) -> tuple[str, Any]:
        """The first of several spellings of a key that has a value, with it; else the first of all and None."""
        self.read.update(keys)
        return next(((key, self.values[key]) for key in keys if self.values.get(key) is not None), (keys[0], None))

    def whole(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; None as the default asks for one."""
        key, value = self.given(*keys)
        return self.as_whole(key, default if value is None else value, least=least)

    def number(self, *keys: str, default: float) -> float:
        """A number."""
        key, value = self.given(*keys)
        return self.as_number(key, default if value is None else value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        """True or false."""
        key, value = self.given(*keys)
        return self.as_flag(key, default if value is None else value)

    def text(self, *keys: str, default: str = "") -> str:
        """A word or path."""
        _, value = self.given(*keys)
        return default if value is None else str(value)

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys that nobody asked for."""
        return tuple(key for key in self.values if key not in self.read)


def settings(text: str, where: str) -> Settings:
    """The values of a launch script, a list of overrides, or a YAML configuration (by its name).

    Raises:
        InputError: it has none, or an argument is no override.
    """
    values = dict(_yaml(text, where) if where.endswith((".yaml", ".yml")) else _overrides(text, where))
    return Settings(values=values, where=where)


def _overrides(text: str, where: str) -> Iterator[tuple[str, Any]]:
    waiting = iter(words(text, where))
    for word in waiting:
        option, equals, value = word.partition("=")
        if option in ("--config-name", "--config-path", "-cn", "-cp", "--config-dir"):
            yield option.lstrip("-"), value if equals else next(waiting, "")
        elif (pair := override(word)) is not None:
            yield pair[0], _value(pair[1])
        elif not word.startswith(("-", "~", "$")):
            raise InputError(f"{where}: {word}", "must be a Hydra override, key=value")


def _yaml(text: str, where: str) -> Iterator[tuple[str, Any]]:
    for key, value in flat(yaml_mapping(text, where)):
        # A value that refers to another key is that key's default, which readers know.
        if not (isinstance(value, str) and value.startswith("${")):
            yield key, _value(value) if isinstance(value, str) else value


def _value(text: str) -> Any:
    """A value as Hydra reads it; lists and mappings stay text."""
    bare = text.strip()
    if len(bare) >= 2 and bare[0] == bare[-1] and bare[0] in "'\"":
        return bare[1:-1]
    if bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if bare.lower() in ("null", "none", "", "???"):
        return None
    for kind in (int, float):
        try:
            return kind(bare)
        except ValueError:
            continue
    return bare
