"""OpenRLHF 0.11.2: which plans its flags can express (openrlhf/cli/train_ppo_ray.py and the trainers it starts).

One set of DeepSpeed flags serves all models, and vLLM's engines take only their tensor
parallel size and share of memory; the rest is as vLLM has it for an engine of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.backend import Backend, Follower, Values, codes
from ir.batch import ROLES
from ir.frameworks.common import EARLY_REWARD, NATIVE, ONE_KIND_OF_DEVICE, flags
from ir.frameworks.jobs import EVERY_RESPONSE, REFERENCE_IS_THE_ACTOR, job_rule
from ir.frameworks.openrlhf_layout import ENGINE_TOKENS, LAYOUT_RULES
from ir.graph import Op
from ir.job import Role
from ir.setting import Columns, Mask, Rule, Setting

ESTIMATORS = {
    "ppo": "gae",
    "grpo": "group_norm",
    "dr-grpo": "dr_grpo",
    "dapo": "group_norm",
    "gspo": "group_norm",
    "rloo": "rloo",
    "reinforce++": "reinforce",
    "reinforce++-baseline": "reinforce_baseline",
}
"""`--algo.advantage.estimator` by algorithm; DAPO filters groups as well, and GSPO has an `actor.policy_loss_type`."""

_ROLLOUT, _ACTOR = ROLES.index("rollout"), ROLES.index("actor")

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    **NATIVE,
    # The actor's log-probs are always a pass of their own, and nothing but a verifier works while engines generate.
    **flags("fusions.reward_with_generation", "fusions.interleave_updates"),
    **{f"{kind}.pp": (1,) for kind in ("generate", "pass", "update")},
    **{f"{kind}.ep": (1,) for kind in ("generate", "pass", "update")},
    **{"update.vpp": (1,), "update.etp": (1,)},
    "generate.prefill_tokens": (ENGINE_TOKENS,),
    "update.recompute": codes("recompute", "none", "full"),
    "update.offload": codes("offload", "none", "optimizer"),
    "sync": codes("sync", "reshard", "broadcast"),
}


def _places(b: Columns, s: Setting) -> dict[str, NDArray[Any]]:
    return {role: b[f"place.{role}"] for role in ROLES if role in s.roles}


def _placed(b: Columns, s: Setting) -> Mask:
    """Whether flags say where models are: all on one pool (`train.colocate_all`; in asynchronous runs all but the
    engines), or the reference with the actor or alone, and the reward model with the critic or alone."""
    place = _places(b, s)
    with_engines = np.logical_and.reduce([p == _ROLLOUT for p in place.values()])
    trained = {role: p for role, p in place.items() if role != "rollout"}
    with_actor = np.logical_and.reduce([p == _ACTOR for p in trained.values()])
    apart = np.logical_and.reduce([_apart(role, p) for role, p in trained.items()])
    return np.asarray(with_engines | (with_actor & (b["staleness"] > 0)) | apart)


def _apart(role: str, place: NDArray[Any]) -> Mask:
    """Whether a model is on a pool of its own, or with its only companion."""
    companion = {"reference": "actor", "reward": "critic"}.get(role, role)
    return np.asarray((place == ROLES.index(role)) | (place == ROLES.index(companion)))


def _shares_devices(b: Columns) -> Mask:
    return np.asarray(b["place.critic"] == b["place.actor"])


def _updates_at_once(b: Columns, s: Setting) -> Mask | bool:
    if Role.CRITIC not in s.job.models:
        return True
    at_once = _shares_devices(b) & (b["update_actor.offload"] == 0)
    return np.asarray(b["fusions.interleave_updates"] == at_once)


def _sleeps_in_turns(b: Columns, s: Setting) -> Mask | bool:
    return Role.CRITIC not in s.job.models or np.asarray(_shares_devices(b) | (b["update_actor.offload"] == 0))


def _deals_out_as_to_the_actor(b: Columns, s: Setting) -> Mask:
    """Whether micro-batches by tokens, as many as a multiple of the actor's replicas, are enough for other models'
    replicas; the critic trains on as many of them in each."""
    of_actor = b["devices.actor"]
    enough = of_actor % np.maximum(b["devices.critic"], 1) == 0
    for role in ("reference", "reward"):
        enough = enough & (b[f"devices.{role}"] <= of_actor)
    return np.asarray((b["update_actor.micro_tokens"] == 0) | enough)


def _one_rank(s: Setting) -> bool:
    ranks = {model.lora_rank for role, model in s.job.models.items() if role in (Role.ACTOR, Role.CRITIC)}
    return len(ranks) == 1


_RULES = (
    Rule(
        name="openrlhf-places-models",
        path="pools",
        reads=(*(f"place.{role}" for role in ROLES), "staleness"),
        holds=_placed,
        message=(
            "must be one for all models, with staleness above 0 also one for all but the engines, or else have the "
            "reference with the actor or alone and the reward model with the critic or alone, for OpenRLHF"
        ),
    ),
    EARLY_REWARD,
    # These join structure and sections, so that a space's tables, which a rule that reads sizes is not asked of, still
    # hold plans that break them.
    Rule(
        name="openrlhf-updates-at-once",
        path="fusions.interleave_updates",
        reads=("fusions.interleave_updates", "place.critic", "place.actor", "update_actor.offload", "devices.actor"),
        holds=_updates_at_once,
        message=(
            "must be true exactly where actor and critic share devices and update_actor.offload is none, for OpenRLHF "
            "updates both at the same time unless `ds.enable_sleep` has one wait for the other"
        ),
    ),
    Rule(
        name="openrlhf-sleeps-in-turns",
        path="update_actor.offload",
        reads=("place.critic", "place.actor", "update_actor.offload", "devices.actor"),
        holds=_sleeps_in_turns,
        message=(
            "must be none with the critic on other devices, for `ds.enable_sleep` has OpenRLHF update one at a time"
        ),
    ),
    Rule(
        # Lists of micro-batches are cut by async_run_method_batch, and made by split_rollout_samples and
        # balance_experiences for the actor's replicas.
        name="openrlhf-deals-out-as-to-the-actor",
        path="update_actor.micro_tokens",
        reads=(
            "update_actor.micro_tokens",
            *(f"devices.{role}" for role in ("actor", "critic", "reference", "reward")),
        ),
        holds=_deals_out_as_to_the_actor,
        message=(
            "must be 0 for OpenRLHF where the reference or the reward model have more devices than the actor, or the "
            "critic not a part of as many: its micro-batches by tokens are as many as the actor needs"
        ),
    ),
    REFERENCE_IS_THE_ACTOR,
    job_rule(
        "openrlhf-one-rank-of-adapters",
        _one_rank,
        "the job's critic must have the actor's lora_rank for OpenRLHF, where `ds.lora.rank` is both models'",
    ),
    job_rule(
        "openrlhf-filters-by-a-verifier",
        lambda s: not s.job.algorithm.dynamic_sampling or Role.REWARD not in s.job.models,
        "the job must have a verifier for OpenRLHF's dynamic filtering, no reward model",
    ),
    EVERY_RESPONSE,
)

_BATCHES = ("tp", "cp", "zero", "micro_batch", "micro_tokens")
_TRAINED = ("tp", "cp", "stage", "micro_batch", "micro_tokens")

OPENRLHF = Backend(
    name="openrlhf",
    what="OpenRLHF 0.11.2: vLLM and DeepSpeed ZeRO with automatic tensor parallelism and ring attention",
    algorithms=tuple(ESTIMATORS),
    needs_memory_percent=True,
    values=_VALUES,
    rules=_RULES,
    layout_rules=LAYOUT_RULES,
    follows=(
        Follower(op=Op.UPDATE_CRITIC, leader=Op.UPDATE_ACTOR, fields=(*_TRAINED, "recompute", "offload", "dp")),
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=("tp", "cp", "zero", "unit")),
        Follower(op=Op.VALUES, leader=Op.OLD_LOGPROB, fields=_BATCHES),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.OLD_LOGPROB, fields=_BATCHES),
        Follower(op=Op.REWARD, leader=Op.OLD_LOGPROB, fields=_BATCHES),
    ),
)
