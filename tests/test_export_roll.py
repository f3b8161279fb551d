"""Plans as ROLL's YAML, and plans that ROLL cannot run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from framework_plans import JOBS, VERIFIED, colocated, document, job, production, productions, setting, space
from hypothesis import given, settings

from executor.export import roll
from ir.errors import InputError
from ir.job import Job
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check

AWAY = {"offload": "all"}
SYNC = colocated(
    update={"dp": 4, "zero": 1, "tp": 2, "pp": 2, "micro_batch": 2},
    reference_logprob=Pass(pool="all", zero=3, micro_batch=8, **AWAY),
    old_logprob=Pass(pool="all", tp=2, pp=2, micro_batch=4),
    fusions=VERIFIED,
)
ASYNC = Plan(
    pools=(Pool(name="rollout", devices=4), Pool(name="train", devices=8), Pool(name="critic", devices=4)),
    generate=Generate(pool="rollout", tp=2, concurrency=128, memory_percent=80, precision="fp8"),
    old_logprob=Pass(pool="train", cp=4, micro_tokens=2048),
    values=Pass(pool="critic", micro_batch=4),
    update_critic=Update(pool="critic", dp=4, zero=2, micro_batch=2),
    update_actor=Update(pool="train", dp=2, cp=4, micro_tokens=1024, **AWAY),
    fusions=VERIFIED,
    staleness=2,
    in_flight=True,
    sync="broadcast",
)


def config(of: Job, plan: Plan) -> Any:
    return document(roll.write(production(of, plan, "roll"))["roll.yaml"])


def test_a_colocated_plan() -> None:
    found = config(JOBS["grpo"], SYNC)
    train, strategy = found.actor_train, found.actor_train.strategy_args
    assert (found.rollout_batch_size, found.num_return_sequences_in_group, found.async_generation_ratio) == (128, 8, 0)
    assert (found.adv_estimator, found.use_kl_loss, found.kl_loss_coef, found.init_kl_coef) == ("grpo", True, 0.01, 0.0)
    assert (train.training_args.per_device_train_batch_size, train.training_args.gradient_accumulation_steps) == (2, 64)
    assert (train.infer_batch_size, train.device_mapping) == (4, "list(range(0,16))")
    assert (strategy.strategy_name, strategy.strategy_config.pipeline_model_parallel_size) == ("megatron_train", 2)
    assert train.sequence_packing_args.algorithm == "none"
    assert found.reference.strategy_args.strategy_name == "fsdp2_infer"
    assert found.reference.strategy_args.strategy_config.reshard_after_forward is True
    assert found.actor_infer.strategy_args.strategy_config.max_num_batched_tokens == 2112


def test_generation_ahead_with_a_critic_elsewhere() -> None:
    found = config(JOBS["ppo"], ASYNC)
    assert (found.async_generation_ratio, found.train_infer_correction.is_weight.enabled) == (2, True)
    assert [getattr(found, role).device_mapping for role in ("actor_infer", "actor_train", "critic")] == [
        "list(range(0,4))", "list(range(4,12))", "list(range(12,16))",
    ]  # fmt: skip
    packing = found.actor_train.sequence_packing_args
    assert (packing.algorithm, packing.max_packed_sequence_length_train) == ("load_balance", 4096)
    assert packing.max_packed_sequence_length_forward == 8192
    assert found.actor_train.training_args.gradient_accumulation_steps == 256
    critic = found.critic.strategy_args
    assert (critic.strategy_name, critic.strategy_config.reshard_after_forward) == ("fsdp2_train", False)
    engine = found.actor_infer.strategy_args.strategy_config
    assert (engine.quantization, engine.enable_chunked_prefill, engine.max_num_batched_tokens) == ("fp8", False, 4096)


def test_old_logprobs_may_be_folded() -> None:
    plan = colocated(
        update={"dp": 16, "zero": 1, "micro_batch": 2},
        fusions=Fusions(reward_with_generation=True, fold_old_logprob=True),
    )
    assert config(JOBS["free"], plan).enable_old_logprobs_recompute is False


@pytest.mark.parametrize(
    ("of", "plan", "change", "rule"),
    [
        (JOBS["grpo"], SYNC, {"fusions": Fusions()}, "verified-when-finished"),
        (JOBS["grpo"], SYNC, {"update_actor": msgspec.structs.replace(SYNC.update_actor, offload="none")},
         "states-leave-before-generation"),
        (JOBS["ppo"], ASYNC, {"in_flight": False}, "backend-updates-in-flight"),
        (JOBS["ppo"], ASYNC, {"update_critic": Update(pool="critic", dp=4, zero=1, micro_batch=2, **AWAY)}, "critics-are-fsdp"),
        (JOBS["ppo"], ASYNC, {"update_critic": Update(pool="critic", dp=4, zero=2, micro_tokens=4096)},
         "fsdp-counts-sequences"),
        (job("ppo", kl=0.0, epochs=2), ASYNC, {}, "critic-trains-once"),
        (job(prompts_per_step=130, minibatches=1), SYNC, {}, "replicas-divide-the-prompts|batches-are-even"),
        (job("dapo", kl=0.0, useful_groups=0.5), SYNC, {"reference_logprob": None}, "backend-runs-the-algorithm"),
    ],
)  # fmt: skip
def test_what_roll_cannot_run(of: Job, plan: Plan, change: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        check(msgspec.structs.replace(plan, **change), setting(of, "roll"))


def test_actor_and_critic_on_one_pool_train_at_once() -> None:
    critic = {
        "values": Pass(pool="all", micro_batch=4),
        "update_critic": Update(pool="all", dp=16, zero=2, micro_batch=2),
    }
    plan = colocated(update={"dp": 16, "zero": 1, "micro_batch": 2}, old_logprob=True, **critic, fusions=VERIFIED)
    with pytest.raises(InputError, match="updates-run-at-once"):
        check(plan, setting(JOBS["ppo"], "roll"))
    both = msgspec.structs.replace(VERIFIED, interleave_updates=True)
    check(msgspec.structs.replace(plan, fusions=both), setting(JOBS["ppo"], "roll"))


@pytest.mark.parametrize("cluster", ["dgx-h100:8", "dgx-h100:128"])
@pytest.mark.parametrize("name", ["grpo", "moe", "ppo-kl"])
def test_there_are_plans(name: str, cluster: str) -> None:
    assert space(JOBS[name], "roll", cluster).num_plans > 0


@settings(max_examples=30, deadline=None)
@given(productions("roll", ("grpo", "free", "moe", "ppo-kl")))
def test_batches_and_devices_add_up(made: Any) -> None:
    of, plan = made.job, made.plan
    found = config(of, plan)
    training = found.actor_train.training_args
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * plan.update_actor.dp
    assert batch * of.workload.minibatches == of.workload.sequences
    roles = ("actor_infer", "actor_train", "reference", "critic")
    ranges = {vars(found)[role].device_mapping for role in roles if hasattr(found, role)}
    spans = [span.removeprefix("list(range(").removesuffix("))").split(",") for span in ranges]
    assert sum(int(last) - int(first) for first, last in spans) == plan.num_devices
