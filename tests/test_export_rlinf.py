"""Plans as RLinf's YAML, and plans that RLinf cannot run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from framework_plans import JOBS, VERIFIED, colocated, document, job, production, productions, setting, space
from hypothesis import given, settings

from executor.export import rlinf
from ir.errors import InputError
from ir.frameworks.rlinf import model_type
from ir.job import Job
from ir.known_models import known_config
from ir.model import shape_from_config
from ir.plan import Fusions, Pass, Plan, Pool, Update
from ir.rules import check

MERGED = Fusions(reward_with_generation=True, merge_logprobs=True)
MEGATRON = colocated(
    update={"dp": 4, "zero": 1, "tp": 2, "pp": 2, "micro_batch": 2},
    reference_logprob=Pass(pool="all", tp=2, pp=2, micro_batch=8, offload="all"),
    fusions=MERGED,
)
FSDP = colocated(
    8, update={"dp": 8, "zero": 3, "micro_tokens": 8192}, old_logprob=Pass(pool="all", zero=3, micro_tokens=8192),
    fusions=VERIFIED,
)  # fmt: skip
CRITIC = {"values": Pass(pool="all", tp=4, micro_batch=2), "old_logprob": Pass(pool="all", cp=4, micro_batch=2)}
PPO = colocated(
    update={"dp": 4, "cp": 4, "zero": 1, "micro_batch": 4}, **CRITIC, fusions=VERIFIED,
    update_critic=Update(pool="all", dp=4, tp=4, micro_batch=4, recompute="selective", offload="optimizer"),
)  # fmt: skip


def config(of: Job, plan: Plan) -> Any:
    return document(rlinf.write(production(of, plan, "rlinf"))["rlinf.yaml"])


def test_megatron_with_a_reference() -> None:
    found = config(JOBS["grpo"], MEGATRON)
    assert found.cluster.num_nodes == 2 and vars(found.cluster.component_placement) == {"actor,rollout,reward": "0-15"}
    algorithm, actor = found.algorithm, found.actor
    assert (algorithm.group_size, algorithm.n_minibatches, algorithm.training_batch_size_per_gpu) == (8, 2, 2)
    assert (algorithm.logprob_forward_micro_batch_size, algorithm.recompute_logprobs) == (8, True)
    assert (algorithm.kl_beta, algorithm.reinpp_kl_beta) == (0.01, 0.0)
    assert (actor.training_backend, actor.offload_weight, actor.optim.use_distributed_optimizer) == (
        "megatron",
        True,
        True,
    )
    assert (actor.model.tensor_model_parallel_size, actor.model.pipeline_model_parallel_size) == (2, 2)
    assert (actor.model.recompute_granularity, actor.model.recompute_method) == ("full", "uniform")
    assert found.rollout.model.model_type == "qwen2.5"
    assert (found.rollout.tensor_parallel_size, found.rollout.vllm.max_num_batched_tokens) == (2, 2112)
    assert (found.data.rollout_batch_size, found.runner.seq_length) == (128, 4096)


def test_fsdp_by_tokens() -> None:
    found = config(job(kl=0.0), FSDP)
    assert (found.runner.enable_dynamic_batch_size, found.runner.max_tokens_per_mbs) == (True, 8192)
    assert (found.actor.training_backend, found.actor.enable_offload) == ("fsdp", True)
    assert found.actor.fsdp_config.reshard_after_forward and found.actor.fsdp_config.gradient_checkpointing
    assert found.cluster.num_nodes == 1 and found.critic.use_critic_model is False


def test_a_critic_of_other_degrees() -> None:
    found = config(JOBS["ppo"], PPO)
    assert list(vars(found.cluster.component_placement)) == ["actor,rollout,reward,critic"]
    assert (found.algorithm.adv_type, found.critic.use_critic_model) == ("gae", True)
    assert (found.actor.model.context_parallel_size, found.critic.model.tensor_model_parallel_size) == (4, 4)
    assert (found.critic.offload_optimizer, found.critic.offload_weight) == (True, False)
    assert found.critic.optim.use_distributed_optimizer is False


APART = {"pools": (Pool(name="rollout", devices=8), Pool(name="all", devices=8)), "sync": "broadcast"}


@pytest.mark.parametrize(
    ("of", "plan", "change", "rule"),
    [
        (JOBS["grpo"], MEGATRON, {"fusions": VERIFIED, "old_logprob": Pass(pool="all", tp=2, pp=2, micro_batch=8)},
         "reference-goes-with-the-old-logprobs"),
        (JOBS["ppo-kl"], PPO, {"reference_logprob": Pass(pool="all", cp=4, micro_batch=2, offload="all")},
         "reference-goes-with-the-old-logprobs"),
        (job(kl=0.0, prompts_per_step=132), FSDP, {}, "fsdp-ranks-divide-the-prompts"),
        (job(kl=0.0, model="meta-llama/Llama-3.1-8B"), FSDP, {}, "model-is-supported"),
        (job(kl=0.0), FSDP, {"update_actor": Update(pool="all", dp=8, zero=3, micro_tokens=8192, offload="optimizer")},
         "fsdp-offloads-all-or-nothing"),
        (job(kl=0.0), FSDP, {"staleness": 1, **APART, "generate": msgspec.structs.replace(FSDP.generate, pool="rollout")},
         "one-pool|backend-supports"),
    ],
)  # fmt: skip
def test_what_rlinf_cannot_run(of: Job, plan: Plan, change: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        check(msgspec.structs.replace(plan, **change), setting(of, "rlinf"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen2.5-7B", "qwen2.5"), ("Qwen/Qwen3-8B", "qwen3"), ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("meta-llama/Llama-3.1-8B", None), ("zai-org/GLM-4.5-Air", None), ("deepseek-ai/DeepSeek-V3", None),
        ("google/gemma-3-4b-it", None), ("openai/gpt-oss-20b", None),
    ],
)  # fmt: skip
def test_architectures_it_knows(name: str, kind: str | None) -> None:
    assert model_type(shape_from_config(known_config(name, where="test"), where="test")) == kind


@pytest.mark.parametrize("cluster", ["dgx-h100:8", "dgx-h100:128"])
@pytest.mark.parametrize("name", ["grpo", "moe", "ppo"])
def test_there_are_plans(name: str, cluster: str) -> None:
    assert space(JOBS[name], "rlinf", cluster).num_plans > 0


@settings(max_examples=30, deadline=None)
@given(productions("rlinf", ("grpo", "free", "moe", "ppo")))
def test_batches_and_devices_add_up(made: Any) -> None:
    of, plan = made.job, made.plan
    found = config(of, plan)
    (span,) = vars(found.cluster.component_placement).values()
    assert span == f"0-{plan.num_devices - 1}"
    share = of.workload.sequences // of.workload.minibatches // plan.update_actor.dp
    assert share % found.algorithm.training_batch_size_per_gpu == 0
    assert found.runner.enable_dynamic_batch_size == (plan.update_actor.micro_tokens > 0)
