"""Plans as NeMo-RL's YAML, and its configurations as plans."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from framework_plans import JOBS, MOE, NOTE, changed, drawn, job, setting
from framework_plans import exported as files_of
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.imports.nemo_rl import read
from ir.errors import InputError
from ir.job import Job
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check

RUN = {"grpo": "dgx-h100:8", "ppo-kl": "dgx-h100:16", "moe": "dgx-h100:32", "synchronous": "dgx-a100:64"}
"""Jobs with a cluster each."""


def exported(plan: Plan, of: Job, cluster: str) -> dict[str, Any]:
    files = files_of(of, plan, "nemo-rl", cluster)
    assert list(files) == ["nemo_rl.yaml", "run.sh"]
    assert f"# {NOTE}" in files["nemo_rl.yaml"]
    section = "ppo" if plan.update_critic else "grpo"
    assert f"uv run examples/run_{section}.py" in files["run.sh"]
    found = msgspec.yaml.decode(files["nemo_rl.yaml"])
    assert found["defaults"] == f"{section}_math_1B.yaml"
    return found


COLOCATED = Plan(
    pools=(Pool(name="all", devices=8),),
    generate=Generate(pool="all", tp=2, concurrency=128, memory_percent=60, prefill_tokens=8192),
    reference_logprob=Pass(pool="all", tp=2, cp=2, micro_tokens=4096, offload="all"),
    old_logprob=Pass(pool="all", tp=2, cp=2, micro_tokens=4096),
    update_actor=Update(
        pool="all", dp=2, tp=2, cp=2, zero=1, micro_tokens=2048, recompute="selective", offload="all", precision="fp8"
    ),
)


def test_one_pool_on_megatron() -> None:
    found = exported(COLOCATED, JOBS["grpo"], "dgx-h100:8")
    assert found["cluster"] == {"num_nodes": 1, "gpus_per_node": 8}
    policy = found["policy"]
    assert (policy["train_global_batch_size"], policy["train_micro_batch_size"], policy["logprob_batch_size"]) == (
        512,
        1,
        1,
    )
    assert policy["sequence_packing"] == {"enabled": True, "train_mb_tokens": 4096, "logprob_mb_tokens": 8192}
    megatron = policy["megatron_cfg"]
    assert (policy["dtensor_cfg"], megatron["enabled"], megatron["sequence_parallel"]) == (
        {"enabled": False},
        True,
        True,
    )
    assert [megatron[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "expert")] == [2, 1, 1]
    assert (megatron["context_parallel_size"], megatron["recompute_granularity"]) == (2, "selective")
    assert megatron["optimizer"] == {
        "lr": 1e-6,
        "min_lr": 1e-6,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
    }
    assert (megatron["fp8_cfg"]["enabled"], policy["make_sequence_length_divisible_by"]) == (True, 8)
    generation = policy["generation"]
    assert generation["colocated"] == {"enabled": True}
    assert generation["vllm_kwargs"] == {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "enable_chunked_prefill": True,
    }
    assert (generation["vllm_cfg"]["async_engine"], generation["vllm_cfg"]["gpu_memory_utilization"]) == (False, 0.6)
    assert (policy["max_total_sequence_length"], generation["max_new_tokens"]) == (4096, 3072)
    grpo, loss = found["grpo"], found["loss_fn"]
    assert (grpo["num_prompts_per_step"], grpo["num_generations_per_prompt"]) == (128, 8)
    assert grpo["skip_reference_policy_logprobs_calculation"] is False and grpo["async_grpo"]["enabled"] is False
    assert (loss["reference_policy_kl_penalty"], loss["force_on_policy_ratio"]) == (0.01, False)


def test_small_rates_are_numbers_in_yaml() -> None:
    files = files_of(JOBS["grpo"], COLOCATED, "nemo-rl", "dgx-h100:8")
    assert "lr: 1.0e-06 " in files["nemo_rl.yaml"]


APART = Plan(
    pools=(Pool(name="rollout", devices=16), Pool(name="train", devices=16)),
    generate=Generate(pool="rollout", tp=4, ep=4, concurrency=64, memory_percent=80, precision="fp8"),
    update_actor=Update(pool="train", dp=16, zero=3, micro_batch=4, recompute="full", offload="optimizer"),
    fusions=Fusions(fold_old_logprob=True, reward_with_generation=True),
    staleness=2,
    in_flight=True,
    sync="broadcast",
)


def test_two_pools_on_dtensor() -> None:
    found = exported(APART, job(model=MOE, kl=0.0, minibatches=1), "dgx-h100:32")
    assert found["cluster"] == {"num_nodes": 4, "gpus_per_node": 8}
    policy, generation = found["policy"], found["policy"]["generation"]
    assert generation["colocated"] == {"enabled": False, "resources": {"num_nodes": 2, "gpus_per_node": 8}}
    assert found["grpo"]["async_grpo"] == {
        "enabled": True,
        "max_trajectory_age_steps": 2,
        "in_flight_weight_updates": True,
    }
    loss = found["loss_fn"]
    assert (loss["force_on_policy_ratio"], loss["use_importance_sampling_correction"]) == (True, True)
    assert (loss["truncated_importance_sampling_type"], loss["truncated_importance_sampling_ratio"]) == ("tis", 5.0)
    assert policy["dtensor_cfg"] == {
        "enabled": True,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "activation_checkpointing": True,
    }
    assert (policy["megatron_cfg"], policy["offload_optimizer_for_logprob"]) == ({"enabled": False}, True)
    assert (policy["train_micro_batch_size"], policy["sequence_packing"]) == (4, {"enabled": False})
    engine = generation["vllm_cfg"]
    assert (engine["async_engine"], engine["precision"], engine["expert_parallel_size"]) == (True, "fp8", 4)
    assert generation["vllm_kwargs"]["max_num_batched_tokens"] == 4096


def test_part_of_a_node_generates() -> None:
    pools = (Pool(name="rollout", devices=6), Pool(name="train", devices=2))
    plan = msgspec.structs.replace(changed(APART, generate={"tp": 2, "ep": 1}, update_actor={"dp": 2}), pools=pools)
    found = exported(plan, job(model="Qwen/Qwen3-4B", kl=0.0, minibatches=1), "dgx-h100:8")
    assert found["cluster"] == {"num_nodes": 1, "gpus_per_node": 8}
    assert found["policy"]["generation"]["colocated"]["resources"] == {"num_nodes": 1, "gpus_per_node": 6}


def test_a_value_model_has_workers_of_its_own() -> None:
    for plan in drawn(JOBS["ppo-kl"], "nemo-rl"):
        found = exported(plan, JOBS["ppo-kl"], "dgx-h100:16")
        value, critic = found["value"], plan.update_critic
        assert critic is not None and critic.offload == "all"
        assert value["megatron_cfg"]["enabled"] == (critic.zero < 2)
        assert value["train_micro_batch_size"] == max(critic.micro_batch, 1)
        assert found["ppo"]["ppo_epochs"] == 1 and found["loss_fn"]["use_kl_in_reward"] is True


REFUSED = {
    "update_actor-waits-for-engines": changed(COLOCATED, update_actor={"offload": "none"}),
    "reference_logprob-follows-update_actor": changed(COLOCATED, reference_logprob={"cp": 1, "tp": 4}),
    "reference_logprob-follows-old_logprob": changed(COLOCATED, reference_logprob={"micro_tokens": 2048}),
    "backend-supports-reference_logprob.offload": changed(COLOCATED, reference_logprob={"offload": "none"}),
    "fsdp-trains-natively": changed(
        COLOCATED,
        update_actor={"zero": 3, "recompute": "full", "cp": 1, "dp": 4, "micro_tokens": 4096},
        old_logprob={"zero": 3, "cp": 1},
        reference_logprob={"zero": 3, "cp": 1},
    ),
    "nemo-rl-divides-sequences": changed(
        COLOCATED,
        update_actor={"micro_tokens": 0, "micro_batch": 4},
        old_logprob={"micro_tokens": 0, "micro_batch": 4},
        reference_logprob={"micro_tokens": 0, "micro_batch": 4},
    ),
    "nemo-rl-step-holds-its-sequences": changed(COLOCATED, generate={"prefill_tokens": 64}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_nemo_rl_cannot_run_is_refused(rule: str) -> None:
    check(REFUSED[rule], setting(JOBS["grpo"], None, "dgx-h100:8"))
    with pytest.raises(InputError, match=rule):
        check(REFUSED[rule], setting(JOBS["grpo"], "nemo-rl", "dgx-h100:8"))


def test_several_nodes_are_shared_out_whole() -> None:
    at = setting(job(model=MOE, kl=0.0, minibatches=1), "nemo-rl", "dgx-h100:32")
    pools = (Pool(name="rollout", devices=12), Pool(name="train", devices=16))
    with pytest.raises(InputError, match="nemo-rl-pools-are-whole-nodes"):
        check(msgspec.structs.replace(APART, pools=pools), at)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(RUN)), st.integers(0, 1 << 30))
def test_export_and_import_are_inverse(name: str, seed: int) -> None:
    of, cluster = JOBS[name], RUN[name]
    plan = drawn(of, "nemo-rl", cluster, seed=seed)[0]
    found = read(files_of(of, plan, "nemo-rl", cluster)["nemo_rl.yaml"], where="nemo_rl.yaml")
    assert found.plan == plan
    assert found.devices == plan.num_devices
    ours, theirs = of.document, found.job
    assert (theirs.algorithm, theirs.models) == (ours.algorithm, ours.models)
    assert msgspec.structs.replace(theirs.workload, lengths=None) == ours.workload


# Import

RECIPE = """
defaults: ../../../grpo_math_1B.yaml
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32}
policy:
  model_name: Qwen/Qwen3-32B
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 4
    optimizer: {lr: 3.0e-07}
  generation:
    vllm_cfg: {tensor_parallel_size: 4}
cluster: {gpus_per_node: 8, num_nodes: 4}
"""


def test_a_recipe_is_read_over_its_base() -> None:
    found = read(RECIPE, where="recipe.yaml")
    assert (found.nodes, found.per_node, found.job.algorithm.name) == (4, 8, "grpo")
    assert (found.job.algorithm.kl_coefficient, found.job.algorithm.learning_rate) == (0.01, 3e-7)
    assert (found.job.workload.minibatches, found.job.workload.max_tokens) == (4, 4096)
    visit = Pass(pool="all", tp=4, pp=4, micro_tokens=4096)
    assert found.plan == Plan(
        pools=(Pool(name="all", devices=32),),
        generate=Generate(pool="all", tp=4, concurrency=256, memory_percent=60, prefill_tokens=8192),
        reference_logprob=msgspec.structs.replace(visit, offload="all"),
        old_logprob=visit,
        update_actor=Update(pool="all", dp=2, tp=4, pp=4, zero=1, micro_tokens=4096, offload="all"),
    )
    assert "policy.max_total_sequence_length: 4096 tokens, 512 of them the longest prompt" in found.assumed


def test_copies_of_sharded_weights_are_read() -> None:
    text = RECIPE.replace("dtensor_cfg: {enabled: false}", "dtensor_cfg: {enabled: true, dp_replicate_size: 4}")
    plan = read(text.replace("megatron_cfg:\n    enabled: true", "megatron_cfg:\n    enabled: false"), where="x").plan
    assert (plan.update_actor.dp, plan.update_actor.zero, plan.update_actor.shard) == (32, 3, 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("grpo_math_1B.yaml", "other.yaml", "defaults: must be grpo_math_1B.yaml or ppo_math_1B.yaml"),
        ("num_nodes: 4", "num_nodes: 3", "policy.megatron_cfg: must, by their product, divide the 24 devices"),
        (
            "train_micro_batch_size: 1",
            "train_global_batch_size: 500",
            "policy.train_global_batch_size: must divide the 64",
        ),
        ("vllm_cfg: {", "backend: sglang\n    vllm_cfg: {", "policy.generation.backend: must be vllm"),
        ("vllm_cfg: {", "colocated: {enabled: false}\n    vllm_cfg: {", "resources.gpus_per_node: must be set"),
        (
            "vllm_cfg: {",
            "colocated: {enabled: false, resources: {gpus_per_node: two}}\n    vllm_cfg: {",
            "resources.gpus_per_node: must be a whole number, got 'two'",
        ),
    ],
)
def test_what_cannot_be_read_is_named(old: str, new: str, message: str) -> None:
    assert old in RECIPE
    with pytest.raises(InputError, match=message):
        read(RECIPE.replace(old, new), where="recipe.yaml")
