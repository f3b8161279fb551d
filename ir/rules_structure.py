"""Rules on a plan's structure: placement, staleness, weight sync, fusions and shared models."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.batch import ROLES
from ir.graph import Op
from ir.job import Role
from ir.setting import Columns, Mask, Rule, Setting

PLACES = tuple(f"place.{role}" for role in ROLES)
SIZES = tuple(f"devices.{role}" for role in ROLES)
GROUPS = tuple(f"group.{role}" for role in ROLES)

_OLD = ("fusions.rollout_logprob", "fusions.fold_old_logprob", "fusions.merge_logprobs")


def _off_or(flag: str, b: Columns, holds: Mask | bool) -> Mask:
    return np.asarray((b[flag] == 0) | holds)


def _colocated(b: Columns) -> Mask:
    return np.asarray(b["place.actor"] == ROLES.index("rollout"))


def _off_or_together(flag: str, b: Columns, s: Setting, one: Role, other: Role) -> Mask | bool:
    """Whether two models share a pool where the flag asks for it; without one of them another rule speaks."""
    if not {one, other} <= set(s.job.models):
        return True
    return _off_or(flag, b, np.asarray(b[f"place.{one}"] == b[f"place.{other}"]))


def _old_feeds_only_the_update(s: Setting) -> bool:
    """Whether old log-probs can wait for the update: no advantage is made of them."""
    algorithm = s.job.algorithm
    return not algorithm.uses_teacher and not (algorithm.kl_in_reward and Role.REFERENCE in s.job.models)


def _used(b: Columns, s: Setting, group: int) -> NDArray[Any]:
    """Devices of a group that the pools take together."""
    used = np.zeros(1, dtype=np.int64)
    for index, role in enumerate(ROLES):
        if role in s.roles:
            leads = (b[f"place.{role}"] == index) & (b[f"group.{role}"] == group)
            used = used + np.where(leads, b[f"devices.{role}"], 0)
    return used


def _fits(b: Columns, s: Setting) -> Mask:
    holds = np.ones(1, dtype=bool)
    for group, devices in enumerate(s.groups):
        holds = holds & (_used(b, s, group) <= devices.count)
    return holds


def _allowed(b: Columns, s: Setting) -> Mask:
    total = sum((_used(b, s, group) for group in range(len(s.groups))), np.zeros(1, dtype=np.int64))
    return np.asarray(s.job.limits.allows(total, max(s.num_devices, int(total.max(initial=0)))))


STRUCTURE_RULES: tuple[Rule, ...] = (
    Rule(
        name="pools-fit-the-devices",
        path="pools",
        reads=(*PLACES, *GROUPS, *SIZES),
        holds=_fits,
        message="the pools' devices together must not exceed the devices there are",
    ),
    Rule(
        name="devices-as-the-job-allows",
        path="pools",
        reads=(*PLACES, *GROUPS, *SIZES),
        holds=_allowed,
        message="the pools' devices together must be as many as the job's limits.devices or limits.max_devices allow",
    ),
    Rule(
        name="staleness-within-limit",
        path="staleness",
        reads=("staleness",),
        holds=lambda b, s: b["staleness"] <= s.job.limits.max_staleness,
        message="must not exceed the job's limits.max_staleness",
    ),
    Rule(
        name="staleness-needs-own-pool",
        path="staleness",
        reads=("staleness", "place.actor"),
        holds=lambda b, s: (b["staleness"] == 0) | ~_colocated(b),
        message="must be 0 when generation and training take turns on the same devices",
    ),
    Rule(
        name="in-flight-needs-staleness",
        path="in_flight",
        reads=("in_flight", "staleness"),
        holds=lambda b, s: (b["in_flight"] == 0) | (b["staleness"] > 0),
        message="needs a staleness above 0: without it no weights change while sequences are generated",
    ),
    Rule(
        name="weights-reshard-within-a-pool",
        path="sync",
        reads=("sync", "place.actor"),
        holds=lambda b, s: (b["sync"] == 0) == _colocated(b),
        message="must be 'reshard' when generation and training share their pool, and another method when they do not",
    ),
    Rule(
        name="one-source-of-old-logprobs",
        path="fusions.rollout_logprob",
        reads=_OLD,
        holds=lambda b, s: b[_OLD[0]] + b[_OLD[1]] + b[_OLD[2]] <= 1,
        message="at most one of rollout_logprob, fold_old_logprob and merge_logprobs may provide the old log-probs",
    ),
    Rule(
        name="fold-needs-a-single-update",
        path="fusions.fold_old_logprob",
        reads=("fusions.fold_old_logprob",),
        holds=lambda b, s: _off_or("fusions.fold_old_logprob", b, s.job.updates_per_step == 1),
        message="needs one optimizer step per RL step: minibatches = 1 and epochs = 1",
    ),
    Rule(
        name="fold-needs-old-logprobs-in-the-update-only",
        path="fusions.fold_old_logprob",
        reads=("fusions.fold_old_logprob",),
        holds=lambda b, s: _off_or("fusions.fold_old_logprob", b, _old_feeds_only_the_update(s)),
        message="needs an algorithm whose advantages are made without the old log-probs",
    ),
    Rule(
        name="merge-needs-a-reference",
        path="fusions.merge_logprobs",
        reads=("fusions.merge_logprobs",),
        holds=lambda b, s: _off_or("fusions.merge_logprobs", b, Role.REFERENCE in s.job.models),
        message="needs a reference pass: algorithm.kl_coefficient above 0",
    ),
    Rule(
        name="merge-needs-one-pool",
        path="fusions.merge_logprobs",
        reads=("fusions.merge_logprobs", "place.reference", "place.actor"),
        holds=lambda b, s: _off_or_together("fusions.merge_logprobs", b, s, Role.REFERENCE, Role.ACTOR),
        message="needs the reference on the pool that trains the actor",
    ),
    Rule(
        name="stream-needs-own-pool",
        path="fusions.stream",
        reads=("fusions.stream", "place.actor"),
        holds=lambda b, s: _off_or("fusions.stream", b, ~_colocated(b)),
        message="needs generation on a pool of its own: its consumers run while it generates",
    ),
    Rule(
        name="stream-excludes-merge",
        path="fusions.stream",
        reads=("fusions.stream", "fusions.merge_logprobs"),
        holds=lambda b, s: _off_or("fusions.stream", b, b["fusions.merge_logprobs"] == 0),
        message="excludes merge_logprobs: a streamed reference pass runs before the batch is whole",
    ),
    Rule(
        name="interleave-needs-a-critic",
        path="fusions.interleave_updates",
        reads=("fusions.interleave_updates",),
        holds=lambda b, s: _off_or("fusions.interleave_updates", b, Role.CRITIC in s.job.models),
        message="needs an algorithm with a critic",
    ),
    Rule(
        name="interleave-needs-one-pool",
        path="fusions.interleave_updates",
        reads=("fusions.interleave_updates", "place.critic", "place.actor"),
        holds=lambda b, s: _off_or_together("fusions.interleave_updates", b, s, Role.CRITIC, Role.ACTOR),
        message="needs actor and critic on one pool; on two they are updated at the same time anyway",
    ),
    Rule(
        name="early-reward-needs-a-verifier",
        path="fusions.reward_with_generation",
        reads=("fusions.reward_with_generation",),
        holds=lambda b, s: _off_or(
            "fusions.reward_with_generation", b, Op.REWARD in s.ops and Role.REWARD not in s.job.models
        ),
        message="needs a verifier, which runs on the processors beside the engines",
    ),
    Rule(
        name="adapter-reference-needs-lora",
        path="sharing.reference_adapter",
        reads=("sharing.reference_adapter",),
        holds=lambda b, s: _off_or(
            "sharing.reference_adapter", b, s.job.actor.lora_rank > 0 and Role.REFERENCE in s.job.models
        ),
        message="needs a reference and an actor that trains low-rank adapters: models.actor.lora_rank",
    ),
    Rule(
        name="adapter-reference-runs-with-the-actor",
        path="sharing.reference_adapter",
        reads=("sharing.reference_adapter", "place.reference", "place.actor"),
        holds=lambda b, s: _off_or_together("sharing.reference_adapter", b, s, Role.REFERENCE, Role.ACTOR),
        message="needs the reference on the pool that trains the actor, whose weights it uses",
    ),
    Rule(
        name="shared-trunk-needs-equal-shapes",
        path="sharing.critic_trunk",
        reads=("sharing.critic_trunk",),
        holds=lambda b, s: _off_or("sharing.critic_trunk", b, s.job.models.get(Role.CRITIC) == s.job.actor),
        message="needs a critic of the actor's shape",
    ),
    Rule(
        name="shared-trunk-runs-with-the-actor",
        path="sharing.critic_trunk",
        reads=("sharing.critic_trunk", "place.critic", "place.actor"),
        holds=lambda b, s: _off_or_together("sharing.critic_trunk", b, s, Role.CRITIC, Role.ACTOR),
        message="needs the critic on the pool that trains the actor",
    ),
    Rule(
        name="shared-trunk-needs-a-pass",
        path="sharing.critic_trunk",
        reads=("sharing.critic_trunk", *_OLD[:2]),
        holds=lambda b, s: _off_or("sharing.critic_trunk", b, b[_OLD[0]] + b[_OLD[1]] == 0),
        message="needs a pass for the old log-probs, which gives the values too",
    ),
    Rule(
        name="shared-trunk-is-one-update",
        path="sharing.critic_trunk",
        reads=("sharing.critic_trunk", "fusions.interleave_updates"),
        holds=lambda b, s: _off_or("sharing.critic_trunk", b, b["fusions.interleave_updates"] == 0),
        message="excludes interleave_updates: there is a single update",
    ),
    Rule(
        name="reward-trunk-needs-equal-shapes",
        path="sharing.reward_trunk",
        reads=("sharing.reward_trunk",),
        holds=lambda b, s: _off_or(
            "sharing.reward_trunk",
            b,
            Role.REWARD in s.job.models and s.job.models[Role.REWARD] == s.job.models.get(Role.CRITIC),
        ),
        message="needs a reward model of the critic's shape",
    ),
    Rule(
        name="reward-trunk-runs-with-the-critic",
        path="sharing.reward_trunk",
        reads=("sharing.reward_trunk", "place.reward", "place.critic"),
        holds=lambda b, s: _off_or_together("sharing.reward_trunk", b, s, Role.REWARD, Role.CRITIC),
        message="needs the reward model on the critic's pool",
    ),
    Rule(
        name="one-shared-trunk",
        path="sharing.reward_trunk",
        reads=("sharing.reward_trunk", "sharing.critic_trunk"),
        holds=lambda b, s: _off_or("sharing.reward_trunk", b, b["sharing.critic_trunk"] == 0),
        message="excludes critic_trunk: three models on one trunk are not supported",
    ),
    Rule(
        name="backend-runs-the-algorithm",
        path="generate.pool",
        reads=(),
        holds=lambda b, s: (
            s.backend is None or not s.backend.algorithms or s.job.algorithm.name in s.backend.algorithms
        ),
        message="the backend must be one that runs the job's algorithm",
    ),
    Rule(
        name="backend-keeps-the-reference-with-the-actor",
        path="pools",
        reads=("place.reference", "place.actor"),
        holds=lambda b, s: (
            s.backend is None
            or not s.backend.reference_with_actor
            or Role.REFERENCE not in s.job.models
            or np.asarray(b["place.reference"] == b["place.actor"])
        ),
        message="the backend must be one that can run the reference apart from the actor",
    ),
    Rule(
        name="backend-updates-in-flight",
        path="in_flight",
        reads=("in_flight", "staleness"),
        holds=lambda b, s: (
            s.backend is None or not s.backend.always_in_flight or (b["in_flight"] == (b["staleness"] > 0))
        ),
        message="must be true with staleness above 0 for this backend, whose stale engines never drain",
    ),
)
