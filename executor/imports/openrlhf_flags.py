"""Flags of OpenRLHF, of 0.11.2 and as they were spelled before 0.10.2, with the defaults of those that are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.imports.openrlhf_renamed import RENAMED, SPLIT
from executor.imports.source import Source
from executor.imports.texts import options
from ir.errors import InputError, nearest

DEFAULTS: Mapping[str, str] = {
    **{f"{role}.num_nodes": "1" for role in ("actor", "ref", "critic", "reward")},
    **{f"{role}.num_gpus_per_node": "8" for role in ("actor", "ref", "critic", "reward")},
    "vllm.num_engines": "0",
    "vllm.tensor_parallel_size": "1",
    "vllm.gpu_memory_utilization": "0.95",
    "train.async_queue_size": "1",
    "ds.zero_stage": "2",
    "ds.tensor_parallel_size": "1",
    "ds.ring_attn_size": "1",
    "ds.lora.rank": "0",
    "rollout.batch_size": "1024",
    "rollout.n_samples_per_prompt": "1",
    "rollout.micro_batch_size": "1",
    "rollout.temperature": "1.0",
    "train.batch_size": "128",
    "train.micro_batch_size": "1",
    "train.max_epochs": "1",
    "train.max_tokens_per_gpu": "16192",
    "train.seed": "42",
    "data.max_len": "2048",
    "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": "0.01",
    "actor.policy_loss_type": "ppo",
    "actor.adam.lr": "1e-6",
    "actor.eps_clip": "0.2",
    "actor.max_norm": "1.0",
}
"""openrlhf/cli/train_ppo_ray.py of 0.11.2; a flag that is not here is off or None."""

READ = (
    *DEFAULTS,
    "train.colocate_all", "train.colocate_actor_ref", "train.colocate_critic_reward", "train.async_enable",
    "train.partial_rollout_enable", "train.dynamic_batch_enable", "train.agent_func_path", "rollout.max_tokens_per_gpu",
    "rollout.max_new_tokens", "rollout.vllm_generate_batch_size", "ds.enable_sleep", "ds.adam_offload", "ref.offload",
    "reward.offload", "actor.gradient_checkpointing_enable", "algo.kl.use_loss", "algo.dynamic_filtering_enable",
    "algo.advantage.is_correction_level", "algo.advantage.is_correction_threshold", "actor.eps_clip_low_high",
    "actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path", "reward.remote_url",
    "vllm.enable_sleep", "prompt_max_len",
)  # fmt: skip
"""Flags that say something of the job or the plan."""

REMARKS: Mapping[str, str] = {
    "vllm.enforce_eager": "priced with CUDA graphs",
    "vllm.sync_with_ray": "priced as a broadcast by NCCL",
    "ds.zpg": "priced without the second partition of ZeRO++",
    "ds.deepcompile": "not priced",
    "ds.use_liger_kernel": "not priced",
    "ds.experts_implementation": "not priced",
    "ds.use_universal_ckpt": "not priced",
    "ds.grad_accum_dtype": "not priced",
    "train.enable_ema": "the averaged model is not counted",
    "train.full_determinism_enable": "not priced",
    "actor.optim": "priced as Adam",
    "critic.optim": "priced as Adam",
    "critic.freezing_steps": "priced as after them",
}
"""Flags that change costs and that a plan has no word for."""

REFUSED: Mapping[str, str] = {
    "ds.load_in_4bit": "must not be given: weights in 4 bits are not planned for",
    "data.max_images_per_prompt": "must not be given: images are not planned for",
}

_BESIDE: Mapping[str, str] = {
    "actor": "gradient_checkpointing_reentrant dual_clip loss_agg_mode aux_loss_coef entropy_coef "
    "freeze_visual_encoder muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov "
    "adam.betas adam.eps adam.weight_decay lr_scheduler lr_warmup_ratio min_lr_ratio",
    "critic": "value_clip save_value_network max_norm muon.lr muon.momentum muon.ns_steps muon.nesterov "
    "muon.no_nesterov adam.lr adam.betas adam.eps adam.weight_decay lr_scheduler lr_warmup_ratio min_lr_ratio",
    "reward": "normalize_enable clip_range overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef",
    "algo": "advantage.is_correction_mode advantage.is_correction_gating advantage.lambd advantage.gamma "
    "advantage.no_std_norm kl.target kl.horizon kl.estimator kl.unbiased_gradient dynamic_filtering_range",
    "ds": "param_dtype attn_implementation overlap_comm packing_samples lora.alpha lora.target_modules lora.dropout "
    "ring_attn_head_stride value_head_prefix",
    "vllm": "sync_backend enable_prefix_caching",
    "rollout": "top_p",
    "train": "ema_beta num_episodes",
    "data": "disable_fast_tokenizer dataloader_num_workers max_samples prompt_dataset prompt_probs prompt_split "
    "input_key label_key input_template apply_chat_template image_key",
    "eval": "steps dataset split temperature n_samples_per_prompt",
    "ckpt": "save_steps path save_hf disable_ds max_num max_mem load_enable best_metric_key output_dir",
    "logger": "logging_steps wandb.key wandb.org wandb.group wandb.project wandb.run_name tensorboard_dir",
    "local_rank": "",
    "use_ms": "",
}
"""Flags that have no bearing on how a step is laid out, by what they begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags(Source):
    """Flags by today's names."""

    given: Mapping[str, tuple[str, ...]]
    """Values of each that is given; none for a switch."""

    def on(self, key: str) -> bool:
        """Whether a switch is set, or a flag given."""
        return key in self.given

    def text(self, key: str, at: int = 0) -> str | None:
        """A flag's value, the first unless `at` says otherwise, or its default; None if it has neither."""
        values = self.given.get(key)
        return values[at] if values else DEFAULTS.get(key)

    def number(self, key: str, at: int = 0) -> float:
        """A number that is given or has a default.

        Raises:
            InputError: it is no number.
        """
        return self.as_number(key, self.text(key, at))

    def count(self, key: str, *, least: int = 1) -> int:
        """A whole number that is given or has a default.

        Raises:
            InputError: it is none, or less than the least.
        """
        return self.as_whole(key, self.text(key), least=least)


def flags_of(words: Sequence[str], where: str) -> Flags:
    """Flags of a command by today's names.

    Raises:
        InputError: a flag that OpenRLHF never had, or one that no plan can have.
    """
    given: dict[str, tuple[str, ...]] = {}
    for name, values in options(words, where):
        for key in _today(name, where):
            if key in REFUSED and values[:1] != ("0",):
                raise InputError(f"{where}: {name}", REFUSED[key])
            given[key] = values
    return Flags(where=where, given=given)


def _today(name: str, where: str) -> tuple[str, ...]:
    known = {*READ, *REMARKS, *REFUSED}
    if name in SPLIT:
        return SPLIT[name]
    key = RENAMED.get(name, name)
    section, _, rest = key.partition(".")
    if key in known or rest in _BESIDE.get(section, "-").split(" "):
        return (key,)
    flags = [f"--{flag}" for flag in (*known, *RENAMED)]
    raise InputError(f"{where}: --{name}", nearest("must be a flag of OpenRLHF", f"--{name}", flags))
