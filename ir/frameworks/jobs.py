"""Jobs that frameworks do not run: conditions on the job alone that several have in common."""

from __future__ import annotations

from collections.abc import Callable

from ir.job import Role
from ir.setting import Rule, Setting


def job_rule(name: str, holds: Callable[[Setting], bool], message: str) -> Rule:
    """A rule on the job alone."""
    return Rule(name=name, path="generate.pool", reads=(), holds=lambda _b, s: holds(s), message=message)


ONE_EPOCH = job_rule(
    "one-epoch",
    lambda s: s.job.workload.epochs == 1,
    "the job's workload.epochs must be 1, for the framework goes over a batch once",
)

EVERY_RESPONSE = job_rule(
    "every-response-counts",
    lambda s: s.job.workload.oversampling == 1.0,
    "the job's workload.oversampling must be 1, for the framework abandons no response",
)

NO_REWARD_MODEL = job_rule(
    "rewards-are-verified",
    lambda s: Role.REWARD not in s.job.models,
    "the job must have a verifier and no models.reward, for which the framework has no place",
)

NO_ADAPTERS = job_rule(
    "all-weights-are-trained",
    lambda s: s.job.actor.lora_rank == 0,
    "the job's models.actor must have no lora_rank, for the framework trains all weights",
)

REFERENCE_LIKE_ACTOR = job_rule(
    "reference-is-like-the-actor",
    lambda s: s.job.models.get(Role.REFERENCE, s.job.actor) == s.job.actor,
    "the job's models.reference must have the actor's shape, for the framework has one shape for both",
)

CRITIC_LIKE_ACTOR = job_rule(
    "critic-is-like-the-actor",
    lambda s: Role.CRITIC not in s.job.models or s.is_like_the_actor(Role.CRITIC),
    "the job's models.critic must have the actor's shape, for the framework has one shape for both",
)


def _loads_the_actor(s: Setting) -> bool:
    models = s.job.document.models
    own, actor = models.reference, models.actor
    return own is None or (own.name, own.path) == (actor.name, actor.path)


REFERENCE_IS_THE_ACTOR = job_rule(
    "reference-is-the-actor",
    _loads_the_actor,
    "the job's models.reference must be models.actor, whose name the framework loads once more",
)
