"""RLinf 0.3.0 (RLinf/RLinf), reasoning tasks: `rlinf.yaml` for `examples/reasoning/main_grpo.py`.

Keys are those of `rlinf/config.py` and `examples/reasoning/config`. `data.rollout_batch_size` is prompts, micro-batches
are sequences of a data-parallel rank, `max_tokens_per_mbs` is tokens of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from executor.export.entries import Entry, comments, entry, yaml
from executor.export.production import Files, Production
from ir.frameworks.rlinf import model_type
from ir.job import Role
from ir.plan import Pass, Update

_TO_SET = (
    "RLinf 0.3.0. Run run.sh in RLinf's checkout on the head node of a Ray cluster. Still to be set, in place of",
    "/path/to: model directories, Megatron checkpoints, data and their keys; and reward.reward_type.",
)


def write(production: Production) -> Files:
    """`rlinf.yaml` and `run.sh`."""
    command = 'python examples/reasoning/main_grpo.py --config-path "$here" --config-name rlinf "$@"'
    header = [*production.header, *_TO_SET]
    script = ["#!/usr/bin/env bash", *comments(header), "set -euo pipefail"]
    script += ['here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', command, ""]
    return {"rlinf.yaml": yaml(header, list(_entries(production))), "run.sh": "\n".join(script)}


def _entries(production: Production) -> Iterator[Entry]:
    plan = production.plan
    yield entry("defaults", [{"override hydra/job_logging": "stdout"}], "rule: as its examples")
    yield entry("hydra", {"run": {"dir": "."}, "output_subdir": None}, "rule: as its examples")
    yield from _placement(production)
    yield from _runner(production)
    yield from _algorithm(production)
    yield from _rollout(production)
    yield from _data(production)
    yield from _role("actor", plan.update_actor, production)
    yield entry("reward.group_name", "RewardGroup", "rule: as its examples")
    yield entry("reward.use_reward_model", False, "job: responses are verified")
    yield entry("reward.reward_type", "math", "to be set: the verifier")
    yield entry("reward.reward_scale", 1.0, "rule: rewards as they are")
    yield from _tokenizer("reward", production.model(Role.ACTOR))
    if plan.update_critic is None:
        yield entry("critic.use_critic_model", False, "job: algorithm.name has none")
    else:
        yield entry("critic.use_critic_model", True, "job: models.critic")
        yield from _role("critic", plan.update_critic, production)


def _placement(production: Production) -> Iterator[Entry]:
    plan = production.plan
    pool = plan.generate.pool
    roles = ["actor", "rollout", "reward", *(["critic"] if plan.update_critic is not None else [])]
    yield entry("cluster.num_nodes", production.nodes(pool), f"plan: pool {pool}")
    last = plan.devices_of(pool) - 1
    yield entry(f"cluster.component_placement.{','.join(roles)}", f"0-{last}", f"plan: pool {pool}")


def _runner(production: Production) -> Iterator[Entry]:
    job, tokens = production.job, production.plan.update_actor.micro_tokens
    yield entry("runner.task_type", "reasoning", "rule: language models")
    yield entry("runner.logger.log_path", "./results", "to be set")
    yield entry("runner.logger.project_name", "rlinf", "to be set")
    yield entry("runner.logger.experiment_name", job.document.name, "job: name")
    yield entry("runner.logger.logger_backends", ["tensorboard"], "to be set")
    for key, value in {"max_epochs": 1, "max_steps": -1, "val_check_interval": -1, "save_interval": 50}.items():
        yield entry(f"runner.{key}", value, "to be set")
    yield entry("runner.seq_length", job.workload.max_tokens, "job: longest prompt and response")
    yield entry("runner.enable_dynamic_batch_size", tokens > 0, "plan: update_actor.micro_tokens")
    most = tokens or job.workload.max_tokens
    yield entry("runner.max_tokens_per_mbs", most, "plan: update_actor.micro_tokens" if tokens else "rule: not used")
    yield entry("runner.resume_dir", None, "to be set")
    yield entry("runner.experiment_name", job.document.name, "job: name")
    yield entry("runner.output_dir", "./results", "to be set")


def _algorithm(production: Production) -> Iterator[Entry]:
    algorithm, workload, plan = production.job.algorithm, production.job.workload, production.plan
    recomputed = not plan.fusions.rollout_logprob
    in_reward = algorithm.kl_coefficient if algorithm.kl_in_reward else 0.0
    passing = plan.reference_logprob or plan.old_logprob or plan.values
    yield entry("algorithm.group_size", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    yield entry("algorithm.n_minibatches", workload.minibatches, "job: workload.minibatches")
    micro = plan.update_actor.micro_batch or 1
    yield entry("algorithm.training_batch_size_per_gpu", micro, "plan: update_actor.micro_batch; 1 where by tokens")
    yield entry("algorithm.rollout_batch_size_per_gpu", None, "rule: even shares")
    yield entry("algorithm.logprob_forward_micro_batch_size", _micro(passing), "plan: micro_batch of passes")
    yield entry("algorithm.recompute_logprobs", recomputed, "plan: not fusions.rollout_logprob")
    yield entry("algorithm.shuffle_rollout", False, "rule: as its examples")
    yield entry("algorithm.max_num_gen_batches", 1, "rule: one batch")
    yield entry("algorithm.loss_type", "actor", "job: algorithm.name")
    yield entry("algorithm.loss_agg_func", "token-mean", "rule: as its examples")
    yield entry("algorithm.kl_beta", algorithm.kl_coefficient - in_reward, "job: algorithm.kl_coefficient, in the loss")
    yield entry("algorithm.reinpp_kl_beta", in_reward, "job: algorithm.kl_coefficient, in the reward")
    yield entry("algorithm.kl_penalty_type", "low_var_kl", "job: algorithm.name")
    yield entry("algorithm.ratio_clip_eps", algorithm.clip, "job: algorithm.clip")
    for key, value in {"entropy_bonus": 0.0, "calculate_entropy": False, "clip_ratio_c": None}.items():
        yield entry(f"algorithm.{key}", value, "rule: as its examples")
    estimator = {"grpo": "grpo", "ppo": "gae"}.get(algorithm.name, "reinpp")
    yield entry("algorithm.adv_type", estimator, "job: algorithm.name")
    baseline = algorithm.name == "reinforce++-baseline"
    yield entry("algorithm.use_reinpp_baseline", baseline, "job: algorithm.name")
    for key, other in {
        "gamma": 1,
        "gae_lambda": 1,
        "value_clip": 0.2,
        "normalize_advantages": estimator == "gae",
    }.items():
        yield entry(f"algorithm.{key}", other, "rule: as its examples")
    yield entry("algorithm.early_stop_imp_ratio", None, "rule: no batch is given up")
    yield entry("algorithm.use_valid_token_scale", False, "rule: as its examples")
    yield entry("algorithm.sampling_params.do_sample", True, "rule: as its examples")
    yield entry("algorithm.sampling_params.temperature", workload.temperature, "job: workload.temperature")
    for key, plain in {"top_k": 1000000, "top_p": 1.0, "repetition_penalty": 1.0, "min_new_tokens": 1}.items():
        yield entry(f"algorithm.sampling_params.{key}", plain, "rule: as its examples")
    longest = workload.max_response_tokens
    yield entry("algorithm.sampling_params.max_new_tokens", longest, "job: workload.max_response_tokens")


def _micro(passing: Pass | None) -> int:
    """Sequences of a pass; 1 where it packs tokens, or there is none."""
    return passing.micro_batch if passing is not None and passing.micro_batch else 1


def _rollout(production: Production) -> Iterator[Entry]:
    engine = production.plan.generate
    yield entry("rollout.group_name", "RolloutGroup", "rule: as its examples")
    yield entry("rollout.gpu_memory_utilization", engine.memory_percent / 100, "plan: generate.memory_percent")
    yield from _model_of("rollout", production)
    for key, value in {
        "enforce_eager": False,
        "distributed_executor_backend": "mp",
        "disable_log_stats": False,
    }.items():
        yield entry(f"rollout.{key}", value, "rule: as its examples")
    for key, other in {"detokenize": False, "padding": None, "eos": None, "validate_weight": False}.items():
        yield entry(f"rollout.{key}", other, "rule: as its examples")
    for key, more in {"validate_save_dir": None, "print_outputs": False}.items():
        yield entry(f"rollout.{key}", more, "rule: as its examples")
    yield entry("rollout.rollout_backend", "vllm", "rule: its token budget can be set")
    yield entry("rollout.sglang.attention_backend", "triton", "rule: not used")
    chunked = engine.prefill_tokens > 0
    yield entry("rollout.vllm.attention_backend", "FLASH_ATTN", "rule: as its examples")
    yield entry("rollout.vllm.enable_chunked_prefill", chunked, "plan: generate.prefill_tokens")
    yield entry("rollout.vllm.enable_prefix_caching", True, "rule: as its examples")
    yield entry("rollout.vllm.enable_flash_infer_sampler", True, "rule: as its examples")
    yield entry(
        "rollout.vllm.max_num_batched_tokens",
        production.step_tokens,
        "plan: generate.prefill_tokens and a token a sequence",
    )
    yield entry("rollout.vllm.torch_profiler_dir", None, "rule: as its examples")
    yield entry("rollout.return_logprobs", production.plan.fusions.rollout_logprob, "plan: fusions.rollout_logprob")
    yield entry("rollout.tensor_parallel_size", engine.tp, "plan: generate.tp")
    yield entry("rollout.pipeline_parallel_size", 1, "rule: engines have no pipeline")
    yield entry("rollout.max_running_requests", engine.concurrency, "plan: generate.concurrency")
    yield entry("rollout.cuda_graph_max_bs", engine.concurrency, "plan: generate.concurrency")


def _model_of(role: str, production: Production) -> Iterator[Entry]:
    yield entry(f"{role}.model.model_path", production.model(Role.ACTOR), "job: models.actor; must be on disk")
    yield entry(f"{role}.model.model_type", model_type(production.job.actor), "job: architecture of models.actor")
    yield entry(f"{role}.model.precision", "bf16", "rule: native precision")


def _data(production: Production) -> Iterator[Entry]:
    workload = production.job.workload
    yield entry("data.type", "math", "to be set")
    yield entry("data.dataset_name", "boba", "to be set")
    yield entry("data.max_prompt_length", workload.max_prompt_tokens, "job: workload.max_prompt_tokens")
    yield entry("data.filter_prompt_by_length", True, "rule: as its examples")
    yield entry("data.rollout_batch_size", workload.prompts_per_step, "job: workload.prompts_per_step")
    yield entry("data.val_rollout_batch_size", None, "to be set")
    yield entry("data.num_workers", 2, "to be set")
    yield entry("data.prompt_key", "prompt", "to be set")
    yield entry("data.answer_key", "solutions", "to be set")
    yield entry("data.apply_chat_template", False, "to be set")
    yield entry("data.shuffle", True, "to be set")
    yield entry("data.validation_shuffle", False, "to be set")
    yield entry("data.seed", workload.seed, "job: workload.seed")
    yield entry("data.train_data_paths", ["/path/to/train.jsonl"], "to be set")
    yield entry("data.val_data_paths", ["/path/to/validation.jsonl"], "to be set")


def _role(role: str, update: Update, production: Production) -> Iterator[Entry]:
    fsdp, algorithm = update.zero >= 2, production.job.algorithm
    yield entry(f"{role}.group_name", f"{role.capitalize()}Group", "rule: as its examples")
    backend = "fsdp" if fsdp else "megatron"
    yield entry(f"{role}.training_backend", backend, f"plan: update_{role}.zero, above 1 for FSDP")
    yield entry(f"{role}.seed", production.job.workload.seed, "job: workload.seed")
    yield entry(f"{role}.calculate_flops", False, "rule: as its examples")
    yield entry(f"{role}.enable_dp_load_balance", False, "rule: as its examples")
    longest = production.job.workload.max_tokens
    yield entry(f"{role}.model.seq_length", longest, "job: longest prompt and response")
    yield entry(f"{role}.model.encoder_seq_length", longest, "job: longest prompt and response")
    yield from (_fsdp if fsdp else _megatron)(role, update, production)
    yield entry(f"{role}.optim.optimizer", "adam", "rule: as its examples")
    yield entry(f"{role}.optim.lr", algorithm.learning_rate, "job: algorithm.learning_rate")
    yield entry(f"{role}.optim.clip_grad", algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")
    plain = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.01, "min_lr": 0.0}
    for key, value in plain.items():
        yield entry(f"{role}.optim.{key}", value, "rule: as its examples")
    yield entry(f"{role}.optim.bf16", True, "rule: native precision")
    yield entry(f"{role}.optim.fp16", False, "rule: native precision")
    yield entry(f"{role}.optim.use_distributed_optimizer", update.zero >= 1, f"plan: update_{role}.zero")
    yield entry(f"{role}.optim.overlap_grad_reduce", False, "rule: as its examples")
    yield entry(f"{role}.optim.overlap_param_gather", False, "rule: as its examples")
    yield entry(f"{role}.optim.optimizer_enable_pin", False, "rule: as its examples")
    yield entry(f"{role}.lr_sched.lr_decay_style", "constant", "rule: as its examples")
    yield entry(f"{role}.lr_sched.max_lr", algorithm.learning_rate, "job: algorithm.learning_rate")
    yield from _tokenizer(role, production.model(Role.ACTOR))


def _fsdp(role: str, update: Update, production: Production) -> Iterator[Entry]:
    yield from _model_of(role, production)
    yield entry(f"{role}.model.is_lora", False, "job: models.actor.lora_rank")
    yield entry(f"{role}.enable_offload", update.offload == "all", f"plan: update_{role}.offload")
    here = f"{role}.fsdp_config"
    yield entry(f"{here}.strategy", "fsdp2", "rule: the stage is whether layers are gathered again")
    yield entry(f"{here}.sharding_strategy", "full_shard", "rule: over all devices")
    yield entry(f"{here}.reshard_after_forward", update.zero == 3, f"plan: update_{role}.zero")
    yield entry(f"{here}.gradient_checkpointing", update.recompute == "full", f"plan: update_{role}.recompute")
    yield entry(f"{here}.cpu_offload", False, "rule: states move between stages only")
    yield entry(f"{here}.fsdp_size", -1, "rule: over all devices")
    yield entry(f"{here}.enable_gradient_accumulation", True, "rule: gradients are reduced once an update")
    precision = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    for key, value in precision.items():
        yield entry(f"{here}.mixed_precision.{key}", value, "rule: native precision")
    yield entry(f"{here}.amp_autocast.enabled", False, "rule: excluded by mixed_precision")
    yield entry(f"{here}.grad_scaler.enabled", False, "rule: bfloat16 needs none")


def _megatron(role: str, update: Update, production: Production) -> Iterator[Entry]:
    shape = production.job.actor
    yield entry(f"{role}.mcore_gpt", True, "rule: as its examples")
    yield entry(f"{role}.spec_name", "decoder_gpt", "rule: as its examples")
    yield entry(f"{role}.offload_optimizer", update.offload != "none", f"plan: update_{role}.offload")
    yield entry(f"{role}.offload_weight", update.offload == "all", f"plan: update_{role}.offload")
    yield entry(f"{role}.offload_grad", update.offload == "all", f"plan: update_{role}.offload")
    model = f"{role}.model"
    yield entry(
        f"{model}.megatron_checkpoint", f"/path/to/megatron/{role}", "to be set: the model in Megatron's format"
    )
    yield entry(f"{model}.precision", "bf16", "rule: native precision")
    yield entry(f"{model}.tensor_model_parallel_size", update.tp, f"plan: update_{role}.tp")
    yield entry(f"{model}.sequence_parallel", update.tp > 1, "rule: with tensor parallelism")
    yield entry(f"{model}.pipeline_model_parallel_size", update.pp, f"plan: update_{role}.pp")
    yield entry(f"{model}.context_parallel_size", update.cp, f"plan: update_{role}.cp")
    yield entry(f"{model}.expert_model_parallel_size", update.ep, f"plan: update_{role}.ep")
    if shape.is_moe:
        yield entry(f"{model}.expert_tensor_parallel_size", update.etp, f"plan: update_{role}.etp")
        yield entry(f"{model}.moe_grouped_gemm", "te", "rule: as its examples")
    granularity = None if update.recompute == "none" else update.recompute
    yield entry(f"{model}.recompute_granularity", granularity, f"plan: update_{role}.recompute")
    full = update.recompute == "full"
    yield entry(f"{model}.recompute_method", "uniform" if full else None, f"plan: update_{role}.recompute")
    yield entry(f"{model}.recompute_num_layers", 1 if full else None, f"plan: update_{role}.recompute")
    for key, value in _MEGATRON.items():
        yield entry(f"{role}.{key}", value, "rule: as its examples")


_MEGATRON = {
    "model.add_bias_linear": False,
    "model.activation": "swiglu",
    "model.normalization": "rmsnorm",
    "model.position_embedding_type": "rope",
    "model.apply_rope_fusion": True,
    "model.bias_dropout_fusion": False,
    "model.persist_layer_norm": False,
    "model.bias_activation_fusion": False,
    "model.attention_softmax_in_fp32": True,
    "model.batch_p2p_comm": False,
    "model.variable_seq_lengths": True,
    "model.gradient_accumulation_fusion": False,
    "model.moe_token_dispatcher_type": "alltoall",
    "model.use_cpu_initialization": False,
    "megatron.ddp_bucket_size": None,
    "megatron.distributed_backend": "nccl",
    "megatron.distributed_timeout_minutes": 30,
    "megatron.ckpt_format": "torch",
    "megatron.use_dist_ckpt": False,
    "megatron.tp_comm_bootstrap_backend": "nccl",
    "megatron.tp_comm_overlap_cfg": None,
    "megatron.use_hf_ckpt": False,
    "megatron.use_profiler": False,
}
"""What a Megatron worker needs beside the plan's values."""


def _tokenizer(role: str, model: str) -> Iterator[Entry]:
    yield entry(f"{role}.tokenizer.tokenizer_model", model, "job: models.actor; must be on disk")
    for key, value in {"use_fast": False, "trust_remote_code": True, "padding_side": "right"}.items():
        yield entry(f"{role}.tokenizer.{key}", value, "rule: as its examples")
