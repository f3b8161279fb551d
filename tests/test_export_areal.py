"""Plans as AReaL's YAML, and its configurations as plans."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from framework_plans import JOBS, MOE, NOTE, changed, drawn, job, setting
from framework_plans import exported as files_of
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.imports.areal import read
from executor.imports.areal_backends import parse_allocation, parse_backend
from ir.errors import InputError
from ir.job import Job
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check

REWARDED = Fusions(reward_with_generation=True)


RUN = {"grpo": "dgx-h100:8", "ppo-kl": "dgx-h100:16", "moe": "dgx-h100:32", "synchronous": "dgx-a100:64"}
"""Jobs with a cluster each."""


def exported(plan: Plan, of: Job, cluster: str) -> dict[str, Any]:
    files = files_of(of, plan, "areal", cluster)
    assert list(files) == ["areal.yaml", "run.sh"]
    assert "--config areal.yaml" in files["run.sh"] and f"# {NOTE}" in files["areal.yaml"]
    return msgspec.yaml.decode(files["areal.yaml"])


ASYNC = Plan(
    pools=(Pool(name="rollout", devices=4), Pool(name="train", devices=4)),
    generate=Generate(pool="rollout", tp=2, concurrency=256, memory_percent=80, prefill_tokens=8192),
    reference_logprob=Pass(pool="train", micro_tokens=4096, offload="all"),
    old_logprob=Pass(pool="train", zero=3, cp=2, micro_tokens=8192),
    update_actor=Update(pool="train", dp=2, cp=2, zero=3, micro_tokens=8192, recompute="full"),
    fusions=REWARDED,
    staleness=2,
    in_flight=True,
    sync="broadcast",
)


def test_stale_samples_on_fsdp() -> None:
    found = exported(ASYNC, JOBS["grpo"], "dgx-h100:8")
    assert found["cluster"] == {"n_nodes": 1, "n_gpus_per_node": 8, "fileroot": "/tmp/areal/experiments"}
    assert (found["scheduler"]["type"], found["enable_offload"]) == ("local", True)
    rollout, sglang, actor, ref = (found[name] for name in ("rollout", "sglang", "actor", "ref"))
    assert (rollout["backend"], rollout["max_head_offpolicyness"]) == ("sglang:d2t2", 2)
    assert (rollout["consumer_batch_size"], rollout["max_concurrent_rollouts"]) == (128, 384)
    assert (sglang["max_running_requests"], sglang["mem_fraction_static"]) == (256, 0.8)
    assert (sglang["chunked_prefill_size"], sglang["enable_mixed_chunk"], sglang["context_length"]) == (
        8192,
        True,
        4096,
    )
    assert (actor["backend"], actor["mb_spec"]) == ("fsdp:d2c2", {"max_tokens_per_mb": 16384})
    assert (actor["gradient_checkpointing"], actor["offload"], "megatron" in actor) == (True, False, False)
    assert (actor["ppo_n_minibatches"], actor["kl_ctl"], actor["weight_update_mode"]) == (2, 0.01, "xccl")
    assert (actor["recompute_logprob"], actor["use_decoupled_loss"]) == (True, True)
    assert actor["rejection_sampling"] == {"level": "token", "action": "clamp", "metric": "ratio", "upper": 5.0}
    assert actor["reward_norm"] == {"mean_level": "group", "std_level": "group", "group_size": 8}
    assert (ref["backend"], ref["offload"], ref["optimizer"]) == ("megatron:d4", True, None)
    assert ref["scheduling_strategy"] == {"type": "colocation", "target": "actor"}
    assert found["gconfig"] == {"n_samples": 8, "max_new_tokens": 3072, "max_tokens": 4096, "temperature": 1.0}
    assert (found["train_dataset"]["batch_size"], found["train_dataset"]["max_length"]) == (128, 1024)


EXPERTS = Plan(
    pools=(Pool(name="rollout", devices=16), Pool(name="train", devices=16)),
    generate=Generate(pool="rollout", tp=4, ep=4, concurrency=128, memory_percent=90),
    update_actor=Update(
        pool="train", dp=2, tp=2, pp=4, ep=2, etp=2, zero=1, micro_tokens=4096, recompute="selective", offload="all"
    ),
    fusions=Fusions(rollout_logprob=True, reward_with_generation=True),
    sync="disk",
)


def test_pipeline_and_experts_on_megatron() -> None:
    found = exported(EXPERTS, job(model=MOE, kl=0.0), "dgx-h100:32")
    actor, sglang = found["actor"], found["sglang"]
    assert actor["backend"] == "megatron:(attn:d2p4t2|ffn:e2t2)"
    assert actor["megatron"] == {
        "ddp": {"use_distributed_optimizer": True},
        "recompute_granularity": "selective",
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    assert (actor["recompute_logprob"], actor["use_decoupled_loss"], "rejection_sampling" in actor) == (
        False,
        False,
        False,
    )
    assert (actor["weight_update_mode"], actor["offload"], found["enable_offload"]) == ("disk", True, True)
    assert (sglang["ep_size"], sglang["chunked_prefill_size"], sglang["enable_mixed_chunk"]) == (4, -1, False)
    assert (found["cluster"]["n_nodes"], found["scheduler"]["type"]) == (4, "ray")
    assert found["rollout"]["max_head_offpolicyness"] == 0 and "ref" not in found


def test_a_critic_on_its_own_devices() -> None:
    visit = {"zero": 3, "micro_tokens": 4096}
    plan = Plan(
        pools=(Pool(name="rollout", devices=8), Pool(name="train", devices=4), Pool(name="critic", devices=4)),
        generate=Generate(pool="rollout", concurrency=64, memory_percent=80),
        reference_logprob=Pass(pool="critic", **visit),
        old_logprob=Pass(pool="train", **visit),
        values=Pass(pool="critic", **visit),
        update_critic=Update(pool="critic", dp=4, **visit),
        update_actor=Update(pool="train", dp=4, **visit),
        fusions=REWARDED,
        staleness=1,
        in_flight=True,
        sync="broadcast",
    )
    found = exported(plan, JOBS["ppo-kl"], "dgx-h100:16")
    assert found["critic"]["scheduling_strategy"] == {"type": "separation"}
    assert found["ref"]["scheduling_strategy"] == {"type": "colocation", "target": "critic"}
    assert (found["critic"]["is_critic"], found["critic"]["ppo_n_minibatches"]) == (True, 2)
    assert (found["actor"]["reward_norm"], found["actor"]["adv_norm"]["mean_level"]) == (None, "batch")


def test_adapters_travel_in_files() -> None:
    of = job(model="Qwen/Qwen3-8B", kl=0.0, lora=32)
    for plan in drawn(of, "areal", "dgx-h100:8", count=4):
        found = exported(plan, of, "dgx-h100:8")
        assert (found["actor"]["use_lora"], found["actor"]["lora_rank"], found["rollout"]["use_lora"]) == (
            True,
            32,
            True,
        )
        assert found["actor"]["weight_update_mode"] == "disk" and found["actor"]["backend"].startswith("fsdp:")
        assert (found["sglang"]["enable_lora"], found["sglang"]["max_lora_rank"]) == (True, 32)


def all_in_one(plan: Plan) -> Plan:
    moved = changed(
        plan,
        **{
            name: {"pool": "all"} | ({"dp": 4} if name == "update_actor" else {})
            for name in ("generate", "reference_logprob", "old_logprob", "update_actor")
        },
    )
    pools = (Pool(name="all", devices=8),)
    return msgspec.structs.replace(moved, pools=pools, staleness=0, in_flight=False, sync="reshard")


def wide(plan: Plan, devices: int = 8) -> Plan:
    return msgspec.structs.replace(plan, pools=(plan.pools[0], Pool(name="train", devices=devices)))


REFUSED = {
    "areal-servers-run-alone": changed(all_in_one(ASYNC), generate={"concurrency": 64}),
    "fsdp-scatters-heads": changed(wide(ASYNC), update_actor={"cp": 8, "dp": 1}, old_logprob={"cp": 8}),
    "fsdp-recomputes-whole-layers": changed(ASYNC, update_actor={"recompute": "selective"}),
    "areal-deals-prompts-out-evenly": changed(wide(ASYNC, 6), update_actor={"dp": 3}),
    "backend-supports-update_actor.offload": changed(ASYNC, update_actor={"offload": "optimizer"}),
    "backend-supports-sync": msgspec.structs.replace(ASYNC, sync="p2p"),
    "old_logprob-follows-update_actor": changed(ASYNC, old_logprob={"micro_tokens": 4096}),
    "backend-updates-in-flight": msgspec.structs.replace(ASYNC, in_flight=False),
    "updates-fill-the-pool": changed(ASYNC, update_actor={"dp": 1}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_areal_cannot_run_is_refused(rule: str) -> None:
    # 128 prompts do not divide by 3 replicas, the 384 sequences of a minibatch do.
    of = job(samples_per_prompt=6)
    check(REFUSED[rule], setting(of, None))
    with pytest.raises(InputError, match=rule):
        check(REFUSED[rule], setting(of, "areal"))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(RUN)), st.integers(0, 1 << 30))
def test_export_and_import_are_inverse(name: str, seed: int) -> None:
    of, cluster = JOBS[name], RUN[name]
    plan = drawn(of, "areal", cluster, seed=seed)[0]
    found = read(files_of(of, plan, "areal", cluster)["areal.yaml"], where="areal.yaml")
    assert found.plan == plan
    assert found.devices >= plan.num_devices
    ours, theirs = of.document, found.job
    assert (theirs.algorithm, theirs.models) == (ours.algorithm, ours.models)
    assert msgspec.structs.replace(theirs.workload, lengths=None) == ours.workload


# Import

GSM8K = """
experiment_name: gsm8k
cluster: {n_nodes: 1, n_gpus_per_node: 8}
rollout:
  backend: "sglang:d4"
  max_concurrent_rollouts: 256
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
gconfig: {n_samples: 4, max_new_tokens: 1024}
actor:
  backend: "fsdp:d4"
  path: Qwen/Qwen2.5-1.5B-Instruct
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: {lr: 1.70e-5}
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  use_decoupled_loss: true
  reward_norm: {mean_level: group, std_level: group}
ref: {path: "${actor.path}", backend: "${actor.backend}"}
sglang: {mem_fraction_static: 0.8}
train_dataset: {batch_size: 256, max_length: 1024}
"""


def imported(*changes: tuple[str, str]) -> Plan:
    text = GSM8K
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read(text, where="gsm8k.yaml").plan


def test_a_configuration_is_read() -> None:
    found = read(GSM8K, where="gsm8k.yaml")
    assert (found.nodes, found.per_node, found.job.algorithm.name) == (1, 8, "grpo")
    assert (found.job.algorithm.learning_rate, found.job.limits.max_staleness) == (1.7e-5, 2)
    assert found.plan == Plan(
        pools=(Pool(name="rollout", devices=4), Pool(name="train", devices=4)),
        generate=Generate(pool="rollout", concurrency=256, memory_percent=80),
        old_logprob=Pass(pool="train", zero=3, micro_tokens=10240),
        update_actor=Update(pool="train", dp=4, zero=3, micro_tokens=10240, recompute="full"),
        fusions=REWARDED,
        staleness=2,
        in_flight=True,
        sync="broadcast",
    )
    assert found.assumed[-1] == "sglang.max_running_requests: 256 sequences of a server, of 256 that may run there"


def test_older_releases_allocate_in_one_string() -> None:
    text = GSM8K.replace('  backend: "sglang:d4"\n', "").replace('  backend: "fsdp:d4"\n', "")
    assert read(text + "allocation_mode: sglang.d4p1t1+d4p1t1\n", where="x").plan == imported()
    shared = read(text + "allocation_mode: 'sglang[rollout]:d8|fsdp[actor]:d8'\n", where="x").plan
    assert (shared.colocated, shared.num_devices, shared.staleness, shared.sync) == (True, 8, 0, "reshard")
    assert shared.update_actor.offload == "all"


def test_engines_share_devices_as_their_strategies_say() -> None:
    separate = imported(("kl_ctl: 0.0", "kl_ctl: 0.1"))
    assert [pool.name for pool in separate.pools] == ["rollout", "train", "reference"]
    together = imported(
        ("kl_ctl: 0.0", "kl_ctl: 0.1"),
        ("ref: {", "ref: {scheduling_strategy: {type: colocation, target: actor}, "),
    )
    assert [pool.name for pool in together.pools] == ["rollout", "train"]
    with pytest.raises(InputError, match=r"gsm8k.yaml: ref.backend: must take as many devices as actor"):
        imported(
            ("kl_ctl: 0.0", "kl_ctl: 0.1"),
            ("ref: {", "ref: {scheduling_strategy: {type: colocation, target: actor}, "),
            ('"${actor.backend}"', '"fsdp:d2"'),
        )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"fsdp:d4"', '"zero:d4"', r"actor.backend: must name one of sglang, vllm, fsdp, megatron, archon, got 'zero'"),
        ('"fsdp:d4"', '"d4x2"', "actor.backend: must be an engine and degrees"),
        ("kl_ctl: 0.0", "kl_ctl: high", "actor.kl_ctl: must be a number, got 'high'"),
        ("n_samples: 4", "n_samples: 4.5", "gconfig.n_samples: must be a whole number, got 4.5"),
        ("  path: Qwen/Qwen2.5-1.5B-Instruct\n", "", "actor.path: must be set"),
        ("experiment_name: gsm8k", "defaults: [base]", "defaults: must be resolved"),
        ("experiment_name: gsm8k", "teacher: {path: x}", "teacher: must be null"),
        ("kl_ctl: 0.0", "weight_update_mode: carrier", "actor.weight_update_mode: must be one of xccl, disk, awex"),
    ],
)
def test_what_cannot_be_read_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported((old, new))


def test_engines_in_strings() -> None:
    folded = parse_backend("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", where="x")
    assert (folded.dp, folded.pp, folded.tp, folded.cp, folded.ep, folded.etp, folded.devices) == (4, 2, 2, 2, 2, 4, 32)
    both = parse_allocation("vllm:d8t4+megatron:(attn:d4p4t2|ffn:d2p4e4)", where="x")
    assert (both.rollout.devices, both.trainers[0].devices, both.trainers[0].ep, both.colocated) == (32, 32, 4, False)
    with pytest.raises(InputError, match="must divide attention and experts"):
        parse_backend("megatron:(attn:d2|ffn:e3)", where="x")
    with pytest.raises(InputError, match="must have one engine that generates"):
        parse_allocation("fsdp:d4+fsdp:d4", where="x")
