"""Models that are known by name: the sizes of their configurations and the parameter counts their makers publish.

A name is a Hugging Face id, or what follows its slash; case does not matter. Names of the same sizes (instruct, base,
distillations) share an entry of `data/models.json`, which holds facts and their sources only.
"""

from __future__ import annotations

import copy
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from ir.errors import InputError


class KnownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size of model."""

    names: tuple[str, ...]
    """Hugging Face ids that have these sizes."""
    parameters: int
    """Published count; rounded if it is published so."""
    active: int | None = None
    """Published count of the parameters a token goes through, for mixtures of experts; rounded if published so."""
    source: str
    """Where the counts were read."""
    note: str = ""
    """What the published counts include or leave out."""
    config: dict[str, Any]
    """The fields of its config.json that determine sizes."""


def _load() -> tuple[KnownModel, ...]:
    text = (Path(__file__).parent / "data" / "models.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[KnownModel, ...])


def _tail(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower()


_MODELS = _load()

KNOWN: tuple[str, ...] = tuple(name for model in _MODELS for name in model.names)
"""All known names."""

_BY_NAME = {key: model for model in _MODELS for name in model.names for key in (name.lower(), _tail(name))}


def known_config(name: str, *, where: str) -> dict[str, Any]:
    """The configuration of a known model, as far as it determines sizes.

    Raises:
        InputError: an unknown name; the closest known ones are named.
    """
    return copy.deepcopy(_find(name, where).config)


def published_parameters(name: str) -> tuple[int, int | None, str]:
    """(all parameters, active parameters of a mixture of experts, source) as published.

    Raises:
        InputError: an unknown name.
    """
    model = _find(name, "published_parameters")
    return model.parameters, model.active, model.source


def _find(name: str, where: str) -> KnownModel:
    model = _BY_NAME.get(name.lower())
    if model is None:
        raise InputError(where, f"must be a known model, such as {_closest(name)}", repr(name))
    return model


def _closest(name: str) -> str:
    """The three known sizes most like this one, by the first of their names."""
    stems = {_stem(known): known for known in reversed(KNOWN)}
    found = get_close_matches(_stem(name), stems, n=3, cutoff=0.0)
    return " or ".join(stems[stem] for stem in found)


def _stem(name: str) -> str:
    return re.sub(r"-(instruct|base|chat|it|pt|hf)\b.*", "", _tail(name))
