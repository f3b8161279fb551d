"""Kinds of text that configurations are written in: YAML, `key=value` arguments, and flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ir.errors import InputError

_OVERRIDE = re.compile(r"\+{0,2}([\w@./-]+)=(.*)", re.DOTALL)


def decoded(text: str) -> Any:
    """A text as YAML, itself if it is none."""
    try:
        return msgspec.yaml.decode(text)
    except msgspec.DecodeError:
        return text


def mapping(text: str) -> dict[Any, Any] | None:
    """The YAML mapping that a text is, None for any other text."""
    document = decoded(text)
    return document if isinstance(document, dict) else None


def yaml_mapping(text: str, where: str) -> dict[Any, Any]:
    """The YAML mapping that a text must be.

    Raises:
        InputError: it is none.
    """
    try:
        document = msgspec.yaml.decode(text)
    except msgspec.DecodeError as error:
        raise InputError(where, f"must be YAML ({error})") from error
    if not isinstance(document, dict):
        raise InputError(where, "must be a YAML mapping")
    return document


def flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key; lists are values, and a mapping without entries is None."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, None if node == {} else node


def override(word: str) -> tuple[str, str] | None:
    """The key and value of an argument `key=value`, which Hydra also writes `+key=value`; None for another."""
    match = _OVERRIDE.fullmatch(word)
    return (match[1], match[2]) if match else None


def options(words: Iterable[str], where: str) -> list[tuple[str, tuple[str, ...]]]:
    """Flags with the values of each: of `--key=value`, `--key value ...`, and none of a switch.

    Raises:
        InputError: the words do not begin with a flag.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name, (value,) if equals else ()))
        elif found:
            found[-1] = (found[-1][0], (*found[-1][1], word))
        else:
            raise InputError(where, "must begin with a flag", repr(word))
    return found
