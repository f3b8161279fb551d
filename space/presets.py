"""Plans by name: shapes that frameworks run by default, with degrees at which the job fits. They are measured like any
plan.

A preset places the models and says how a framework lays them out (`Style`); the degrees are the smallest at which
weights and optimizer leave room. One that cannot be in a setting raises InputError, and `presets` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ir.errors import InputError
from ir.plan import Plan
from ir.rules import check
from ir.setting import Setting
from space.preset_layouts import OWN_PERCENT, Style, apart, colocated

_GENERIC = Style(percent=OWN_PERCENT)
_VERL_ALGORITHMS = (
    "ppo", "grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "remax", "gspo", "cispo",
)  # fmt: skip
_VERL = Style(
    percent=50, beyond="experts", tokens=16384, early_reward=True, frozen_away=True, algorithms=_VERL_ALGORITHMS
)
_OPENRLHF_ALGORITHMS = ("ppo", "grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline")
_OPENRLHF = Style(
    trainer="zero", stages=(2, 3), percent=60, beyond="nothing", offload="all", algorithms=_OPENRLHF_ALGORITHMS
)
_AREAL_ALGORITHMS = ("ppo", "grpo", "dr-grpo", "dapo", "rloo", "gspo")
_AREAL = Style(percent=90, tokens=1, early_reward=True, algorithms=_AREAL_ALGORITHMS)
_NEMO = Style(trainer="megatron", percent=60, tokens=1, offload="all", algorithms=("ppo", "grpo", "dapo"))
_REAL = Style(
    trainer="megatron", prefill=0, context=False, per_call=True, algorithms=("ppo", "grpo", "remax"), experts=False
)
_CHAT = Style(trainer="zero", prefill=0, beyond="nothing", context=False, algorithms=("ppo",), experts=False)


# The presets


def colocated_sync(setting: Setting) -> Plan:
    """All stages on all devices, synchronous, log-probs recomputed."""
    return colocated(setting, _GENERIC)


def disaggregated_sync(setting: Setting) -> Plan:
    """Rollout and training on pools of their own, one waiting for the other."""
    return apart(setting, replace(_GENERIC, percent=80))


def one_step_off(setting: Setting) -> Plan:
    """Disaggregated, generation one update behind."""
    in_flight = setting.backend is not None and setting.backend.always_in_flight
    return apart(setting, replace(_GENERIC, percent=80), staleness=1, in_flight=in_flight)


def fully_async(setting: Setting) -> Plan:
    """Disaggregated, generation up to four updates behind with three quarters of the devices."""
    return apart(setting, replace(_GENERIC, percent=80), shares=(0.75, 0.5), staleness=4, in_flight=True)


def verl_colocated(setting: Setting) -> Plan:
    """verl 0.9.1, `trainer.v1.trainer_mode=sync` (verl/trainer/config/ppo_trainer.yaml): one pool, FSDP with full
    sharding, or Megatron for experts; `use_dynamic_bsz` with `ppo_max_token_len_per_gpu` 16384,
    `gpu_memory_utilization` 0.5, no pipeline in engines; rewards are scored as responses finish, and FSDP keeps a
    reference in host memory (verl/workers/engine/fsdp/transformer_impl.py)."""
    return colocated(setting, _VERL)


def verl_separate_async(setting: Setting) -> Plan:
    """verl 0.9.1, `trainer.v1.trainer_mode=separate_async` (verl/trainer/ppo/v1): `sampler.max_off_policy_threshold` 8
    versions or what the job allows, partial rollout always on, `checkpoint_engine.backend=nccl`, a reward model on
    a pool of its own; equal halves as in docs/advance/fully_async.md."""
    style, own = replace(_VERL, percent=80), frozenset({"reward"})
    stale = max(min(8, setting.job.limits.max_staleness), 1)
    return apart(setting, style, own=own, staleness=stale, in_flight=True)


def openrlhf_colocate_all(setting: Setting) -> Plan:
    """OpenRLHF 0.11.2, `--train.colocate_all --ds.enable_sleep --vllm.enable_sleep` (openrlhf/cli/train_ppo_ray.py):
    one pool, ZeRO-2 (`--ds.zero_stage`) or 3 where that is too large, micro-batches by sequences."""
    return colocated(setting, _OPENRLHF)


def openrlhf_separate(setting: Setting) -> Plan:
    """OpenRLHF 0.11.2 with `--train.colocate_actor_ref --train.colocate_critic_reward` (openrlhf/cli/
    train_ppo_ray.py): engines, actor with reference, and critic with reward model on pools of their own, synchronous;
    `--vllm.gpu_memory_utilization` 0.95 by default, 0.9 here."""
    own = frozenset({"critic", "reward"} if "critic" in setting.roles else ())
    return apart(setting, replace(_OPENRLHF, percent=90), own=own)


def areal(setting: Setting) -> Plan:
    """AReaL 1.0.4 (areal/api/cli_args.py): `rollout.max_head_offpolicyness` 4 and three quarters of the devices
    generating as in its paper (arXiv:2505.24298), interruptible generation, `mb_spec.max_tokens_per_mb` one longest
    sequence, `gpu_memory_utilization` 0.9, rewards scored in the rollout workflow."""
    return apart(setting, _AREAL, shares=(0.75, 0.5), staleness=4, in_flight=True)


def nemo_rl_on_policy(setting: Setting) -> Plan:
    """NeMo-RL of August 2026, `policy.generation.colocated.enabled: true` (examples/configs/grpo_math_1B.yaml, and
    recipes of docs/about/performance-summary.md): Megatron, sequence packing to the longest sequence,
    `gpu_memory_utilization` 0.6, training states in host memory while it generates."""
    return colocated(setting, _NEMO)


def nemo_rl_one_step_off(setting: Setting) -> Plan:
    """NeMo-RL of August 2026, `grpo.async_grpo.max_trajectory_age_steps` 1 on equal halves (recipes `*-async-1off` of
    docs/about/performance-summary.md), `gpu_memory_utilization` 0.8; it forbids dynamic sampling."""
    style = replace(_NEMO, percent=80, algorithms=("ppo", "grpo"))
    return apart(setting, style, staleness=1)


def real(setting: Setting) -> Plan:
    """ReaL (arXiv:2406.14088; openpsi-project/ReaLHF): synchronous, every call of a model with its own tensor and
    pipeline degrees on the same devices, parameters reallocated between calls."""
    return colocated(setting, _REAL)


def deepspeed_chat(setting: Setting) -> Plan:
    """DeepSpeed-Chat's hybrid engine (arXiv:2308.01320; DeepSpeedExamples applications/DeepSpeed-Chat): PPO on one
    pool, ZeRO-3 for training, tensor parallel inside a node for generation (`--inference_tp_size`)."""
    return colocated(setting, _CHAT)


PRESETS: dict[str, Callable[[Setting], Plan]] = {
    "colocated-sync": colocated_sync,
    "disaggregated-sync": disaggregated_sync,
    "one-step-off": one_step_off,
    "async": fully_async,
    "verl-colocated": verl_colocated,
    "verl-separate-async": verl_separate_async,
    "openrlhf-colocate-all": openrlhf_colocate_all,
    "openrlhf-separate": openrlhf_separate,
    "areal": areal,
    "nemo-rl-on-policy": nemo_rl_on_policy,
    "nemo-rl-one-step-off": nemo_rl_one_step_off,
    "real": real,
    "deepspeed-chat": deepspeed_chat,
}


def presets(setting: Setting) -> dict[str, Plan]:
    """The presets that are legal in the setting."""
    found: dict[str, Plan] = {}
    for name, make in PRESETS.items():
        try:
            plan = make(setting)
            check(plan, setting, where=f"preset {name}")
        except InputError:
            continue
        found[name] = plan
    return found
