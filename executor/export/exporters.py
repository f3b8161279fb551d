"""The exporters by the name that `tune.py export --to` takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from executor.export import areal, deepspeed_json, nemo_rl, openrlhf, trl
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
    Exporter(
        name="deepspeed-json", what="DeepSpeed 0.19.8, JSON", backend="deepspeed-json", write=deepspeed_json.write
    ),
    Exporter(name="openrlhf", what="OpenRLHF 0.11.2, flags", backend="openrlhf", write=openrlhf.write),
    Exporter(name="trl", what="TRL 1.16.0, GRPO and accelerate YAML", backend="trl", write=trl.write),
    Exporter(name="areal", what="AReaL 1.0.4: YAML and the command that reads it", backend="areal", write=areal.write),
    Exporter(
        name="nemo-rl",
        what="NeMo-RL of September 2026: YAML on its base configuration",
        backend="nemo-rl",
        write=nemo_rl.write,
    ),
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
