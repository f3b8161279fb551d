"""Keys and values of a configuration, each with where it comes from, and how formats write them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 88
"""Column at which comments start, where a line leaves room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value."""

    key: str
    """Dotted path, or the name of a flag without its dashes."""
    value: Any
    """A bool, number, text, None, or a list or mapping of such; a flag that is True stands alone."""
    why: str
    """Where it comes from: an axis of the plan, a field of the job, or a rule of the framework."""


def entry(key: str, value: Any, why: str) -> Entry:
    """An entry in short."""
    return Entry(key=key, value=value, why=why)


def commented(line: str, why: str) -> str:
    """A line with its comment."""
    return f"{line:<{WIDTH - 2}}  # {why}" if why else line


def comments(lines: Iterable[str]) -> Iterator[str]:
    """Lines as comments of a shell script or YAML."""
    return (f"# {line}".rstrip() for line in lines)


def shell_script(header: Sequence[str], command: Sequence[str], arguments: Iterable[tuple[str, str]]) -> str:
    """A bash script that runs a command with arguments, (words, comment) each; what the script is given is added.

    The arguments are an array, because only there may each have a comment.
    """
    body = [commented(f"  {words}", why) for words, why in arguments]
    lines = ["#!/usr/bin/env bash", *comments(header), "set -euo pipefail", "", "arguments=(", *body, ")"]
    return "\n".join([*lines, "", f'{shlex.join(command)} "${{arguments[@]}}" "$@"', ""])


def overrides(entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    """Hydra overrides, `key=value`, as arguments of a script."""
    return ((shlex.quote(f"{e.key}={hydra(e.value)}"), e.why) for e in entries)


def flags(entries: Iterable[Entry], *, prefix: str = "--") -> Iterator[tuple[str, str]]:
    """Command-line flags, `--key value`; True stands alone and False is left out."""
    for e in entries:
        if e.value is True:
            yield f"{prefix}{e.key}", e.why
        elif isinstance(e.value, list):
            yield f"{prefix}{e.key} {shlex.join(map(str, e.value))}", e.why
        elif e.value is not False:
            yield f"{prefix}{e.key} {shlex.quote(str(e.value))}", e.why


def hydra(value: Any) -> str:
    """A value as Hydra's override grammar spells it."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(inner)}" for key, inner in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    plain = text and not set(text) & set(" ,:={}[]()'\"\\$#\t")
    return text if plain or not isinstance(value, str) else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def tree(entries: Iterable[Entry]) -> dict[str, Any]:
    """Values by nested keys."""
    root: dict[str, Any] = {}
    for e in entries:
        *path, last = e.key.split(".")
        node = root
        for part in path:
            node = node.setdefault(part, {})
        assert last not in node, f"{e.key} is given twice"
        node[last] = e.value
    return root


def yaml(header: Sequence[str], entries: Sequence[Entry]) -> str:
    """A YAML document with a comment beside every value."""
    why = {e.key: e.why for e in entries}
    return "\n".join([*comments(header), *_yaml(tree(entries), "", why), ""])


def _yaml(node: dict[str, Any], path: str, why: dict[str, str]) -> Iterator[str]:
    indent = "  " * (path.count(".") if path else 0)
    for key, value in node.items():
        here = f"{path}{key}"
        if isinstance(value, dict) and value and here not in why:
            yield f"{indent}{key}:"
            yield from _yaml(value, f"{here}.", why)
        else:
            yield commented(f"{indent}{key}: {_yaml_value(value)}", why.get(here, ""))


def _yaml_value(value: Any) -> str:
    """A JSON value is a YAML value, but for numbers such as 1e-06, which YAML 1.1 reads as text."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def as_json(entries: Iterable[Entry]) -> str:
    """A JSON document; it has no room for comments, which `reasons` writes elsewhere."""
    return json.dumps(tree(entries), indent=2) + "\n"


def reasons(header: Sequence[str], entries: Iterable[Entry]) -> str:
    """Where each value comes from, as a text of its own."""
    return "\n".join([*header, "", *(f"{e.key} = {json.dumps(e.value)}: {e.why}" for e in entries), ""])
