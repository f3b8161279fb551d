"""Plans as NeMo-RL configurations: YAML that inherits from the base configuration of GRPO or PPO, as of September 2026
(examples/configs/grpo_math_1B.yaml and ppo_math_1B.yaml)."""

from __future__ import annotations

from collections.abc import Iterator

from executor.export.entries import Entry, entry, shell_script, yaml
from executor.export.production import Files, Production
from ir.frameworks.megatron import NAMES
from ir.job import Role
from ir.plan import Pass, Update

_TO_SET = (
    "Copy nemo_rl.yaml to examples/configs of NeMo-RL and start it there: it inherits from a file beside it.",
    "Still to set: data and env (data set and verifier), checkpointing, logger, the number of steps.",
)


def write(production: Production) -> Files:
    """The configuration and a script that starts it."""
    header = (*production.header, "", *_TO_SET)
    ppo = production.job.algorithm.uses_critic
    command = ["uv", "run", f"examples/run_{'ppo' if ppo else 'grpo'}.py"]
    script = shell_script(header, command, [("--config examples/configs/nemo_rl.yaml", "")])
    return {"nemo_rl.yaml": yaml(header, list(_entries(production))), "run.sh": script}


def _entries(p: Production) -> Iterator[Entry]:
    section = "ppo" if p.job.algorithm.uses_critic else "grpo"
    yield entry("defaults", f"{section}_math_1B.yaml", "base configuration")
    yield from _step(p, section)
    yield from _loss(p)
    yield from _policy(p)
    yield from _generation(p)
    if p.plan.update_critic is not None:
        yield from _value(p, p.plan.update_critic)
    yield entry("data.max_input_seq_length", p.job.workload.max_prompt_tokens, "job: workload.max_prompt_tokens")
    yield from _cluster(p)


def _step(p: Production, section: str) -> Iterator[Entry]:
    workload, plan = p.job.workload, p.plan
    yield entry(f"{section}.num_prompts_per_step", workload.prompts_per_step, "job: workload.prompts_per_step, prompts")
    yield entry(
        f"{section}.num_generations_per_prompt", workload.samples_per_prompt, "job: workload.samples_per_prompt"
    )
    yield entry(f"{section}.seed", workload.seed, "job: workload.seed")
    skipped = plan.reference_logprob is None
    yield entry(f"{section}.skip_reference_policy_logprobs_calculation", skipped, "job: algorithm.kl_coefficient")
    yield entry(f"{section}.seq_logprob_error_threshold", None, "rule: a threshold asks for log-probs of its own")
    stale = plan.staleness > 0
    ahead = f"{section}.async_{section}"
    yield entry(f"{ahead}.enabled", stale, "plan: staleness")
    yield entry(f"{ahead}.max_trajectory_age_steps", max(plan.staleness, 1), "plan: staleness, steps; at least 1")
    yield entry(f"{ahead}.in_flight_weight_updates", plan.in_flight, "plan: in_flight")
    if section == "ppo":
        yield entry("ppo.ppo_epochs", workload.epochs, "job: workload.epochs")
    for name in ("reward_shaping", "reward_scaling"):
        yield entry(f"{section}.{name}.enabled", False, "rule: not in asynchronous runs, and no part of the job")
    yield from _advantages(p)


def _advantages(p: Production) -> Iterator[Entry]:
    name, why = p.job.algorithm.name, f"job: algorithm {p.job.algorithm.name}"
    if name == "ppo":
        return
    if name.startswith("reinforce++"):
        yield entry("grpo.adv_estimator.name", "reinforce_plus_plus", why)
        yield entry("grpo.adv_estimator.minus_baseline", name.endswith("baseline"), why)
    else:
        yield entry("grpo.normalize_rewards", name not in ("dr-grpo", "rloo"), why)
        yield entry("grpo.use_leave_one_out_baseline", name == "rloo", why)
    useful = p.job.workload.useful_groups
    yield entry("grpo.use_dynamic_sampling", useful is not None, why)
    if useful is not None:
        yield entry("grpo.batch_multiplier", round(1 / useful, 4), "job: workload.useful_groups")


def _loss(p: Production) -> Iterator[Entry]:
    algorithm, stale = p.job.algorithm, p.plan.staleness > 0
    why = f"job: algorithm {algorithm.name}"
    yield entry("loss_fn.reference_policy_kl_penalty", algorithm.kl_coefficient, "job: algorithm.kl_coefficient")
    in_reward = algorithm.name in ("ppo", "reinforce++", "reinforce++-baseline") and algorithm.kl_coefficient > 0
    yield entry("loss_fn.use_kl_in_reward", in_reward, why)
    yield entry("loss_fn.ratio_clip_min", algorithm.clip, "job: algorithm.clip")
    yield entry("loss_fn.ratio_clip_max", algorithm.clip, "job: algorithm.clip")
    yield entry("loss_fn.use_importance_sampling_correction", stale, "plan: staleness")
    cap = algorithm.max_importance_weight
    yield entry("loss_fn.truncated_importance_sampling_type", "tis" if stale else None, "plan: staleness")
    why_cap = "job: algorithm.max_importance_weight"
    yield entry("loss_fn.truncated_importance_sampling_ratio", cap if stale else None, why_cap)
    on_policy = p.plan.fusions.fold_old_logprob
    yield entry("loss_fn.force_on_policy_ratio", on_policy, "plan: fusions.fold_old_logprob")
    if algorithm.name in ("gspo", "cispo"):
        yield entry("loss_fn.sequence_level_importance_ratios", algorithm.name == "gspo", why)
        yield entry("loss_fn.token_level_loss", algorithm.name != "gspo", why)
        yield entry("loss_fn.use_cispo", algorithm.name == "cispo", why)


# Workers that train


def _policy(p: Production) -> Iterator[Entry]:
    plan, update = p.plan, p.plan.update_actor
    passing = plan.old_logprob or plan.reference_logprob
    yield from _workers("policy", p, Role.ACTOR, update, passing)
    visit = passing.micro_batch if passing is not None else update.micro_batch
    yield entry("policy.logprob_batch_size", max(visit, 1), "plan: old_logprob.micro_batch; 1 if packed")
    away = update.offload == "optimizer"
    yield entry(
        "policy.offload_optimizer_for_logprob", away, "plan: update_actor.offload; all if colocated in any case"
    )
    rank = p.job.actor.lora_rank
    if rank:
        adapters = "megatron_cfg.peft" if _megatron(update) else "dtensor_cfg.lora_cfg"
        yield entry(f"policy.{adapters}.enabled", True, "job: models.actor.lora_rank")
        yield entry(f"policy.{adapters}.dim", rank, "job: models.actor.lora_rank")
        if not _megatron(update):
            yield entry(f"policy.{adapters}.use_triton", update.tp == 1, "rule: false with tensor parallelism")


def _value(p: Production, update: Update) -> Iterator[Entry]:
    yield from _workers("value", p, Role.CRITIC, update, p.plan.values)


def _workers(key: str, p: Production, role: Role, update: Update, passing: Pass | None) -> Iterator[Entry]:
    section, workload, megatron = f"update_{role.value}", p.job.workload, _megatron(update)
    yield entry(f"{key}.model_name", p.model(role), f"job: models.{role.value}")
    batch = workload.sequences // workload.minibatches
    yield entry(f"{key}.train_global_batch_size", batch, "job: sequences / minibatches, samples")
    yield entry(
        f"{key}.train_micro_batch_size", max(update.micro_batch, 1), f"plan: {section}.micro_batch; 1 if packed"
    )
    yield entry(f"{key}.max_total_sequence_length", workload.max_tokens, "job: prompt and response")
    multiple = update.tp * (2 * update.cp if update.cp > 1 else 1)
    yield entry(f"{key}.make_sequence_length_divisible_by", multiple, "rule: tp, times 2 cp with context parallelism")
    yield entry(f"{key}.max_grad_norm", p.job.algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")
    yield entry(f"{key}.dtensor_cfg.enabled", not megatron, f"plan: {section}.zero {update.zero}")
    yield entry(f"{key}.megatron_cfg.enabled", megatron, f"plan: {section}.zero {update.zero}")
    yield from _megatron_keys(key, p, update, section) if megatron else _dtensor_keys(key, p, update, section)
    yield entry(f"{key}.dynamic_batching.enabled", False, "rule: not with packing")
    packed = update.micro_tokens > 0
    yield entry(f"{key}.sequence_packing.enabled", packed, f"plan: {section}.micro_tokens")
    if packed:
        visit = passing.micro_tokens if passing is not None else update.micro_tokens
        why = "micro_tokens x cp, tokens of a replica"
        yield entry(
            f"{key}.sequence_packing.train_mb_tokens", update.micro_tokens * update.cp, f"plan: {section}.{why}"
        )
        yield entry(f"{key}.sequence_packing.logprob_mb_tokens", visit * update.cp, f"plan: of its passes, {why}")


def _megatron(update: Update) -> bool:
    return update.zero < 2


def _dtensor_keys(key: str, p: Production, update: Update, section: str) -> Iterator[Entry]:
    yield entry(f"{key}.dtensor_cfg.tensor_parallel_size", update.tp, f"plan: {section}.tp")
    yield entry(f"{key}.dtensor_cfg.context_parallel_size", update.cp, f"plan: {section}.cp")
    yield entry(f"{key}.dtensor_cfg.sequence_parallel", False, "rule: not with context parallelism")
    recompute = update.recompute != "none"
    yield entry(f"{key}.dtensor_cfg.activation_checkpointing", recompute, f"plan: {section}.recompute")
    yield entry(f"{key}.optimizer.kwargs.lr", p.job.algorithm.learning_rate, "job: algorithm.learning_rate")


def _megatron_keys(key: str, p: Production, update: Update, section: str) -> Iterator[Entry]:
    prefix = f"{key}.megatron_cfg"
    for axis, name in NAMES.items():
        yield entry(f"{prefix}.{name}", getattr(update, axis), f"plan: {section}.{axis}")
    yield entry(f"{prefix}.sequence_parallel", update.tp > 1, "rule: with tensor parallelism")
    recompute = update.recompute
    yield entry(f"{prefix}.activation_checkpointing", recompute != "none", f"plan: {section}.recompute")
    if recompute != "none":
        yield entry(f"{prefix}.recompute_granularity", recompute, f"plan: {section}.recompute")
    rate, divided = p.job.algorithm.learning_rate, update.zero == 1
    for name in ("lr", "min_lr"):
        yield entry(f"{prefix}.optimizer.{name}", rate, "job: algorithm.learning_rate")
    for name in ("use_distributed_optimizer", "use_precision_aware_optimizer"):
        yield entry(f"{prefix}.optimizer.{name}", divided, f"plan: {section}.zero")
    gather = f"{prefix}.distributed_data_parallel_config.overlap_param_gather"
    yield entry(gather, divided, f"plan: {section}.zero")
    yield entry(f"{prefix}.fp8_cfg.enabled", update.precision == "fp8", f"plan: {section}.precision")


# Engines and nodes


def _generation(p: Production) -> Iterator[Entry]:
    generate, workload, plan = p.plan.generate, p.job.workload, p.plan
    prefix = "policy.generation"
    fp8 = generate.precision == "fp8"
    yield entry(f"{prefix}.backend", "vllm", "")
    yield entry(f"{prefix}.max_new_tokens", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry(f"{prefix}.temperature", workload.temperature, "job: workload.temperature")
    at_once = plan.fusions.reward_with_generation
    yield entry(f"{prefix}.vllm_cfg.async_engine", at_once, "plan: fusions.reward_with_generation, staleness")
    yield entry(f"{prefix}.vllm_cfg.tensor_parallel_size", generate.tp, "plan: generate.tp")
    yield entry(f"{prefix}.vllm_cfg.pipeline_parallel_size", 1, "plan: generate.pp")
    yield entry(f"{prefix}.vllm_cfg.expert_parallel_size", generate.ep, "plan: generate.ep")
    share = generate.memory_percent / 100
    yield entry(f"{prefix}.vllm_cfg.gpu_memory_utilization", share, "plan: generate.memory_percent")
    yield entry(f"{prefix}.vllm_cfg.max_model_len", workload.max_tokens, "job: prompt and response")
    yield entry(f"{prefix}.vllm_cfg.precision", "fp8" if fp8 else "bfloat16", "plan: generate.precision")
    yield entry(f"{prefix}.vllm_cfg.use_deep_gemm", fp8, "plan: generate.precision")
    yield entry(f"{prefix}.vllm_kwargs.max_num_seqs", generate.concurrency, "plan: generate.concurrency, of an engine")
    chunk = generate.prefill_tokens
    tokens = chunk or max(workload.max_tokens, generate.concurrency)
    yield entry(f"{prefix}.vllm_kwargs.max_num_batched_tokens", tokens, "plan: generate.prefill_tokens; 0: the longest")
    yield entry(f"{prefix}.vllm_kwargs.enable_chunked_prefill", chunk > 0, "plan: generate.prefill_tokens")


def _cluster(p: Production) -> Iterator[Entry]:
    plan, resources = p.plan, "policy.generation.colocated.resources"
    pool = plan.generate.pool
    yield entry("policy.generation.colocated.enabled", plan.colocated, "plan: pools")
    if plan.colocated:
        yield entry("cluster.num_nodes", p.nodes(pool), "plan: pools")
        yield entry("cluster.gpus_per_node", p.per_node(pool), "plan: pools")
        return
    one = p.cluster.num_devices <= p.node
    yield entry("cluster.num_nodes", 1 if one else plan.num_devices // p.node, "plan: pools")
    yield entry("cluster.gpus_per_node", plan.num_devices if one else p.node, "plan: pools")
    yield entry(f"{resources}.num_nodes", 1 if one else p.nodes(pool), "plan: the generating pool")
    yield entry(f"{resources}.gpus_per_node", plan.devices_of(pool) if one else p.node, "plan: the generating pool")
