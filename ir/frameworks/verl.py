"""verl 0.9.1 with its V1 trainer: FSDP or Megatron-Core, and vLLM engines.

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
from ir.frameworks.common import ONE_KIND_OF_DEVICE, UPDATES, UPDATES_FILL_THE_POOL, WHOLE_NODES, together
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS, Update
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

MAX_LORA_RANK = 512
"""Of vLLM, which `validate_config` asks (verl/workers/rollout/vllm_rollout/utils.py)."""

_PASSES = (Op.REFERENCE_LOGPROB, Op.OLD_LOGPROB, Op.VALUES)
"""Those that run on a training engine; a reward model is served by engines of its own."""
_TRAINED = (*_PASSES, *UPDATES)
_SERVED = (Op.GENERATE, Op.REWARD)

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    # verl/workers/config/rollout.py raises NotImplementedError above 1.
    "generate.pp": (1,),
    "reward.pp": (1,),
    "reward.cp": (1,),
    "reward.zero": (0,),
    # `max_num_batched_tokens` of the engines that serve it.
    "reward.micro_batch": (0,),
    # `trainer.v1` syncs through a collective (`checkpoint_engine.backend=nccl`) or, on shared devices, in place.
    "sync": codes("sync", "reshard", "broadcast"),
    **{
        name: (0,)
        for name in (
            *(f"fusions.{name}" for name in ("fold_old_logprob", "merge_logprobs", "stream", "interleave_updates")),
            *(f"sharing.{name}" for name in ("critic_trunk", "reward_trunk")),
        )
    },
}


def _verified(s: Setting) -> bool:
    return Op.REWARD in s.ops and Role.REWARD not in s.job.models


def _reward_is_served(b: Columns, s: Setting) -> Mask | bool:
    if Role.REWARD not in s.job.models:
        return True
    own = b["place.reward"] == ROLES.index("reward")
    shared = (b["place.actor"] == ROLES.index("rollout")) & (b["place.reward"] == b["place.actor"])
    # Groups are filtered by their rewards as they finish, so these cannot wait (trainer_base.py).
    return np.asarray(own | (shared & (not s.job.algorithm.dynamic_sampling)))


def _adapter(b: Columns, s: Setting) -> Mask:
    lora = s.job.actor.lora_rank > 0 and Role.REFERENCE in s.job.models
    return np.asarray(b["sharing.reference_adapter"] == int(lora))


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
    Rule(
        name="verl-verifies-as-it-generates",
        path="fusions.reward_with_generation",
        reads=("fusions.reward_with_generation",),
        holds=lambda b, s: np.asarray(b["fusions.reward_with_generation"] == int(_verified(s))),
        message="must be true with a verifier, which scores every response when it is finished",
    ),
    Rule(
        name="verl-takes-the-adapter-off",
        path="sharing.reference_adapter",
        reads=("sharing.reference_adapter",),
        holds=_adapter,
        message="must be true exactly if the actor trains adapters: its reference is the actor without them",
    ),
    Rule(
        name="verl-has-one-model-for-actor-and-reference",
        path="generate.pool",
        reads=(),
        holds=lambda b, s: _has_the_actors_shape(s),
        message="the job's reference must be of the actor's shape, for actor_rollout_ref.model gives both",
    ),
    Rule(
        name="verl-uses-what-it-generates",
        path="generate.pool",
        reads=(),
        holds=lambda b, s: s.job.workload.oversampling == 1,
        message="the job's workload.oversampling must be 1: vLLM rollout abandons no response",
    ),
    Rule(
        name="verl-serves-the-adapters",
        path="generate.pool",
        reads=(),
        holds=lambda b, s: s.job.actor.lora_rank <= MAX_LORA_RANK,
        message=f"the job's models.actor.lora_rank must not exceed {MAX_LORA_RANK}, the most that vLLM serves",
    ),
)


def _fsdp(x: Columns, s: Section) -> Mask:
    return np.asarray(x["zero"] >= 2)


def _only_states(x: Columns, s: Section) -> Mask:
    degrees = ("tp", "pp", "ep", *(("vpp", "etp") if SECTIONS[s.op] is Update else ()))
    return np.asarray(~_fsdp(x, s) | np.logical_and.reduce([x[name] == 1 for name in degrees]))


def _ulysses(x: Columns, s: Section) -> Mask:
    keys = (s.shape.kv_heads % x["cp"] == 0) | (x["cp"] % s.shape.kv_heads == 0)
    return np.asarray(~_fsdp(x, s) | ((s.shape.heads % x["cp"] == 0) & keys))


def _replicas(x: Columns, s: Section) -> Mask:
    if s.op in UPDATES:
        return np.asarray(x["dp"])
    return np.asarray(np.maximum(x["devices"] // (x["tp"].astype(np.int64) * x["pp"] * x["cp"]), 1))


def _whole_micro_batches(x: Columns, s: Section) -> Mask:
    """A pass of `separate_async` sees a minibatch at a time, so that its share of one is divided, as an update's."""
    workload = s.setting.job.workload
    replicas, micro = _replicas(x, s), np.maximum(x["micro_batch"], 1)
    minibatch = workload.sequences // workload.minibatches
    return np.asarray((x["micro_batch"] == 0) | (minibatch % (replicas * micro) == 0))


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
    LayoutRule(
        name="fsdp-divides-states-alone",
        ops=_TRAINED,
        path="zero",
        reads=("zero", "tp", "pp", "ep", "vpp", "etp"),
        holds=_only_states,
        message="above 1 is FSDP, which needs tp, pp, vpp, ep and etp of 1",
    ),
    LayoutRule(
        name="fsdp-recomputes-whole-layers",
        ops=UPDATES,
        path="recompute",
        reads=("zero", "recompute"),
        holds=lambda x, s: ~_fsdp(x, s) | (x["recompute"] != codes("recompute", "selective")[0]),
        message="must be none or full with FSDP (zero above 1)",
    ),
    LayoutRule(
        name="fsdp-trains-in-16-bits",
        ops=UPDATES,
        path="precision",
        reads=("zero", "precision"),
        holds=lambda x, s: ~_fsdp(x, s) | (x["precision"] == 0),
        message="must be native with FSDP (zero above 1)",
    ),
    # verl/models/transformers/monkey_patch.py; passes have the degree of the update that they follow.
    LayoutRule(
        name="ulysses-divides-the-heads",
        ops=UPDATES,
        path="cp",
        reads=("zero", "cp"),
        holds=_ulysses,
        message="must divide the attention heads, and divide the KV heads or be a multiple of them, with FSDP",
    ),
    # verl/workers/engine/utils.py, prepare_micro_batches.
    LayoutRule(
        name="micro-batches-are-whole",
        ops=_TRAINED,
        path="micro_batch",
        reads=("micro_batch", "devices", "tp", "pp", "cp", "dp"),
        holds=_whole_micro_batches,
        message="must divide a replica's sequences of a minibatch",
    ),
    # verl/utils/config.py, validate_config: without dynamic batches FSDP counts every device, whatever the context
    # parallelism.
    LayoutRule(
        name="devices-divide-the-batch",
        ops=(Op.UPDATE_ACTOR,),
        path="micro_batch",
        reads=("micro_batch", "zero", "devices"),
        holds=lambda x, s: (
            ~_fsdp(x, s)
            | (x["micro_batch"] == 0)
            | (s.setting.job.workload.sequences % np.maximum(x["devices"], 1) == 0)
        ),
        message="above 0 needs a step's sequences to be a multiple of the pool's devices",
    ),
    # An engine of vLLM is tp devices; `data_parallel_size` of them that share experts are one replica, and
    # `expert_parallel_size` is 1 or all of its devices (verl/workers/config/rollout.py).
    LayoutRule(
        name="experts-over-whole-engines",
        ops=_SERVED,
        path="ep",
        reads=("tp", "ep"),
        holds=lambda x, s: (x["ep"] == 1) | (x["ep"] % x["tp"] == 0),
        message="must be 1 or a multiple of tp: tensor_model_parallel_size x data_parallel_size",
    ),
    LayoutRule(
        name="engines-fill-nodes",
        ops=_SERVED,
        path="tp",
        reads=("tp", "ep", "devices", "group"),
        holds=_whole_engines,
        message="and ep must divide the pool, and divide a node or be whole nodes",
    ),
    # verl/workers/engine/fsdp/transformer_impl.py: a forward-only engine always has CPUOffload.
    LayoutRule(
        name="fsdp-keeps-the-reference-in-host-memory",
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
    extras=("update.shard",),
    algorithms=_ALGORITHMS,
    values=_VALUES,
    rules=_RULES,
    layout_rules=_LAYOUT_RULES,
    follows=(
        # Megatron's process groups are one per process, which all models of the pool share
        # (verl/workers/engine/megatron/transformer_impl.py, _init_device_mesh).
        Follower(op=Op.UPDATE_CRITIC, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "vpp", "etp", "kind")),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "kind")),
        # engine_workers.py asserts actor.use_dynamic_bsz == rollout.log_prob_use_dynamic_bsz.
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "zero", "unit")),
        # V1 gives the critic's engine one token budget for passes and updates.
        Follower(op=Op.VALUES, leader=Op.UPDATE_CRITIC, fields=(*DEGREES, "zero", "unit", "micro_tokens")),
        # The actor without its adapter computes the reference's log-probs, in its own micro-batches.
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR, fields=("unit",), flag="sharing.reference_adapter"),
        Follower(
            op=Op.REFERENCE_LOGPROB,
            leader=Op.OLD_LOGPROB,
            fields=("micro_batch", "micro_tokens"),
            flag="sharing.reference_adapter",
        ),
    ),
)
