"""Lowering and moves: what an RPEG looks like, and what holds for every legal plan of every kind of job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import build
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.batch import PlanBatch, batch_of
from ir.documents import from_data, plain, read_document, write_document
from ir.graph import Data, Layout, Op, Rpeg, State
from ir.job import Job, Role
from ir.lower import lower
from ir.plan import Plan
from ir.recipes import RECIPES
from ir.rules import Setting, breaches, check
from ir.setting import Devices
from space.build import default_space
from space.enumerate import LegalSpace, legal_space
from space.neighbours import neighbours_in

JOBS = build.jobs()
GROUPS = (Devices(count=4, domain=4, fp8=True, host=True), Devices(count=2, domain=2))


def space_of(job: Job) -> LegalSpace:
    setting = Setting(job=job, groups=GROUPS)
    return legal_space(default_space(setting), setting)


SPACES = {name: space_of(job) for name, job in JOBS.items()}
SAMPLES = {name: space.sample(150, np.random.default_rng(7)) for name, space in SPACES.items()}


def names(rpeg: Rpeg) -> list[str]:
    return [stage.name for stage in rpeg.stages]


GRPO = "generate reward reference_logprob old_logprob advantage update_actor sync_weights"
PPO = "generate reward reference_logprob old_logprob values advantage update_critic update_actor sync_weights"


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("grpo", GRPO),
        ("ppo", PPO),
        ("dapo", "generate reward select old_logprob advantage update_actor sync_weights"),
        ("remax", GRPO.replace("generate", "generate+greedy")),
        ("distillation", "generate teacher_logprob old_logprob advantage update_actor sync_weights"),
        ("multi-turn", GRPO.replace("generate", "generate+environment")),
        ("lora", GRPO),
    ],
)
def test_recipes(kind: str, stages: str) -> None:
    assert names(RECIPES[JOBS[kind].algorithm.name](JOBS[kind])) == stages.split()
    assert names(lower(JOBS[kind], build.full_plan(JOBS[kind]))) == stages.split()


@pytest.mark.parametrize("name", ["dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"])
def test_algorithms_with_the_stages_of_grpo(name: str) -> None:
    assert names(RECIPES[name](build.job(name=name))) == GRPO.split()


def test_without_a_kl_term_there_is_no_reference() -> None:
    job = build.job(kl_coefficient=0.0)
    assert names(lower(job, build.full_plan(job))) == GRPO.replace(" reference_logprob", "").split()


FUSED = {
    ("grpo", "rollout_logprob"): "generate reward reference_logprob advantage update_actor sync_weights",
    ("grpo", "fold_old_logprob"): ("generate reward reference_logprob advantage old_logprob+update_actor sync_weights"),
    ("grpo", "merge_logprobs"): "generate reward reference_logprob+old_logprob advantage update_actor sync_weights",
    ("grpo", "stream"): GRPO,
    ("grpo", "reward_with_generation"): (
        "generate+reward reference_logprob old_logprob advantage update_actor sync_weights"
    ),
    ("remax", "reward_with_generation"): (
        "generate+greedy+reward reference_logprob old_logprob advantage update_actor sync_weights"
    ),
    ("ppo", "interleave_updates"): (
        "generate reward reference_logprob old_logprob values advantage update_critic+update_actor sync_weights"
    ),
    ("ppo", "critic_trunk"): (
        "generate reward reference_logprob old_logprob+values advantage update_critic+update_actor sync_weights"
    ),
    ("ppo", "critic_trunk merge_logprobs"): (
        "generate reward reference_logprob+old_logprob+values advantage update_critic+update_actor sync_weights"
    ),
    ("ppo", "reward_trunk"): (
        "generate reference_logprob old_logprob reward+values advantage update_critic update_actor sync_weights"
    ),
    ("ppo", "reward_trunk rollout_logprob interleave_updates"): (
        "generate reference_logprob reward+values advantage update_critic+update_actor sync_weights"
    ),
    ("lora", "reference_adapter"): GRPO,
    ("dapo", "fold_old_logprob reward_with_generation"): (
        "generate+reward select advantage old_logprob+update_actor sync_weights"
    ),
    ("distillation", "rollout_logprob"): "generate teacher_logprob advantage update_actor sync_weights",
}


@pytest.mark.parametrize(("kind", "flags"), FUSED)
def test_fusions_and_sharing_change_the_stages(kind: str, flags: str) -> None:
    job = JOBS[kind]
    plan = build.full_plan(job, flags=tuple(flags.split()))
    check(plan, Setting(job=job, groups=GROUPS))
    assert names(lower(job, plan)) == FUSED[kind, flags].split()


def test_shared_models_have_no_weights_of_their_own() -> None:
    shared = {
        flag: lower(JOBS[kind], build.full_plan(JOBS[kind], flags=(flag,))).shared
        for kind, flag in (("lora", "reference_adapter"), ("ppo", "critic_trunk"), ("ppo", "reward_trunk"))
    }
    assert shared == {
        "reference_adapter": ((Role.REFERENCE, Role.ACTOR),),
        "critic_trunk": ((Role.CRITIC, Role.ACTOR),),
        "reward_trunk": ((Role.REWARD, Role.CRITIC),),
    }


def test_a_stage_is_compared_without_what_rides_on_it() -> None:
    rpeg = lower(JOBS["ppo"], build.full_plan(JOBS["ppo"], flags=("critic_trunk",)))
    assert [stage.key for stage in rpeg.stages if stage.riders] == ["old_logprob", "update_actor"]


def edges_into(rpeg: Rpeg, op: Op) -> set[tuple[str, str]]:
    return {(edge.source.value, edge.data.value) for edge in rpeg.data if edge.target is op}


def test_kl_in_the_reward_is_known_to_the_advantage_and_kl_in_the_loss_to_the_update() -> None:
    loss = lower(JOBS["grpo"], build.full_plan(JOBS["grpo"]))
    assert edges_into(loss, Op.ADVANTAGE) == {("reward", "reward")}
    assert edges_into(loss, Op.UPDATE_ACTOR) == {
        ("generate", "tokens"),
        ("generate", "rollout_logprob"),
        ("advantage", "advantage"),
        ("old_logprob", "old_logprob"),
        ("reference_logprob", "reference_logprob"),
    }
    reward = lower(JOBS["remax"], build.full_plan(JOBS["remax"]))
    assert edges_into(reward, Op.ADVANTAGE) == {
        ("reward", "reward"),
        ("reference_logprob", "reference_logprob"),
        ("old_logprob", "old_logprob"),
        ("generate", "rollout_logprob"),
    }
    assert ("reference_logprob", "reference_logprob") not in edges_into(reward, Op.UPDATE_ACTOR)


def test_what_follows_a_selection_sees_what_it_kept() -> None:
    rpeg = lower(JOBS["dapo"], build.full_plan(JOBS["dapo"]))
    assert edges_into(rpeg, Op.SELECT) == {
        ("generate", "tokens"),
        ("generate", "rollout_logprob"),
        ("reward", "reward"),
    }
    assert edges_into(rpeg, Op.ADVANTAGE) == {("select", "reward")}
    assert edges_into(rpeg, Op.OLD_LOGPROB) == {("select", "tokens")}
    assert ("select", "tokens") in edges_into(rpeg, Op.UPDATE_ACTOR)


def test_streaming_marks_what_can_take_finished_groups() -> None:
    def streamed(kind: str, **options: object) -> set[str]:
        rpeg = lower(JOBS[kind], build.full_plan(JOBS[kind], **options))
        return {op.value for op in rpeg.streamed}

    assert streamed("grpo") == set()
    assert streamed("grpo", flags=("stream",)) == {"reward", "reference_logprob"}
    assert streamed("ppo", flags=("stream",)) == {"reward", "reference_logprob", "values"}
    assert streamed("dapo", flags=("stream", "reward_with_generation")) == {"select"}
    # A stage on the devices that generate waits for them; values on the old log-probs' visit wait for the batch.
    assert streamed("grpo", flags=("stream",), place={"reference_logprob": "rollout"}) == {"reward"}
    assert streamed("ppo", flags=("stream", "critic_trunk")) == {"reward", "reference_logprob"}


def test_placement_and_layouts_follow_the_plan() -> None:
    update = {"dp": 2, "tp": 2, "zero": 2, "shard": 2, "micro_batch": 8, "recompute": "full", "offload": "optimizer"}
    plan = build.full_plan(
        JOBS["ppo"],
        pools={"rollout": 2, "critic": 1, "train": 4},
        place={"values": "critic", "update_critic": "critic"},
        change={"generate": {"tp": 2, "concurrency": 16, "prefill_tokens": 2048}, "update_actor": update},
        staleness=2,
        sync="p2p",
    )
    rpeg = lower(JOBS["ppo"], plan)
    assert [(p.name, p.device_ids) for p in rpeg.pools] == [
        ("rollout", (0, 1)),
        ("critic", (2,)),
        ("train", (3, 4, 5, 6)),
    ]
    assert {stage.name: stage.pool for stage in rpeg.stages if stage.pool != "train"} == {
        "generate": "rollout",
        "values": "critic",
        "update_critic": "critic",
    }
    assert rpeg.stage(Op.GENERATE).layout == Layout(tp=2, micro_batch=16, micro_tokens=2048)
    assert rpeg.stage(Op.UPDATE_ACTOR).layout == Layout(**update)
    assert rpeg.stage(Op.REFERENCE_LOGPROB).layout == Layout(dp=4, micro_batch=4)
    assert (rpeg.staleness, rpeg.colocated, rpeg.rollout_weights.method) == (2, False, "p2p")


def test_devices_are_counted_within_their_group() -> None:
    pools = [{"name": "rollout", "devices": 2, "group": 1}, {"name": "train", "devices": 3}]
    plan = from_data(plain(build.plan()) | {"pools": pools}, Plan, where="plan")
    spans = lower(JOBS["grpo"], plan).pools
    assert [(p.group, p.device_ids) for p in spans] == [(1, (0, 1)), (0, (0, 1, 2))]


def test_state_of_a_shared_critic_is_the_actors() -> None:
    states = {edge.state for edge in lower(JOBS["ppo"], build.full_plan(JOBS["ppo"], flags=("critic_trunk",))).state}
    assert states == {State.ACTOR_WEIGHTS, State.ACTOR_OPTIMIZER, State.EXPERIENCE}


# For every legal plan

examples = st.tuples(st.sampled_from(sorted(JOBS)), st.integers(0, 149))


def needs(job: Job, plan: Plan, op: Op) -> set[Data]:
    """What an operation must be handed."""
    reference, in_reward = Role.REFERENCE in job.models, job.algorithm.kl_in_reward
    if op is Op.REWARD:
        return {Data.TOKENS} | ({Data.GREEDY_TOKENS} if job.algorithm.greedy_baseline else set())
    if op is Op.ADVANTAGE:
        found = {Data.TEACHER_LOGPROB} if job.algorithm.uses_teacher else {Data.REWARD}
        found |= {Data.VALUES} if job.algorithm.uses_critic else set()
        found |= {Data.REFERENCE_LOGPROB} if reference and in_reward else set()
        old = Data.ROLLOUT_LOGPROB if plan.fusions.rollout_logprob else Data.OLD_LOGPROB
        return found | ({old} if job.algorithm.uses_teacher or (reference and in_reward) else set())
    if op is Op.UPDATE_ACTOR:
        found = {Data.TOKENS, Data.ROLLOUT_LOGPROB, Data.ADVANTAGE}
        return found | ({Data.REFERENCE_LOGPROB} if reference and not in_reward else set())
    return {
        Op.SELECT: {Data.TOKENS, Data.ROLLOUT_LOGPROB, Data.REWARD},
        Op.UPDATE_CRITIC: {Data.TOKENS, Data.VALUES, Data.RETURNS},
        Op.REFERENCE_LOGPROB: {Data.TOKENS},
        Op.TEACHER_LOGPROB: {Data.TOKENS},
        Op.VALUES: {Data.TOKENS},
    }.get(op, set())


@given(example=examples)
@settings(max_examples=300, deadline=None)
def test_data_flows_forward_and_every_consumer_gets_what_it_needs(example: tuple[str, int]) -> None:
    kind, row = example
    job, plan = JOBS[kind], SAMPLES[kind].plan(row)
    rpeg = lower(job, plan)
    order = {op: (i, j) for i, stage in enumerate(rpeg.stages) for j, op in enumerate(stage.ops)}
    assert all(order[edge.source] < order[edge.target] for edge in rpeg.data), "data flows forward"
    assert len({(edge.target, edge.data) for edge in rpeg.data}) == len(rpeg.data), "nothing has two sources"
    for op in order:
        assert needs(job, plan, op) <= {edge.data for edge in rpeg.data if edge.target is op}, op
    computed = any(edge.target is Op.UPDATE_ACTOR and edge.data is Data.OLD_LOGPROB for edge in rpeg.data)
    folded = Op.OLD_LOGPROB in rpeg.stage(Op.UPDATE_ACTOR).ops
    assert computed + folded + plan.fusions.rollout_logprob == 1, "exactly one source of old log-probs"
    base = {op for stage in RECIPES[job.algorithm.name](job).stages for op in stage.ops}
    assert base - set(order) == ({Op.OLD_LOGPROB} if plan.fusions.rollout_logprob else set())


@given(example=examples)
@settings(max_examples=300, deadline=None)
def test_state_keeps_its_bound(example: tuple[str, int]) -> None:
    kind, row = example
    plan = SAMPLES[kind].plan(row)
    rpeg = lower(JOBS[kind], plan)
    assert all(rpeg.stage_of(edge.source) and rpeg.stage_of(edge.target) for edge in rpeg.state)
    stale = [edge for edge in rpeg.state if edge.source is Op.SYNC_WEIGHTS or edge.state is State.EXPERIENCE]
    assert [edge.target for edge in stale] == [Op.GENERATE, Op.UPDATE_ACTOR]
    assert {(edge.staleness, edge.in_flight) for edge in stale} == {(plan.staleness, plan.in_flight)}
    assert all(edge.staleness == 0 and not edge.in_flight for edge in rpeg.state if edge not in stale)
    assert [edge.method for edge in rpeg.state if edge.method] == [plan.sync]
    kept = {edge.state for edge in rpeg.state if edge.source is edge.target}
    trained = (
        {State.CRITIC_WEIGHTS, State.CRITIC_OPTIMIZER} if kind == "ppo" and not plan.sharing.critic_trunk else set()
    )
    assert kept == {State.ACTOR_WEIGHTS, State.ACTOR_OPTIMIZER} | trained


@given(example=examples)
@settings(max_examples=300, deadline=None)
def test_stages_lie_on_pools_that_hold_them(example: tuple[str, int]) -> None:
    kind, row = example
    plan = SAMPLES[kind].plan(row)
    rpeg = lower(JOBS[kind], plan)
    assert all(stage.layout.ranks <= rpeg.pool(stage.pool).devices for stage in rpeg.stages)
    assert {stage.pool for stage in rpeg.stages} == {pool.name for pool in plan.pools}
    ids = [(pool.group, device) for pool in rpeg.pools for device in pool.device_ids]
    assert len(set(ids)) == len(ids) == plan.num_devices
    assert all(device < GROUPS[group].count for group, device in ids)


@given(example=examples)
@settings(max_examples=200, deadline=None)
def test_a_plan_is_the_same_as_arrays_and_as_toml(example: tuple[str, int]) -> None:
    kind, row = example
    plan = SAMPLES[kind].plan(row)
    check(plan, SPACES[kind].setting)
    assert batch_of([plan]).plan(0) == plan
    assert from_data(plain(plan), Plan, where="plan") == plan


def test_a_plan_is_read_back_from_its_file(tmp_path: Path) -> None:
    for kind, plans in SAMPLES.items():
        path = tmp_path / f"{kind}.toml"
        write_document(path, plans.plan(0))
        assert read_document(path, Plan) == plans.plan(0)


STREAMING = {
    **JOBS,
    "ppo, verified, no reference": replace(
        build.job(name="ppo", kl_coefficient=0.0), others={Role.CRITIC: build.SHAPE}
    ),
    "dapo, reward model": replace(JOBS["dapo"], others={Role.REFERENCE: build.SHAPE, Role.REWARD: build.SHAPE}),
}


@pytest.mark.parametrize("kind", STREAMING)
def test_plans_may_stream_where_a_stage_takes_finished_groups(kind: str) -> None:
    job = STREAMING[kind]
    setting = Setting(job=job, groups=GROUPS)
    # Layouts are pinned, so that structures with few sections are drawn as well.
    fix = build.pinned(
        setting, "place.", "devices.", "sync", "fusions.", "sharing.", "update_actor.dp", "update_critic.dp"
    )
    plans = legal_space(default_space(setting, fix), setting).sample(400, np.random.default_rng(2))
    may_stream = (plans["place.actor"] != 0) & (plans["fusions.merge_logprobs"] == 0)
    plans = plans.take(may_stream)
    set_ = PlanBatch(len(plans), dict(plans.columns) | {"fusions.stream": np.ones(len(plans), dtype=np.int32)})
    refused = next(b for b in breaches(set_, setting) if b.name == "stream-needs-a-consumer").broken
    assert len(plans) > 50
    assert [bool(lower(job, set_.plan(i)).streamed) for i in range(len(plans))] == (~refused).tolist()


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_different_plans_lower_to_different_graphs(kind: str) -> None:
    job, legal = JOBS[kind], SPACES[kind]
    for row in range(6):
        near: PlanBatch = neighbours_in(legal, SAMPLES[kind].take(np.array([row])))
        plan = SAMPLES[kind].plan(row)
        plans = [plan, *(near.plan(i) for i in range(len(near)))]
        graphs = [lower(job, each) for each in plans]
        assert graphs[0] not in graphs[1:]
        assert len(plans) > 20
