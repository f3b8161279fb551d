"""ROLL 0.3.0 (alibaba/ROLL), the RLVR pipeline: Megatron-LM or FSDP2, and vLLM, each role on GPUs of its choice.

Facts from `roll/configs/{base_config,worker_config}.py`, `roll/pipeline/rlvr/rlvr_pipeline.py`,
`roll/pipeline/base_worker.py`, `roll/distributed/strategy/fsdp2_strategy.py` and `roll/models/model_providers.py`
(Apache-2.0).
"""

from __future__ import annotations

import numpy as np

from ir.backend import DEGREES, Backend, Follower, codes
from ir.batch import SHARING
from ir.frameworks.common import (
    EARLY_REWARD,
    EVEN_MICRO_BATCHES,
    ONE_KIND_OF_DEVICE,
    PASSES,
    TRAINERS,
    UPDATES,
    UPDATES_FILL_THE_POOL,
    WHOLE_NODES,
    even_batches,
)
from ir.frameworks.fsdp import RECOMPUTES_WHOLE_LAYERS, is_fsdp, only_shards
from ir.frameworks.jobs import NO_ADAPTERS, NO_REWARD_MODEL, job_rule
from ir.frameworks.megatron import EVEN_PIPELINE
from ir.graph import Op
from ir.job import Role
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

_ONE, _OFF = (1,), (0,)
_NONE, _ALL = codes("offload", "none", "all")


def _offloads_as_its_trainer(x: Columns, s: Section) -> Mask:
    return np.asarray(x["offload"] == np.where(is_fsdp(x), _NONE, _ALL))


_RULES = (
    # FSDP2's sequence parallelism would shard weights less.
    only_shards(("tp", "pp", "cp", "ep"), *TRAINERS),
    RECOMPUTES_WHOLE_LAYERS,
    # Megatron packs (use_sequence_packing); FSDP2's dynamic batching does not keep minibatches.
    LayoutRule(
        name="roll-fsdp-counts-sequences",
        ops=TRAINERS,
        path="micro_tokens",
        reads=("zero", "micro_tokens"),
        holds=lambda x, s: ~is_fsdp(x) | (x["micro_tokens"] == 0),
        message="must be 0 with FSDP2: zero above 1",
    ),
    # Every step begins with offload_states; FSDP2's leaves the optimizer where it is.
    LayoutRule(
        name="roll-states-leave-before-generation",
        ops=UPDATES,
        path="offload",
        reads=("zero", "offload"),
        holds=_offloads_as_its_trainer,
        message="must be all with Megatron-LM, and none with FSDP2 (zero above 1), whose optimizer stays",
    ),
    # default_value_model_provider: "megatron value model not implemented".
    LayoutRule(
        name="roll-critics-are-fsdp",
        ops=(Op.UPDATE_CRITIC,),
        path="zero",
        reads=("zero",),
        holds=lambda x, s: is_fsdp(x),
        message="must be 2 or 3, which is FSDP2",
    ),
    # validate_megatron_batch_size
    LayoutRule(
        name="roll-replicas-divide-the-prompts",
        ops=(Op.UPDATE_ACTOR,),
        path="dp",
        reads=("dp", "zero"),
        holds=lambda x, s: is_fsdp(x) | (s.setting.job.workload.prompts_per_step % x["dp"] == 0),
        message="must divide the prompts of a step with Megatron-LM: zero of 0 or 1",
    ),
)


def _together(b: Columns, s: Setting) -> Mask | bool:
    return Role.CRITIC in s.job.models and np.asarray(b["place.critic"] == b["place.actor"])


_AT_ONCE = Rule(
    name="roll-updates-run-at-once",
    path="fusions.interleave_updates",
    reads=("fusions.interleave_updates", "place.critic", "place.actor"),
    holds=lambda b, s: np.asarray((b["fusions.interleave_updates"] == 1) == _together(b, s)),
    message="must be true exactly where actor and critic share a pool: both are told to train at the same time",
)

# apply_train_infer_correction_to_batch needs enable_old_logprobs_recompute.
_CORRECTED = Rule(
    name="roll-stale-samples-are-corrected",
    path="fusions.fold_old_logprob",
    reads=("fusions.fold_old_logprob", "staleness"),
    holds=lambda b, s: np.asarray((b["fusions.fold_old_logprob"] == 0) | (b["staleness"] == 0)),
    message="must be false with staleness above 0: importance weights need the old log-probs",
)

_CRITIC_ONCE = job_rule(
    "roll-critic-trains-once",
    lambda s: s.job.workload.epochs == 1 or Role.CRITIC not in s.job.models,
    "the job's workload.epochs must be 1 for ppo with ROLL, whose critic goes over a batch once",
)

ROLL = Backend(
    name="roll",
    what="ROLL 0.3.0, RLVR pipeline: vLLM with Megatron-LM or FSDP2",
    algorithms=("grpo", "dr-grpo", "gspo", "reinforce++", "reinforce++-baseline", "ppo"),
    needs_memory_percent=True,
    engine_experts=True,
    always_in_flight=True,
    values={
        **ONE_KIND_OF_DEVICE,
        **dict.fromkeys(SHARING, _OFF),
        "sync": codes("sync", "reshard", "broadcast"),
        "fusions.rollout_logprob": _OFF,
        "fusions.merge_logprobs": _OFF,
        "fusions.stream": _OFF,
        "update.etp": _ONE,
        "update.precision": codes("precision", "native"),
        # A frozen worker loads its weights for the pass and takes them off the device after it.
        "reference_logprob.offload": codes("offload", "all"),
    },
    rules=(EARLY_REWARD, _AT_ONCE, _CORRECTED, _CRITIC_ONCE, NO_REWARD_MODEL, NO_ADAPTERS),
    layout_rules=(
        WHOLE_NODES,
        UPDATES_FILL_THE_POOL,
        EVEN_MICRO_BATCHES,
        even_batches(*PASSES),
        EVEN_PIPELINE,
        *_RULES,
    ),
    follows=(
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "zero", "unit")),
        Follower(op=Op.VALUES, leader=Op.UPDATE_CRITIC, fields=(*DEGREES, "zero", "unit")),
    ),
)
