"""Documents on disk: TOML in, TOML out, and the canonical JSON that is a document's identity.

Every document is a frozen msgspec struct that refuses unknown keys, so a typing
slip is an error that names its path and never a silent default.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from ir.errors import InputError

T = TypeVar("T")

_AT = re.compile(r"^(?P<rule>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


def read_document(path: Path, kind: type[T]) -> T:
    """Read a TOML file as `kind`.

    Raises:
        InputError: the file is missing, is not TOML, or breaks the schema; names the path inside it.
    """
    try:
        data = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(str(path), f"must be valid TOML ({error})") from error
    return from_data(data, kind, where=str(path))


def read_text(path: Path) -> str:
    """The content of a text file.

    Raises:
        InputError: it is not there, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), "must be a readable file", error.strerror) from error
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"must be text in UTF-8 ({error})") from error


def from_data(data: object, kind: type[T], *, where: str) -> T:
    """Convert plain data to `kind`; `where` names the source in errors."""
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _input_error(where, str(error)) from error


def _input_error(where: str, message: str) -> InputError:
    match = _AT.match(message)
    assert match is not None
    inside = (match["path"] or "$").removeprefix("$").removeprefix(".")
    rule, _, got = match["rule"].partition(", got ")
    rule = rule.replace("Object contains unknown field", "unknown key").replace(
        "Object missing required field", "missing key"
    )
    return InputError(f"{where}: {inside}" if inside else where, rule[:1].lower() + rule[1:], got or None)


def write_document(path: Path, document: object) -> None:
    """Write a document as TOML, atomically: a reader sees the old file or the new one, never a part."""
    text = tomli_w.dumps(plain(document))
    write_atomically(path, text.encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write, sync and rename, so that a kill at any moment leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def plain(document: object) -> dict[str, Any]:
    """The document as built-in types, without keys whose value is None (TOML has no null)."""
    data = _without_none(msgspec.to_builtins(document))
    assert isinstance(data, dict)
    return data


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(v) for v in value]
    return value


def canonical_json(document: object) -> bytes:
    """Deterministic JSON of a document: sorted keys, no spaces."""
    return msgspec.json.encode(plain(document), order="deterministic")


def digest(document: object) -> str:
    """Identity of a document: the first 16 hex digits of the SHA-256 of its canonical JSON."""
    return hashlib.sha256(canonical_json(document)).hexdigest()[:16]
