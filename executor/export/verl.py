"""verl 0.9.1: a script that starts `verl.trainer.main_ppo` with Hydra overrides: the V1 trainer and vLLM engines, or
SGLang's where only changed values are sent."""

from __future__ import annotations

from executor.export.entries import entry, overrides, shell_script
from executor.export.production import Files, Production
from executor.export.verl_training import Entries, is_fsdp, lora, micro, training
from ir.graph import Op
from ir.job import Role
from ir.plan import Generate, Pass, Update

FILE = "run.sh"
COMMAND = ("python3", "-m", "verl.trainer.main_ppo")

_A = "actor_rollout_ref"
_ACTOR, _ROLLOUT, _REF, _REWARD = f"{_A}.actor", f"{_A}.rollout", f"{_A}.ref", "reward.reward_model"

_TO_SET = (
    "verl 0.9.1, V1 trainer. To be set by you; what the script is given is added, and the last value of a key counts:",
    "  data.train_files, data.val_files   parquet files; the paths here are placeholders",
    "  reward.custom_reward_function.path and .name   unless verl has a rule for your data source",
    "  trainer.default_local_dir, trainer.total_epochs, trainer.save_freq, trainer.logger",
)

_FP8 = ("  NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1   in the environment of every node, which training in fp8 needs",)

_ESTIMATORS = {
    "ppo": "gae",
    "rloo": "rloo",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++-baseline": "reinforce_plus_plus_baseline",
}
"""Of `algorithm.adv_estimator`; grpo for the others, which differ by what follows."""

_VARIANTS: dict[str, dict[str, object]] = {
    "dr-grpo": {
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "dapo": {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "reward"},
    "gspo": {f"{_ACTOR}.policy_loss.loss_mode": "gspo", f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {f"{_ACTOR}.policy_loss.loss_mode": "cispo"},
}


def write(production: Production) -> Files:
    """The plan as a launch script. The plan must be legal for the backend `verl`."""
    parts = (_data, _algorithm, _placement, _asynchrony, _models, _engine, _actor, _old, _reference, _critic, _reward)
    entries = [found for part in parts for found in part(production)]
    return {FILE: shell_script((*production.header, "", *_to_set(production)), COMMAND, overrides(entries))}


def _to_set(p: Production) -> tuple[str, ...]:
    updates = (p.plan.update_actor, p.plan.update_critic)
    fp8 = any(update is not None and update.precision == "fp8" for update in updates)
    return (*_TO_SET, *_FP8) if fp8 else _TO_SET


def _data(p: Production) -> Entries:
    workload = p.job.workload
    yield entry("data.train_files", "/path/to/train.parquet", "placeholder")
    yield entry("data.val_files", "/path/to/val.parquet", "placeholder")
    yield entry("data.max_prompt_length", workload.max_prompt_tokens, "job: workload.max_prompt_tokens")
    yield entry("data.max_response_length", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry("data.train_batch_size", workload.prompts_per_step, "job: workload.prompts_per_step")
    minibatch = workload.prompts_per_step // workload.minibatches
    yield entry(f"{_ACTOR}.ppo_mini_batch_size", minibatch, "job: workload.prompts_per_step / minibatches (prompts)")
    yield entry(f"{_ACTOR}.ppo_epochs", workload.epochs, "job: workload.epochs")
    yield entry(f"{_ROLLOUT}.n", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    yield entry(f"{_ROLLOUT}.temperature", workload.temperature, "job: workload.temperature")
    if workload.turns is not None:
        yield entry(f"{_ROLLOUT}.multi_turn.enable", True, "job: workload.turns; set its tools")


def _algorithm(p: Production) -> Entries:
    algorithm, why = p.job.algorithm, "job: algorithm.name"
    yield entry("algorithm.adv_estimator", _ESTIMATORS.get(algorithm.name, "grpo"), why)
    for key, value in _VARIANTS.get(algorithm.name, {}).items():
        yield entry(key, value, why)
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        yield entry(f"{_ACTOR}.{key}", algorithm.clip, "job: algorithm.clip")
    for model in [_ACTOR, "critic"] if algorithm.uses_critic else [_ACTOR]:
        yield entry(f"{model}.optim.lr", algorithm.learning_rate, "job: algorithm.learning_rate")
        yield entry(f"{model}.optim.clip_grad", algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")
    coefficient, why = algorithm.kl_coefficient, "job: algorithm.kl_coefficient"
    in_reward = coefficient > 0 and algorithm.kl_in_reward
    in_loss = coefficient > 0 and not in_reward
    yield entry("algorithm.use_kl_in_reward", in_reward, f"{why} and name")
    yield entry(f"{_ACTOR}.use_kl_loss", in_loss, f"{why} and name")
    if coefficient > 0:
        yield entry("algorithm.kl_ctrl.kl_coef" if in_reward else f"{_ACTOR}.kl_loss_coef", coefficient, why)


def _placement(p: Production) -> Entries:
    train, rollout = p.plan.update_actor.pool, p.plan.generate.pool
    yield entry("trainer.nnodes", p.nodes(train), f"plan: pool {train}")
    yield entry("trainer.n_gpus_per_node", p.per_node(train), f"plan: pool {train}")
    if not p.plan.colocated:
        yield entry(f"{_A}.hybrid_engine", False, "plan: generation on a pool of its own")
        yield entry(f"{_ROLLOUT}.nnodes", p.nodes(rollout), f"plan: pool {rollout}")
        yield entry(f"{_ROLLOUT}.n_gpus_per_node", p.per_node(rollout), f"plan: pool {rollout}")
        sends = "delta_sharded" if p.plan.sync == "delta" else "nccl"
        yield entry(f"{_ROLLOUT}.checkpoint_engine.backend", sends, "plan: sync")


def _asynchrony(p: Production) -> Entries:
    plan, workload = p.plan, p.job.workload
    mode, v1 = "sync" if plan.colocated else "separate_async", "trainer.v1"
    yield entry(f"{v1}.trainer_mode", mode, "plan: pools")
    if not plan.colocated:
        yield entry(
            f"{v1}.separate_async.parameter_sync_step",
            workload.minibatches,
            "rule: data.train_batch_size / ppo_mini_batch_size; weights go to the engines once a step",
        )
        yield entry(f"{v1}.separate_async.num_warmup_batches", plan.staleness, "plan: staleness, steps begun ahead")
        yield entry(
            f"{v1}.sampler.max_off_policy_threshold",
            plan.staleness + 1,
            "plan: staleness; versions, the newest included",
        )
        yield entry(f"{v1}.sampler.max_off_policy_strategy", "wait", "plan: staleness is a bound; no sample is dropped")
    if plan.fusions.rollout_logprob:
        yield entry("algorithm.rollout_correction.bypass_mode", True, "plan: fusions.rollout_logprob")
    elif plan.staleness:
        yield entry("algorithm.rollout_correction.rollout_is", "token", "plan: staleness")
        cap = p.job.algorithm.max_importance_weight
        yield entry("algorithm.rollout_correction.rollout_is_threshold", cap, "job: algorithm.max_importance_weight")


def _models(p: Production) -> Entries:
    actor = p.plan.update_actor
    yield entry(f"{_A}.model.path", p.model(Role.ACTOR), "job: models.actor")
    yield entry(f"{_A}.model.use_remove_padding", True, "rule: packed sequences, which context parallelism needs")
    yield from lora(f"{_A}.model", p.job.actor, actor, "job: models.actor.lora_rank")
    if p.job.actor.lora_rank:
        yield entry(f"{_ROLLOUT}.load_format", "safetensors", "rule: only adapters are sent to the engines")


def _engine(p: Production) -> Entries:
    engine = p.plan.generate
    longest = p.job.workload.max_tokens
    if p.plan.sync == "delta":
        yield entry(f"{_ROLLOUT}.name", "sglang", "rule: the engine that takes changed values, plan: sync")
        yield from _sglang(engine)
    else:
        yield entry(f"{_ROLLOUT}.name", "vllm", "the backend's engine")
    yield from _degrees(_ROLLOUT, engine, "generate")
    yield entry(f"{_ROLLOUT}.max_num_seqs", engine.concurrency, "plan: generate.concurrency")
    yield entry(f"{_ROLLOUT}.gpu_memory_utilization", engine.memory_percent / 100, "plan: generate.memory_percent")
    yield entry(f"{_ROLLOUT}.max_model_len", longest, "job: longest prompt and response")
    yield entry(f"{_ROLLOUT}.enable_chunked_prefill", engine.prefill_tokens > 0, "plan: generate.prefill_tokens")
    why = "plan: generate.prefill_tokens + concurrency" if engine.prefill_tokens else "rule: whole prompts"
    yield entry(f"{_ROLLOUT}.max_num_batched_tokens", p.step_tokens, why)
    if engine.precision == "fp8":
        yield entry(f"{_ROLLOUT}.quantization", "fp8", "plan: generate.precision")


def _sglang(engine: Generate) -> Entries:
    """What verl does not hand on to SGLang of its own keys."""
    chunk = engine.prefill_tokens + engine.concurrency if engine.prefill_tokens else -1
    keys = f"+{_ROLLOUT}.engine_kwargs.sglang"
    yield entry(f"{keys}.chunked_prefill_size", chunk, "plan: generate.prefill_tokens and a token a sequence")
    yield entry(f"{keys}.enable_mixed_chunk", engine.prefill_tokens > 0, "plan: generate.prefill_tokens")


def _degrees(rollout: str, section: Generate | Pass, name: str) -> Entries:
    """Of engines; those that share experts are ranks of one with data parallelism."""
    yield entry(f"{rollout}.tensor_model_parallel_size", section.tp, f"plan: {name}.tp")
    if section.ep > 1:
        yield entry(f"{rollout}.data_parallel_size", section.ep // section.tp, f"plan: {name}.ep / tp")
        yield entry(f"{rollout}.expert_parallel_size", section.ep, f"plan: {name}.ep")


# Training and passes


def _actor(p: Production) -> Entries:
    update = p.plan.update_actor
    engine = "dp" if is_fsdp(update) else "megatron"
    yield entry("model_engine", engine, "plan: update_actor.zero; 2 and 3 are FSDP")
    yield from training(p, Op.UPDATE_ACTOR, _ACTOR, "fsdp_config", f"{_A}.model")
    yield entry(f"{_ACTOR}.use_dynamic_bsz", update.micro_tokens > 0, "plan: update_actor.micro_tokens")
    yield from micro(
        update, f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ACTOR}.ppo_micro_batch_size_per_gpu", Op.UPDATE_ACTOR
    )


def _old(p: Production) -> Entries:
    """Log-probs of the actor, and of the reference where that is the actor without its adapter."""
    adapter = p.plan.reference_logprob if p.plan.sharing.reference_adapter else None
    section: Pass | Update = p.plan.old_logprob or adapter or p.plan.update_actor
    op = Op.OLD_LOGPROB if p.plan.old_logprob else Op.REFERENCE_LOGPROB if adapter else Op.UPDATE_ACTOR
    why = "rule: as actor.use_dynamic_bsz"
    yield entry(f"{_ROLLOUT}.log_prob_use_dynamic_bsz", p.plan.update_actor.micro_tokens > 0, why)
    names = f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    yield from micro(section, *names, op)


def _reference(p: Production) -> Entries:
    section, update = p.plan.reference_logprob, p.plan.update_actor
    if section is None:
        return
    if p.plan.sharing.reference_adapter:
        if not update.micro_tokens:
            yield entry(f"{_REF}.log_prob_micro_batch_size_per_gpu", section.micro_batch, "rule: asked for; not used")
        return
    dynamic, op = section.micro_tokens > 0, Op.REFERENCE_LOGPROB
    yield entry(f"{_REF}.log_prob_use_dynamic_bsz", dynamic, "plan: reference_logprob.micro_tokens")
    yield from micro(section, f"{_REF}.log_prob_max_token_len_per_gpu", f"{_REF}.log_prob_micro_batch_size_per_gpu", op)
    if dynamic and not update.micro_tokens:
        yield entry(f"{_REF}.log_prob_micro_batch_size_per_gpu", 1, "rule: asked for; not used")
    if is_fsdp(update):
        degree = update.cp
        yield entry(f"{_REF}.fsdp_config.ulysses_sequence_parallel_size", degree, "plan: reference_logprob.cp")
        size = section.shard or -1
        yield entry(f"{_REF}.fsdp_config.fsdp_size", size, "plan: reference_logprob.shard; -1: over all replicas")
    else:
        yield entry(f"{_REF}.megatron.param_offload", section.offload == "all", "plan: reference_logprob.offload")


def _critic(p: Production) -> Entries:
    update, values = p.plan.update_critic, p.plan.values
    if update is None:
        return
    assert values is not None, "shared trunks are not legal for verl"
    yield entry("critic.model.path", p.model(Role.CRITIC), "job: models.critic")
    yield from lora("critic.model", p.job.models[Role.CRITIC], update, "job: models.critic.lora_rank")
    yield from training(p, Op.UPDATE_CRITIC, "critic", "fsdp", "critic.model")
    dynamic, op = update.micro_tokens > 0, Op.UPDATE_CRITIC
    yield entry("critic.use_dynamic_bsz", dynamic, "plan: update_critic.micro_tokens")
    yield from micro(update, "critic.ppo_max_token_len_per_gpu", "critic.ppo_micro_batch_size_per_gpu", op)
    # The V1 trainer reads the critic's micro-batches from its engine, and one budget for passes and updates.
    why = "rule: what the V1 trainer reads"
    if dynamic:
        yield entry("+critic.ppo_infer_max_token_len_per_gpu", update.micro_tokens, why)
        return
    engine = "critic.fsdp" if is_fsdp(update) else "critic.megatron"
    yield entry(f"+{engine}.use_dynamic_bsz", False, why)
    yield entry(f"+{engine}.micro_batch_size_per_gpu", update.micro_batch, why)
    yield entry(f"+{engine}.infer_micro_batch_size_per_gpu", values.micro_batch, "plan: values.micro_batch")


def _reward(p: Production) -> Entries:
    section = p.plan.reward
    if section is None:
        return
    own = section.pool != p.plan.update_actor.pool
    rollout, longest = f"{_REWARD}.rollout", p.job.workload.max_tokens
    yield entry(f"{_REWARD}.enable", True, "job: models.reward")
    yield entry(f"{_REWARD}.model_path", p.model(Role.REWARD), "job: models.reward")
    yield entry(f"{_REWARD}.enable_resource_pool", own, "plan: reward.pool")
    if own:
        yield entry(f"{_REWARD}.nnodes", p.nodes(section.pool), f"plan: pool {section.pool}")
        yield entry(f"{_REWARD}.n_gpus_per_node", p.per_node(section.pool), f"plan: pool {section.pool}")
    yield entry(f"{rollout}.name", "vllm", "the backend's engine")
    yield from _degrees(rollout, section, "reward")
    yield entry(f"{rollout}.max_num_batched_tokens", section.micro_tokens, "plan: reward.micro_tokens")
    yield entry(f"{rollout}.max_num_seqs", min(1024, section.micro_tokens), "rule: at most max_num_batched_tokens")
    yield entry(f"{rollout}.max_model_len", longest, "job: longest prompt and response")
    yield entry(f"{rollout}.prompt_length", longest, "job: longest prompt and response")
    yield entry(f"{rollout}.free_cache_engine", section.offload == "all", "plan: reward.offload")
