"""Rules on a plan's structure: placement, staleness, weight sync, fusions and shared models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ir.batch import DELTAS, ROLES
from ir.graph import Op
from ir.job import Role
from ir.setting import Columns, Mask, Rule, Setting

PLACES = tuple(f"place.{role}" for role in ROLES)
SIZES = tuple(f"devices.{role}" for role in ROLES)
GROUPS = tuple(f"group.{role}" for role in ROLES)
_OLD = ("fusions.rollout_logprob", "fusions.fold_old_logprob", "fusions.merge_logprobs")


def _if_set(
    flag: str, name: str, holds: Callable[[Columns, Setting], Mask | bool], message: str, *, reads: tuple[str, ...] = ()
) -> Rule:
    """A rule on the plans that set a fusion or a sharing."""
    return Rule(
        name=name,
        path=flag,
        reads=(flag, *reads),
        holds=lambda b, s: np.asarray((b[flag] == 0) | holds(b, s)),
        message=message,
    )


def _colocated(b: Columns) -> Mask:
    return np.asarray(b["place.actor"] == ROLES.index("rollout"))


def _together(one: Role, other: Role) -> Callable[[Columns, Setting], Mask | bool]:
    """Whether two models share a pool; where the job lacks one of them another rule speaks."""
    return lambda b, s: not {one, other} <= set(s.job.models) or np.asarray(b[f"place.{one}"] == b[f"place.{other}"])


def _old_feeds_only_the_update(s: Setting) -> bool:
    """Whether old log-probs can wait for the update: no advantage is made of them."""
    return not s.job.algorithm.uses_teacher and not (s.job.algorithm.kl_in_reward and Role.REFERENCE in s.job.models)


def _has_like_reference(s: Setting) -> bool:
    reference = s.job.models.get(Role.REFERENCE)
    return reference is not None and replace(reference, lora_rank=s.job.actor.lora_rank) == s.job.actor


def _verified(s: Setting) -> bool:
    return Op.REWARD in s.ops and Role.REWARD not in s.job.models


def _streams_somewhere(b: Columns, s: Setting) -> Mask | bool:
    """Whether a stage on devices that do not generate can take finished groups, as `moves.stream` finds them. What
    comes after a selection streams only if the selection's rewards do."""
    if _verified(s) and Op.SELECT in s.ops:
        return True
    apart = {role: b[f"place.{role}"] != ROLES.index("rollout") for role in ROLES if role in s.roles}
    found = b["fusions.reward_with_generation"] == 0 if _verified(s) else apart.get("reward", np.zeros(1, dtype=bool))
    if Op.SELECT not in s.ops:
        found = found | apart.get("reference", False) | apart.get("teacher", False)
        found = found | (apart.get("critic", False) & (b["sharing.critic_trunk"] == 0))
    return np.asarray(found)


def _used(b: Columns, s: Setting, group: int) -> NDArray[np.int64]:
    """Devices of a group that the pools take together."""
    used = [
        np.where((b[f"place.{role}"] == ROLES.index(role)) & (b[f"group.{role}"] == group), b[f"devices.{role}"], 0)
        for role in s.roles
    ]
    return np.asarray(sum(used), dtype=np.int64)


def _grouped(b: Columns, s: Setting) -> Mask:
    return np.asarray(np.logical_and.reduce([b[f"group.{role}"] < len(s.groups) for role in s.roles]))


def _fits(b: Columns, s: Setting) -> Mask:
    return np.asarray(np.logical_and.reduce([_used(b, s, i) <= group.count for i, group in enumerate(s.groups)]))


def _allowed(b: Columns, s: Setting) -> Mask:
    total = np.asarray(sum(_used(b, s, group) for group in range(len(s.groups))), dtype=np.int64)
    return np.asarray(s.job.limits.allows(total, max(s.num_devices, int(total.max(initial=0)))))


def _keeps_what_was_sent(b: Columns, s: Setting) -> Mask:
    host = np.array([group.host for group in s.groups])
    return np.asarray(~np.isin(b["sync"], DELTAS) | host[np.minimum(b["group.actor"], len(host) - 1)])


STRUCTURE_RULES: tuple[Rule, ...] = (
    Rule(
        name="pools-lie-in-a-group",
        path="pools",
        reads=GROUPS,
        holds=_grouped,
        message="every pool's group must be one of the cluster's, counted from 0",
    ),
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
        name="deltas-need-whole-training",
        path="sync",
        reads=("sync",),
        holds=lambda b, s: ~np.isin(b["sync"], DELTAS) | (s.job.actor.lora_rank == 0),
        message="must send whole weights where adapters are trained: how many values change once they are merged is "
        "not known",
    ),
    Rule(
        name="deltas-need-host-memory",
        path="sync",
        reads=("sync", "group.actor"),
        holds=_keeps_what_was_sent,
        message="must send whole weights where devices that train have no host memory apart from their own, which "
        "keeps the weights that were sent last",
    ),
    Rule(
        name="one-source-of-old-logprobs",
        path="fusions.rollout_logprob",
        reads=_OLD,
        holds=lambda b, s: b[_OLD[0]] + b[_OLD[1]] + b[_OLD[2]] <= 1,
        message="at most one of rollout_logprob, fold_old_logprob and merge_logprobs may provide the old log-probs",
    ),
    _if_set(
        "fusions.fold_old_logprob",
        "fold-needs-a-single-update",
        lambda b, s: s.job.updates_per_step == 1,
        "needs one optimizer step per RL step: minibatches = 1 and epochs = 1",
    ),
    _if_set(
        "fusions.fold_old_logprob",
        "fold-needs-old-logprobs-in-the-update-only",
        lambda b, s: _old_feeds_only_the_update(s),
        "needs an algorithm whose advantages are made without the old log-probs",
    ),
    _if_set(
        "fusions.merge_logprobs",
        "merge-needs-a-reference",
        lambda b, s: _has_like_reference(s),
        "needs a reference pass, of a model of the actor's shape: algorithm.kl_coefficient above 0",
    ),
    _if_set(
        "fusions.merge_logprobs",
        "merge-needs-one-pool",
        _together(Role.REFERENCE, Role.ACTOR),
        "needs the reference on the pool that trains the actor",
        reads=("place.reference", "place.actor"),
    ),
    _if_set(
        "fusions.stream",
        "stream-needs-own-pool",
        lambda b, s: ~_colocated(b),
        "needs generation on a pool of its own: its consumers run while it generates",
        reads=("place.actor",),
    ),
    _if_set(
        "fusions.stream",
        "stream-needs-a-consumer",
        lambda b, s: _colocated(b) | _streams_somewhere(b, s),
        "needs a reward, reference, teacher or critic on devices that do not generate, to take the finished groups",
        reads=(*PLACES, "fusions.reward_with_generation", "sharing.critic_trunk"),
    ),
    _if_set(
        "fusions.stream",
        "stream-excludes-merge",
        lambda b, s: b["fusions.merge_logprobs"] == 0,
        "excludes merge_logprobs: a streamed reference pass runs before the batch is whole",
        reads=("fusions.merge_logprobs",),
    ),
    _if_set(
        "fusions.interleave_updates",
        "interleave-needs-a-critic",
        lambda b, s: Role.CRITIC in s.job.models,
        "needs an algorithm with a critic",
    ),
    _if_set(
        "fusions.interleave_updates",
        "interleave-needs-one-pool",
        _together(Role.CRITIC, Role.ACTOR),
        "needs actor and critic on one pool; on two they are updated at the same time anyway",
        reads=("place.critic", "place.actor"),
    ),
    _if_set(
        "fusions.reward_with_generation",
        "early-reward-needs-a-verifier",
        lambda b, s: _verified(s),
        "needs a verifier, which runs on the processors beside the engines",
    ),
    _if_set(
        "sharing.reference_adapter",
        "adapter-reference-needs-lora",
        lambda b, s: s.job.actor.lora_rank > 0 and Role.REFERENCE in s.job.models,
        "needs a reference and an actor that trains low-rank adapters: models.actor.lora_rank",
    ),
    _if_set(
        "sharing.reference_adapter",
        "adapter-reference-runs-with-the-actor",
        _together(Role.REFERENCE, Role.ACTOR),
        "needs the reference on the pool that trains the actor, whose weights it uses",
        reads=("place.reference", "place.actor"),
    ),
    _if_set(
        "sharing.critic_trunk",
        "shared-trunk-needs-equal-shapes",
        lambda b, s: s.is_like_the_actor(Role.CRITIC),
        "needs a critic of the actor's shape",
    ),
    _if_set(
        "sharing.critic_trunk",
        "shared-trunk-runs-with-the-actor",
        _together(Role.CRITIC, Role.ACTOR),
        "needs the critic on the pool that trains the actor",
        reads=("place.critic", "place.actor"),
    ),
    _if_set(
        "sharing.critic_trunk",
        "shared-trunk-needs-a-pass",
        lambda b, s: b[_OLD[0]] + b[_OLD[1]] == 0,
        "needs a pass for the old log-probs, which gives the values too",
        reads=_OLD[:2],
    ),
    _if_set(
        "sharing.critic_trunk",
        "shared-trunk-is-one-update",
        lambda b, s: b["fusions.interleave_updates"] == 0,
        "excludes interleave_updates: there is a single update",
        reads=("fusions.interleave_updates",),
    ),
    _if_set(
        "sharing.reward_trunk",
        "reward-trunk-needs-equal-shapes",
        lambda b, s: Role.REWARD in s.job.models and s.job.models[Role.REWARD] == s.job.models.get(Role.CRITIC),
        "needs a reward model of the critic's shape",
    ),
    _if_set(
        "sharing.reward_trunk",
        "reward-trunk-runs-with-the-critic",
        _together(Role.REWARD, Role.CRITIC),
        "needs the reward model on the critic's pool",
        reads=("place.reward", "place.critic"),
    ),
    _if_set(
        "sharing.reward_trunk",
        "one-shared-trunk",
        lambda b, s: b["sharing.critic_trunk"] == 0,
        "excludes critic_trunk: three models on one trunk are not supported",
        reads=("sharing.critic_trunk",),
    ),
    Rule(
        name="backend-runs-the-algorithm",
        path="generate.pool",
        reads=(),
        holds=lambda b, s: s.backend is None or s.backend.runs(s.job.algorithm.name),
        message="the backend must be one that runs the job's algorithm",
    ),
    Rule(
        name="backend-keeps-the-reference-with-the-actor",
        path="pools",
        reads=("place.reference", "place.actor"),
        holds=lambda b, s: (
            s.backend is None or not s.backend.reference_with_actor or _together(Role.REFERENCE, Role.ACTOR)(b, s)
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


def structure_rules(setting: Setting) -> tuple[Rule, ...]:
    """The rules on a plan's structure, those of the setting's backend included."""
    return STRUCTURE_RULES if setting.backend is None else (*STRUCTURE_RULES, *setting.backend.rules)
