"""Presets: the traits they are known for, degrees at which jobs fit, and the tiny job on two cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import build
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.backends import backend
from ir.batch import batch_of
from ir.errors import InputError
from ir.graph import Op
from ir.job import Job, load_job
from ir.plan import Generate, Pass, Plan, Pool, Update
from ir.rules import check
from ir.setting import Devices, Setting, setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.presets import PRESETS, presets

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LOCAL = ("colocated-sync", "disaggregated-sync", "one-step-off", "async")


def example(name: str, cluster: str) -> Setting:
    return setting_of(load_job(EXAMPLES / name / "job.toml"), load_cluster(cluster))


PPO = example("ppo-70b", "alps-gh200:256")
GRPO = example("grpo-qwen2.5-7b", "dgx-a100:8")
DAPO = example("dapo-qwen2.5-32b", "dgx-h100:128")
EXPERTS = example("grpo-qwen3-235b", "dgx-h100:128")


def local(job: Job, devices: int) -> Setting:
    return setting_of(job, build.cluster(devices=devices), backend("local"))


def shrunk(memory_gb: int, *, count: int, host: bool = True) -> Setting:
    """The GRPO job on so many devices of so much memory."""
    group = replace(GRPO.groups[0], memory_bytes=memory_gb * 10**9, count=count, host=host)
    return replace(GRPO, groups=(group,))


# Traits

TRAITS = {
    # preset: (PPO's pools, GRPO's pools, staleness, in flight, sync)
    "colocated-sync": ("all 256", "all 8", 0, False, "reshard"),
    "disaggregated-sync": ("rollout 128 + train 128", "rollout 4 + train 4", 0, False, "broadcast"),
    "one-step-off": ("rollout 128 + train 128", "rollout 4 + train 4", 1, False, "broadcast"),
    "async": ("rollout 192 + train 64", "rollout 4 + train 4", 4, True, "broadcast"),
    "verl-colocated": ("all 256", "all 8", 0, False, "reshard"),
    "verl-separate-async": (
        "rollout 96 + train 128 + reward 32", "rollout 4 + train 4", 4, True, "broadcast"
    ),
    "openrlhf-colocate-all": ("all 256", "all 8", 0, False, "reshard"),
    "openrlhf-separate": (
        "rollout 128 + train 64 + critic 64", "rollout 4 + train 4", 0, False, "broadcast"
    ),
    "areal": ("rollout 192 + train 64", "rollout 4 + train 4", 4, True, "broadcast"),
    "nemo-rl-on-policy": ("all 256", "all 8", 0, False, "reshard"),
    "nemo-rl-one-step-off": ("rollout 128 + train 128", "rollout 4 + train 4", 1, False, "broadcast"),
    "real": ("all 256", "all 8", 0, False, "reshard"),
    "deepspeed-chat": ("all 256", None, 0, False, "reshard"),
}  # fmt: skip

PPO_SECTIONS = (
    Op.GENERATE,
    Op.REWARD,
    Op.REFERENCE_LOGPROB,
    Op.OLD_LOGPROB,
    Op.VALUES,
    Op.UPDATE_CRITIC,
    Op.UPDATE_ACTOR,
)
GRPO_SECTIONS = (Op.GENERATE, Op.REFERENCE_LOGPROB, Op.OLD_LOGPROB, Op.UPDATE_ACTOR)


def pools_of(plan: Plan) -> str:
    return " + ".join(f"{pool.name} {pool.devices}" for pool in plan.pools)


def test_every_preset_has_its_traits_told() -> None:
    assert tuple(PRESETS) == tuple(TRAITS)


@pytest.mark.parametrize("name", TRAITS)
def test_traits_for_ppo(name: str) -> None:
    plan, (pools, _, *ahead) = presets(PPO)[name], TRAITS[name]
    assert pools_of(plan) == pools
    assert [plan.staleness, plan.in_flight, plan.sync] == ahead
    assert tuple(plan.sections) == PPO_SECTIONS


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if traits[1]])
def test_traits_for_grpo(name: str) -> None:
    plan, (_, pools, *ahead) = presets(GRPO)[name], TRAITS[name]
    assert pools_of(plan) == pools
    assert [plan.staleness, plan.in_flight, plan.sync] == ahead
    assert tuple(plan.sections) == GRPO_SECTIONS


def test_where_frameworks_put_models() -> None:
    found = presets(PPO)
    apart = found["openrlhf-separate"]
    assert {str(op): section.pool for op, section in apart.sections.items()} == {
        "generate": "rollout",
        "reward": "critic",
        "reference_logprob": "train",
        "old_logprob": "train",
        "values": "critic",
        "update_critic": "critic",
        "update_actor": "train",
    }
    rewarded = found["verl-separate-async"].reward
    assert rewarded is not None and rewarded.pool == "reward"


@pytest.mark.parametrize(
    ("name", "percent", "zero", "unit"),
    [
        ("verl-colocated", 50, 3, "micro_tokens"),
        ("verl-separate-async", 80, 3, "micro_tokens"),
        ("openrlhf-colocate-all", 60, 2, "micro_batch"),
        ("openrlhf-separate", 90, 2, "micro_batch"),
        ("areal", 90, 3, "micro_tokens"),
        ("nemo-rl-on-policy", 60, 1, "micro_tokens"),
        ("real", 0, 0, "micro_batch"),
    ],
)
def test_how_frameworks_lay_out(name: str, percent: int, zero: int, unit: str) -> None:
    plan = presets(GRPO)[name]
    assert plan.generate.memory_percent == percent
    assert plan.update_actor.zero == zero
    assert plan.update_actor.recompute == "full"
    assert getattr(plan.update_actor, unit) > 0


def test_only_colocated_frameworks_that_sleep_offload() -> None:
    found = presets(GRPO)
    assert {name: plan.update_actor.offload for name, plan in found.items() if plan.colocated} == {
        "colocated-sync": "none",
        "verl-colocated": "none",
        "openrlhf-colocate-all": "all",
        "nemo-rl-on-policy": "all",
        "real": "none",
    }
    references = {name: plan.reference_logprob for name, plan in found.items() if plan.colocated}
    # verl's FSDP keeps whatever is not trained in host memory.
    assert {name for name, visit in references.items() if visit is not None and visit.offload == "all"} == {
        "verl-colocated",
        "openrlhf-colocate-all",
        "nemo-rl-on-policy",
    }
    assert not any(plan.old_logprob.offload == "all" for plan in found.values() if plan.old_logprob)


@pytest.mark.parametrize(
    ("name", "setting", "update", "visit", "context"),
    [
        # The logits of 1536 tokens fit in an update of 80 GB, of twice as many in a forward pass.
        ("verl-colocated", GRPO, 1536, 3072, 1),
        ("areal", GRPO, 1536, 1536, 1),
        ("nemo-rl-on-policy", GRPO, 1536, 1536, 1),
        # Of 22528 tokens they do not: sequences are divided over eight devices.
        ("verl-colocated", DAPO, 2816, 2816, 8),
    ],
)
def test_budgets_of_tokens_hold_the_longest_sequence(
    name: str, setting: Setting, update: int, visit: int, context: int
) -> None:
    plan = presets(setting)[name]
    assert isinstance(plan.old_logprob, Pass)
    assert (plan.update_actor.micro_tokens, plan.old_logprob.micro_tokens) == (update, visit)
    assert (plan.update_actor.cp, plan.old_logprob.cp) == (context, context)


def test_verifiers_run_beside_the_engines_where_rollouts_score_themselves() -> None:
    early = {name for name, plan in presets(GRPO).items() if plan.fusions.reward_with_generation}
    assert early == {"verl-colocated", "verl-separate-async", "areal"}
    assert not any(plan.fusions.reward_with_generation for plan in presets(PPO).values())


def test_deepspeed_chat_divides_tensors_to_generate_and_weights_to_train() -> None:
    plan = presets(PPO)["deepspeed-chat"]
    assert (plan.generate.tp, plan.generate.pp, plan.update_actor.tp, plan.update_actor.zero) == (4, 1, 1, 3)


def test_all_models_of_a_framework_have_one_zero_stage() -> None:
    # The critic alone would do with stage 2.
    for name in ("openrlhf-colocate-all", "openrlhf-separate"):
        plan = presets(PPO)[name]
        assert plan.update_critic is not None
        assert (plan.update_critic.zero, plan.update_actor.zero) == (3, 3)


def test_devices_without_a_sequence_of_the_minibatch_share_those_of_others() -> None:
    found = presets(PPO)
    actor = found["verl-colocated"].update_actor
    assert (actor.dp, actor.cp) == (128, 2)
    # DeepSpeed-Chat cannot.
    actor = found["deepspeed-chat"].update_actor
    assert (actor.dp, actor.cp) == (128, 1)


def test_real_gives_every_call_its_own_degrees() -> None:
    plan = presets(PPO)["real"]
    assert {(section.tp, section.pp) for section in plan.sections.values()} == {(4, 1), (4, 4), (4, 8), (4, 16)}
    assert isinstance(plan.old_logprob, Pass)
    assert (plan.old_logprob.pp, plan.update_actor.pp) == (4, 16)


# Degrees


def test_a_mixture_of_experts_is_divided_as_in_published_recipes() -> None:
    # NeMo-RL, docs/about/performance-summary.md: DeepSeek-V3 one step off on 512 H100, 32 devices an engine.
    plan = presets(example("grpo-deepseek-v3", "dgx-h100:512"))["nemo-rl-one-step-off"]
    actor, engine = plan.update_actor, plan.generate
    assert (actor.tp, actor.pp, actor.ep, actor.dp, actor.zero) == (1, 16, 16, 16, 1)
    assert (engine.tp, engine.pp, engine.ep) == (8, 4, 8)
    # verl's engines have no pipelines: they share experts.
    engine = presets(example("grpo-deepseek-v3", "dgx-h100:512"))["verl-colocated"].generate
    assert (engine.tp, engine.pp, engine.ep) == (4, 1, 64)


def test_experts_stay_inside_a_domain_where_there_is_memory() -> None:
    large = replace(EXPERTS, groups=(replace(EXPERTS.groups[0], memory_bytes=10**12),))
    assert [PRESETS["nemo-rl-on-policy"](s).update_actor.ep for s in (EXPERTS, large)] == [16, 8]


@pytest.mark.parametrize(("memory_gb", "tp"), [(80, 1), (16, 2), (8, 4)])
def test_engines_are_as_small_as_memory_allows(memory_gb: int, tp: int) -> None:
    # 15.2 GB of weights in three quarters of 90 % of memory.
    assert PRESETS["openrlhf-separate"](shrunk(memory_gb, count=64)).generate.tp == tp


def test_an_engine_that_cannot_be_small_enough_is_refused() -> None:
    # Four ways leave 3.8 GB, more than the 2.7 GB there are, and 28 heads cannot be divided by eight.
    with pytest.raises(InputError, match="must have devices for an engine whose weights fit their memory, got 64"):
        PRESETS["openrlhf-separate"](shrunk(4, count=128))
    assert "openrlhf-separate" not in presets(shrunk(4, count=128))


@pytest.mark.parametrize(("memory_gb", "tp", "concurrency"), [(80, 1, 256), (40, 1, 64), (30, 2, 128)])
def test_a_cache_of_its_own_holds_the_longest_sequences(memory_gb: int, tp: int, concurrency: int) -> None:
    # 28 layers x 1024 values x 2 bytes x 1536 tokens are 88 MB a sequence. Of 40 GB 60 % are the engine's: 15.2 GB of
    # weights leave 8.8 GB, 99 sequences. Of 30 GB the weights would take 85 %: halved, 10.4 GB are left for 44 MB each.
    generate = PRESETS["real"](shrunk(memory_gb, count=16)).generate
    assert (generate.tp, generate.concurrency) == (tp, concurrency)


def test_an_engine_is_divided_until_its_own_cache_holds_eight_sequences() -> None:
    # The longest sequence takes 22528 tokens x 64 layers x 2048 values x 2 bytes = 5.9 GB, the weights 65.5 GB. Of 170
    # GB the engine has 102: on one device it would hold six, so that it takes two, where 69 GB hold 23 halves.
    wide = replace(DAPO, groups=(replace(DAPO.groups[0], memory_bytes=170 * 10**9),))
    job = msgspec.structs.replace(wide.job.document, algorithm=GRPO.job.algorithm)
    workload = msgspec.structs.replace(job.workload, useful_groups=None)
    grpo = replace(wide.job, document=msgspec.structs.replace(job, workload=workload))
    generate = PRESETS["real"](replace(wide, job=grpo)).generate
    assert (generate.tp, generate.concurrency) == (2, 16)


def test_states_wait_in_host_memory_where_they_do_not_fit_beside_an_engine() -> None:
    # 18 bytes x 7.6 billion over eight devices are 17 GB: of 80 GB they fit in the 40 % that an engine leaves, not of 40.
    name = "verl-colocated"
    assert [PRESETS[name](shrunk(gb, count=8)).update_actor.offload for gb in (80, 40)] == ["none", "all"]
    assert name not in presets(shrunk(40, count=8, host=False))


def test_training_gets_as_many_devices_as_its_states_need() -> None:
    # 137 GB take 68 GB each of two devices, 34 GB of four.
    splits = [pools_of(PRESETS["areal"](shrunk(gb, count=8))) for gb in (120, 80)]
    assert splits == ["rollout 6 + train 2", "rollout 4 + train 4"]
    assert "areal" not in presets(shrunk(40, count=8))


def test_presets_respect_the_limits_of_the_job() -> None:
    assert {"one-step-off", "async", "areal"} & set(presets(local(build.job(max_staleness=0), 4))) == set()
    assert set(presets(local(build.job(max_staleness=3), 4))) == set(LOCAL) - {"async"}
    plan = presets(local(build.job(max_devices=2), 8))["disaggregated-sync"]
    assert pools_of(plan) == "rollout 1 + train 1"
    plan = presets(local(build.job(devices=6), 8))["async"]
    assert pools_of(plan) == "rollout 4 + train 2"


def test_a_single_device_leaves_one_preset() -> None:
    assert set(presets(local(build.job(), 1))) == {"colocated-sync"}


# The tiny job on two cores


def test_the_local_presets_of_the_arithmetic_job() -> None:
    job = load_job(EXAMPLES / "arithmetic" / "job.toml")
    found = presets(setting_of(job, load_cluster(str(EXAMPLES / "arithmetic" / "cluster.toml")), backend("local")))
    visit = Pass(pool="train", micro_batch=8)
    apart: dict[str, Any] = {
        "pools": (Pool(name="rollout", devices=1), Pool(name="train", devices=1)),
        "generate": Generate(pool="rollout", concurrency=32),
        "reference_logprob": visit,
        "old_logprob": visit,
        "update_actor": Update(pool="train", dp=1, micro_batch=4),
        "sync": "broadcast",
    }
    assert found == {
        "colocated-sync": Plan(
            pools=(Pool(name="all", devices=2),),
            generate=Generate(pool="all", concurrency=16),
            reference_logprob=Pass(pool="all", micro_batch=8),
            old_logprob=Pass(pool="all", micro_batch=8),
            update_actor=Update(pool="all", dp=2, micro_batch=4),
        ),
        "disaggregated-sync": Plan(**apart),
        "one-step-off": Plan(**apart, staleness=1, in_flight=True),
        "async": Plan(**apart, staleness=4, in_flight=True),
    }


@given(devices=st.integers(2, 8), prompts=st.integers(4, 24), samples=st.sampled_from([2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_local_presets_are_all_there_on_any_small_machine(devices: int, prompts: int, samples: int) -> None:
    setting = local(build.job(prompts_per_step=prompts, samples_per_prompt=samples), devices)
    for name in LOCAL:
        plan = PRESETS[name](setting)
        sequences = prompts * samples
        # A pool of which replicas that divide the batch use less than half is refused.
        if 2 * plan.update_actor.dp >= plan.devices_of(plan.update_actor.pool):
            check(plan, setting)
            assert name in presets(setting)
        engines = plan.devices_of(plan.generate.pool)
        assert plan.generate.concurrency <= -(-sequences // engines) < 2 * plan.generate.concurrency


@given(
    devices=st.integers(1, 64),
    memory_gb=st.integers(10, 200),
    domain=st.sampled_from([1, 2, 4, 8]),
    job=st.sampled_from([GRPO.job, PPO.job]),
)
@settings(max_examples=40, deadline=None)
def test_presets_are_legal_and_in_the_space_wherever_they_are(
    devices: int, memory_gb: int, domain: int, job: Job
) -> None:
    group = Devices(count=devices, domain=min(domain, devices), host=True, memory_bytes=memory_gb * 10**9)
    setting = Setting(job=job, groups=(group,))
    found = presets(setting)
    if found:
        assert len(default_space(setting).encode(batch_of(list(found.values())))) == len(found)
    for plan in found.values():
        held = 2 * job.actor.parameters / (plan.generate.tp * plan.generate.pp)
        assert held <= 0.75 * (plan.generate.memory_percent or 60) / 100 * memory_gb * 1e9
