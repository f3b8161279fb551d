"""job.toml: what is trained, on which prompts, within which limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ir.documents import digest, read_document
from ir.errors import InputError
from ir.model import ModelShape, read_config, shape_from_config

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class WarmStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps on worked solutions, before reinforcement learning starts."""

    steps: Positive
    batch: Positive
    """Demonstrations per step."""
    learning_rate: PositiveFloat


class ModelSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model comes from."""

    path: str
    """A Hugging Face directory with weights and tokenizer, or a config.json (then `warm_start` makes the
    weights); relative to the job file."""
    warm_start: WarmStart | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models by role. The reference is the actor as it is when the run starts, frozen."""

    actor: ModelSource


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reasoning-gym data set that prompts are drawn from."""

    dataset: str
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the other tasks' weights."""
    params: dict[str, Any] = {}
    """Passed to reasoning-gym as they are."""


Quantiles = Annotated[tuple[PositiveFloat, ...], Meta(min_length=2)]


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Observed token counts as quantiles at evenly spaced probabilities from 0 to 1."""

    prompt: Quantiles
    response: Quantiles


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One RL step: `prompts_per_step` x `samples_per_prompt` sequences."""

    tasks: Annotated[tuple[Task, ...], Meta(min_length=1)]
    prompts_per_step: Positive
    samples_per_prompt: Annotated[int, Meta(ge=2)]
    """The group that advantages are normalised over."""
    minibatches: Positive = 1
    epochs: Positive = 1
    distinct_prompts: Positive | None = None
    """Size of the set of prompts, which a run goes through again and again; None never repeats one."""
    max_prompt_tokens: Positive
    max_response_tokens: Positive
    temperature: PositiveFloat = 1.0
    seed: int = 0
    full_marks: bool = False
    """Whether a verifier's partial credit counts as nothing. Normalising within a group blows small differences
    up, so that a hint of credit for a wrong answer would count as much as a right one."""
    lengths: Lengths | None = None
    """Given here, or else measured on samples of the actor before a search."""

    @property
    def sequences(self) -> int:
        """Sequences per RL step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens


class Algorithm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Group-relative policy optimisation with a clipped surrogate and a KL penalty to the reference."""

    name: Literal["grpo"]
    learning_rate: PositiveFloat
    clip: PositiveFloat = 0.2
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL term; 0 leaves the reference pass out."""
    max_importance_weight: PositiveFloat = 5.0
    """Cap on the weight pi_old / pi_rollout of a token that older weights generated."""
    max_gradient_norm: PositiveFloat = 1.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan may use."""

    max_staleness: Annotated[int, Meta(ge=0, le=4)] = 4
    """Largest number of updates between the weights that generate a sample and those it trains."""
    max_devices: Positive | None = None
    memory_margin: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of a device's memory that the model keeps free."""


class JobDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of job.toml."""

    name: str
    algorithm: Algorithm
    models: Models
    workload: Workload
    limits: Limits = Limits()
    objective: Literal["step_time"] = "step_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job document together with what it refers to on disk."""

    document: JobDocument
    directory: Path
    """What relative paths in the document start from."""
    actor: ModelShape

    @property
    def workload(self) -> Workload:
        """The workload of the document."""
        return self.document.workload

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the document."""
        return self.document.algorithm

    @property
    def limits(self) -> Limits:
        """The limits of the document."""
        return self.document.limits

    @property
    def actor_path(self) -> Path:
        """The actor's directory or config.json."""
        return self.directory / self.document.models.actor.path

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one RL step."""
        return self.workload.minibatches * self.workload.epochs

    @property
    def identity(self) -> str:
        """Hash of everything a measurement depends on. Lengths are an observation of the same job, and
        the directory is where it happens to lie: neither is part of it."""
        document = msgspec.structs.replace(self.document, workload=msgspec.structs.replace(self.workload, lengths=None))
        source = msgspec.structs.replace(self.document.models.actor, path="")
        document = msgspec.structs.replace(document, models=Models(actor=source))
        return digest({"job": msgspec.to_builtins(document), "actor": _shape_data(self.actor)})


def _shape_data(shape: ModelShape) -> dict[str, int]:
    return {name: int(getattr(shape, name)) for name in shape.__slots__}


def load_job(path: Path) -> Job:
    """Read a job and the shape of its actor.

    Raises:
        InputError: names the file, the path inside it, the rule and what was got.
    """
    document = read_document(path, JobDocument)
    return resolve(document, path.parent, where=str(path))


def resolve(document: JobDocument, directory: Path, *, where: str) -> Job:
    """Check what the schema cannot say and read the actor's configuration."""
    source = document.models.actor
    actor_path = directory / source.path
    if not actor_path.exists():
        raise InputError(f"{where}: models.actor.path", "must be a directory or config.json that exists", actor_path)
    if actor_path.is_file() and source.warm_start is None:
        raise InputError(f"{where}: models.actor.warm_start", "must be given when `path` is a config.json", None)
    workload = document.workload
    if workload.prompts_per_step % workload.minibatches:
        raise InputError(
            f"{where}: workload.minibatches",
            f"must divide `prompts_per_step` = {workload.prompts_per_step}",
            workload.minibatches,
        )
    config = actor_path / "config.json" if actor_path.is_dir() else actor_path
    shape = shape_from_config(read_config(actor_path), where=str(config))
    return Job(document=document, directory=directory, actor=shape)


def with_lengths(job: Job, lengths: Lengths) -> Job:
    """The same job with observed lengths in place of whatever it had."""
    workload = msgspec.structs.replace(job.workload, lengths=lengths)
    document = msgspec.structs.replace(job.document, workload=workload)
    return Job(document=document, directory=job.directory, actor=job.actor)
