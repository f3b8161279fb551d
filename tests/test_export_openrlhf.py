"""Plans as flags of OpenRLHF, and its flags as plans."""

from __future__ import annotations

import re
import shlex

import msgspec
import pytest
from framework_plans import JOBS, QWEN, changed, drawn, exported, job, setting, space
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.imports import openrlhf
from ir.backends import backend
from ir.batch import batch_of
from ir.errors import InputError
from ir.followers import follow
from ir.job import Job
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check
from ir.workload import Turns


def script(of: Job, plan: Plan, cluster: str = "dgx-h100:16") -> str:
    files = exported(of, plan, "openrlhf", cluster)
    assert list(files) == ["run.sh"]
    return files["run.sh"]


def flags(text: str) -> dict[str, str]:
    found = re.search(r"^arguments=\(\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)
    assert found
    lines = [shlex.split(line, comments=True) for line in found[1].splitlines()]
    return {key.removeprefix("--"): " ".join(values) for key, *values in lines}


VISIT = Pass(pool="all", micro_batch=8, zero=3)
COLOCATED = Plan(
    pools=(Pool(name="all", devices=16),),
    generate=Generate(pool="all", tp=2, concurrency=128, memory_percent=60, prefill_tokens=2048),
    reference_logprob=VISIT,
    old_logprob=VISIT,
    update_actor=Update(pool="all", dp=16, zero=3, micro_batch=4, recompute="full", offload="optimizer"),
    fusions=Fusions(reward_with_generation=True),
)

TOKENS = {"tp": 2, "cp": 2, "micro_tokens": 8192}
APART = Plan(
    pools=(Pool(name="rollout", devices=4), Pool(name="train", devices=8), Pool(name="critic", devices=4)),
    generate=Generate(pool="rollout", concurrency=128, memory_percent=90, prefill_tokens=2048),
    reward=Pass(pool="critic", **TOKENS),
    reference_logprob=Pass(pool="train", **TOKENS),
    old_logprob=Pass(pool="train", **TOKENS),
    values=Pass(pool="critic", **TOKENS),
    update_critic=Update(pool="critic", dp=1, zero=2, **TOKENS),
    update_actor=Update(pool="train", dp=2, zero=2, **TOKENS),
    staleness=2,
    in_flight=True,
    sync="broadcast",
)


def test_one_pool() -> None:
    text = script(job(), COLOCATED)
    found = flags(text)
    assert "# predicted: 9 s a step\n" in text
    assert found["actor.num_nodes"] == found["ref.num_nodes"] == "2"
    assert found["actor.num_gpus_per_node"] == "8"
    assert {key: found[key] for key in found if key.startswith("vllm.")} == {
        "vllm.num_engines": "8",
        "vllm.tensor_parallel_size": "2",
        "vllm.gpu_memory_utilization": "0.6",
        "vllm.enable_prefix_caching": "",
        "vllm.enable_sleep": "",
        "vllm.sync_backend": "nccl",
    }
    assert "train.colocate_all" in found and "ds.enable_sleep" in found and "train.async_enable" not in found
    assert (found["rollout.batch_size"], found["rollout.n_samples_per_prompt"]) == ("128", "8")
    assert (found["train.batch_size"], found["train.micro_batch_size"], found["rollout.micro_batch_size"]) == (
        "512",
        "4",
        "8",
    )
    assert (found["data.max_len"], found["rollout.max_new_tokens"]) == ("4096", "3072")
    assert (found["algo.advantage.estimator"], found["algo.kl.init_coef"]) == ("group_norm", "0.01")
    assert found["algo.kl.estimator"] == "k3" and "algo.kl.use_loss" in found
    assert found["reward.remote_url"] == "path/to/reward_func.py"


def test_pools_of_their_own_and_samples_of_older_weights() -> None:
    found = flags(script(JOBS["ppo-reward"], APART))
    assert "train.colocate_all" not in found and "train.colocate_actor_ref" in found
    assert "train.colocate_critic_reward" in found
    sizes = [found[f"{role}.num_gpus_per_node"] for role in ("actor", "ref", "critic", "reward")]
    assert sizes == ["8", "8", "4", "4"]
    assert (found["train.async_queue_size"], found["train.partial_rollout_enable"]) == ("2", "")
    # The budget of a device times both degrees is that of a replica: 8192 x 2.
    assert (found["train.max_tokens_per_gpu"], found["rollout.max_tokens_per_gpu"]) == ("4096", "4096")
    assert (found["ds.tensor_parallel_size"], found["ds.ring_attn_size"], found["ds.zero_stage"]) == ("2", "2", "2")
    assert found["algo.advantage.is_correction_threshold"] == "0.0 5.0"
    assert "vllm.enable_sleep" not in found and "algo.kl.use_loss" not in found
    assert found["critic.model_name_or_path"] == found["reward.model_name_or_path"] == QWEN


def test_a_job_without_reference_says_so() -> None:
    of = job(kl=0.0, turns=Turns(mean=3.0))
    found = flags(script(of, msgspec.structs.replace(COLOCATED, reference_logprob=None)))
    assert found["algo.kl.init_coef"] == "0.0" and "ref.num_nodes" not in found
    assert found["train.agent_func_path"] == "path/to/agent_func.py" and "reward.remote_url" not in found


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (changed(COLOCATED, generate={"concurrency": 32}), "openrlhf-engines-take-their-share"),
        (changed(COLOCATED, generate={"pp": 2}), "backend-supports-generate.pp"),
        (changed(COLOCATED, update_actor={"offload": "all"}), "backend-supports-update_actor.offload"),
        (changed(COLOCATED, update_actor={"recompute": "selective"}), "backend-supports-update_actor.recompute"),
        (changed(COLOCATED, update_actor={"tp": 2, "dp": 8}), "openrlhf-syncs-one-kind-of-shards"),
        (changed(COLOCATED, reference_logprob={"micro_batch": 4}), "reference_logprob-follows-old_logprob"),
        (changed(COLOCATED, old_logprob={"zero": 0}), "old_logprob-follows-update_actor"),
        (
            msgspec.structs.replace(COLOCATED, fusions=Fusions()),
            "verified-when-finished",
        ),
        (
            msgspec.structs.replace(
                changed(COLOCATED, generate={"pool": "rollout"}, reference_logprob={"pool": "rollout"}),
                pools=(Pool(name="rollout", devices=16), Pool(name="all", devices=16)),
                sync="broadcast",
            ),
            "openrlhf-places-models",
        ),
    ],
)
def test_what_it_cannot_run_is_refused(plan: Plan, rule: str) -> None:
    with pytest.raises(InputError, match=rf"\(rule {re.escape(rule)}\)"):
        check(plan, setting(job(), "openrlhf", "dgx-h100:32"))


def test_the_critic_waits_where_states_sleep() -> None:
    of = JOBS["ppo-reward"]
    sleeping = changed(APART, update_actor={"offload": "optimizer"}, update_critic={"offload": "optimizer"})
    with pytest.raises(InputError, match="openrlhf-sleeps-in-turns"):
        check(sleeping, setting(of, "openrlhf"))
    with pytest.raises(InputError, match="openrlhf-deals-out-as-to-the-actor"):
        # Twelve devices of the actor are three replicas, the critic's four devices one.
        check(
            msgspec.structs.replace(
                changed(APART, update_actor={"dp": 1}, update_critic={"dp": 2}),
                pools=(Pool(name="rollout", devices=4), Pool(name="train", devices=4), Pool(name="critic", devices=8)),
            ),
            setting(of, "openrlhf"),
        )


# The space


RUN = ("grpo", "ppo-reward", "dapo", "gspo", "rloo")


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("devices", [8, 64])
def test_the_space_has_plans_that_it_runs(name: str, devices: int) -> None:
    assert space(JOBS[name], "openrlhf", f"dgx-h100:{devices}").num_plans > 0
    assert drawn(JOBS[name], "openrlhf", f"dgx-h100:{devices}")


def as_read(plan: Plan, of: Job) -> Plan:
    """The plan with the fields that flags do not hold as they are read: the engines' sequences are vLLM's default."""
    engines = plan.devices_of(plan.generate.pool) // plan.generate.tp
    return changed(plan, generate={"concurrency": min(128, -(-of.workload.sequences // engines))})


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(RUN), st.sampled_from(["dgx-h100:8", "dgx-h100:16", "dgx-h100:64"]), st.integers(0, 10**6))
def test_what_is_written_is_read_again(name: str, cluster: str, seed: int) -> None:
    of = JOBS[name]
    for plan in drawn(JOBS[name], "openrlhf", cluster, seed=seed):
        found = openrlhf.read(script(of, plan, cluster), where="run.sh")
        assert found.plan == as_read(plan, of)
        assert found.devices == plan.num_devices
        workload = msgspec.structs.replace(of.workload, lengths=found.job.workload.lengths)
        assert (found.job.workload, found.job.algorithm) == (workload, of.algorithm)
        assert found.job.models == of.document.models


# Reading


OLD = """
set -x
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --ref_num_gpus_per_node 8 --actor_num_gpus_per_node 8 --colocate_all_models \\
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.6 \\
   --pretrain Qwen/Qwen2.5-7B --remote_rm_url http://localhost:5000/get_reward \\
   --advantage_estimator group_norm --use_kl_loss --init_kl_coef 1e-3 \\
   --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 128 \\
   --micro_train_batch_size 8 --micro_rollout_batch_size 16 --prompt_max_len 1024 --generate_max_len 2048 \\
   --zero_stage 3 --gradient_checkpointing --packing_samples --adam_offload --enforce_eager --save_path out
"""


def test_a_script_of_an_older_release() -> None:
    found = openrlhf.read(OLD, where="run.sh")
    assert found.plan == Plan(
        pools=(Pool(name="all", devices=8),),
        generate=Generate(pool="all", tp=2, concurrency=128, memory_percent=60, prefill_tokens=2048),
        reference_logprob=Pass(pool="all", zero=3, micro_batch=16),
        old_logprob=Pass(pool="all", zero=3, micro_batch=16),
        update_actor=Update(pool="all", dp=8, zero=3, micro_batch=8, recompute="full", offload="optimizer"),
        fusions=Fusions(reward_with_generation=True),
    )
    assert (found.nodes, found.per_node) == (1, 8)
    workload = found.job.workload
    assert (workload.prompts_per_step, workload.samples_per_prompt, workload.minibatches) == (128, 8, 8)
    assert (workload.max_prompt_tokens, workload.max_response_tokens) == (1024, 2048)
    assert (found.job.algorithm.name, found.job.algorithm.kl_coefficient) == ("grpo", 1e-3)
    assert any(note.startswith("ds.adam_offload: ") for note in found.assumed)
    assert "vllm.enforce_eager: priced with CUDA graphs" in found.assumed


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("--zero_stage 3", "--zero_stag 3", "--zero_stag: must be a flag of OpenRLHF, such as --zero_stage"),
        ("--zero_stage 3", "--load_in_4bit", "load_in_4bit: must not be given"),
        ("--train_batch_size 128", "--train_batch_size 100", "train.batch_size: must divide the 1024 sequences"),
        ("--vllm_num_engines 4", "--vllm_num_engines 3", "vllm.num_engines: must give as many devices"),
        (
            "--rollout_batch_size 128",
            "--rollout_batch_size many",
            "rollout.batch_size: must be a whole number, got 'many'",
        ),
        ("group_norm", "best", "algo.advantage.estimator: must be one of"),
        ("--pretrain Qwen/Qwen2.5-7B", "", "actor.model_name_or_path: must be given"),
    ],
)
def test_what_no_plan_can_say_is_refused(before: str, after: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        openrlhf.read(OLD.replace(before, after), where="run.sh")
    assert message in str(error.value)


def test_micro_batches_hold_the_longest_sequence() -> None:
    text = OLD.replace("--micro_train_batch_size 8", "--use_dynamic_batch --train_max_tokens_per_gpu 2000")
    found = openrlhf.read(text, where="run.sh")
    assert found.plan.update_actor.micro_tokens == 3072
    assert "train.max_tokens_per_gpu: planned as 3072, which holds the longest sequence" in found.assumed


def test_followers_have_a_batch_of_one() -> None:
    """A critic on a device of its own has nothing for ZeRO to divide over."""
    plan = msgspec.structs.replace(
        COLOCATED,
        pools=(Pool(name="all", devices=8), Pool(name="reference", devices=1)),
        reference_logprob=Pass(pool="reference", micro_batch=8),
    )
    assert follow(batch_of([plan]), backend("openrlhf"))["reference_logprob.zero"].tolist() == [0]
