"""What makes a plan legal for a job on a number of devices: one table, on arrays of plans.

A rule gives, for every plan of a batch, whether it holds. The same table refuses a
user's plan, with a sentence, and filters a space of a million.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.batch import PlanBatch, batch_of
from ir.errors import InputError
from ir.job import Job
from ir.plan import Plan

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What plans are judged against."""

    job: Job
    devices: int
    """Devices a plan may use in all."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A named condition; `path` is the key of plan.toml that breaks it and `column` the value reported."""

    name: str
    path: str
    column: str
    holds: Callable[[PlanBatch, Setting], Mask]
    message: str
    """What must be true, in words."""


def _devices_used(b: PlanBatch) -> NDArray[np.int64]:
    return np.where(b.colocated == 1, b.generate_devices, b.generate_devices + b.train_devices)


def _minibatch(s: Setting) -> int:
    return s.job.workload.sequences // s.job.workload.minibatches


def _in_flight(b: PlanBatch, s: Setting) -> NDArray[np.int64]:
    """Most sequences an engine can hold: those of the step being generated and of the k steps ahead of it."""
    return -(-s.job.workload.sequences * (1 + b.staleness) // b.generate_devices)


RULES: tuple[Rule, ...] = (
    Rule(
        "pools-fit-the-devices",
        "pools",
        "generate_devices",
        lambda b, s: _devices_used(b) <= s.devices,
        "the pools' devices together must not exceed the devices there are",
    ),
    Rule(
        "a-shared-pool-has-one-size",
        "pools",
        "train_devices",
        lambda b, s: (b.colocated == 0) | (b.generate_devices == b.train_devices),
        "colocated stages share one pool, so both sizes must be equal",
    ),
    Rule(
        "staleness-within-limit",
        "staleness",
        "staleness",
        lambda b, s: b.staleness <= s.job.limits.max_staleness,
        "must not exceed the job's limits.max_staleness",
    ),
    Rule(
        "staleness-needs-own-pool",
        "staleness",
        "staleness",
        lambda b, s: (b.staleness == 0) | (b.colocated == 0),
        "must be 0 when generation and training take turns on the same devices",
    ),
    Rule(
        "one-source-of-old-logprobs",
        "fusions.rollout_logprob",
        "rollout_logprob",
        lambda b, s: b.rollout_logprob + b.fold_old_logprob + b.merge_logprobs <= 1,
        "at most one of rollout_logprob, fold_old_logprob and merge_logprobs may provide the old log-probs",
    ),
    Rule(
        "fold-needs-a-single-update",
        "fusions.fold_old_logprob",
        "fold_old_logprob",
        lambda b, s: (b.fold_old_logprob == 0) | (s.job.updates_per_step == 1),
        "needs one optimizer step per RL step: minibatches = 1 and epochs = 1",
    ),
    Rule(
        "merge-needs-a-reference",
        "fusions.merge_logprobs",
        "merge_logprobs",
        lambda b, s: (b.merge_logprobs == 0) | (s.job.algorithm.kl_coefficient > 0),
        "needs a reference pass: algorithm.kl_coefficient above 0",
    ),
    Rule(
        "stream-needs-own-pool",
        "fusions.stream",
        "stream",
        lambda b, s: (b.stream == 0) | (b.colocated == 0),
        "needs generation on a pool of its own: its consumers run while it generates",
    ),
    Rule(
        "stream-excludes-merge",
        "fusions.stream",
        "stream",
        lambda b, s: (b.stream == 0) | (b.merge_logprobs == 0),
        "excludes merge_logprobs: a streamed reference pass runs before the batch is whole",
    ),
    Rule(
        "dp-fits-the-pool",
        "update.dp",
        "dp",
        lambda b, s: b.dp <= b.train_devices,
        "must not exceed the devices of its pool",
    ),
    Rule(
        "dp-divides-the-minibatch",
        "update.dp",
        "dp",
        lambda b, s: _minibatch(s) % b.dp == 0,
        "must divide the sequences of a minibatch",
    ),
    Rule(
        "update-micro-batch-fits",
        "update.micro_batch",
        "update_micro_batch",
        lambda b, s: b.update_micro_batch * b.dp <= _minibatch(s),
        "must not exceed a rank's sequences of a minibatch",
    ),
    Rule(
        "logprob-micro-batch-fits",
        "logprob.micro_batch",
        "logprob_micro_batch",
        lambda b, s: b.logprob_micro_batch <= -(-s.job.workload.sequences // b.train_devices),
        "must not exceed a rank's sequences of a step",
    ),
    Rule(
        "concurrency-fits",
        "generate.concurrency",
        "concurrency",
        lambda b, s: b.concurrency <= _in_flight(b, s),
        "must not exceed the sequences an engine can have in flight under the staleness bound",
    ),
)


def legal(batch: PlanBatch, setting: Setting) -> Mask:
    """Which plans keep every rule, bool[n]."""
    mask = np.ones(len(batch), dtype=bool)
    for rule in RULES:
        mask &= rule.holds(batch, setting)
    return mask


def check(plan: Plan, setting: Setting, *, where: str = "plan") -> None:
    """Refuse an illegal plan.

    Raises:
        InputError: names the rule, the key of the plan and the value got.
    """
    _check_pools(plan, where)
    batch = batch_of([plan])
    for rule in RULES:
        if not rule.holds(batch, setting)[0]:
            raise InputError(
                f"{where}: {rule.path}",
                f"{rule.message} (rule {rule.name})",
                int(getattr(batch, rule.column)[0]),
            )


def _check_pools(plan: Plan, where: str) -> None:
    names = [pool.name for pool in plan.pools]
    if len(set(names)) != len(names):
        raise InputError(f"{where}: pools", "names must be unique (rule pools-are-named-once)", names)
    for key in ("generate", "logprob", "update"):
        pool = getattr(plan, key).pool
        if pool not in names:
            raise InputError(f"{where}: {key}.pool", f"must be one of {names} (rule pool-exists)", repr(pool))
    if plan.logprob.pool != plan.update.pool:
        raise InputError(
            f"{where}: logprob.pool",
            f"must be the pool of `update`, {plan.update.pool!r} (rule logprobs-run-where-the-actor-trains)",
            repr(plan.logprob.pool),
        )
    used = {plan.generate.pool, plan.logprob.pool, plan.update.pool}
    if unused := set(names) - used:
        raise InputError(f"{where}: pools", "every pool must run a stage (rule pools-are-used)", sorted(unused))
