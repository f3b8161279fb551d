"""Sections of a plan from a verl configuration: engines, and passes of the actor and reference."""

from __future__ import annotations

from math import ceil
from typing import Any

from executor.imports.verl_keys import Settings
from executor.imports.verl_micro import Layout, held, like, micro
from executor.imports.verl_training import critic, shard, update
from ir.graph import Op
from ir.job import Role
from ir.plan import Generate, Pass, Update

_A = "actor_rollout_ref"
_ACTOR, _ROLLOUT, _REF = f"{_A}.actor", f"{_A}.rollout", f"{_A}.ref"
_REWARDS = ("reward.reward_model", "reward_model")


def sections(layout: Layout) -> dict[str, Any]:
    """The sections of the job's stages, by name."""
    models = layout.job.models
    actor = update(layout, Op.UPDATE_ACTOR, _ACTOR, "fsdp_config")
    found: dict[str, Any] = {"generate": _generate(layout), "update_actor": actor}
    if not layout.steps.rollout_logprob:
        found["old_logprob"] = like(layout, actor, _old(layout, actor), offload="none")
    if Role.REFERENCE in models:
        found["reference_logprob"] = _reference(layout, actor)
    if Role.CRITIC in models:
        found |= critic(layout)
    if Role.REWARD in models:
        found["reward"] = _reward(layout)
    return found


def _generate(layout: Layout) -> Generate:
    s, pool = layout.settings, next(iter(layout.devices))
    engine = s.text(f"{_ROLLOUT}.name", default="vllm")
    if engine != "vllm":
        s.note(f"generate: an engine of {engine} is read as one of vLLM")
    share = f"{_ROLLOUT}.gpu_memory_utilization"
    tp = s.whole(f"{_ROLLOUT}.tensor_model_parallel_size", default=2)
    pp = s.whole(f"{_ROLLOUT}.pipeline_model_parallel_size", default=1)
    ep = s.whole(f"{_ROLLOUT}.expert_parallel_size", default=1)
    ranks = s.whole(f"{_ROLLOUT}.data_parallel_size", default=1)
    if ranks > 1 and ep == 1 and layout.job.actor.is_moe:
        s.note("generate.ep 1: data_parallel_size above 1 without experts to divide is read as single engines")
    engines = max(layout.devices[pool] // (tp * pp), 1)
    started = ceil(ceil(layout.job.generated_sequences) * (1 + layout.steps.staleness) / engines)
    asked = s.whole(f"{_ROLLOUT}.max_num_seqs", default=256)
    if asked > started:
        s.note(f"generate.concurrency {started}: an engine has no more in flight, of max_num_seqs {asked}")
    concurrency = min(asked, started)
    return Generate(
        pool=pool,
        tp=tp,
        pp=pp,
        ep=ep,
        concurrency=concurrency,
        memory_percent=s.percent(share, s.number(share, default=0.5)),
        prefill_tokens=_prefill(s, concurrency),
        precision="fp8" if s.text(f"{_ROLLOUT}.quantization") == "fp8" else "native",
    )


def _prefill(s: Settings, concurrency: int) -> int:
    """Tokens of a step that are left when every running sequence has its one."""
    tokens = s.whole(f"{_ROLLOUT}.max_num_batched_tokens", default=8192)
    if not s.flag(f"{_ROLLOUT}.enable_chunked_prefill", default=True):
        return 0
    return max(tokens - concurrency, 1)


def _reward(layout: Layout) -> Pass:
    s, own = layout.settings, layout.steps.own_reward

    def keys(name: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{kind}.{name}" for prefix in _REWARDS for kind in ("rollout", "inference"))

    tokens = s.whole(*keys("max_num_batched_tokens"), default=8192)
    frees = s.flag(*keys("free_cache_engine"), default=True)
    return Pass(
        pool="reward" if own else layout.train,
        tp=s.whole(*keys("tensor_model_parallel_size"), default=2),
        ep=s.whole(*keys("expert_parallel_size"), default=1),
        micro_tokens=held(layout, tokens, 1, "reward"),
        offload="all" if frees else "none",
    )


def _defaults(layout: Layout) -> dict[str, Any]:
    """What passes take from the actor's keys unless they have their own."""
    s = layout.settings
    tokens = s.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu", default=16384)
    return {"dynamic": s.flag(f"{_ACTOR}.use_dynamic_bsz"), "tokens": tokens}


def _old(layout: Layout, actor: Update) -> dict[str, int]:
    """Micro-batches of the actor's log-probs."""
    return micro(layout, actor, layout.devices[layout.train], f"{_ROLLOUT}.log_prob", **_defaults(layout))


def _reference(layout: Layout, actor: Update) -> Pass:
    """FSDP keeps a frozen model in host memory whatever the configuration says; adapters are just taken off."""
    s, devices = layout.settings, layout.devices[layout.train]
    degrees = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
    s.given(*(f"{_REF}.megatron.{name}_parallel_size" for name in degrees))
    s.given(f"{_REF}.ulysses_sequence_parallel_size", f"{_REF}.fsdp_config.ulysses_sequence_parallel_size")
    s.given(f"{_REF}.fsdp_config.param_offload", f"{_REF}.strategy", f"{_REF}.fsdp_config.strategy")
    waits = s.flag(f"{_REF}.megatron.param_offload", f"{_ACTOR}.megatron.param_offload")
    defaults = _defaults(layout)
    own = s.flag(f"{_REF}.log_prob_use_dynamic_bsz", default=defaults["dynamic"])
    if layout.job.actor.lora_rank:
        s.given(f"{_REF}.log_prob_micro_batch_size_per_gpu", f"{_REF}.log_prob_max_token_len_per_gpu")
        return like(layout, actor, _old(layout, actor), offload="none", whole=True)
    small = micro(layout, actor, devices, f"{_REF}.log_prob", **{**defaults, "dynamic": own})
    away, group = actor.zero >= 2 or waits, shard(s, f"{_REF}.fsdp_config", actor.dp * actor.cp)
    return like(layout, actor, small, offload="all" if away else "none", whole=True, shard=group)
