"""Conditions of frameworks whose trainer is Megatron-LM, or that score responses while they generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ir.frameworks.common import UPDATES
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS, Pass
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

PASSES = tuple(op for op, kind in SECTIONS.items() if kind is Pass)


def _divides_evenly(x: Columns, s: Section) -> Mask:
    share = x["dp"].astype(np.int64) * np.maximum(x["micro_batch"], 1)
    return np.asarray((x["micro_batch"] == 0) | (s.sequences % share == 0))


# Megatron-LM asserts global_batch_size % (micro_batch_size x data_parallel_size) == 0.
EVEN_MICRO_BATCHES = LayoutRule(
    name="micro-batches-are-even",
    ops=UPDATES,
    path="micro_batch",
    reads=("dp", "micro_batch"),
    holds=_divides_evenly,
    message="times dp must divide the sequences of a minibatch",
)


def _passes_are_even(x: Columns, s: Section) -> Mask:
    replicas = np.maximum(x["devices"] // (x["tp"].astype(np.int64) * x["pp"] * x["cp"]), 1)
    return np.asarray(s.sequences % (replicas * np.maximum(x["micro_batch"], 1)) == 0)


EVEN_PASSES = LayoutRule(
    name="passes-are-even",
    ops=PASSES,
    path="micro_batch",
    reads=("devices", "tp", "pp", "cp", "micro_batch"),
    holds=_passes_are_even,
    message="(1 where it packs tokens) times the replicas must divide the sequences of a step",
)

EVEN_PIPELINE = LayoutRule(
    name="pipeline-divides-the-layers",
    ops=(*PASSES, *UPDATES),
    path="pp",
    reads=("pp",),
    holds=lambda x, s: s.shape.layers % x["pp"] == 0,
    message="must divide the model's layers",
)

DISTRIBUTED_OPTIMIZER = LayoutRule(
    name="optimizer-is-distributed",
    ops=UPDATES,
    path="zero",
    reads=("dp", "cp", "zero"),
    holds=lambda x, s: (x["zero"] == 1) == (x["dp"].astype(np.int64) * x["cp"] > 1),
    message="must be 1 where there are replicas to divide over, for the optimizer is always distributed",
)


def job_rule(name: str, holds: Callable[[Setting], bool], message: str) -> Rule:
    """A rule on the job alone."""
    return Rule(name=name, path="generate.pool", reads=(), holds=lambda b, s: holds(s), message=message)


def is_verified(s: Setting) -> bool:
    """Whether responses are scored by a verifier."""
    return Op.REWARD in s.ops and Role.REWARD not in s.job.models


EARLY_REWARD = Rule(
    name="verified-when-finished",
    path="fusions.reward_with_generation",
    reads=("fusions.reward_with_generation",),
    holds=lambda b, s: not is_verified(s) or np.asarray(b["fusions.reward_with_generation"] == 1),
    message="must be true, for each response is verified as soon as it is finished",
)

ONE_EPOCH = job_rule(
    "one-epoch",
    lambda s: s.job.workload.epochs == 1,
    "the framework must be one that goes over a batch several times: workload.epochs above 1",
)

NO_REWARD_MODEL = job_rule(
    "rewards-are-verified",
    lambda s: Role.REWARD not in s.job.models,
    "the framework must be one that places a reward model: models.reward",
)

NO_ADAPTERS = job_rule(
    "all-weights-are-trained",
    lambda s: s.job.actor.lora_rank == 0,
    "the framework must be one that trains low-rank adapters: models.actor.lora_rank",
)

REFERENCE_LIKE_ACTOR = job_rule(
    "reference-is-like-the-actor",
    lambda s: s.job.models.get(Role.REFERENCE, s.job.actor) == s.job.actor,
    "the framework must be one whose reference can have another shape than the actor: models.reference",
)

CRITIC_LIKE_ACTOR = job_rule(
    "critic-is-like-the-actor",
    lambda s: replace(s.job.models.get(Role.CRITIC, s.job.actor), scores=False) == s.job.actor,
    "the framework must be one whose critic can have another shape than the actor: models.critic",
)
