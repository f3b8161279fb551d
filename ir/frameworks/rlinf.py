"""RLinf 0.3.0 (RLinf/RLinf), reasoning tasks: Megatron-LM or FSDP, and vLLM, all roles on the same GPUs.

Facts from `rlinf/config.py`, `rlinf/utils/placement.py`, `rlinf/workers/megatron_worker.py`,
`rlinf/workers/actor/fsdp_actor_worker.py` and `rlinf/runners/reasoning_runner.py` (Apache-2.0). Its disaggregated mode
trains on sequences while others are still generated and computes old log-probs on GPUs of their own, which no plan
says.
"""

from __future__ import annotations

import numpy as np

from ir.backend import DEGREES, Backend, Follower, codes
from ir.batch import SHARING
from ir.frameworks.common import (
    EARLY_REWARD,
    EVEN_MICRO_BATCHES,
    NATIVE,
    ONE_KIND_OF_DEVICE,
    PASSES,
    UPDATES,
    UPDATES_FILL_THE_POOL,
    WHOLE_NODES,
    even_batches,
)
from ir.frameworks.fsdp import RECOMPUTES_WHOLE_LAYERS, is_fsdp, only_shards
from ir.frameworks.jobs import (
    CRITIC_LIKE_ACTOR,
    NO_ADAPTERS,
    NO_REWARD_MODEL,
    ONE_EPOCH,
    REFERENCE_LIKE_ACTOR,
    job_rule,
)
from ir.frameworks.megatron import EVEN_PIPELINE
from ir.graph import Op
from ir.job import Role
from ir.model import ModelShape
from ir.rules_structure import PLACES
from ir.setting import Columns, LayoutRule, Mask, Rule, Setting

_ONE, _OFF = (1,), (0,)


def model_type(shape: ModelShape) -> str | None:
    """RLinf's name of the architecture, None for one it has none for (`SupportedModel` of config.py)."""
    if shape.mla is not None or shape.o_bias or shape.sinks or shape.windows or shape.norms_per_layer != 2:
        return None
    if shape.qk_norm and not shape.qkv_bias:
        plain_experts = shape.moe is not None and not shape.moe.shared_ffn and not shape.moe.dense_at
        return "qwen3_moe" if plain_experts else "qwen3" if shape.moe is None else None
    return "qwen2.5" if shape.qkv_bias and not shape.qk_norm and shape.moe is None else None


_RULES = (
    only_shards(("tp", "pp", "cp", "ep", "etp"), *UPDATES),
    RECOMPUTES_WHOLE_LAYERS,
    # run_inference hands every rank rollout_batch_size // world_size prompts.
    LayoutRule(
        name="rlinf-fsdp-ranks-divide-the-prompts",
        ops=UPDATES,
        path="dp",
        reads=("zero", "dp"),
        holds=lambda x, s: ~is_fsdp(x) | (s.setting.job.workload.prompts_per_step % x["dp"] == 0),
        message="must divide the prompts of a step with FSDP: zero above 1",
    ),
    # enable_offload of fsdp_actor_worker.py moves weights and optimizer alike.
    LayoutRule(
        name="rlinf-fsdp-offloads-all-or-nothing",
        ops=UPDATES,
        path="offload",
        reads=("zero", "offload"),
        holds=lambda x, s: ~is_fsdp(x) | (x["offload"] != codes("offload", "optimizer")[0]),
        message="must be none or all with FSDP: zero above 1",
    ),
    # The FSDP actor asserts not do_offload, which is set beside a critic; critics are Megatron workers.
    LayoutRule(
        name="rlinf-critics-are-megatrons",
        ops=UPDATES,
        path="zero",
        reads=("zero",),
        holds=lambda x, s: ~is_fsdp(x) | (Role.CRITIC not in s.setting.job.models),
        message="must be 0 or 1, which is Megatron-LM, beside a critic",
    ),
    # config.py: padded_vocab_size is hf_config.vocab_size.
    LayoutRule(
        name="rlinf-tensor-parallel-divides-the-vocabulary",
        ops=UPDATES,
        path="tp",
        reads=("tp",),
        holds=lambda x, s: s.shape.vocab % x["tp"] == 0,
        message="must divide the model's vocabulary, which is not padded",
    ),
)


def _one_pool(b: Columns, s: Setting) -> Mask:
    return np.asarray(np.logical_and.reduce([b[f"place.{role}"] == b["place.rollout"] for role in s.roles]))


_ONE_POOL = Rule(
    name="rlinf-one-pool",
    path="pools",
    reads=PLACES,
    holds=_one_pool,
    message="must be one: RLinf's disaggregated mode overlaps stages that a plan has one after the other",
)

# A visit to the batch gives old log-probs and then, with the reference's weights swapped in, its own.
_MERGED = Rule(
    name="rlinf-reference-goes-with-the-old-logprobs",
    path="fusions.merge_logprobs",
    reads=("fusions.merge_logprobs",),
    holds=lambda b, s: np.asarray(b["fusions.merge_logprobs"] == (Role.REFERENCE in s.job.models)),
    message="must be true with a reference: algorithm.kl_coefficient above 0",
)

_NO_PENALTY = job_rule(
    "rlinf-ppo-has-no-penalty",
    lambda s: not (s.job.algorithm.uses_critic and Role.REFERENCE in s.job.models),
    "the job's algorithm.kl_coefficient must be 0 for ppo with RLinf, whose reward has no KL penalty",
)

_KNOWN_MODEL = job_rule(
    "rlinf-model-is-supported",
    lambda s: model_type(s.job.actor) is not None,
    "the job's models.actor must be of an architecture that RLinf knows: Qwen2.5 or Qwen3",
)

RLINF = Backend(
    name="rlinf",
    what="RLinf 0.3.0, reasoning tasks: vLLM with Megatron-LM or FSDP",
    algorithms=("grpo", "reinforce++", "reinforce++-baseline", "ppo"),
    needs_memory_percent=True,
    reference_with_actor=True,
    values={
        **ONE_KIND_OF_DEVICE,
        **NATIVE,
        **dict.fromkeys(SHARING, _OFF),
        "staleness": _OFF,
        "in_flight": _OFF,
        "sync": codes("sync", "reshard"),
        "fusions.fold_old_logprob": _OFF,
        "fusions.stream": _OFF,
        "fusions.interleave_updates": _OFF,
        # A collocated engine takes tensor_parallel_size GPUs, and nothing else reaches vLLM.
        "generate.pp": _ONE,
        "generate.ep": _ONE,
        # Workers read the first model chunk alone.
        "update.vpp": _ONE,
        "reference_logprob.offload": codes("offload", "all"),
    },
    rules=(
        _ONE_POOL,
        EARLY_REWARD,
        _MERGED,
        ONE_EPOCH,
        NO_REWARD_MODEL,
        NO_ADAPTERS,
        REFERENCE_LIKE_ACTOR,
        CRITIC_LIKE_ACTOR,
        _NO_PENALTY,
        _KNOWN_MODEL,
    ),
    layout_rules=(
        WHOLE_NODES,
        UPDATES_FILL_THE_POOL,
        EVEN_MICRO_BATCHES,
        even_batches(*PASSES),
        EVEN_PIPELINE,
        *_RULES,
    ),
    follows=(
        Follower(op=Op.UPDATE_CRITIC, leader=Op.UPDATE_ACTOR, fields=("micro_batch", "micro_tokens")),
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "zero", "unit", "micro_tokens")),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, "zero", "unit", "micro_tokens")),
        Follower(op=Op.VALUES, leader=Op.UPDATE_CRITIC, fields=(*DEGREES, "zero", "unit", "micro_tokens")),
        Follower(op=Op.VALUES, leader=Op.OLD_LOGPROB, fields=("micro_batch", "micro_tokens")),
    ),
)
