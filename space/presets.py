"""Plans by name: shapes that frameworks run by default, with degrees at which the job fits. They are measured like any
plan.

A preset places the models and says how a framework lays them out (`Style`); the degrees are the smallest at which
weights and optimizer leave room. One that cannot be in a setting raises InputError, and `presets` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ir.batch import HOME, PLACED, POOL_NAMES, ROLES
from ir.errors import InputError
from ir.graph import Op
from ir.job import Role
from ir.model import ModelShape
from ir.plan import SECTIONS, Fusions, Generate, Pass, Plan, Pool, Sync, Update
from ir.rules import check
from ir.setting import Devices, Setting
from space.build import MAX_PIPELINE, pool_sizes

TRAIN_SHARE = 0.6
"""Of a device's memory, what weights, gradients and optimizer may take: the rest is for activations."""

COLOCATED_SHARE = 0.9
"""The same together with an engine's share, where neither moves to host memory for the other."""

ENGINE_SHARE = 0.75
"""Of an engine's memory, what its weights may take: the rest is for cached keys and values."""

OWN_PERCENT = 60
"""Memory that engines without a share of their own are judged by, in percent."""

MAX_SEQUENCES = 256
"""Sequences that an engine decodes together by default: vLLM's `max_num_seqs` in verl and AReaL."""

PASS_TOKENS, UPDATE_TOKENS = 32768, 16384
"""Longest-length tokens that micro-batches by sequences are kept below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a framework lays models out. A backend that the setting asks for decides what trains in its place."""

    trainer: str = "auto"
    """plain: replicas; zero: replicas that divide the states; megatron: tensor, pipeline and expert parallel too;
    auto: megatron for models with experts, else zero."""
    stages: tuple[int, ...] = (3,)
    """ZeRO stages of `zero`, the first that fits."""
    percent: int = 0
    """Memory of an engine; 0: a cache that holds its sequences."""
    prefill: int = 8192
    """Prompt tokens taken in with a decode step; 0: prompts are prefilled whole."""
    engine_pipeline: bool = True
    """Whether engines can divide layers."""
    tokens: int = 0
    """Most tokens packed into a micro-batch where the longest sequence is shorter; 0: micro-batches by sequences."""
    offload: str = "none"
    """What waits in host memory when it fits either way."""
    per_call: bool = False
    """Whether every pass has its own degrees, instead of those its model trains with."""
    algorithms: tuple[str, ...] = ()
    """Those that the framework runs; empty for all."""
    experts: bool = True
    """Whether models with experts are supported."""


_GENERIC = Style(percent=OWN_PERCENT)
_VERL_ALGORITHMS = (
    "ppo", "grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "remax", "gspo", "cispo",
)  # fmt: skip
_VERL = Style(percent=50, engine_pipeline=False, tokens=16384, algorithms=_VERL_ALGORITHMS)
_OPENRLHF_ALGORITHMS = ("ppo", "grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline")
_OPENRLHF = Style(
    trainer="zero", stages=(2, 3), percent=60, engine_pipeline=False, algorithms=_OPENRLHF_ALGORITHMS, offload="all"
)
_AREAL = Style(
    percent=90, engine_pipeline=True, tokens=1, algorithms=("ppo", "grpo", "dr-grpo", "dapo", "rloo", "gspo")
)
_NEMO = Style(trainer="megatron", percent=60, tokens=1, offload="all", algorithms=("ppo", "grpo", "dapo"))
_REAL = Style(
    trainer="megatron", prefill=0, per_call=True, algorithms=("ppo", "grpo", "remax"), experts=False
)  # fmt: skip
_CHAT = Style(trainer="zero", prefill=0, engine_pipeline=False, algorithms=("ppo",), experts=False)


# The presets


def colocated_sync(setting: Setting) -> Plan:
    """All stages on all devices, synchronous, log-probs recomputed."""
    return _colocated(setting, _GENERIC)


def disaggregated_sync(setting: Setting) -> Plan:
    """Rollout and training on pools of their own, one waiting for the other."""
    return _apart(setting, replace(_GENERIC, percent=80))


def one_step_off(setting: Setting) -> Plan:
    """Disaggregated, generation one update behind."""
    in_flight = setting.backend is not None and setting.backend.always_in_flight
    return _apart(setting, replace(_GENERIC, percent=80), staleness=1, in_flight=in_flight)


def fully_async(setting: Setting) -> Plan:
    """Disaggregated, generation up to four updates behind with three quarters of the devices."""
    return _apart(setting, replace(_GENERIC, percent=80), shares=(0.75, 0.5), staleness=4, in_flight=True)


def verl_colocated(setting: Setting) -> Plan:
    """verl 0.9.1, `trainer.v1.trainer_mode=sync` (verl/trainer/config/ppo_trainer.yaml): one pool, FSDP with full
    sharding, or Megatron for experts; `use_dynamic_bsz` with `ppo_max_token_len_per_gpu` 16384,
    `gpu_memory_utilization` 0.5, no pipeline in engines."""
    return _colocated(setting, _VERL)


def verl_separate_async(setting: Setting) -> Plan:
    """verl 0.9.1, `trainer.v1.trainer_mode=separate_async` (verl/trainer/ppo/v1): `sampler.max_off_policy_threshold` 8
    versions or what the job allows, partial rollout always on, `checkpoint_engine.backend=nccl`, a reward model on
    a pool of its own; equal halves as in docs/advance/fully_async.md."""
    own = frozenset({"reward"} & set(setting.roles))
    stale = max(min(8, setting.job.limits.max_staleness), 1)
    return _apart(setting, replace(_VERL, percent=80), own=own, staleness=stale, in_flight=True, early_reward=True)


def openrlhf_colocate_all(setting: Setting) -> Plan:
    """OpenRLHF 0.11.2, `--train.colocate_all --ds.enable_sleep --vllm.enable_sleep` (openrlhf/cli/train_ppo_ray.py):
    one pool, ZeRO-2 (`--ds.zero_stage`) or 3 where that is too large, micro-batches by sequences."""
    return _colocated(setting, _OPENRLHF)


def openrlhf_separate(setting: Setting) -> Plan:
    """OpenRLHF 0.11.2 with `--train.colocate_actor_ref --train.colocate_critic_reward` (openrlhf/cli/
    train_ppo_ray.py): engines, actor with reference, and critic with reward model on pools of their own, synchronous;
    `--vllm.gpu_memory_utilization` 0.95 by default, 0.9 here."""
    own = frozenset({"critic", "reward"} if "critic" in setting.roles else ())
    return _apart(setting, replace(_OPENRLHF, percent=90, offload="none"), own=own)


def areal(setting: Setting) -> Plan:
    """AReaL 1.0.4 (areal/api/cli_args.py): `rollout.max_head_offpolicyness` 4 and three quarters of the devices
    generating as in its paper (arXiv:2505.24298), interruptible generation, `mb_spec.max_tokens_per_mb` one longest
    sequence, `gpu_memory_utilization` 0.9, rewards scored in the rollout workflow."""
    return _apart(setting, _AREAL, shares=(0.75, 0.5), staleness=4, in_flight=True, early_reward=True)


def nemo_rl_on_policy(setting: Setting) -> Plan:
    """NeMo-RL of August 2026, `policy.generation.colocated.enabled: true` (examples/configs/grpo_math_1B.yaml, and
    recipes of docs/about/performance-summary.md): Megatron, sequence packing to the longest sequence,
    `gpu_memory_utilization` 0.6, training states in host memory while it generates."""
    return _colocated(setting, _NEMO)


def nemo_rl_one_step_off(setting: Setting) -> Plan:
    """NeMo-RL of August 2026, `grpo.async_grpo.max_trajectory_age_steps` 1 on equal halves (recipes `*-async-1off` of
    docs/about/performance-summary.md), `gpu_memory_utilization` 0.8; it forbids dynamic sampling."""
    style = replace(_NEMO, percent=80, offload="none", algorithms=("ppo", "grpo"))
    return _apart(setting, style, staleness=1)


def real(setting: Setting) -> Plan:
    """ReaL (arXiv:2406.14088; openpsi-project/ReaLHF): synchronous, every call of a model with its own tensor and
    pipeline degrees on the same devices, parameters reallocated between calls."""
    return _colocated(setting, _REAL)


def deepspeed_chat(setting: Setting) -> Plan:
    """DeepSpeed-Chat's hybrid engine (arXiv:2308.01320; DeepSpeedExamples applications/DeepSpeed-Chat): PPO on one
    pool, ZeRO-3 for training, tensor parallel inside a node for generation (`--inference_tp_size`)."""
    return _colocated(setting, _CHAT)


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


# Pools


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """A pool, and what is laid out there."""

    setting: Setting
    style: Style
    pool: Pool
    roles: tuple[str, ...]

    @property
    def device(self) -> Devices:
        return self.setting.groups[self.pool.group]

    @property
    def colocated(self) -> bool:
        return {"rollout", "actor"} <= set(self.roles)

    def trainer(self, shape: ModelShape) -> str:
        """What trains a model: the backend's trainer, or the framework's."""
        backend = self.setting.backend
        if backend is not None:
            return {"local": "plain", "megatron": "megatron"}.get(backend.name, "zero")
        return self.style.trainer if self.style.trainer != "auto" else "megatron" if shape.is_moe else "zero"

    def room(self, op: Op, share: float) -> float:
        """Bytes of a device that a model may take of a share of memory, in proportion to the pool's other models."""
        if self.trainer(self.setting.shape(op)) == "plain":
            return inf
        states = {role: _state_bytes(self.setting, PLACED[role]) for role in self.roles if role != "rollout"}
        return share * self.device.memory_bytes * states[HOME[op]] / sum(states.values())

    @property
    def resident(self) -> float:
        """Share of memory for what stays there while others compute."""
        percent = self.style.percent or OWN_PERCENT
        return min(TRAIN_SHARE, COLOCATED_SHARE - percent / 100) if self.colocated else TRAIN_SHARE


def _state_bytes(setting: Setting, op: Op) -> int:
    shape = setting.shape(op)
    return 2 * shape.parameters + (16 * shape.trainable_parameters if SECTIONS[op] is Update else 0)


def _colocated(setting: Setting, style: Style) -> Plan:
    """Everything on all devices; of several groups, the last."""
    group = len(setting.groups) - 1
    pool = Pool(name="all", devices=_devices(setting, group), group=group)
    return _plan(setting, style, {pool: setting.roles})


def _apart(
    setting: Setting,
    style: Style,
    *,
    shares: tuple[float, ...] = (0.5,),
    own: frozenset[str] = frozenset(),
    early_reward: bool = False,
    **ahead: Any,
) -> Plan:
    """Generation on a share of the devices, the first that leaves training enough; of several groups, on the first.
    The roles in `own` have a pool together: half of the training side, or a quarter of the other without a critic."""
    last, roles = len(setting.groups) - 1, setting.roles
    for share in shares:
        rollout, train = _split(setting, share)
        side = 0
        if own:
            side = train // 2 if "critic" in own else rollout // 4
            rollout, train = (rollout, train - side) if "critic" in own else (rollout - side, train)
        lead = next((role for role in ROLES if role in own), "")
        pools = {
            Pool(name="rollout", devices=rollout): ("rollout",),
            Pool(name=POOL_NAMES["actor"], devices=train, group=last): tuple(sorted(set(roles) - own - {"rollout"})),
        }
        if own:
            group = last if "critic" in own else 0
            pools[Pool(name=lead, devices=side, group=group)] = tuple(sorted(own))
        verifier = early_reward and Op.REWARD in setting.ops and Role.REWARD not in setting.job.models
        try:
            fusions = Fusions(reward_with_generation=verifier)
            return _plan(setting, style, pools, fusions=fusions, sync="broadcast", **ahead)
        except InputError as error:
            failed = error
    raise failed


def _devices(setting: Setting, group: int) -> int:
    """The largest pool of a group that the job allows."""
    most = min(setting.groups[group].count, setting.job.limits.most_devices(setting.num_devices))
    return max((size for size in pool_sizes(setting) if size <= most), default=0)


def _split(setting: Setting, share: float) -> tuple[int, int]:
    """Devices that generate and that train: whole groups, or a share of the one there is and what it leaves."""
    last = len(setting.groups) - 1
    devices, sizes = _devices(setting, last), set(pool_sizes(setting))
    if last:
        return _devices(setting, 0), devices
    options = [size for size in sorted(sizes) if devices - size in sizes]
    if not options:
        raise InputError("preset", "needs two devices", devices)
    rollout = min(options, key=lambda size: abs(size - round(devices * share)))
    return rollout, devices - rollout


# Layouts


def _plan(setting: Setting, style: Style, pools: Mapping[Pool, tuple[str, ...]], **structure: Any) -> Plan:
    name = setting.job.algorithm.name
    if style.algorithms and name not in style.algorithms:
        raise InputError("preset", "must be of a framework that runs the algorithm", name)
    if not style.experts and any(shape.is_moe for shape in setting.job.models.values()):
        raise InputError("preset", "must be of a framework that runs models with experts")
    sites = {r: _Site(setting=setting, style=style, pool=p, roles=roles) for p, roles in pools.items() for r in roles}
    sections: dict[str, Any] = {Op.GENERATE: _engine(sites["rollout"])}
    updates = {HOME[op]: _update(sites[HOME[op]], op) for op in setting.sections if SECTIONS[op] is Update}
    sections |= {PLACED[role]: update for role, update in updates.items()}
    for op in setting.sections:
        if SECTIONS[op] is Pass:
            sections[op] = _pass(sites[HOME[op]], op, updates)
    return Plan(pools=tuple(pools), **{str(op): section for op, section in sections.items()}, **structure)


def _held(shape: ModelShape, tp: int, pp: int, ep: int) -> float:
    """Parameters that a device holds, if data-parallel ranks divide nothing."""
    return (shape.parameters - shape.expert_parameters) / (tp * pp) + shape.expert_parameters / (pp * max(ep, tp))


def _degrees(site: _Site, shape: ModelShape, *, pipeline: bool) -> list[tuple[int, int]]:
    """(tp, pp) that divide the pool and the model, smallest first; pipelines before tensors for thin experts."""
    devices, domain = site.pool.devices, site.device.domain
    found = [
        (tp, pp)
        for tp in _powers(min(domain, devices))
        for pp in (_powers(min(MAX_PIPELINE, shape.layers)) if pipeline else (1,))
        if devices % (tp * pp) == 0 and domain % tp == 0 and _divides_heads(shape, tp)
        if (pp - 1) * -(-shape.layers // pp) < shape.layers
    ]
    return sorted(found, key=lambda d: (d[0] * d[1], d[0] if shape.is_moe else d[1]))


def _divides_heads(shape: ModelShape, tp: int) -> bool:
    kv = shape.mla is not None or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    return shape.heads % tp == 0 and kv


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length())]


def _power_at_most(value: int) -> int:
    return 1 << max(value.bit_length() - 1, 0)
