"""Plans as configurations of TRL and accelerate, and those as plans."""

from __future__ import annotations

import msgspec
import pytest
from framework_plans import JOBS, changed, drawn, exported, job, setting, space
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.imports import trl
from ir.errors import InputError
from ir.job import Job
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check

RUN = ("grpo", "gspo", "adapters")

VISIT = Pass(pool="all", zero=3, micro_batch=8)
COLOCATED = Plan(
    pools=(Pool(name="all", devices=16),),
    generate=Generate(pool="all", tp=2, concurrency=128, memory_percent=40, prefill_tokens=4096),
    reference_logprob=VISIT,
    old_logprob=VISIT,
    update_actor=Update(pool="all", dp=16, zero=3, micro_batch=8, recompute="full"),
)
SERVED = Plan(
    pools=(Pool(name="rollout", devices=4), Pool(name="train", devices=4)),
    generate=Generate(pool="rollout", tp=2, concurrency=64, memory_percent=90, prefill_tokens=4096),
    update_actor=Update(pool="train", dp=4, zero=2, micro_batch=4),
    fusions=Fusions(fold_old_logprob=True),
    sync="broadcast",
)


def values(text: str) -> dict[str, object]:
    document = msgspec.yaml.decode(text)
    assert isinstance(document, dict)
    return document


def test_engines_in_the_training_processes() -> None:
    files = exported(job(), COLOCATED, "trl")
    assert set(files) == {"grpo.yaml", "accelerate.yaml", "run.sh"}
    found, launch = values(files["grpo.yaml"]), values(files["accelerate.yaml"])
    batches = ("num_generations", "generation_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    # A minibatch of 512 sequences is 4 micro-batches of 8 on each of 16 devices.
    assert [found[key] for key in batches] == [8, 1024, 8, 4]
    assert (found["vllm_mode"], found["vllm_tensor_parallel_size"]) == ("colocate", 2)
    assert (found["vllm_gpu_memory_utilization"], found["vllm_enable_sleep_mode"]) == (0.4, True)
    assert (found["vllm_max_model_length"], found["max_completion_length"]) == (4096, 3072)
    assert (found["beta"], found["loss_type"], found["gradient_checkpointing"]) == (0.01, "grpo", True)
    assert found["vllm_importance_sampling_correction"] is True
    assert (launch["num_machines"], launch["num_processes"]) == (2, 16)
    assert launch["deepspeed_config"]["zero_stage"] == 3  # type: ignore[index]
    assert "CUDA_VISIBLE_DEVICES" not in files["run.sh"]


def test_a_server_on_devices_of_its_own() -> None:
    of = job("dr-grpo", kl=0.0, minibatches=1)
    files = exported(of, SERVED, "trl", "dgx-h100:8")
    found = values(files["grpo.yaml"])
    assert (found["vllm_mode"], found["beta"], found["loss_type"]) == ("server", 0.0, "dr_grpo")
    assert (found["scale_rewards"], found["vllm_importance_sampling_correction"]) == ("none", False)
    assert "vllm_gpu_memory_utilization" not in found
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7" in files["run.sh"]
    serve = files["serve.sh"]
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in serve
    for flag in ("tensor_parallel_size 2", "data_parallel_size 2", "gpu_memory_utilization 0.9", "max-num-seqs 64"):
        assert f"--{flag} " in serve


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (changed(COLOCATED, generate={"concurrency": 64}), "trl-engines-take-their-share"),
        (changed(COLOCATED, update_actor={"micro_batch": 24}), "micro-batches-are-even"),
        (changed(COLOCATED, old_logprob={"micro_batch": 16}), "old_logprob-follows-update_actor"),
        (changed(COLOCATED, update_actor={"offload": "optimizer"}), "backend-supports-update_actor.offload"),
        (
            msgspec.structs.replace(
                changed(COLOCATED, generate={"pool": "rollout", "concurrency": 32}),
                pools=(Pool(name="rollout", devices=16), Pool(name="all", devices=16)),
                sync="broadcast",
            ),
            "trl-serves-on-a-node",
        ),
    ],
)
def test_what_it_cannot_run_is_refused(plan: Plan, rule: str) -> None:
    with pytest.raises(InputError, match=rf"\(rule {rule}\)"):
        check(plan, setting(job(), "trl", "dgx-h100:32"))


def test_a_critic_is_refused() -> None:
    plan = drawn(JOBS["ppo-reward"], "openrlhf")[0]
    with pytest.raises(InputError, match="backend-runs-the-algorithm"):
        check(plan, setting(JOBS["ppo-reward"], "trl"))


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("devices", [8, 64])
def test_the_space_has_plans_that_it_runs(name: str, devices: int) -> None:
    assert space(JOBS[name], "trl", f"dgx-h100:{devices}").num_plans > 0
    assert drawn(JOBS[name], "trl", f"dgx-h100:{devices}")


def as_read(plan: Plan, of: Job) -> Plan:
    """The plan with what no key holds as it is read: engines in the training processes take all that these generate."""
    if not plan.colocated:
        return plan
    engines = plan.num_devices // plan.generate.tp
    return changed(plan, generate={"concurrency": of.workload.sequences // engines})


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(RUN), st.sampled_from(["dgx-h100:8", "dgx-h100:32"]), st.integers(0, 10**6))
def test_what_is_written_is_read_again(name: str, cluster: str, seed: int) -> None:
    of = JOBS[name]
    for plan in drawn(JOBS[name], "trl", cluster, seed=seed):
        files = exported(of, plan, "trl", cluster)
        parts = [files[name] for name in ("grpo.yaml", "accelerate.yaml", "serve.sh") if name in files]
        found = trl.read("\n---\n".join(parts), where="trl")
        assert found.plan == as_read(plan, of)
        workload = msgspec.structs.replace(of.workload, lengths=found.job.workload.lengths)
        cap = {} if found.plan.old_logprob is not None else {"max_importance_weight": 3.0}
        assert (found.job.workload, found.job.algorithm) == (workload, msgspec.structs.replace(of.algorithm, **cap))
        assert found.job.models == of.document.models


# Reading

CONFIG = """
model_name_or_path: Qwen/Qwen2.5-7B
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_generations: 8
generation_batch_size: 128
max_completion_length: 2048
max_prompt_length: 1024
learning_rate: 1.0e-6
use_vllm: true
vllm_gpu_memory_utilization: 0.5
output_dir: out
---
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
num_processes: 8
"""


def test_yaml_of_both() -> None:
    found = trl.read(CONFIG, where="grpo.yaml")
    assert found.plan == Plan(
        pools=(Pool(name="all", devices=8),),
        generate=Generate(pool="all", concurrency=16, memory_percent=50, prefill_tokens=4096),
        old_logprob=Pass(pool="all", micro_batch=4),
        update_actor=Update(pool="all", dp=8, zero=2, micro_batch=4, recompute="full"),
    )
    workload = found.job.workload
    assert (workload.prompts_per_step, workload.samples_per_prompt, workload.minibatches) == (16, 8, 2)
    assert "distributed_type FSDP: planned as ZeRO stage 2, which divides the same" in found.assumed


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "output_dir",
            "output_dirr",
            "output_dirr: must be a key of TRL, accelerate or the vLLM server, such as output_dir",
        ),
        ("use_vllm: true", "use_vllm: false", "use_vllm: must be true"),
        ("generation_batch_size: 128", "generation_batch_size: 96", "generation_batch_size: must be whole minibatches"),
        ("output_dir: out", "load_in_4bit: true", "load_in_4bit: must not be set"),
        (
            "num_processes: 8",
            "num_processes: eight",
            "num_processes: must be a whole number, got 'eight'",
        ),
        ("distributed_type: FSDP", "distributed_type: XLA", "distributed_type: must be DEEPSPEED, FSDP"),
    ],
)
def test_what_no_plan_can_say_is_refused(before: str, after: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        trl.read(CONFIG.replace(before, after), where="grpo.yaml")
    assert message in str(error.value)
