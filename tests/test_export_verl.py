"""Plans as verl configurations and back."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from framework_plans import MOE, NOTE, changed, exported, job, sampled, setting, space
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.imports.verl import read
from ir.batch import CODES, batch_of
from ir.errors import InputError
from ir.followers import follow
from ir.frameworks.verl import VERL
from ir.job import Job
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Sharing, Update
from ir.rules import check
from space.presets import presets

A = "actor_rollout_ref"


SIZES = {"prompts_per_step": 256, "minibatches": 4}
JOBS = {
    "grpo": job(model="Qwen/Qwen3-8B", kl=0.0, **SIZES),
    "kl": job(model="Qwen/Qwen2.5-7B", kl=0.001, **SIZES),
    "adapters": job("dr-grpo", model="Qwen/Qwen2.5-7B", kl=0.001, lora=64, **SIZES),
    "ppo": job("ppo", model="Qwen/Qwen2.5-7B", kl=0.01, **SIZES),
    "reward model": job("ppo", model="meta-llama/Llama-3.1-8B", kl=0.0, reward="meta-llama/Llama-3.1-8B", **SIZES),
    "experts": job("gspo", model=MOE, kl=0.0, prompts_per_step=256, minibatches=1),
    "dapo": job("dapo", model="Qwen/Qwen2.5-32B", kl=0.0, useful_groups=0.5, **SIZES),
    "uneven": job("cispo", model="google/gemma-2-2b", kl=0.0, **SIZES),
}

GENERATE = Generate(pool="all", tp=2, concurrency=256, memory_percent=60, prefill_tokens=7936)
OLD = Pass(pool="all", zero=3, micro_tokens=8192)
FSDP = Update(pool="all", dp=8, zero=3, micro_tokens=4096, recompute="full", offload="optimizer")
SYNC = Plan(
    pools=(Pool(name="all", devices=8),),
    generate=GENERATE,
    old_logprob=OLD,
    update_actor=FSDP,
    fusions=Fusions(reward_with_generation=True),
)


def script(plan: Plan, of: Job, devices: int) -> str:
    return exported(of, plan, "verl", f"dgx-h100:{devices}")["run.sh"]


def overrides(text: str, folder: Path) -> dict[str, str]:
    """What bash gives python."""
    file = folder / "run.sh"
    file.write_text(text)
    command = f"python3() {{ printf '%s\\0' \"${{@:3}}\"; }}; source {file}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return dict(word.split("=", 1) for word in done.stdout.split("\0")[:-1])


def expect(found: Mapping[str, str], **wanted: Mapping[str, str]) -> None:
    for prefix, values in wanted.items():
        place = {"actor": f"{A}.actor.", "rollout": f"{A}.rollout.", "ref": f"{A}.ref.", "top": ""}.get(
            prefix, f"{prefix}."
        )
        for key, value in values.items():
            assert found.get(place + key) == value, place + key


def test_a_synchronous_plan_on_one_pool(tmp_path: Path) -> None:
    text = script(SYNC, JOBS["grpo"], 8)
    found = overrides(text, tmp_path)
    assert f"# {NOTE}\n" in text
    expect(
        found,
        top={
            "data.train_batch_size": "256",
            "data.max_prompt_length": "1024",
            "data.max_response_length": "3072",
            "algorithm.adv_estimator": "grpo",
            "model_engine": "dp",
        },
        trainer={"nnodes": "1", "n_gpus_per_node": "8", "v1.trainer_mode": "sync"},
        actor={
            "ppo_mini_batch_size": "64",
            "strategy": "fsdp2",
            "fsdp_config.reshard_after_forward": "true",
            "fsdp_config.fsdp_size": "-1",
            "fsdp_config.param_offload": "false",
            "fsdp_config.optimizer_offload": "true",
            "use_dynamic_bsz": "true",
            "ppo_max_token_len_per_gpu": "4096",
            "use_kl_loss": "false",
        },
        rollout={
            "n": "8",
            "name": "vllm",
            "tensor_model_parallel_size": "2",
            "max_num_seqs": "256",
            "max_num_batched_tokens": "8192",
            "gpu_memory_utilization": "0.6",
            "max_model_len": "4096",
            "log_prob_use_dynamic_bsz": "true",
            "log_prob_max_token_len_per_gpu": "8192",
        },
    )
    assert found[f"{A}.model.enable_gradient_checkpointing"] == "true"
    assert not [key for key in found if "separate_async" in key or key.startswith("critic.")]


def test_a_stale_plan_on_pools_of_its_own(tmp_path: Path) -> None:
    """Four minibatches a sync of weights; generation two steps ahead, so that samples span three versions."""
    plan = msgspec.structs.replace(
        SYNC,
        pools=(Pool(name="rollout", devices=16), Pool(name="train", devices=8)),
        generate=msgspec.structs.replace(GENERATE, pool="rollout", prefill_tokens=0, precision="fp8"),
        old_logprob=None,
        update_actor=msgspec.structs.replace(FSDP, pool="train", zero=2),
        fusions=Fusions(reward_with_generation=True, rollout_logprob=True),
        staleness=2,
        in_flight=True,
        sync="broadcast",
    )
    found = overrides(script(plan, JOBS["grpo"], 32), tmp_path)
    expect(
        found,
        trainer={
            "v1.trainer_mode": "separate_async",
            "v1.separate_async.parameter_sync_step": "4",
            "v1.separate_async.num_warmup_batches": "2",
            "v1.sampler.max_off_policy_threshold": "3",
            "v1.sampler.max_off_policy_strategy": "wait",
            "n_gpus_per_node": "8",
        },
        rollout={
            "nnodes": "2",
            "n_gpus_per_node": "8",
            "checkpoint_engine.backend": "nccl",
            "enable_chunked_prefill": "false",
            "max_num_batched_tokens": "4096",
            "quantization": "fp8",
        },
        top={f"{A}.hybrid_engine": "false", "algorithm.rollout_correction.bypass_mode": "true"},
        actor={"fsdp_config.reshard_after_forward": "false"},
    )


def test_changed_values_go_to_sglang(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(
        SYNC,
        pools=(Pool(name="rollout", devices=8), Pool(name="train", devices=8)),
        generate=msgspec.structs.replace(GENERATE, pool="rollout"),
        old_logprob=None,
        update_actor=msgspec.structs.replace(FSDP, pool="train"),
        fusions=Fusions(reward_with_generation=True, rollout_logprob=True),
        sync="delta",
    )
    text = script(plan, JOBS["grpo"], 16)
    found = overrides(text, tmp_path)
    expect(
        found,
        rollout={"name": "sglang", "checkpoint_engine.backend": "delta_sharded", "max_num_seqs": "256"},
        top={
            f"+{A}.rollout.engine_kwargs.sglang.chunked_prefill_size": "8192",
            f"+{A}.rollout.engine_kwargs.sglang.enable_mixed_chunk": "true",
        },
    )
    assert read(text, where="run.sh").plan == plan


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"generate": {"precision": "fp8"}}, "deltas-need-generate.precision"),
        ({"generate": {"ep": 2}}, "deltas-need-generate.ep"),
    ],
)
def test_what_takes_no_changed_values(change: dict[str, Any], rule: str) -> None:
    pools = {"pools": (Pool(name="rollout", devices=8), Pool(name="train", devices=8))}
    engine, update = Generate(pool="rollout", tp=2, concurrency=64, memory_percent=60), {"pool": "train", "dp": 8}
    plan = Plan(
        **pools, generate=engine, update_actor=Update(**update, zero=2, micro_tokens=4096),
        fusions=Fusions(reward_with_generation=True, rollout_logprob=True), sync="delta",
    )  # fmt: skip
    check(plan, setting(JOBS["experts"], "verl"))
    with pytest.raises(InputError, match=rf"plan: sync: .*\(rule {rule}\)"):
        check(changed(plan, **change), setting(JOBS["experts"], "verl"))


def test_plans_that_all_send_changed_values() -> None:
    found = space(JOBS["experts"], "verl", "dgx-h100:16", {"sync": CODES["sync"].index("delta")})
    assert (found.space["generate.ep"], found.space["generate.precision"]) == ((1,), (0,))
    plans = sampled(found, 0, tries=64, count=8)
    assert len(plans) == 8 and {plan.sync for plan in plans} == {"delta"}
    for plan in plans:
        assert read(script(plan, JOBS["experts"], 16), where="run.sh").plan == plan


def test_states_divided_within_nodes(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(
        SYNC,
        pools=(Pool(name="all", devices=32),),
        generate=msgspec.structs.replace(GENERATE, concurrency=128),
        update_actor=msgspec.structs.replace(FSDP, dp=32, shard=8),
        old_logprob=msgspec.structs.replace(OLD, shard=8),
    )
    text = script(plan, JOBS["grpo"], 32)
    assert overrides(text, tmp_path)[f"{A}.actor.fsdp_config.fsdp_size"] == "8"
    assert read(text, where="run.sh").plan == plan
    whole = msgspec.structs.replace(plan, old_logprob=OLD)
    with pytest.raises(InputError, match="old_logprob-follows-update_actor"):
        check(whole, setting(JOBS["grpo"], "verl", "dgx-h100:32"))
    assert follow(batch_of([whole]), VERL).plan(0) == plan


@pytest.mark.parametrize(("shard", "size"), [(0, "-1"), (8, "8")])
def test_a_reference_divided_otherwise_than_the_actor(tmp_path: Path, shard: int, size: str) -> None:
    plan = msgspec.structs.replace(
        SYNC,
        pools=(Pool(name="all", devices=32),),
        generate=msgspec.structs.replace(GENERATE, concurrency=128),
        reference_logprob=msgspec.structs.replace(OLD, offload="all", shard=shard),
        update_actor=msgspec.structs.replace(FSDP, dp=32),
    )
    text = script(plan, JOBS["kl"], 32)
    found = overrides(text, tmp_path)
    expect(found, actor={"fsdp_config.fsdp_size": "-1"}, ref={"fsdp_config.fsdp_size": size})
    assert read(text, where="run.sh").plan == plan


def test_megatron_with_experts_and_a_pipeline(tmp_path: Path) -> None:
    """Four engines of four devices share their experts; a last stage with fewer layers is said so."""
    degrees: dict[str, Any] = {"pool": "all", "tp": 2, "pp": 2, "cp": 2, "ep": 8}
    update = Update(**degrees, dp=4, vpp=2, zero=1, micro_batch=4, recompute="selective", offload="all")
    plan = msgspec.structs.replace(
        SYNC,
        pools=(Pool(name="all", devices=32),),
        generate=msgspec.structs.replace(GENERATE, tp=4, ep=16),
        old_logprob=Pass(**degrees, micro_batch=8),
        update_actor=update,
    )
    found = overrides(script(plan, JOBS["experts"], 32), tmp_path)
    assert found["model_engine"] == "megatron"
    expect(
        found,
        rollout={
            "tensor_model_parallel_size": "4",
            "data_parallel_size": "4",
            "expert_parallel_size": "16",
            "log_prob_micro_batch_size_per_gpu": "8",
        },
        actor={
            "use_dynamic_bsz": "false",
            "ppo_micro_batch_size_per_gpu": "4",
            "policy_loss.loss_mode": "gspo",
            "megatron.tensor_model_parallel_size": "2",
            "megatron.pipeline_model_parallel_size": "2",
            "megatron.virtual_pipeline_model_parallel_size": "2",
            "megatron.context_parallel_size": "2",
            "megatron.expert_model_parallel_size": "8",
            "megatron.expert_tensor_parallel_size": "1",
            "megatron.use_distributed_optimizer": "true",
            "megatron.param_offload": "true",
            "megatron.override_transformer_config.recompute_granularity": "selective",
        },
    )
    stages: dict[str, Any] = {"pool": "all", "pp": 4, "cp": 2}
    deep = msgspec.structs.replace(
        SYNC,
        old_logprob=Pass(**stages, micro_batch=8),
        update_actor=Update(**stages, dp=2, micro_batch=4, zero=1),
        pools=(Pool(name="all", devices=16),),
    )
    found = overrides(script(deep, JOBS["uneven"], 16), tmp_path)
    assert found[f"+{A}.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage"] == "5"


def test_a_critic_has_what_the_v1_trainer_reads(tmp_path: Path) -> None:
    passing = Pass(pool="all", zero=3, micro_batch=8)
    plan = msgspec.structs.replace(
        SYNC,
        reference_logprob=msgspec.structs.replace(OLD, offload="all"),
        values=passing,
        update_critic=msgspec.structs.replace(FSDP, micro_tokens=0, micro_batch=2, recompute="none"),
    )
    found = overrides(script(plan, JOBS["ppo"], 8), tmp_path)
    assert found["algorithm.adv_estimator"] == "gae"
    assert found["algorithm.use_kl_in_reward"] == "true"
    expect(
        found,
        critic={
            "use_dynamic_bsz": "false",
            "ppo_micro_batch_size_per_gpu": "2",
            "model.path": "Qwen/Qwen2.5-7B",
            "model.enable_gradient_checkpointing": "false",
        },
        ref={"log_prob_use_dynamic_bsz": "true", "log_prob_max_token_len_per_gpu": "8192"},
        top={
            "+critic.fsdp.use_dynamic_bsz": "false",
            "+critic.fsdp.micro_batch_size_per_gpu": "2",
            "+critic.fsdp.infer_micro_batch_size_per_gpu": "8",
        },
    )


REPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "the critic's engine is the actor's": (
        {
            "update_critic": Update(pool="all", dp=8, zero=1, micro_tokens=4096),
            "values": Pass(pool="all", micro_tokens=4096),
        },
        "update_critic-follows-update_actor",
    ),
    "one token budget of the critic": (
        {"values": Pass(pool="all", zero=3, micro_tokens=8192)},
        "values-follows-update_critic",
    ),
    "log-probs in the actor's unit": (
        {"old_logprob": Pass(pool="all", zero=3, micro_batch=8)},
        "old_logprob-follows-update_actor",
    ),
    "FSDP divides no tensors": (
        {"update_actor": Update(pool="all", dp=4, tp=2, zero=3, micro_tokens=4096)},
        "fsdp-only-shards",
    ),
    "no sharding of states over part of the pool": (
        {"update_actor": msgspec.structs.replace(FSDP, dp=4)},
        "updates-fill-the-pool",
    ),
    "a frozen model waits": (
        {"reference_logprob": OLD},
        "verl-fsdp-keeps-the-reference-in-host-memory",
    ),
    "rewards as responses finish": ({"fusions": Fusions()}, "verified-when-finished"),
    "engines have no pipeline": (
        {"generate": msgspec.structs.replace(GENERATE, pp=2)},
        "backend-supports-generate.pp",
    ),
    "micro-batches divide": (
        {
            "update_critic": msgspec.structs.replace(FSDP, micro_tokens=0, micro_batch=3),
            "values": Pass(pool="all", zero=3, micro_batch=8),
        },
        "verl-micro-batches-are-whole",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_what_verl_cannot_run_is_refused_by_name(case: str) -> None:
    plan = msgspec.structs.replace(
        SYNC,
        reference_logprob=msgspec.structs.replace(OLD, offload="all"),
        values=Pass(pool="all", zero=3, micro_tokens=4096),
        update_critic=FSDP,
    )
    check(plan, setting(JOBS["ppo"], "verl", "dgx-h100:8"))
    changes, rule = REPLACED[case]
    with pytest.raises(InputError, match=rf"\(rule {rule}\)"):
        check(msgspec.structs.replace(plan, **changes), setting(JOBS["ppo"], "verl", "dgx-h100:8"))


def test_adapters_are_taken_off_for_the_reference(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(SYNC, reference_logprob=OLD, sharing=Sharing(reference_adapter=True))
    found = overrides(script(plan, JOBS["adapters"], 8), tmp_path)
    expect(found, top={f"{A}.model.lora_rank": "64", "algorithm.norm_adv_by_std_in_grpo": "false"})
    unlike = msgspec.structs.replace(plan, reference_logprob=msgspec.structs.replace(OLD, micro_tokens=4096))
    with pytest.raises(InputError, match="reference_logprob-follows-old_logprob"):
        check(unlike, setting(JOBS["adapters"], "verl", "dgx-h100:8"))
    apart = msgspec.structs.replace(plan, sharing=Sharing())
    with pytest.raises(InputError, match="reference-is-the-actor-without-adapters"):
        check(apart, setting(JOBS["adapters"], "verl", "dgx-h100:8"))


# Spaces


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("devices", [8, 16, 128])
def test_every_job_has_plans(name: str, devices: int) -> None:
    assert space(JOBS[name], "verl", f"dgx-h100:{devices}").num_plans > 0


def test_verl_presets_are_plans_of_verl() -> None:
    found = presets(setting(JOBS["grpo"], "verl", "dgx-h100:16"))
    assert {"verl-colocated", "verl-separate-async"} <= set(found)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(JOBS)),
    devices=st.sampled_from([8, 16, 64]),
    zero=st.sampled_from([None, 2, 3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_importing_undoes_exporting(name: str, devices: int, zero: int | None, seed: int) -> None:
    of, cluster = JOBS[name], f"dgx-h100:{devices}"
    # Most plans of all are Megatron's.
    plans = space(of, "verl", cluster, {"update_actor.zero": zero} if zero is not None else {})
    for plan in sampled(plans, seed, tries=32, count=2):
        found = read(script(plan, of, devices), where="run.sh")
        assert found.plan == plan
        kept = (
            "prompts_per_step",
            "samples_per_prompt",
            "minibatches",
            "epochs",
            "max_prompt_tokens",
            "max_response_tokens",
        )
        assert all(getattr(found.job.workload, key) == getattr(of.workload, key) for key in kept)
        assert found.job.algorithm.name == of.algorithm.name
        assert found.job.algorithm.kl_coefficient == of.algorithm.kl_coefficient
