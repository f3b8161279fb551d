"""The job of a NeMo-RL configuration: its algorithm, models and sequences."""

from __future__ import annotations

from executor.imports.imported import MAX_STALENESS, assumed_lengths
from executor.imports.settings import Settings
from ir.algorithm import Algorithm, Name
from ir.job import JobDocument, Limits, Models, ModelSource, Workload

BASES = ("grpo_math_1B.yaml", "ppo_math_1B.yaml")
"""Files that a configuration may inherit from."""

_MODEL = "Qwen/Qwen2.5-1.5B"
_PROMPTS, _SAMPLES, _BATCH, _CLIP = 32, 16, 512, 0.2
_KL, _RATE, _TOKENS = {"grpo": 0.01, "ppo": 0.0}, {"grpo": 5e-6, "ppo": 1e-6}, {"grpo": 512, "ppo": 16384}
_EPOCHS, _PPO_PROMPT = 4, 2048
"""What the base configurations set of the keys that are read here, as of commit 0352cb76."""


def section_of(s: Settings) -> str:
    """The section of the algorithm."""
    return "ppo" if s.has("ppo") or s.has("value") or "ppo" in str(s.get("defaults")) else "grpo"


def read_job(s: Settings) -> JobDocument:
    """The job; the reference is there if it is used."""
    section = section_of(s)
    kl = s.number("loss_fn.reference_policy_kl_penalty", _KL[section])
    skipped = s.flag(f"{section}.skip_reference_policy_logprobs_calculation", section == "ppo")
    if kl == 0 and not skipped:
        s.took(f"{section}.skip_reference_policy_logprobs_calculation", "a pass that counts for nothing is not read")
    algorithm = Algorithm(
        name=_algorithm(s, section),
        learning_rate=_rate(s, section),
        clip=s.number("loss_fn.ratio_clip_min", _CLIP),
        kl_coefficient=0.0 if skipped else kl,
        max_importance_weight=s.number("loss_fn.truncated_importance_sampling_ratio", 5.0),
        max_gradient_norm=s.number("policy.max_grad_norm", 1.0),
    )
    return JobDocument(
        name=str(s.get("logger.wandb.name") or f"nemo-rl-{section}"),
        algorithm=algorithm,
        models=_models(s, section),
        workload=_workload(s, section, useful=algorithm.dynamic_sampling),
        limits=Limits(max_staleness=_staleness(s, section)),
    )


def _rate(s: Settings, section: str) -> float:
    key = "megatron_cfg.optimizer.lr" if s.flag("policy.megatron_cfg.enabled") else "optimizer.kwargs.lr"
    return s.number(f"policy.{key}", _RATE[section])


def _algorithm(s: Settings, section: str) -> Name:
    if section == "ppo":
        return "ppo"
    if s.get("grpo.adv_estimator.name") == "reinforce_plus_plus":
        return "reinforce++-baseline" if s.flag("grpo.adv_estimator.minus_baseline", True) else "reinforce++"
    if s.flag("grpo.use_dynamic_sampling"):
        return "dapo"
    if s.flag("loss_fn.use_cispo"):
        return "cispo"
    if s.flag("loss_fn.sequence_level_importance_ratios"):
        return "gspo"
    if s.flag("grpo.normalize_rewards", True):
        return "grpo"
    return "rloo" if s.flag("grpo.use_leave_one_out_baseline", True) else "dr-grpo"


def _models(s: Settings, section: str) -> Models:
    actor = str(s.get("policy.model_name") or _MODEL)
    megatron = s.flag("policy.megatron_cfg.enabled")
    adapters = "policy.megatron_cfg.peft" if megatron else "policy.dtensor_cfg.lora_cfg"
    rank = s.whole(f"{adapters}.dim", 8) if s.flag(f"{adapters}.enabled") else None
    critic = ModelSource(name=str(s.get("value.model_name") or actor)) if section == "ppo" else None
    return Models(actor=ModelSource(name=actor, lora_rank=rank), critic=critic)


def _workload(s: Settings, section: str, *, useful: bool) -> Workload:
    prompts = s.whole(f"{section}.num_prompts_per_step", _PROMPTS)
    samples = s.whole(f"{section}.num_generations_per_prompt", _SAMPLES)
    prompt, response = _tokens(s, section)
    lengths, note = assumed_lengths(prompt, response)
    s.note(note)
    if s.whole(f"{section}.max_rollout_turns", 1) > 1:
        s.took(f"{section}.max_rollout_turns", "turns are not read; a response is one")
    return Workload(
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        minibatches=_minibatches(s, prompts, samples),
        epochs=s.whole("ppo.ppo_epochs", _EPOCHS) if section == "ppo" else 1,
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        temperature=s.number("policy.generation.temperature", 1.0),
        useful_groups=min(1 / s.number("grpo.batch_multiplier", 1.0), 1.0) if useful else None,
        seed=s.whole(f"{section}.seed", 42, least=0),
        lengths=lengths,
    )


def _tokens(s: Settings, section: str) -> tuple[int, int]:
    """Longest prompt and response. Where each may take all of a sequence, prompts are taken as an eighth of it."""
    total = s.whole("policy.max_total_sequence_length", _TOKENS[section])
    response = min(s.whole("policy.generation.max_new_tokens", total), total)
    prompt = s.whole("data.max_input_seq_length", total if section == "grpo" else _PPO_PROMPT)
    if prompt + response == total:
        return prompt, response
    room = total - response if response < total else min(prompt, max(total // 8, 1))
    prompt = min(prompt, room)
    s.took("policy.max_total_sequence_length", f"{total} tokens, {prompt} of them the longest prompt")
    return prompt, total - prompt


def _minibatches(s: Settings, prompts: int, samples: int) -> int:
    key = "policy.train_global_batch_size"
    batch = s.whole(key, _BATCH)
    minibatches = prompts * samples / batch
    if minibatches != int(minibatches) or prompts % int(minibatches):
        raise s.error(key, f"must divide the {prompts} x {samples} samples of a step into whole prompts", batch)
    return int(minibatches)


def _staleness(s: Settings, section: str) -> int:
    key = f"{section}.async_{section}"
    if not s.flag(f"{key}.enabled"):
        return 0
    asked = s.whole(f"{key}.max_trajectory_age_steps", 1)
    if asked > MAX_STALENESS:
        s.took(f"{key}.max_trajectory_age_steps", f"{MAX_STALENESS} in place of {asked}")
    return min(asked, MAX_STALENESS)
