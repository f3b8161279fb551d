"""job.toml: what is trained, by which algorithm, on which sequences, within which limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ir.algorithm import Algorithm
from ir.documents import digest, read_document
from ir.errors import InputError
from ir.lengths import Lengths, LengthTables, read_lengths, tabulate
from ir.model import ModelShape
from ir.quantities import Positive, PositiveFloat
from ir.sources import Models, ModelSource, Role, WarmStart, read_shapes
from ir.workload import Task, Workload

# Everything a job document is made of can be had from here.
__all__ = [
    "RUNNABLE_ACTOR",
    "Algorithm",
    "Job",
    "JobDocument",
    "Lengths",
    "Limits",
    "ModelSource",
    "Models",
    "Role",
    "Task",
    "WarmStart",
    "Workload",
    "load_job",
    "resolve",
    "with_lengths",
    "with_limits",
]

RUNNABLE_ACTOR = "must have weights (a directory, or a config.json with warm_start) to be run"
"""Rule of `models.actor` that real runs add to those of planning."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan may use."""

    max_staleness: Annotated[int, Meta(ge=0, le=8)] = 4
    """Largest number of updates between the weights that generate a sample and those it trains."""
    max_devices: Positive | None = None
    """At most that many devices; None for all there are."""
    devices: Positive | Annotated[tuple[Positive, ...], Meta(min_length=1)] | None = None
    """Exactly that many devices, or any of several numbers; in place of `max_devices`."""
    max_price_per_hour: PositiveFloat | None = None
    """Price of all devices of a plan, in the currency of the cluster's prices."""
    memory_margin: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of a device's memory that the model keeps free."""

    def __post_init__(self) -> None:
        if self.devices is not None and self.max_devices is not None:
            raise ValueError("at most one of `devices` and `max_devices` may be given")

    def allows(self, total: NDArray[np.int64], available: int) -> NDArray[np.bool_]:
        """Whether a plan may use so many devices in all where there are `available`."""
        fits: NDArray[np.bool_] = total <= min(available, self.max_devices or available)
        return fits if self.devices is None else fits & np.isin(total, self.devices)

    def most_devices(self, available: int) -> int:
        """Largest number of devices a plan may use where there are `available`; 0 if there are too few."""
        totals = np.arange(1, available + 1)
        return int(totals[self.allows(totals, available)].max(initial=0))


class JobDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of job.toml."""

    name: str
    algorithm: Algorithm
    models: Models
    workload: Workload
    limits: Limits = Limits()
    objective: Literal["step_time", "cost_per_step", "cost_per_sample", "pareto"] = "step_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job document together with what it refers to on disk."""

    document: JobDocument
    """Its lengths are quantiles or lognormals: a file of lengths was read."""
    directory: Path
    """What relative paths in the document start from."""
    actor: ModelShape
    others: Mapping[Role, ModelShape] = field(default_factory=dict)
    """The other models that a step uses."""

    @property
    def models(self) -> Mapping[Role, ModelShape]:
        """The shape of every model that a step uses; the reference is there if there is a KL term."""
        return {Role.ACTOR: self.actor, **self.others}

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
        """The actor's directory or config.json.

        Raises:
            InputError: the actor is given by its name.
        """
        source = self.document.models.actor
        if source.path is None:
            raise InputError("models.actor", RUNNABLE_ACTOR, repr(source.name))
        return self.directory / source.path

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one RL step."""
        return self.workload.minibatches * self.workload.epochs

    @property
    def generated_sequences(self) -> float:
        """Expected sequences started per RL step: those trained on, those abandoned or dropped with their group, and
        the greedy ones."""
        greedy = self.workload.prompts_per_step if self.algorithm.greedy_baseline else 0
        return self.workload.started + greedy

    @property
    def lengths(self) -> LengthTables | None:
        """Prompt and response lengths, None while they are unknown."""
        workload = self.workload
        if workload.lengths is None:
            return None
        return tabulate(
            workload.lengths,
            max_prompt_tokens=workload.max_prompt_tokens,
            max_response_tokens=workload.max_response_tokens,
        )

    @property
    def identity(self) -> str:
        """Hash of everything a measurement depends on. Lengths are an observation of the same job, and a path or a
        name is where a model of some shape happens to be found: neither is part of it."""
        document = msgspec.to_builtins(self.document)
        document["workload"]["lengths"] = None
        for source in document["models"].values():
            if source is not None:
                source["path"] = source["name"] = None
        shapes = {role.value: asdict(shape) for role, shape in self.models.items()}
        for shape in shapes.values():
            # Said by the role too; jobs are known by the sizes alone.
            shape.pop("scores")
        return digest({"job": document, "models": shapes})


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the schema of a job cannot say; the message may name values of the document in braces."""

    path: str
    holds: Callable[[JobDocument], bool]
    message: str


MOST_SEQUENCES = MOST_TOKENS = 10**8
"""Started in a step, and of the longest sequence: columns of plans hold several times as many."""

_RULES: tuple[_Rule, ...] = (
    _Rule(
        "workload.max_response_tokens",
        lambda d: d.workload.max_tokens <= MOST_TOKENS,
        f"must, with `max_prompt_tokens`, be at most {MOST_TOKENS}",
    ),
    _Rule(
        "workload.samples_per_prompt",
        lambda d: d.workload.started <= MOST_SEQUENCES,
        f"must be so that a step starts at most {MOST_SEQUENCES} sequences",
    ),
    _Rule(
        "workload.minibatches",
        lambda d: d.workload.prompts_per_step % d.workload.minibatches == 0,
        "must divide `prompts_per_step` = {workload.prompts_per_step}",
    ),
    _Rule(
        "workload.samples_per_prompt",
        lambda d: d.workload.samples_per_prompt >= 2 or not d.algorithm.uses_groups,
        "must be at least 2 for {algorithm.name}, whose baseline is taken over the samples of a prompt",
    ),
    _Rule(
        "workload.shared_prefix_tokens",
        lambda d: d.workload.shared_prefix_tokens <= d.workload.max_prompt_tokens,
        "must not exceed `max_prompt_tokens` = {workload.max_prompt_tokens}",
    ),
    _Rule(
        "workload.useful_groups",
        lambda d: (d.workload.useful_groups is not None) == d.algorithm.dynamic_sampling,
        "must be given for dapo, which replaces groups of equal rewards, and for no other algorithm",
    ),
    _Rule(
        "workload.reward_seconds",
        lambda d: d.workload.reward_seconds is None or (d.algorithm.uses_reward and d.models.reward is None),
        "must not be given where no verifier scores responses",
    ),
    _Rule(
        "models.critic",
        lambda d: (d.models.critic is not None) == d.algorithm.uses_critic,
        "must be given for ppo and for no other algorithm",
    ),
    _Rule(
        "models.teacher",
        lambda d: (d.models.teacher is not None) == d.algorithm.uses_teacher,
        "must be given for distillation and for no other algorithm",
    ),
    _Rule(
        "models.reward",
        lambda d: d.models.reward is None or d.algorithm.uses_reward,
        "must not be given for {algorithm.name}, which uses no reward",
    ),
    _Rule(
        "models.reference",
        lambda d: d.models.reference is None or d.algorithm.kl_coefficient > 0,
        "must not be given when algorithm.kl_coefficient is 0, for nothing uses it",
    ),
)


def load_job(path: Path) -> Job:
    """Read a job, the shapes of its models, and its lengths.

    Raises:
        InputError: names the file, the path inside it, the rule and what was got.
    """
    document = read_document(path, JobDocument)
    return resolve(document, path.parent, where=str(path))


def resolve(document: JobDocument, directory: Path, *, where: str) -> Job:
    """Check what the schema cannot say and read what the document refers to."""
    _check(document, where)
    has_reference = document.algorithm.kl_coefficient > 0
    shapes = read_shapes(document.models, directory, reference=has_reference, where=where)
    job = Job(document=document, directory=directory, actor=shapes.pop(Role.ACTOR), others=shapes)
    lengths = document.workload.lengths
    return job if lengths is None else with_lengths(job, read_lengths(lengths, directory, where=where))


def _check(document: JobDocument, where: str) -> None:
    for rule in _RULES:
        if not rule.holds(document):
            message = rule.message.format(algorithm=document.algorithm, workload=document.workload)
            got: object = reduce(getattr, rule.path.split("."), document)
            raise InputError(f"{where}: {rule.path}", message, got if isinstance(got, int | float) else None)


def with_limits(job: Job, limits: Limits) -> Job:
    """The same job within other limits."""
    return replace(job, document=msgspec.structs.replace(job.document, limits=limits))


def with_lengths(job: Job, lengths: Lengths) -> Job:
    """The same job with observed lengths in place of whatever it had."""
    workload = msgspec.structs.replace(job.workload, lengths=lengths)
    return replace(job, document=msgspec.structs.replace(job.document, workload=workload))
