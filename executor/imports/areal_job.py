"""The job of an AReaL configuration: its algorithm, models and sequences."""

from __future__ import annotations

from executor.imports.imported import MAX_STALENESS, assumed_lengths
from executor.imports.settings import Settings
from ir.algorithm import Algorithm, Name
from ir.job import JobDocument, Limits, Models, ModelSource, Workload

_KL, _MINIBATCHES, _RESPONSE_TOKENS, _RANK = 0.1, 4, 16384, 32
"""`actor.kl_ctl`, `ppo_n_minibatches`, `gconfig.max_new_tokens` and `lora_rank` where AReaL 1.0.4 has them not set."""
_PROMPT_TOKENS = 1024
"""Longest prompt where `train_dataset.max_length` does not say it; most examples set this."""


def read_job(s: Settings) -> JobDocument:
    """The job; the reference is there if it is used."""
    kl = s.number("actor.kl_ctl", _KL) if s.has("ref") else 0.0
    algorithm = Algorithm(
        name=_algorithm(s),
        learning_rate=s.number("actor.optimizer.lr", 1e-3),
        clip=s.number("actor.eps_clip", 0.2),
        kl_coefficient=kl,
        max_importance_weight=s.number("actor.rejection_sampling.upper", 5.0),
        max_gradient_norm=s.number("actor.optimizer.gradient_clipping", 1.0),
    )
    return JobDocument(
        name=str(s.get("experiment_name") or "areal"),
        algorithm=algorithm,
        models=_models(s, reference=kl > 0),
        workload=_workload(s),
        limits=Limits(max_staleness=_staleness(s)),
    )


def _algorithm(s: Settings) -> Name:
    """By the critic and by what rewards and advantages are normalised over."""
    if s.has("critic"):
        return "ppo"
    if s.get("actor.importance_sampling_level") == "sequence":
        return "gspo"
    if s.get("actor.reward_norm.mean_level") == "group":
        return _by_rewards(s)
    if s.get("actor.adv_norm.mean_level") == "group":
        return "grpo" if s.get("actor.adv_norm.std_level") else "dr-grpo"
    return "reinforce++"


def _by_rewards(s: Settings) -> Name:
    """Rewards are centred on their group."""
    if s.flag("actor.reward_norm.mean_leave1out"):
        return "rloo"
    if s.get("actor.reward_norm.std_level", "batch") is not None:
        return "grpo"
    return "reinforce++-baseline" if s.get("actor.adv_norm.mean_level") == "batch" else "dr-grpo"


def _models(s: Settings, *, reference: bool) -> Models:
    actor = str(s.required("actor.path"))
    critic, other = str(s.get("critic.path") or actor), str(s.get("ref.path") or actor)
    rank = s.whole("actor.lora_rank", _RANK) if s.flag("actor.use_lora") else None
    return Models(
        actor=ModelSource(name=actor, lora_rank=rank),
        critic=ModelSource(name=critic) if s.has("critic") else None,
        reference=ModelSource(name=other) if reference and other != actor else None,
    )


def _workload(s: Settings) -> Workload:
    prompt = s.whole("train_dataset.max_length", _PROMPT_TOKENS)
    response = s.whole("gconfig.max_new_tokens", _RESPONSE_TOKENS)
    if s.get("train_dataset.max_length") is None:
        s.took("train_dataset.max_length", f"prompts of at most {prompt} tokens")
    if s.has("econfig"):
        s.took("econfig", "turns of an environment are not read; gconfig.max_new_tokens is one whole response")
    lengths, note = assumed_lengths(prompt, response)
    s.note(note)
    prompts = s.whole("train_dataset.batch_size", 1)
    return Workload(
        prompts_per_step=prompts,
        samples_per_prompt=s.whole("gconfig.n_samples", 1),
        minibatches=_minibatches(s, prompts),
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        temperature=s.number("gconfig.temperature", 1.0),
        seed=s.whole("seed", 1, least=0),
        lengths=lengths,
    )


def _minibatches(s: Settings, prompts: int) -> int:
    key = "ppo_n_minibatches"
    asked = s.whole(f"actor.{key}", _MINIBATCHES)
    if s.has("critic") and s.whole(f"critic.{key}", _MINIBATCHES) != asked:
        s.took(f"critic.{key}", f"{asked}, those of the actor")
    divisor = max(n for n in range(1, asked + 1) if prompts % n == 0)
    if divisor != asked:
        s.took(f"actor.{key}", f"{divisor} of equal size in place of {asked}")
    return divisor


def _staleness(s: Settings) -> int:
    asked = s.whole("rollout.max_head_offpolicyness", 0, least=0)
    if asked > MAX_STALENESS:
        s.took("rollout.max_head_offpolicyness", f"{MAX_STALENESS} in place of {asked}")
    return min(asked, MAX_STALENESS)
