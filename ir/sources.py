"""The models of a job by role: where they come from, and their shapes."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import msgspec

from ir.errors import InputError
from ir.known_models import known_config
from ir.model import ModelShape, read_config, shape_from_config, with_lora
from ir.quantities import Positive, PositiveFloat


class Role(StrEnum):
    """What a model does in a step."""

    ACTOR = "actor"
    """The policy that is trained."""
    CRITIC = "critic"
    """Values of tokens; trained beside the actor."""
    REFERENCE = "reference"
    """The frozen policy that the KL divergence is taken to."""
    REWARD = "reward"
    """Scores responses, in place of a verifier."""
    TEACHER = "teacher"
    """The frozen policy that is distilled."""


SCORING = (Role.CRITIC, Role.REWARD)
"""Models whose head gives a number for a token."""


class WarmStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps on worked solutions, before reinforcement learning starts."""

    steps: Positive
    batch: Positive
    """Demonstrations per step."""
    learning_rate: PositiveFloat


class ModelSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model comes from: exactly one of `path` and `name`."""

    path: str | None = None
    """A Hugging Face directory, or a config.json; relative to the job file."""
    name: str | None = None
    """A model whose sizes are known, such as "Qwen/Qwen3-8B": enough for planning."""
    lora_rank: Positive | None = None
    """Rank of the adapters that are trained in place of the weights; None trains all of them."""
    warm_start: WarmStart | None = None
    """Makes the weights of an actor that is only a config.json."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.name is None):
            raise ValueError("exactly one of `path` and `name` must be given")


class Models(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models by role."""

    actor: ModelSource
    critic: ModelSource | None = None
    reference: ModelSource | None = None
    """None for the actor as it is when the run starts."""
    reward: ModelSource | None = None
    """None for a verifier."""
    teacher: ModelSource | None = None


def read_shapes(models: Models, directory: Path, *, reference: bool, where: str) -> dict[Role, ModelShape]:
    """The shape of every model given, and of the `reference` if there is to be one: where none is given, the actor
    without adapters.

    Raises:
        InputError: a model is not there or not known, or a warm start cannot be.
    """
    found: dict[Role, ModelShape] = {}
    for role in Role:
        source: ModelSource | None = getattr(models, role.value)
        if source is not None:
            shape = _shape(source, role, directory, where)
            found[role] = replace(shape, scores=True) if role in SCORING else shape
    if reference and Role.REFERENCE not in found:
        full = msgspec.structs.replace(models.actor, lora_rank=None)
        found[Role.REFERENCE] = _shape(full, Role.ACTOR, directory, where)
    return found


def _shape(source: ModelSource, role: Role, directory: Path, where: str) -> ModelShape:
    place = f"{where}: models.{role.value}"
    if source.warm_start is not None and (role is not Role.ACTOR or source.path is None):
        raise InputError(f"{place}.warm_start", "must only be given for an actor with a `path`")
    shape = _full_shape(source, directory, place)
    return shape if source.lora_rank is None else with_lora(shape, source.lora_rank)


def _full_shape(source: ModelSource, directory: Path, place: str) -> ModelShape:
    if source.name is not None:
        return shape_from_config(known_config(source.name, where=f"{place}.name"), where=source.name)
    assert source.path is not None, "a source has a path or a name"
    path = directory / source.path
    if not path.exists():
        raise InputError(f"{place}.path", "must be a directory or config.json that exists", path)
    config = path / "config.json" if path.is_dir() else path
    return shape_from_config(read_config(path), where=str(config))
