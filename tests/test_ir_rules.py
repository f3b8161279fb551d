"""Every rule is broken by one plan that breaks no other, and says so in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import build
import msgspec
import numpy as np
import pytest

from ir.backends import BACKENDS, backend
from ir.batch import ROLES, PlanBatch, batch_of
from ir.errors import InputError
from ir.job import Job, Role
from ir.model import ModelShape, Moe
from ir.plan import Pass, Plan, Pool
from ir.rules import breaches, check, legal
from ir.rules_layout import LAYOUT_RULES
from ir.rules_structure import STRUCTURE_RULES
from ir.setting import Devices, Setting

JOBS = build.jobs()
GRPO, PPO = JOBS["grpo"], JOBS["ppo"]
NODE = Devices(count=24, domain=12, fp8=True, host=True)


def shaped(job: Job, **changes: Any) -> Job:
    """The job with another shape for all its models."""
    shape: ModelShape = replace(build.SHAPE, **changes)
    return replace(job, actor=shape, others=dict.fromkeys(job.others, shape))


MOE = shaped(GRPO, moe=Moe(experts=4, experts_per_token=2, ffn=32))


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A plan that breaks a rule, and what the error says of it."""

    job: Job = GRPO
    devices: Devices = NODE
    backend: str | None = None
    path: str
    got: str
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        found = backend(self.backend) if self.backend else None
        return Setting(job=self.job, groups=(self.devices,), backend=found)


ONE = {"all": 1}
CACHE = {"memory_percent": 80}

BROKEN: dict[str, Broken] = {
    "pools-fit-the-devices": Broken(
        devices=Devices(count=3), path="pools", got="['rollout 2', 'train 2']", plan={"pools": {"rollout": 2, "train": 2}, "change": {"update_actor": {"dp": 2}}},
    ),
    "devices-as-the-job-allows": Broken(
        job=build.job(devices=(4, 8)), path="pools", got="['rollout 1', 'train 1']", plan={},
    ),
    "staleness-within-limit": Broken(path="staleness", got="3", plan={"staleness": 3}),
    "staleness-needs-own-pool": Broken(path="staleness", got="1", plan={"pools": ONE, "staleness": 1}),
    "in-flight-needs-staleness": Broken(path="in_flight", got="True", plan={"in_flight": True}),
    "weights-reshard-within-a-pool": Broken(path="sync", got="reshard", plan={"sync": "reshard"}),
    "deltas-need-whole-training": Broken(job=JOBS["lora"], path="sync", got="delta", plan={"sync": "delta"}),
    "deltas-need-host-memory": Broken(
        devices=replace(NODE, host=False), path="sync", got="delta-disk", plan={"sync": "delta-disk"},
    ),
    "one-source-of-old-logprobs": Broken(
        path="fusions.rollout_logprob", got="True", plan={"flags": ("rollout_logprob", "fold_old_logprob")},
    ),
    "fold-needs-a-single-update": Broken(
        job=build.job(epochs=2), path="fusions.fold_old_logprob", got="True", plan={"flags": ("fold_old_logprob",)},
    ),
    "fold-needs-old-logprobs-in-the-update-only": Broken(
        job=JOBS["distillation"], path="fusions.fold_old_logprob", got="True", plan={"flags": ("fold_old_logprob",)},
    ),
    "merge-needs-a-reference": Broken(
        job=build.job(kl_coefficient=0.0), path="fusions.merge_logprobs", got="True", plan={"flags": ("merge_logprobs",)},
    ),
    "merge-needs-one-pool": Broken(
        path="fusions.merge_logprobs", got="True", plan={"flags": ("merge_logprobs",), "place": {"reference_logprob": "rollout"}},
    ),
    "stream-needs-own-pool": Broken(path="fusions.stream", got="True", plan={"pools": ONE, "flags": ("stream",)}),
    "stream-needs-a-consumer": Broken(
        job=build.job(kl_coefficient=0.0), path="fusions.stream", got="True", plan={"flags": ("stream", "reward_with_generation")},
    ),
    "stream-excludes-merge": Broken(path="fusions.stream", got="True", plan={"flags": ("stream", "merge_logprobs")}),
    "interleave-needs-a-critic": Broken(
        path="fusions.interleave_updates", got="True", plan={"flags": ("interleave_updates",)},
    ),
    "interleave-needs-one-pool": Broken(
        job=PPO, path="fusions.interleave_updates", got="True",
        plan={"flags": ("interleave_updates",), "place": {"values": "rollout", "update_critic": "rollout"}},
    ),
    "early-reward-needs-a-verifier": Broken(
        job=PPO, path="fusions.reward_with_generation", got="True", plan={"flags": ("reward_with_generation",)},
    ),
    "adapter-reference-needs-lora": Broken(
        path="sharing.reference_adapter", got="True", plan={"flags": ("reference_adapter",)},
    ),
    "adapter-reference-runs-with-the-actor": Broken(
        job=JOBS["lora"], path="sharing.reference_adapter", got="True",
        plan={"flags": ("reference_adapter",), "place": {"reference_logprob": "rollout"}},
    ),
    "shared-trunk-needs-equal-shapes": Broken(
        job=replace(PPO, others={**PPO.others, Role.CRITIC: replace(build.SHAPE, layers=4)}),
        path="sharing.critic_trunk", got="True", plan={"flags": ("critic_trunk",)},
    ),
    "shared-trunk-needs-a-pass": Broken(
        job=PPO, path="sharing.critic_trunk", got="True", plan={"flags": ("critic_trunk", "rollout_logprob")},
    ),
    "shared-trunk-is-one-update": Broken(
        job=PPO, path="sharing.critic_trunk", got="True", plan={"flags": ("critic_trunk", "interleave_updates")},
    ),
    "reward-trunk-needs-equal-shapes": Broken(
        job=replace(PPO, others={**PPO.others, Role.REWARD: replace(build.SHAPE, layers=4)}),
        path="sharing.reward_trunk", got="True", plan={"flags": ("reward_trunk",)},
    ),
    "one-shared-trunk": Broken(
        job=PPO, path="sharing.reward_trunk", got="True", plan={"flags": ("critic_trunk", "reward_trunk")},
    ),
    "backend-runs-the-algorithm": Broken(job=JOBS["dapo"], backend="local", path="generate.pool", got="rollout"),
    "backend-keeps-the-reference-with-the-actor": Broken(
        backend="local", path="pools", got="['rollout 1', 'train 1']", plan={"place": {"reference_logprob": "rollout"}},
    ),
    "backend-updates-in-flight": Broken(backend="local", path="in_flight", got="False", plan={"staleness": 1}),
    "backend-supports-generate.tp": Broken(
        backend="local", path="generate.tp", got="2", plan={"pools": {"rollout": 2, "train": 1}, "change": {"generate": {"tp": 2}}},
    ),
    "backend-supports-update_actor.recompute": Broken(
        backend="local", path="update_actor.recompute", got="selective", plan={"change": {"update_actor": {"recompute": "selective"}}},
    ),
    "backend-supports-sync": Broken(backend="local", path="sync", got="disk", plan={"sync": "disk"}),
    "replicas-fill-the-pool": Broken(
        path="generate.tp", got="2", plan={"pools": {"rollout": 3, "train": 1}, "change": {"generate": {"tp": 2}}},
    ),
    "replicas-fit-the-pool": Broken(path="update_actor.dp", got="2", plan={"change": {"update_actor": {"dp": 2}}}),
    "half-the-pool-works": Broken(path="update_actor.dp", got="1", plan={"pools": {"rollout": 1, "train": 4}}),
    "tensor-parallel-divides-the-heads": Broken(
        path="generate.tp", got="3", plan={"pools": {"rollout": 3, "train": 1}, "change": {"generate": {"tp": 3}}},
    ),
    "tensor-parallel-inside-a-domain": Broken(
        devices=replace(NODE, domain=2), path="generate.tp", got="4", plan={"pools": {"rollout": 4, "train": 1}, "change": {"generate": {"tp": 4}}},
    ),
    "layers-fill-the-pipeline": Broken(
        path="generate.pp", got="4", plan={"pools": {"rollout": 4, "train": 1}, "change": {"generate": {"pp": 4}}},
    ),
    "interleaving-needs-a-pipeline": Broken(
        path="update_actor.vpp", got="2", plan={"change": {"update_actor": {"vpp": 2}}},
    ),
    "interleaving-divides-the-layers": Broken(
        job=shaped(GRPO, layers=7), path="update_actor.vpp", got="2",
        plan={"pools": {"rollout": 1, "train": 2}, "change": {"update_actor": {"pp": 2, "vpp": 2}}},
    ),
    "interleaving-runs-in-rounds": Broken(
        job=shaped(GRPO, layers=4), path="update_actor.vpp", got="2",
        plan={"pools": {"rollout": 1, "train": 2}, "change": {"update_actor": {"pp": 2, "vpp": 2, "micro_batch": 6}}},
    ),
    "zero-bubble-needs-a-pipeline": Broken(
        job=shaped(GRPO, layers=4), path="update_actor.schedule", got="zero-bubble",
        plan={"pools": {"rollout": 1, "train": 2}, "change": {"update_actor": {"pp": 2, "vpp": 2, "schedule": "zero-bubble"}}},
    ),
    "pipeline-is-filled": Broken(
        path="update_actor.pp", got="2",
        plan={"pools": {"rollout": 1, "train": 2}, "change": {"update_actor": {"pp": 2, "micro_batch": 16}}},
    ),
    "experts-divide": Broken(
        path="generate.ep", got="2", plan={"pools": {"rollout": 2, "train": 1}, "change": {"generate": {"ep": 2}}},
    ),
    "experts-inside-the-replicas": Broken(
        job=MOE, path="generate.ep", got="4", plan={"pools": {"rollout": 2, "train": 1}, "change": {"generate": {"ep": 4}}},
    ),
    "backend-divides-an-engines-experts": Broken(
        job=MOE, backend="torch", path="generate.ep", got="2",
        plan={"pools": {"rollout": 2, "train": 1}, "change": {"generate": {"ep": 2, **CACHE}}},
    ),
    "expert-tensor-parallel-is-one-or-all": Broken(
        job=MOE, path="update_actor.etp", got="2", plan={"pools": {"rollout": 1, "train": 2}, "change": {"update_actor": {"dp": 2, "etp": 2}}},
    ),
    "context-parallel-divides-the-sequence": Broken(
        job=build.job(max_response_tokens=25), path="old_logprob.cp", got="2",
        plan={"pools": {"rollout": 1, "train": 2}, "change": {"old_logprob": {"cp": 2}, "update_actor": {"dp": 2}}},
    ),
    "zero-needs-replicas": Broken(path="update_actor.zero", got="1", plan={"change": {"update_actor": {"zero": 1}}}),
    "zero-excludes-a-pipeline": Broken(
        path="update_actor.zero", got="2",
        plan={"pools": {"rollout": 1, "train": 4}, "change": {"update_actor": {"dp": 2, "pp": 2, "zero": 2}}},
    ),
    "hybrid-sharding-needs-zero": Broken(
        devices=replace(NODE, domain=2), path="update_actor.shard", got="2",
        plan={"pools": {"rollout": 1, "train": 4}, "change": {"update_actor": {"dp": 4, "zero": 1, "shard": 2}}},
    ),
    "hybrid-sharding-groups-the-replicas": Broken(
        devices=replace(NODE, domain=4), path="update_actor.shard", got="4",
        plan={"pools": {"rollout": 1, "train": 4}, "change": {"update_actor": {"dp": 4, "zero": 3, "shard": 4}}},
    ),
    "hybrid-sharding-fills-a-domain": Broken(
        path="update_actor.shard", got="2",
        plan={"pools": {"rollout": 1, "train": 4}, "change": {"update_actor": {"dp": 4, "zero": 3, "shard": 2}}},
    ),
    "dp-divides-the-minibatch": Broken(
        path="update_actor.dp", got="3", plan={"pools": {"rollout": 1, "train": 3}, "change": {"update_actor": {"dp": 3}}},
    ),
    "one-unit-of-micro-batch": Broken(
        path="old_logprob.micro_batch", got="4", plan={"change": {"old_logprob": {"micro_tokens": 64}}},
    ),
    "micro-tokens-hold-a-sequence": Broken(
        path="update_actor.micro_tokens", got="32", plan={"change": {"update_actor": {"micro_batch": 0, "micro_tokens": 32}}},
    ),
    "micro-batch-fits": Broken(
        path="reference_logprob.micro_batch", got="32", plan={"change": {"reference_logprob": {"micro_batch": 32}}},
    ),
    "concurrency-fits": Broken(
        path="generate.concurrency", got="49", plan={"staleness": 2, "change": {"generate": {"concurrency": 49}}},
    ),
    "guesses-need-an-acceptance": Broken(
        path="generate.draft_tokens", got="2", plan={"change": {"generate": {"draft_tokens": 2}}},
    ),
    "backend-sizes-the-cache-by-memory": Broken(backend="torch", path="generate.memory_percent", got="0"),
    "fp8-needs-the-device": Broken(
        devices=replace(NODE, fp8=False), path="generate.precision", got="fp8", plan={"change": {"generate": {"precision": "fp8"}}},
    ),
    "offload-needs-host-memory": Broken(
        devices=replace(NODE, host=False), path="update_actor.offload", got="optimizer",
        plan={"change": {"update_actor": {"offload": "optimizer"}}},
    ),
    "trained-weights-wait-as-the-update-says": Broken(
        path="old_logprob.offload", got="all", plan={"change": {"old_logprob": {"offload": "all"}}},
    ),
}  # fmt: skip

ARRAYS_ONLY = {"pools-lie-in-a-group", "shared-trunk-runs-with-the-actor", "reward-trunk-runs-with-the-critic"}
"""Rules with tests of their own, below."""


def broken_rules(batch: PlanBatch, setting: Setting) -> list[str]:
    return [breach.name for breach in breaches(batch, setting) if breach.broken[0]]


def test_every_rule_has_a_plan_that_breaks_it() -> None:
    rules = {rule.name for rule in (*STRUCTURE_RULES, *LAYOUT_RULES)}
    assert rules == {name for name in BROKEN if not name.startswith("backend-supports-")} | ARRAYS_ONLY


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_is_broken_alone_and_says_so(name: str) -> None:
    case = BROKEN[name]
    plan = build.full_plan(case.job, **case.plan)
    assert broken_rules(batch_of([plan]), case.setting) == [name]
    assert not legal(batch_of([plan]), case.setting)[0]
    with pytest.raises(InputError) as caught:
        check(plan, case.setting, where="plan.toml")
    rules = {rule.name: rule for rule in (*STRUCTURE_RULES, *LAYOUT_RULES)}
    if name in rules:
        assert str(caught.value) == f"plan.toml: {case.path}: {rules[name].message} (rule {name}), got {case.got}"
    else:
        assert str(caught.value).startswith(f"plan.toml: {case.path}: must be ")
        assert str(caught.value).endswith(f" for the backend 'local' (rule {name}), got {case.got}")


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("grpo", {}),
        ("grpo", {"pools": ONE}),
        ("ppo", {"flags": ("interleave_updates", "reward_trunk")}),
        ("ppo", {"flags": ("critic_trunk", "merge_logprobs")}),
        ("dapo", {"flags": ("stream", "reward_with_generation", "fold_old_logprob")}),
        ("remax", {"staleness": 2, "in_flight": True, "sync": "disk"}),
        ("distillation", {"flags": ("rollout_logprob", "stream")}),
        ("lora", {"flags": ("reference_adapter", "merge_logprobs")}),
    ],
)
def test_plans_that_break_none(kind: str, plan: dict[str, Any]) -> None:
    setting = Setting(job=JOBS[kind], groups=(NODE,))
    made = build.full_plan(JOBS[kind], **plan)
    check(made, setting)
    assert legal(batch_of([made]), setting).tolist() == [True]


def test_a_message_in_full() -> None:
    plan = build.full_plan(GRPO, change={"generate": {"concurrency": 17}})
    with pytest.raises(InputError) as caught:
        check(plan, Setting(job=GRPO, groups=(NODE,)), where="plan.toml")
    assert str(caught.value) == (
        "plan.toml: generate.concurrency: must not exceed the sequences an engine can have in flight under the "
        "staleness bound (rule concurrency-fits), got 17"
    )
    plan = build.full_plan(GRPO, sync="disk")
    with pytest.raises(InputError) as caught:
        check(plan, Setting(job=GRPO, groups=(NODE,), backend=BACKENDS["local"]))
    assert str(caught.value) == (
        "plan: sync: must be reshard or broadcast for the backend 'local' (rule backend-supports-sync), got disk"
    )


def test_a_pool_in_a_group_that_is_not_there() -> None:
    plan = build.full_plan(GRPO)
    pools = (plan.pools[0], Pool(name="train", devices=1, group=1))
    with pytest.raises(InputError) as caught:
        check(msgspec.structs.replace(plan, pools=pools), Setting(job=GRPO, groups=(NODE,)))
    assert str(caught.value) == (
        "plan: pools: every pool's group must be one of the cluster's, counted from 0 (rule pools-lie-in-a-group), "
        "got ['rollout 1', 'train 1 of group 1']"
    )


def moved(batch: PlanBatch, role: str) -> PlanBatch:
    """The plan with a role on a pool of its own of one device."""
    own = {f"place.{role}": ROLES.index(role), f"devices.{role}": 1, f"group.{role}": 0}
    return PlanBatch(1, dict(batch.columns) | {name: np.array([value]) for name, value in own.items()})


@pytest.mark.parametrize(
    ("flag", "role", "rule"),
    [
        ("critic_trunk", "critic", "shared-trunk-runs-with-the-actor"),
        ("reward_trunk", "reward", "reward-trunk-runs-with-the-critic"),
    ],
)
def test_a_role_without_a_section_stays_with_its_host(flag: str, role: str, rule: str) -> None:
    # A plan cannot break these: the sections that would say where the model runs are absent. Arrays can.
    batch = batch_of([build.full_plan(PPO, flags=(flag,))])
    setting = Setting(job=PPO, groups=(NODE,))
    assert broken_rules(batch, setting) == []
    assert broken_rules(moved(batch, role), setting) == [rule]


def test_groups_have_their_own_devices_and_abilities() -> None:
    setting = Setting(job=GRPO, groups=(Devices(count=2, domain=2), Devices(count=4, domain=4, fp8=True)))
    plan = build.full_plan(GRPO, pools={"rollout": 4, "train": 1}, change={"generate": {"tp": 4, "precision": "fp8"}})
    there = msgspec.structs.replace(plan, pools=(Pool(name="rollout", devices=4, group=1), plan.pools[1]))
    assert broken_rules(batch_of([there]), setting) == []
    assert broken_rules(batch_of([plan]), setting) == [
        "pools-fit-the-devices",
        "tensor-parallel-inside-a-domain",
        "fp8-needs-the-device",
    ]


def test_a_fixed_degree_may_leave_its_domain() -> None:
    plan = build.full_plan(GRPO, pools={"rollout": 4, "train": 1}, change={"generate": {"tp": 4}})
    setting = Setting(job=GRPO, groups=(replace(NODE, domain=2),))
    assert broken_rules(batch_of([plan]), setting) == ["tensor-parallel-inside-a-domain"]
    assert broken_rules(batch_of([plan]), setting.with_fixed(frozenset({"generate.tp"}))) == []


def test_backends_that_divide_state_in_groups() -> None:
    def plan(zero: int) -> PlanBatch:
        update = {"dp": 4, "zero": zero, "shard": 2, "micro_batch": 4}
        pools = {"rollout": 1, "train": 4}
        return batch_of([build.full_plan(GRPO, pools=pools, change={"generate": CACHE, "update_actor": update})])

    def broken(name: str, zero: int) -> list[str]:
        groups = (replace(NODE, domain=2),)
        return broken_rules(plan(zero), Setting(job=GRPO, groups=groups, backend=backend(name)))

    assert (broken("torch", 2), broken("torch", 3)) == ([], [])
    # DeepSpeed 0.19.8 refuses `mics_shard_size`.
    assert broken("deepspeed", 3) == ["backend-supports-update_actor.shard"]
    assert "backend-supports-update_actor.shard" in broken("megatron", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pools": (Pool(name="rollout", devices=1), Pool(name="rollout", devices=1))},
            "plan: pools: names must be unique (rule pools-are-named-once), got ['rollout', 'rollout']",
        ),
        (
            {"old_logprob": Pass(pool="gpu", micro_batch=4)},
            "plan: old_logprob.pool: must be one of ['rollout', 'train'] (rule pool-exists), got 'gpu'",
        ),
        (
            {"old_logprob": Pass(pool="rollout", micro_batch=4)},
            "plan: old_logprob.pool: must be 'train', the pool that trains the model "
            "(rule passes-run-where-the-model-trains), got 'rollout'",
        ),
        (
            {"values": Pass(pool="rollout", micro_batch=4)},
            "plan: values.pool: must be 'train', the pool that trains the model "
            "(rule passes-run-where-the-model-trains), got 'rollout'",
        ),
        (
            {"pools": tuple(Pool(name=name, devices=1) for name in ("rollout", "train", "spare"))},
            "plan: pools: every pool must run a stage (rule pools-are-used), got ['spare']",
        ),
        (
            {"teacher_logprob": Pass(pool="train", micro_batch=4)},
            "plan: teacher_logprob: must not be given for ppo with the job's models (rule sections-are-the-jobs)",
        ),
        ({"reward": None}, "plan: reward: must be given for ppo with the job's models (rule sections-are-the-jobs)"),
    ],
)
def test_pools_and_sections_must_make_sense(change: dict[str, Any], message: str) -> None:
    plan = msgspec.structs.replace(build.full_plan(PPO), **change)
    with pytest.raises(InputError) as caught:
        check(plan, Setting(job=PPO, groups=(NODE,)))
    assert str(caught.value) == message


def test_a_removed_section_must_not_be_given() -> None:
    plan: Plan = build.full_plan(GRPO, flags=("fold_old_logprob",))
    with pytest.raises(InputError) as caught:
        check(msgspec.structs.replace(plan, old_logprob=plan.reference_logprob), Setting(job=GRPO, groups=(NODE,)))
    assert str(caught.value) == (
        "plan: old_logprob: must not be given while fusions.fold_old_logprob is set (rule sections-are-the-jobs)"
    )


def test_an_unknown_backend_names_the_closest() -> None:
    with pytest.raises(InputError) as caught:
        backend("megatorn")
    text = str(caught.value)
    assert text.startswith("backend: must be one of local, torch, deepspeed, megatron")
    assert text.endswith("; did you mean 'megatron'?, got 'megatorn'")
