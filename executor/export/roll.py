"""ROLL 0.3.0 (alibaba/ROLL), RLVR pipeline: `roll.yaml` for `examples/start_rlvr_pipeline.py`.

Keys are those of `roll/configs` and `roll/pipeline/rlvr/rlvr_config.py`; `strategy_config` has mcore_adapter's, FSDP2's
or vLLM's. `rollout_batch_size` is prompts, batches of a worker are sequences of a data-parallel rank, and a packed
length is tokens of a replica, which context parallelism divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from executor.export.entries import Entry, comments, entry, yaml
from executor.export.production import Files, Production
from ir.job import Role
from ir.plan import Pass, Update

_TO_SET = (
    "ROLL 0.3.0. Run run.sh in ROLL's checkout on the head node of a Ray cluster. Still to be set: the data and its",
    "template, the reward worker with its tags, and what `to be set` stands beside.",
)

_ESTIMATORS = {"grpo": "grpo", "dr-grpo": "grpo", "gspo": "grpo", "ppo": "gae"}
"""`adv_estimator` by algorithm; reinforce for the others."""


def write(production: Production) -> Files:
    """`roll.yaml` and `run.sh`."""
    header = [*production.header, *_TO_SET]
    script = ["#!/usr/bin/env bash", *comments(header), "set -euo pipefail"]
    # The script composes configurations relative to its own folder only.
    script += ['here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', "mkdir -p examples/steptune"]
    script += ['cp "$here/roll.yaml" examples/steptune/']
    script += ["python examples/start_rlvr_pipeline.py --config_path steptune --config_name roll", ""]
    return {"roll.yaml": yaml(header, list(_entries(production))), "run.sh": "\n".join(script)}


def _entries(production: Production) -> Iterator[Entry]:
    plan = production.plan
    yield entry("hydra", {"run": {"dir": "."}, "output_subdir": None}, "rule: as its examples")
    yield from _run(production)
    yield from _batch(production)
    yield from _algorithm(production)
    yield from _trained("actor_train", plan.update_actor, plan.old_logprob, production)
    yield from _engine(production)
    if plan.reference_logprob is not None:
        yield from _frozen(plan.reference_logprob, production)
    if plan.update_critic is not None:
        yield from _trained("critic", plan.update_critic, plan.values, production)
    yield from _reward(production)


def _run(production: Production) -> Iterator[Entry]:
    job = production.job
    yield entry("exp_name", job.document.name, "job: name")
    yield entry("seed", job.workload.seed, "job: workload.seed")
    yield entry("logging_dir", "./output/logs", "to be set")
    yield entry("output_dir", "./output", "to be set")
    yield entry("track_with", "tensorboard", "to be set")
    yield entry("max_steps", 500, "to be set")
    yield entry("save_steps", 100, "to be set")
    yield entry("num_gpus_per_node", production.node, "cluster: devices of a node")
    yield entry("pretrain", production.model(Role.ACTOR), "job: models.actor")
    if job.algorithm.uses_critic:
        yield entry("reward_pretrain", production.model(Role.CRITIC), "job: models.critic, where it starts")


def _batch(production: Production) -> Iterator[Entry]:
    workload, plan = production.job.workload, production.plan
    yield entry("rollout_batch_size", workload.prompts_per_step, "job: workload.prompts_per_step")
    yield entry("num_return_sequences_in_group", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    yield entry("is_num_return_sequences_expand", True, "rule: samples of a prompt are requests of their own")
    yield entry("prompt_length", workload.max_prompt_tokens, "job: workload.max_prompt_tokens")
    yield entry("response_length", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry("ppo_epochs", workload.epochs, "job: workload.epochs")
    yield entry("generate_opt_level", 1, "rule: requests are scheduled one by one")
    yield entry("max_running_requests", plan.generate.concurrency, "plan: generate.concurrency")
    yield entry("async_generation_ratio", plan.staleness, "plan: staleness, in versions of the weights")
    extra = round(workload.prompts_per_step * (workload.oversampling - 1))
    yield entry("is_use_additional_prompts", extra > 0, "job: workload.oversampling")
    if extra:
        yield entry("max_additional_running_prompts", extra, "job: workload.oversampling, prompts more")


def _algorithm(production: Production) -> Iterator[Entry]:
    algorithm, plan = production.job.algorithm, production.plan
    in_reward = algorithm.kl_coefficient if algorithm.kl_in_reward else 0.0
    in_loss = algorithm.kl_coefficient - in_reward
    yield entry("adv_estimator", _ESTIMATORS.get(algorithm.name, "reinforce"), "job: algorithm.name")
    yield entry("importance_sampling", "seq" if algorithm.name == "gspo" else "token", "job: algorithm.name")
    yield entry("norm_mean_type", "group" if algorithm.uses_groups else None, "job: algorithm.name")
    spread = "group" if algorithm.name in ("grpo", "gspo") else None
    yield entry("norm_std_type", spread, "job: algorithm.name")
    yield entry("whiten_advantages", not algorithm.uses_groups, "job: algorithm.name")
    yield entry("pg_clip", algorithm.clip, "job: algorithm.clip")
    yield entry("max_grad_norm", algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")
    yield entry("enable_reference", plan.reference_logprob is not None, "job: algorithm.kl_coefficient")
    yield entry("init_kl_coef", in_reward, "job: algorithm.kl_coefficient, in the reward")
    yield entry("add_token_level_kl", in_reward > 0, "job: algorithm.kl_coefficient, in the reward")
    yield entry("use_kl_loss", in_loss > 0, "job: algorithm.kl_coefficient, in the loss")
    yield entry("kl_loss_coef", in_loss, "job: algorithm.kl_coefficient, in the loss")
    recomputed = plan.old_logprob is not None
    yield entry("enable_old_logprobs_recompute", recomputed, "plan: old_logprob is a pass, or folded")
    weight = "train_infer_correction.is_weight"
    yield entry(f"{weight}.enabled", plan.staleness > 0, "plan: staleness; old log-probs over the engines'")
    yield entry(f"{weight}.weight_type", "token", "plan: staleness")
    yield entry(f"{weight}.upper_bound", algorithm.max_importance_weight, "job: algorithm.max_importance_weight")


def _devices(pool: str, production: Production) -> Entry:
    span = production.rpeg.pool(pool)
    last = span.first_device + span.devices
    return entry("device_mapping", f"list(range({span.first_device},{last}))", f"plan: pool {pool}")


def _trained(name: str, update: Update, passing: Pass | None, production: Production) -> Iterator[Entry]:
    """A worker that trains, and that computes log-probs or values with the same weights."""
    plan = f"plan: update_{name.partition('_')[0]}"
    workload, fsdp = production.job.workload, update.zero >= 2
    share = workload.sequences // workload.minibatches // update.dp
    micro = update.micro_batch or 1
    role = Role.CRITIC if name == "critic" else Role.ACTOR
    yield entry(f"{name}.model_args.model_name_or_path", production.model(role), f"job: models.{role.value}")
    yield entry(f"{name}.model_args.dtype", "fp32" if fsdp else "bf16", "rule: weights that are updated")
    kept = update.recompute == "none"
    yield entry(f"{name}.model_args.disable_gradient_checkpointing", kept, f"{plan}.recompute")
    if name == "critic":
        yield entry(f"{name}.model_args.model_type", "auto_token_classification", "rule: a value a token")
        yield entry(f"{name}.model_args.num_labels", 1, "rule: a value a token")
    yield entry(f"{name}.training_args.learning_rate", production.job.algorithm.learning_rate, "job: algorithm")
    yield entry(f"{name}.training_args.weight_decay", 0.0, "to be set")
    yield entry(f"{name}.training_args.warmup_steps", 0, "to be set")
    yield entry(f"{name}.training_args.per_device_train_batch_size", micro, f"{plan}.micro_batch; 1 where it packs")
    accumulated = f"{plan}.dp: a replica's sequences of a minibatch over the line above"
    yield entry(f"{name}.training_args.gradient_accumulation_steps", share // micro, accumulated)
    if name == "actor_train":
        yield from _data(name)
    strategy = _fsdp2(update.zero == 3, plan) if fsdp else _megatron(update, plan, production)
    yield entry(f"{name}.strategy_args.strategy_name", "fsdp2_train" if fsdp else "megatron_train", f"{plan}.zero")
    yield from _prefixed(f"{name}.strategy_args.strategy_config", strategy)
    yield from _prefixed(name, [_devices(update.pool, production)])
    infer = passing.micro_batch if passing is not None and passing.micro_batch else 1
    yield entry(f"{name}.infer_batch_size", infer, "plan: micro_batch of its pass; 1 where it packs or has none")
    if not fsdp:
        forward = passing.micro_tokens if passing is not None else 0
        yield from _prefixed(name, _packing(update.micro_tokens, forward, update.cp, plan))


def _frozen(passing: Pass, production: Production) -> Iterator[Entry]:
    """The reference."""
    name, plan, fsdp = "reference", "plan: reference_logprob", passing.zero == 3
    yield entry(f"{name}.model_args.model_name_or_path", production.model(Role.REFERENCE), "job: models.reference")
    yield entry(f"{name}.model_args.dtype", "bf16", "rule: weights that stay")
    yield entry(f"{name}.model_args.disable_gradient_checkpointing", True, "rule: no gradients")
    strategy = _fsdp2(True, plan) if fsdp else _megatron(passing, plan, production)
    yield entry(f"{name}.strategy_args.strategy_name", "fsdp2_infer" if fsdp else "megatron_infer", f"{plan}.zero")
    yield from _prefixed(f"{name}.strategy_args.strategy_config", strategy)
    yield from _prefixed(name, [_devices(passing.pool, production)])
    yield entry(f"{name}.infer_batch_size", passing.micro_batch or 1, f"{plan}.micro_batch; 1 where it packs")
    if not fsdp:
        yield from _prefixed(name, _packing(0, passing.micro_tokens, passing.cp, plan))


def _prefixed(prefix: str, entries: Any) -> Iterator[Entry]:
    return (entry(f"{prefix}.{e.key}", e.value, e.why) for e in entries)


def _megatron(section: Update | Pass, plan: str, production: Production) -> Iterator[Entry]:
    yield entry("tensor_model_parallel_size", section.tp, f"{plan}.tp")
    yield entry("sequence_parallel", section.tp > 1, "rule: with tensor parallelism")
    yield entry("pipeline_model_parallel_size", section.pp, f"{plan}.pp")
    yield entry("context_parallel_size", section.cp, f"{plan}.cp")
    yield entry("expert_model_parallel_size", section.ep, f"{plan}.ep")
    if production.job.actor.is_moe:
        yield entry("moe_token_dispatcher_type", "alltoall", "rule: lengths vary")
        yield entry("moe_grouped_gemm", True, "rule: experts of a device at once")
    if isinstance(section, Update):
        if section.vpp > 1:
            yield entry("virtual_pipeline_model_parallel_size", section.vpp, f"{plan}.vpp")
        yield entry("use_distributed_optimizer", section.zero == 1, f"{plan}.zero")
        if section.recompute != "none":
            yield entry("recompute_granularity", section.recompute, f"{plan}.recompute")
        if section.recompute == "full":
            yield entry("recompute_method", "uniform", f"{plan}.recompute")
            yield entry("recompute_num_layers", 1, f"{plan}.recompute, each layer")


def _fsdp2(regathered: bool, plan: str) -> Iterator[Entry]:
    yield entry("reshard_after_forward", regathered, f"{plan}.zero")
    yield entry("offload_policy", False, f"{plan}.offload: states move between stages only")
    yield entry("param_dtype", "bf16", "rule: native precision")
    yield entry("reduce_dtype", "fp32", "rule: native precision")


def _packing(train: int, forward: int, cp: int, plan: str) -> Iterator[Entry]:
    """Sequences of a micro-batch are laid end to end; by tokens, as many as fit."""
    algorithm = "load_balance" if train or forward else "none"
    yield entry("use_sequence_packing", True, "rule: no padding")
    yield entry("sequence_packing_args.algorithm", algorithm, f"{plan}.micro_tokens")
    for name, tokens in {"train": train, "forward": forward}.items():
        if tokens:
            why = f"{plan}.micro_tokens x cp" if name == "train" else "plan: micro_tokens x cp of its pass"
            yield entry(f"sequence_packing_args.max_packed_sequence_length_{name}", tokens * cp, why)


def _engine(production: Production) -> Iterator[Entry]:
    engine, workload, name = production.plan.generate, production.job.workload, "actor_infer"
    chunked = engine.prefill_tokens > 0
    yield entry(f"{name}.model_args.model_name_or_path", production.model(Role.ACTOR), "job: models.actor")
    yield entry(f"{name}.model_args.dtype", "bf16", "rule: native precision")
    yield entry(f"{name}.model_args.disable_gradient_checkpointing", True, "rule: no gradients")
    sampling = f"{name}.generating_args"
    yield entry(f"{sampling}.max_new_tokens", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry(f"{sampling}.temperature", workload.temperature, "job: workload.temperature")
    for key, value in {"top_p": 1.0, "top_k": -1, "num_beams": 1}.items():
        yield entry(f"{sampling}.{key}", value, "rule: plain sampling")
    yield entry(f"{sampling}.num_return_sequences", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    yield entry(f"{name}.data_args.template", "qwen2_5", "to be set")
    yield entry(f"{name}.strategy_args.strategy_name", "vllm", "rule: its token budget can be set")
    here = f"{name}.strategy_args.strategy_config"
    yield entry(f"{here}.tensor_parallel_size", engine.tp, "plan: generate.tp")
    yield entry(f"{here}.pipeline_parallel_size", engine.pp, "plan: generate.pp")
    yield entry(f"{here}.enable_expert_parallel", engine.ep > 1, "plan: generate.ep")
    yield entry(f"{here}.gpu_memory_utilization", engine.memory_percent / 100, "plan: generate.memory_percent")
    yield entry(f"{here}.max_num_seqs", engine.concurrency, "plan: generate.concurrency")
    yield entry(f"{here}.enable_chunked_prefill", chunked, "plan: generate.prefill_tokens")
    yield entry(
        f"{here}.max_num_batched_tokens", production.step_tokens, "plan: generate.prefill_tokens and a token a sequence"
    )
    yield entry(f"{here}.max_model_len", workload.max_tokens, "job: longest prompt and response")
    if engine.precision == "fp8":
        yield entry(f"{here}.quantization", "fp8", "plan: generate.precision")
    yield from _prefixed(name, [_devices(engine.pool, production)])
    yield entry(f"{name}.infer_batch_size", 1, "rule: requests are scheduled one by one")


def _data(name: str) -> Iterator[Entry]:
    yield entry(f"{name}.data_args.template", "qwen2_5", "to be set")
    yield entry(f"{name}.data_args.file_name", ["/path/to/train.jsonl"], "to be set")
    yield entry(f"{name}.data_args.domain_interleave_probs", {"math_rule": 1.0}, "to be set: as rewards")
    yield entry(f"{name}.data_args.dataset_dir", "data", "to be set")
    yield entry(f"{name}.data_args.messages", "messages", "to be set")
    yield entry(f"{name}.data_args.preprocessing_num_workers", 16, "to be set")


def _reward(production: Production) -> Iterator[Entry]:
    here = "rewards.math_rule"
    worker = "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
    yield entry(f"{here}.worker_cls", worker, "to be set: the verifier")
    yield entry(f"{here}.model_args.model_name_or_path", production.model(Role.ACTOR), "rule: for its tokenizer")
    yield entry(f"{here}.data_args.template", "qwen2_5", "to be set")
    yield entry(f"{here}.tag_included", ["math"], "to be set")
    yield entry(f"{here}.world_size", 8, "to be set: processes on the host")
    yield entry(f"{here}.infer_batch_size", 1, "rule: each response is verified when it is finished")
