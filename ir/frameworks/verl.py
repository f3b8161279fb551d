"""verl 0.9.1 with its V1 trainer: FSDP or Megatron-Core, and vLLM engines, or SGLang's where changed values are sent.

Stages 2 and 3 of ZeRO are FSDP (`reshard_after_forward` false and true), 0 and 1 Megatron (`use_distributed_optimizer`
false and true); one Hydra group, `model_engine`, decides for actor, critic and reference. Generation on the training
devices is `trainer_mode=sync`, on a pool of its own `separate_async`. `colocate_async` carries unfinished responses
over to the next step on shared devices, which no plan says.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ir.backend import DEGREES, Backend, Follower, Values, codes
from ir.batch import ROLES
from ir.frameworks.common import (
    ADAPTER_TAKEN_OFF,
    EARLY_REWARD,
    ONE_KIND_OF_DEVICE,
    REPLICAS,
    UPDATES,
    UPDATES_FILL_THE_POOL,
    WHOLE_NODES,
    flags,
    replicas,
    together,
    whole_engines,
)
from ir.frameworks.fsdp import RECOMPUTES_WHOLE_LAYERS, TRAINS_NATIVELY, is_fsdp, only_shards, scatters_heads
from ir.frameworks.jobs import EVERY_RESPONSE, job_rule
from ir.graph import Op
from ir.job import Role
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

MAX_LORA_RANK = 512
"""Of vLLM, which `validate_config` asks (verl/workers/rollout/vllm_rollout/utils.py)."""

_PASSES = (Op.REFERENCE_LOGPROB, Op.OLD_LOGPROB, Op.VALUES)
"""Those that run on a training engine; a reward model is served by engines of its own."""
_TRAINED = (*_PASSES, *UPDATES)
_SERVED = (Op.GENERATE, Op.REWARD)

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    **flags("fusions.rollout_logprob", "fusions.reward_with_generation", "sharing.reference_adapter"),
    # verl/workers/config/rollout.py raises NotImplementedError above 1.
    "generate.pp": (1,),
    "reward.pp": (1,),
    "reward.cp": (1,),
    "reward.zero": (0,),
    "reward.shard": (0,),
    # `max_num_batched_tokens` of the engines that serve it.
    "reward.micro_batch": (0,),
    # `trainer.v1` syncs through a collective (`checkpoint_engine.backend=nccl` or `delta_sharded`) or, on shared
    # devices, in place.
    "sync": codes("sync", "reshard", "broadcast", "delta"),
}


def _reward_is_served(b: Columns, s: Setting) -> Mask | bool:
    if Role.REWARD not in s.job.models:
        return True
    own = b["place.reward"] == ROLES.index("reward")
    shared = (b["place.actor"] == ROLES.index("rollout")) & (b["place.reward"] == b["place.actor"])
    # Groups are filtered by their rewards as they finish, so these cannot wait (trainer_base.py).
    return np.asarray(own | (shared & (not s.job.algorithm.dynamic_sampling)))


def _has_the_actors_shape(s: Setting) -> bool:
    reference = s.job.models.get(Role.REFERENCE)
    return reference is None or replace(reference, lora_rank=s.job.actor.lora_rank) == s.job.actor


_RULES = (
    together(Role.CRITIC, Role.ACTOR),
    together(Role.REFERENCE, Role.ACTOR),
    Rule(
        name="verl-serves-the-reward-model",
        path="pools",
        reads=("place.reward", "place.actor"),
        holds=_reward_is_served,
        message="the reward model must have a pool of its own, or share that of generation and training together; "
        "the former where groups are filtered by reward",
    ),
    EARLY_REWARD,
    ADAPTER_TAKEN_OFF,
    EVERY_RESPONSE,
    # actor_rollout_ref.model gives both.
    job_rule(
        "verl-has-one-model-for-actor-and-reference",
        _has_the_actors_shape,
        "the job's models.reference must have the actor's shape for verl, which has one `model` for both",
    ),
    job_rule(
        "verl-serves-the-adapters",
        lambda s: s.job.actor.lora_rank <= MAX_LORA_RANK,
        f"the job's models.actor.lora_rank must not exceed {MAX_LORA_RANK} for verl, the most that its vLLM serves",
    ),
)


def _whole_micro_batches(x: Columns, s: Section) -> Mask:
    """A pass of `separate_async` sees a minibatch at a time, so that its share of one is divided, as an update's."""
    workload = s.setting.job.workload
    batch = replicas(x, s) * np.maximum(x["micro_batch"], 1)
    minibatch = workload.sequences // workload.minibatches
    return np.asarray((x["micro_batch"] == 0) | (minibatch % batch == 0))


def _whole_engines(x: Columns, s: Section) -> Mask:
    node = np.minimum(s.of_group(x["group"], "node"), np.maximum(x["devices"], 1))
    engine = np.maximum(x["tp"], x["ep"])
    return np.asarray((x["devices"] % engine == 0) & ((node % engine == 0) | (engine % node == 0)))


def _reference_waits(x: Columns, s: Section) -> Mask:
    host, none = codes("offload", "all", "none")
    if s.setting.job.actor.lora_rank > 0:
        return np.asarray(x["offload"] == none)
    return np.asarray((x["zero"] == 0) | (x["offload"] == host))


_LAYOUT_RULES = (
    WHOLE_NODES,
    UPDATES_FILL_THE_POOL,
    only_shards(("tp", "pp", "ep", "vpp", "etp"), *_TRAINED),
    RECOMPUTES_WHOLE_LAYERS,
    TRAINS_NATIVELY,
    # verl/models/transformers/monkey_patch.py; passes have the degree of the update that they follow.
    scatters_heads(*UPDATES),
    # verl/workers/engine/utils.py, prepare_micro_batches.
    LayoutRule(
        name="verl-micro-batches-are-whole",
        ops=_TRAINED,
        path="micro_batch",
        reads=("micro_batch", *REPLICAS),
        holds=_whole_micro_batches,
        message="must divide a replica's sequences of a minibatch",
    ),
    # verl/utils/config.py, validate_config: without dynamic batches FSDP counts every device, whatever the context
    # parallelism.
    LayoutRule(
        name="verl-devices-divide-the-batch",
        ops=(Op.UPDATE_ACTOR,),
        path="micro_batch",
        reads=("micro_batch", "zero", "devices"),
        holds=lambda x, s: (
            ~is_fsdp(x)
            | (x["micro_batch"] == 0)
            | (s.setting.job.workload.sequences % np.maximum(x["devices"], 1) == 0)
        ),
        message="above 0 needs a step's sequences to be a multiple of the pool's devices",
    ),
    # An engine of vLLM is tp devices; `data_parallel_size` of them that share experts are one replica, and
    # `expert_parallel_size` is 1 or all of its devices (verl/workers/config/rollout.py).
    whole_engines(*_SERVED),
    LayoutRule(
        name="verl-engines-fill-nodes",
        ops=_SERVED,
        path="tp",
        reads=("tp", "ep", "devices", "group"),
        holds=_whole_engines,
        message="and ep must divide the pool, and divide a node or be whole nodes",
    ),
    # verl/workers/engine/fsdp/transformer_impl.py: a forward-only engine always has CPUOffload.
    LayoutRule(
        name="verl-fsdp-keeps-the-reference-in-host-memory",
        ops=(Op.REFERENCE_LOGPROB,),
        path="offload",
        reads=("offload", "zero"),
        holds=_reference_waits,
        message="must be all with FSDP (zero 3), and none for an adapter, whose weights are the actor's",
    ),
)

_ALGORITHMS = (
    "ppo", "grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo",
)  # fmt: skip
"""Distillation has a recipe of its own, and the V1 trainer no greedy responses for ReMax."""

VERL = Backend(
    name="verl",
    what="verl 0.9.1: vLLM and FSDP or Megatron-Core",
    needs_memory_percent=True,
    always_in_flight=True,
    extras=("pass.shard", "update.shard"),
    algorithms=_ALGORITHMS,
    values=_VALUES,
    rules=_RULES,
    layout_rules=_LAYOUT_RULES,
    # docs/advance/delta_weight_sync.md: SGLang in bfloat16. vLLM has no release that rollout/vllm_rollout/
    # delta_weight_transfer.py accepts, and SGLang shares experts by data-parallel attention only.
    deltas={"generate.precision": codes("precision", "native"), "generate.ep": (1,)},
    follows=(
        # Megatron's process groups are one per process, which all models of the pool share
        # (verl/workers/engine/megatron/transformer_impl.py, _init_device_mesh).
        Follower(op=Op.UPDATE_CRITIC, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "vpp", "etp", "kind")),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "kind")),
        # engine_workers.py asserts actor.use_dynamic_bsz == rollout.log_prob_use_dynamic_bsz.
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "zero", "shard", "unit")),
        # V1 gives the critic's engine one token budget for passes and updates.
        Follower(op=Op.VALUES, leader=Op.UPDATE_CRITIC, fields=(*DEGREES, "zero", "shard", "unit", "micro_tokens")),
        # The actor without its adapter computes the reference's log-probs, in its own micro-batches.
        Follower(
            op=Op.REFERENCE_LOGPROB,
            leader=Op.UPDATE_ACTOR,
            fields=("shard", "unit"),
            flag="sharing.reference_adapter",
        ),
        Follower(
            op=Op.REFERENCE_LOGPROB,
            leader=Op.OLD_LOGPROB,
            fields=("micro_batch", "micro_tokens"),
            flag="sharing.reference_adapter",
        ),
    ),
)
