"""Keys of TRL's GRPO configuration, of accelerate's and of the vLLM server's, in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from executor.imports.shell import words
from executor.imports.source import Source
from executor.imports.texts import mapping, options
from ir.errors import InputError, nearest

DEFAULTS: Mapping[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "max_completion_length": 512,
    "temperature": 1.0,
    "seed": 42,
    "gradient_checkpointing": True,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon": 0.2,
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_enable_sleep_mode": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_clip_max": 3.0,
    "use_peft": False,
    "lora_r": 16,
    # The server's.
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "gpu_memory_utilization": 0.9,
    # accelerate's, as in trl/accelerate_configs/zero2.yaml.
    "distributed_type": "DEEPSPEED",
    "zero_stage": 2,
    "num_processes": 8,
    "num_machines": 1,
}
"""GRPOConfig, ModelConfig and trl/scripts/vllm_serve.py of TRL 1.16.0."""

READ = frozenset(DEFAULTS) | {
    "model_name_or_path", "reward_model_name_or_path", "generation_batch_size", "steps_per_generation",
    "vllm_max_model_length", "max_model_len", "max-num-seqs", "max-num-batched-tokens", "max_prompt_length",
    "vllm_device", "offload_optimizer_device", "offload_param_device", "fsdp_version", "fsdp_reshard_after_forward",
    "fsdp_sharding_strategy", "fsdp_offload_params",
}  # fmt: skip
"""Keys that say something of the job or the plan; `vllm_device` and `max_prompt_length` are of older releases."""

REMARKS: Mapping[str, str] = {
    "optim": "priced as AdamW",
    "torch_compile": "not priced",
    "use_liger_kernel": "not priced",
    "enforce_eager": "priced with CUDA graphs",
    "sync_ref_model": "not priced",
    "speculative_config": "not priced",
    "kv_cache_dtype": "priced in the model's precision",
    "fp16": "priced as bfloat16",
}
"""Keys that change costs and that a plan has no word for."""

REFUSED: Mapping[str, str] = {
    "load_in_4bit": "must not be set: weights in 4 bits are not planned for",
    "load_in_8bit": "must not be set: weights in 8 bits are not planned for",
    "megatron_lm_config": "must not be set: TRL's models are not divided by Megatron",
    "fp8_config": "must not be set: products in fp8 are not planned for",
}

_BESIDE = (
    "dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers "
    "reward_funcs datasets streaming test_split_size model_revision dtype torch_dtype attn_implementation "
    "lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type "
    "use_rslora use_dora bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage output_dir "
    "overwrite_output_dir num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_steps "
    "warmup_ratio optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules "
    "average_tokens_across_devices label_smoothing_factor bf16 bf16_full_eval fp16_full_eval tf32 "
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_compile_backend torch_compile_mode "
    "liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps logging_strategy logging_steps "
    "logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level "
    "log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
    "trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only "
    "eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
    "batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit "
    "enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
    "hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip "
    "restore_callback_states_from_checkpoint full_determinism data_seed accelerator_config dataloader_drop_last "
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names "
    "train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout skip_memory_metrics do_train do_eval "
    "do_predict resume_from_checkpoint local_rank model_init_kwargs trust_remote_code router_aux_loss_coef "
    "disable_dropout cast_lm_head_to_fp32 num_generations_eval ds3_gather_for_generation shuffle_dataset "
    "pad_to_multiple_of top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty "
    "cache_implementation vllm_model_impl vllm_structured_outputs_regex vllm_server_base_url vllm_server_host "
    "vllm_server_port vllm_server_timeout vllm_group_port delta epsilon_high sapo_temperature_neg "
    "sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg reward_weights "
    "multi_objective_aggregation scale_rewards mask_truncated_completions ref_model_mixup_alpha "
    "ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min "
    "entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_mode "
    "vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions "
    "log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo model revision host port "
    "enable_prefix_caching distributed_executor_backend compute_environment mixed_precision use_cpu debug "
    "machine_rank gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function "
    "enable_cpu_affinity downcast_bf16 tpu_use_cluster tpu_use_sudo tpu_env command_file commands "
    "deepspeed_multinode_launcher gradient_clipping zero3_init_flag zero3_save_16bit_model "
    "fsdp_activation_checkpointing fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_cpu_ram_efficient_loading "
    "fsdp_forward_prefetch fsdp_state_dict_type fsdp_sync_module_states fsdp_use_orig_params config config_file"
)
"""Keys that have no bearing on how a step is laid out, with spaces between them."""

_SECTIONS = ("deepspeed_config", "fsdp_config")
"""Mappings of accelerate's whose keys are read as if they were not inside one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys(Source):
    """Keys that are set."""

    given: Mapping[str, Any]

    def has(self, key: str) -> bool:
        """Whether a key is set."""
        return self.given.get(key) is not None

    def get(self, key: str) -> Any:
        """A value or its default, None if it has neither."""
        return self.given[key] if self.has(key) else DEFAULTS.get(key)

    def on(self, key: str) -> bool:
        """Whether a switch is set."""
        return str(self.get(key)).lower() in ("true", "1", "yes")

    def number(self, key: str) -> float:
        """A number that is set or has a default.

        Raises:
            InputError: it is no number.
        """
        return self.as_number(key, self.get(key))

    def count(self, key: str, *, least: int = 1) -> int:
        """A whole number that is set or has a default.

        Raises:
            InputError: it is none, or less than the least.
        """
        return self.as_whole(key, self.get(key), least=least)


def keys_of(text: str, where: str) -> Keys:
    """Keys of a configuration: YAML documents and scripts, which lines of `---` part.

    Raises:
        InputError: a key that none of them has, or one that no plan can have.
    """
    given: dict[str, Any] = {}
    for part in text.split("\n---\n"):
        given |= dict(_pairs(part, where))
    for key, value in given.items():
        if key in REFUSED and value not in (None, False, {}, "false", ""):
            raise InputError(f"{where}: {key}", REFUSED[key])
        if key not in (known := READ | {*_BESIDE.split(), *REMARKS, *REFUSED}):
            rule = "must be a key of TRL, accelerate or the vLLM server"
            raise InputError(f"{where}: {key}", nearest(rule, key, known))
    return Keys(where=where, given=given)


def _pairs(part: str, where: str) -> Iterator[tuple[str, Any]]:
    if (document := mapping(part)) is None:
        # A command such as `trl vllm-serve` stands before its flags.
        given = dropwhile(lambda word: not word.startswith("--"), words(part, where))
        yield from ((key, values[0] if values else "true") for key, values in options(given, where))
        return
    for key, value in document.items():
        if key in _SECTIONS and isinstance(value, dict):
            yield from value.items()
        else:
            yield str(key), value
