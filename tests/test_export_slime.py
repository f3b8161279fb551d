"""Plans as slime's flags, and plans that slime cannot run."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest
from framework_plans import JOBS, MOE, VERIFIED, colocated, job, production, productions, setting, space
from hypothesis import given, settings

from executor.export import slime
from ir.errors import InputError
from ir.job import Job
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check

AWAY = {"offload": "all"}
MICRO = {"tp": 2, "pp": 2, "micro_batch": 2}
SYNC = colocated(
    update={"dp": 4, "zero": 1, **MICRO},
    reference_logprob=Pass(pool="all", **MICRO, **AWAY),
    old_logprob=True,
    fusions=VERIFIED,
)
ASYNC = Plan(
    pools=(Pool(name="rollout", devices=8), Pool(name="train", devices=8)),
    generate=Generate(pool="rollout", tp=4, concurrency=128, memory_percent=80),
    update_actor=Update(pool="train", dp=2, cp=4, zero=1, micro_tokens=4096),
    fusions=Fusions(reward_with_generation=True, fold_old_logprob=True),
    staleness=1,
    sync="disk",
)
EXPERTS = {"tp": 4, "pp": 4, "ep": 2, "micro_batch": 1}


def flags(of: Job, plan: Plan) -> tuple[str, dict[str, str]]:
    """The program and its arguments."""
    text = slime.write(production(of, plan, "slime"))["run.sh"]
    body = text.partition("arguments=(\n")[2].partition("\n)\n")
    lines = [shlex.split(line, comments=True) for line in body[0].splitlines()]
    return shlex.split(body[2])[1], {name.removeprefix("--"): " ".join(rest) for name, *rest in lines}


def test_a_colocated_plan() -> None:
    program, found = flags(JOBS["grpo"], SYNC)
    expected = {
        "actor-num-nodes": "2", "actor-num-gpus-per-node": "8", "num-gpus-per-node": "8", "colocate": "",
        "offload-train": "", "rollout-batch-size": "128", "n-samples-per-prompt": "8", "global-batch-size": "512",
        "micro-batch-size": "2", "tensor-model-parallel-size": "2", "sequence-parallel": "",
        "pipeline-model-parallel-size": "2", "context-parallel-size": "1", "recompute-granularity": "full",
        "rollout-num-gpus-per-engine": "2", "sglang-mem-fraction-static": "0.7", "sglang-max-running-requests": "64",
        "sglang-chunked-prefill-size": "2112", "sglang-enable-mixed-chunk": "", "use-kl-loss": "",
        "kl-loss-coef": "0.01", "rollout-max-context-len": "4096",
    }  # fmt: skip
    assert program == "train.py"
    assert {name: found.get(name) for name in expected} == expected
    assert not found.keys() & {"rollout-num-gpus", "use-tis", "use-dynamic-batch-size", "expert-model-parallel-size"}


def test_a_plan_one_rollout_ahead() -> None:
    program, found = flags(JOBS["free"], ASYNC)
    expected = {
        "rollout-num-gpus": "8", "rollout-num-gpus-per-engine": "4", "update-weight-transport": "disk",
        "no-offload-train": "", "use-dynamic-batch-size": "", "max-tokens-per-gpu": "4096",
        "context-parallel-size": "4", "global-batch-size": "1024", "use-tis": "", "tis-clip": "5.0",
        "sglang-chunked-prefill-size": "-1",
    }  # fmt: skip
    assert program == "train_async.py"
    assert {name: found.get(name) for name in expected} == expected
    assert not found.keys() & {"colocate", "use-kl-loss", "micro-batch-size", "sglang-enable-mixed-chunk"}


def test_changed_values_through_files() -> None:
    _, found = flags(JOBS["free"], msgspec.structs.replace(ASYNC, sync="delta-disk"))
    assert {name: value for name, value in found.items() if name.startswith("update-weight")} == {
        "update-weight-transport": "disk", "update-weight-disk-dir": "/path/to/shared/weights",
        "update-weight-mode": "delta", "update-weight-local-checkpoint-dir": "/path/to/local/checkpoint",
    }  # fmt: skip


def test_a_pipeline_whose_last_stage_is_smaller_and_experts() -> None:
    of = job(model="Qwen/Qwen3-235B-A22B", kl=0.0, minibatches=2)
    plan = colocated(update={"dp": 1, "recompute": "selective", **EXPERTS}, old_logprob=True, fusions=VERIFIED)
    _, found = flags(of, plan)
    assert found["decoder-last-pipeline-num-layers"] == "22"
    assert (found["expert-model-parallel-size"], found["expert-tensor-parallel-size"]) == ("2", "1")
    assert found["recompute-granularity"] == "selective" and "recompute-method" not in found


@pytest.mark.parametrize(
    ("of", "plan", "change", "rule"),
    [
        (JOBS["grpo"], SYNC, {"fusions": Fusions()}, "verified-when-finished"),
        (JOBS["free"], ASYNC, {"staleness": 2}, "backend-supports-staleness"),
        (JOBS["free"], ASYNC, {"sync": "p2p"}, "backend-supports-sync"),
        (JOBS["free"], ASYNC, {"sync": "delta"}, "backend-supports-sync"),
        (JOBS["grpo"], SYNC, {"sync": "delta-disk"}, "weights-reshard-within-a-pool"),
        (
            JOBS["free"], ASYNC,
            {"old_logprob": Pass(pool="train", cp=4, micro_tokens=4096), "fusions": VERIFIED},
            "old-logprobs-fold-when-they-can",
        ),
        (JOBS["grpo"], SYNC, {"old_logprob": Pass(pool="all", micro_batch=2)}, "old_logprob-follows-update_actor"),
        (
            JOBS["grpo"], SYNC, {"generate": Generate(pool="all", pp=2, concurrency=8, memory_percent=50, prefill_tokens=8)},
            "mixed-chunks-exclude-a-pipeline",
        ),
        (job(epochs=2), SYNC, {}, "one-epoch"),
        (job(reward=MOE), SYNC, {"reward": Pass(pool="all", micro_batch=1), "fusions": Fusions()},
         "rewards-are-verified"),
    ],
)  # fmt: skip
def test_what_slime_cannot_run(of: Job, plan: Plan, change: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        check(msgspec.structs.replace(plan, **change), setting(of, "slime"))


@pytest.mark.parametrize("cluster", ["dgx-h100:8", "dgx-h100:128"])
@pytest.mark.parametrize("name", ["grpo", "moe", "ppo-kl"])
def test_there_are_plans(name: str, cluster: str) -> None:
    assert space(JOBS[name], "slime", cluster).num_plans > 0


@settings(max_examples=30, deadline=None)
@given(productions("slime", ("grpo", "free", "moe", "ppo")))
def test_batches_and_devices_add_up(made: Any) -> None:
    of, plan = made.job, made.plan
    _, found = flags(of, plan)
    replica = [int(found[f"{axis}-parallel-size"]) for axis in ("tensor-model", "pipeline-model", "context")]
    trainers = int(found["actor-num-nodes"]) * int(found["actor-num-gpus-per-node"])
    assert trainers == replica[0] * replica[1] * replica[2] * plan.update_actor.dp
    assert trainers + int(found.get("rollout-num-gpus", 0)) == plan.num_devices
    assert int(found["global-batch-size"]) * of.workload.minibatches == of.workload.sequences
