"""The exporters by the name that `tune.py export --to` takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from executor.export import verl
from executor.export.production import Files, Production
from ir.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """Writes plans as one framework's configuration."""

    name: str
    what: str
    """In words, with the version whose keys it writes."""
    backend: str | None
    """The backend that says which plans it can express; None for all."""
    write: Callable[[Production], Files]
    """Pure. The plan must be legal for the backend."""


_ALL: tuple[Exporter, ...] = (
    Exporter(name="verl", what="verl 0.9.1: a script of Hydra overrides", backend="verl", write=verl.write),
)

EXPORTERS: Mapping[str, Exporter] = {exporter.name: exporter for exporter in _ALL}


def exporter(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        InputError: there is none.
    """
    if name not in EXPORTERS:
        close = difflib.get_close_matches(name, EXPORTERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError("to", f"must be one of {', '.join(EXPORTERS)}{hint}", repr(name))
    return EXPORTERS[name]
