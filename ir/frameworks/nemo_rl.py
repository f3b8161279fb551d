"""NeMo-RL of September 2026: which plans its configuration can express (examples/configs/grpo_math_1B.yaml and
ppo_math_1B.yaml, nemo_rl/algorithms, nemo_rl/models/policy/lm_policy.py, nemo_rl/models/megatron/setup.py).

The policy's workers train, score and hold the reference, on DTensor (`zero` 3, FSDP2) or on Megatron-Core (`zero` 0 or
1); PPO's value model has workers of its own on the same devices. vLLM generates on these devices or on others.
"""

from __future__ import annotations

import numpy as np

from ir.backend import DEGREES, Backend, Follower, Values, codes
from ir.frameworks.common import (
    ONE_KIND_OF_DEVICE,
    TRAINERS,
    UPDATES_FILL_THE_POOL,
    even_batches,
    flags,
    together,
)
from ir.frameworks.fsdp import RECOMPUTES_WHOLE_LAYERS, TRAINS_NATIVELY, is_fsdp, only_shards
from ir.frameworks.jobs import EVERY_RESPONSE, NO_REWARD_MODEL, job_rule
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    **flags("fusions.fold_old_logprob", "fusions.reward_with_generation"),
    # vLLM's pipelines need the asynchronous engine, whatever else the plan says.
    "generate.pp": (1,),
    "update.zero": (0, 1, 3),
    # No key sets virtual stages.
    "update.vpp": (1,),
    # Weights of the reference are kept in host memory and swapped in for its pass.
    "reference_logprob.offload": codes("offload", "all"),
    # Values are computed and trained with the model brought in for each.
    "update_critic.offload": codes("offload", "all"),
    "sync": codes("sync", "reshard", "broadcast"),
}


def _sampled_when_fresh(b: Columns, s: Setting) -> Mask:
    return np.asarray((b["staleness"] == 0) | (not s.job.algorithm.dynamic_sampling))


_RULES = (
    together(Role.REFERENCE, Role.ACTOR),
    together(Role.CRITIC, Role.ACTOR),
    Rule(
        # should_use_async_rollouts: with the asynchronous engine each response goes on to its environment at once.
        name="nemo-rl-verifies-stale-samples-at-once",
        path="fusions.reward_with_generation",
        reads=("fusions.reward_with_generation", "staleness"),
        holds=lambda b, s: np.asarray((b["staleness"] == 0) | (b["fusions.reward_with_generation"] == 1)),
        message="must be true with staleness above 0 for NeMo-RL, whose collector needs the asynchronous engine",
    ),
    Rule(
        name="nemo-rl-samples-on-when-fresh",
        path="staleness",
        reads=("staleness",),
        holds=_sampled_when_fresh,
        message="must be 0 for dapo with NeMo-RL, which has no dynamic sampling in asynchronous runs",
    ),
    job_rule(
        "nemo-rl-goes-over-a-batch-once",
        lambda s: s.job.workload.epochs == 1 or s.job.algorithm.uses_critic,
        "the job's workload.epochs must be 1 for NeMo-RL, but for ppo",
    ),
    job_rule(
        "nemo-rl-reference-is-the-actor",
        lambda s: s.job.document.models.reference in (None, s.job.document.models.actor),
        "the job's models.reference must be that of models.actor for NeMo-RL, which copies the policy",
    ),
    # Its reward models run on nodes apart from the plan's.
    NO_REWARD_MODEL,
    EVERY_RESPONSE,
)


def _whole_nodes(x: Columns, s: Section) -> Mask:
    node, count = s.of_group(x["group"], "node"), s.of_group(x["group"], "count")
    return np.asarray((count <= node) | (x["devices"] % node == 0))


def _context_is_supported(x: Columns, s: Section) -> Mask:
    """Packed with Megatron, unpacked with DTensor, whose value model has none at all."""
    critic = s.op in (Op.VALUES, Op.UPDATE_CRITIC)
    unpacked = (x["micro_tokens"] == 0) & (not critic)
    return np.asarray((x["cp"] == 1) | np.where(is_fsdp(x), unpacked, x["micro_tokens"] > 0))


_LAYOUT_RULES = (
    UPDATES_FILL_THE_POOL,
    LayoutRule(
        # The setup of either algorithm gives generation a part of the only node, or whole nodes.
        name="nemo-rl-pools-are-whole-nodes",
        ops=tuple(SECTIONS),
        path="pool",
        reads=("devices", "group"),
        holds=_whole_nodes,
        message="must be of whole nodes where there are several, for NeMo-RL",
    ),
    # shard_by_batch_size, and micro-batches of equal size where sequences are not packed.
    even_batches(*TRAINERS),
    # No key of the base configuration divides DTensor's experts.
    only_shards(("ep", "etp"), *TRAINERS),
    RECOMPUTES_WHOLE_LAYERS,
    TRAINS_NATIVELY,
    LayoutRule(
        # validate_and_prepare_config of nemo_rl/models/automodel/setup.py, and nemo_rl/models/megatron/setup.py.
        name="nemo-rl-divides-sequences",
        ops=TRAINERS,
        path="cp",
        reads=("cp", "zero", "micro_tokens"),
        holds=_context_is_supported,
        message="above 1 needs micro_tokens with Megatron, and micro_batch and no critic with zero 3, for NeMo-RL",
    ),
    LayoutRule(
        name="nemo-rl-packs-no-values-with-dtensor",
        ops=(Op.VALUES, Op.UPDATE_CRITIC),
        path="micro_tokens",
        reads=("micro_tokens", "zero"),
        holds=lambda x, s: ~is_fsdp(x) | (x["micro_tokens"] == 0),
        message="must be 0 with zero 3, for NeMo-RL packs no sequences for a value model on DTensor",
    ),
    LayoutRule(
        # vLLM's scheduler configuration.
        name="nemo-rl-step-holds-its-sequences",
        ops=(Op.GENERATE,),
        path="prefill_tokens",
        reads=("prefill_tokens", "concurrency"),
        holds=lambda x, s: (x["prefill_tokens"] == 0) | (x["prefill_tokens"] >= x["concurrency"]),
        message="must be 0 or at least the concurrency, for vLLM counts a token of each sequence",
    ),
)

_WORKERS = (*DEGREES, "zero", "unit", "micro_batch")
"""A policy's passes run on the workers that train it. With tp of 4 and more their micro-batches must have as many
sequences as the update's; the base configuration has it so for all."""

NEMO_RL = Backend(
    name="nemo-rl",
    what="NeMo-RL of September 2026: vLLM with DTensor (FSDP2) or Megatron-Core",
    algorithms=(
        "ppo",
        "grpo",
        "dr-grpo",
        "dapo",
        "rloo",
        "reinforce++",
        "reinforce++-baseline",
        "gspo",
        "cispo",
    ),
    needs_memory_percent=True,
    engine_experts=True,
    values=_VALUES,
    rules=_RULES,
    layout_rules=_LAYOUT_RULES,
    follows=(
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=_WORKERS),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR, fields=_WORKERS),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.OLD_LOGPROB, fields=("micro_batch", "micro_tokens")),
        Follower(op=Op.VALUES, leader=Op.UPDATE_CRITIC, fields=_WORKERS),
    ),
    swaps=(Op.UPDATE_ACTOR,),
)
