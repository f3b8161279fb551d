"""What is refused before any worker starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import build
import msgspec
import pytest

from executor.support import check_plan, check_runnable
from ir.errors import InputError
from ir.model import Mla, Moe
from ir.plan import Pass, Plan, Pool
from ir.workload import Turns

set_ = msgspec.structs.replace
PLAN = build.plan()


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        build.plan(colocated=True, train=2, dp=2, recompute=True, merge_logprobs=True),
        build.plan(colocated=True, train=2, dp=1, fold_old_logprob=True),
        build.plan(staleness=4, stream=True, rollout_logprob=True),
        set_(PLAN, old_logprob=Pass(pool="train", micro_batch=1)),
    ],
)
def test_what_the_executor_does_is_let_through(plan: Plan) -> None:
    check_plan(plan, build.job(), 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (build.plan(train=4), "plan: pools: the pools' devices together must not exceed the devices there are"),
        (
            set_(PLAN, pools=(Pool(name="rollout", devices=1, group=1), PLAN.pools[1])),
            "plan: pools: must lie in group 0 to be run: a machine is one group, got 1",
        ),
        (
            set_(build.plan(rollout=2), generate=set_(PLAN.generate, tp=2)),
            "plan: generate.tp: must be 1 for the backend 'local'",
        ),
        (
            set_(PLAN, generate=set_(PLAN.generate, memory_percent=50)),
            "plan: generate.memory_percent: must be 0 for the backend 'local'",
        ),
        (
            set_(PLAN, reference_logprob=Pass(pool="train", micro_tokens=64)),
            "plan: reference_logprob.micro_tokens: must be 0 for the backend 'local'",
        ),
        (
            set_(PLAN, update_actor=set_(PLAN.update_actor, recompute="selective")),
            "plan: update_actor.recompute: must be none or full for the backend 'local'",
        ),
        (
            set_(PLAN, reference_logprob=Pass(pool="rollout", micro_batch=4)),
            "plan: pools: the backend must be one that can run the reference apart from the actor",
        ),
        (
            set_(
                PLAN,
                reference_logprob=Pass(pool="own", micro_batch=4),
                pools=(*PLAN.pools, Pool(name="own", devices=1)),
            ),
            "plan: pools: the backend must be one that can run the reference apart from the actor",
        ),
        (set_(PLAN, sync="p2p"), "plan: sync: must be reshard or broadcast for the backend 'local'"),
        (set_(build.plan(staleness=1), in_flight=False), "plan: in_flight: must be true with staleness above 0"),
        (
            build.plan(reward_with_generation=True),
            "plan: fusions.reward_with_generation: must be 0 for the backend 'local'",
        ),
    ],
)
def test_a_plan_that_would_be_run_as_another_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_plan(plan, build.job(), 4)
    assert str(caught.value).startswith(message)


def test_the_job_is_looked_at_before_the_plan() -> None:
    with pytest.raises(InputError, match=r"job: workload\.turns: must not be given to be run"):
        check_plan(PLAN, build.job(turns=Turns(mean=2.0)), 2)


def test_a_job_that_names_its_actor_is_refused() -> None:
    job = build.job()
    models = set_(
        job.document.models, actor=set_(job.document.models.actor, path=None, name="Qwen/Qwen3-8B", warm_start=None)
    )
    with pytest.raises(InputError, match=r"job: models\.actor\.path: must have weights \(a directory, or a config"):
        check_runnable(replace(job, document=set_(job.document, models=models)))


def test_a_directory_needs_no_warm_start(tmp_path: Path) -> None:
    job = build.job(directory=tmp_path)
    models = set_(job.document.models, actor=set_(job.document.models.actor, path="actor", warm_start=None))
    job = replace(job, document=set_(job.document, models=models))
    with pytest.raises(InputError, match="must have weights"):
        check_runnable(job)
    (tmp_path / "actor").mkdir()
    check_runnable(job)


def test_prompts_with_a_shared_prefix_are_refused() -> None:
    with pytest.raises(InputError, match=r"job: workload\.shared_prefix_tokens: must be 0 to be run.*, got 8"):
        check_runnable(build.job(shared_prefix_tokens=8))


@pytest.mark.parametrize(
    "changes",
    [
        {"moe": Moe(experts=4, experts_per_token=2, ffn=32)},
        {"mla": Mla(kv_lora_rank=8, nope_head_dim=4, rope_head_dim=4, v_head_dim=8)},
        {"sinks": True},
        {"norms_per_layer": 4},
        {"windows": (0, 55)},
    ],
)
def test_an_actor_whose_attention_the_engine_does_not_know_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"job: models\.actor: must be a dense decoder with full attention"):
        check_runnable(build.job(shape=replace(build.SHAPE, **changes)))


def test_windows_that_hold_every_sequence_are_full_attention() -> None:
    check_runnable(build.job(shape=replace(build.SHAPE, windows=(0, 56))))
