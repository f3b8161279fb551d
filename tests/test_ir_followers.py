"""Sections that run on the engine of another: refused where they do not match, and made to match."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from build import changed
from test_examples import FOLDER

from ir.backend import Backend, Follower
from ir.batch import batch_of
from ir.errors import InputError
from ir.followers import follow
from ir.graph import Op
from ir.job import load_job
from ir.plan import Plan
from ir.rules import check, legal, setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.enumerate import legal_space
from space.presets import presets

JOB = load_job(FOLDER / "grpo-qwen2.5-7b" / "job.toml")
CLUSTER = load_cluster("dgx-h100:16")
ONE_ENGINE = Backend(
    name="one-engine",
    what="a trainer whose passes run on its own engine",
    values={},
    follows=(
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=("tp", "pp", "cp", "ep", "zero", "unit")),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR),
    ),
)
SETTING = setting_of(JOB, CLUSTER, ONE_ENGINE)
PLAN = presets(setting_of(JOB, CLUSTER))["verl-colocated"]


def test_a_plan_that_matches_is_legal_and_stays_as_it_is():
    check(PLAN, SETTING)
    assert follow(batch_of([PLAN]), ONE_ENGINE).plan(0) == PLAN


@pytest.mark.parametrize(
    ("fields", "where", "rule"),
    [
        ({"tp": 2}, "old_logprob.tp", "must be that of update_actor"),
        ({"zero": 0}, "old_logprob.zero", "must be 3 exactly if update_actor.zero is"),
        ({"micro_batch": 4, "micro_tokens": 0}, "old_logprob.micro_tokens", "above 0 exactly if update_actor"),
    ],
)
def test_a_plan_that_does_not_match_is_refused(fields: dict[str, object], where: str, rule: str):
    with pytest.raises(InputError) as error:
        check(changed(PLAN, old_logprob=fields), SETTING)
    assert error.value.where == f"plan: {where}"
    assert rule in error.value.rule
    assert "(rule old_logprob-follows-update_actor)" in error.value.rule


def test_a_follower_without_that_field_may_differ():
    check(changed(PLAN, reference_logprob={"micro_batch": 4, "micro_tokens": 0}), SETTING)


def test_drawn_plans_can_be_made_to_match():
    space = legal_space(default_space(SETTING), SETTING)
    rng = np.random.default_rng(0)
    drawn = [factor.draw(4, rng) for _, factor in zip(range(40), space.factors(), strict=False)]
    for batch in drawn:
        followed = follow(batch, ONE_ENGINE)
        assert (followed["old_logprob.tp"] == np.where(batch.has(Op.OLD_LOGPROB), batch["update_actor.tp"], 0)).all()
        assert (follow(followed, ONE_ENGINE)["old_logprob.micro_tokens"] == followed["old_logprob.micro_tokens"]).all()
        names = {rule for plan in map(followed.plan, range(len(followed))) for rule in _broken(plan)}
        assert not {name for name in names if "follows" in name}


def _broken(plan: Plan) -> list[str]:
    batch = batch_of([plan])
    if legal(batch, SETTING)[0]:
        return []
    with pytest.raises(InputError) as error:
        check(plan, SETTING)
    return [error.value.rule]


ONE_TRAINER = Backend(
    name="one-trainer",
    what="a trainer with one set of degrees for all models",
    values={},
    follows=(Follower(op=Op.UPDATE_CRITIC, leader=Op.UPDATE_ACTOR, fields=("tp", "pp", "cp", "stage", "dp")),),
)
PPO = load_job(FOLDER / "ppo-70b" / "job.toml")


def test_an_update_may_have_its_leaders_stage_and_the_replicas_that_are_left():
    cluster = load_cluster("dgx-h100:256")
    plan = presets(setting_of(PPO, cluster))["openrlhf-separate"]
    assert plan.update_critic is not None
    devices = plan.devices_of(plan.update_critic.pool)
    followed = follow(batch_of([changed(plan, update_actor={"tp": 2, "cp": 2, "zero": 1})]), ONE_TRAINER)
    columns = [int(followed[f"update_critic.{name}"][0]) for name in ("tp", "cp", "zero", "dp")]
    assert columns == [2, 2, 1, devices // 4]
    with pytest.raises(InputError, match=r"update_critic.zero: must be update_actor.zero for the backend"):
        check(changed(plan, update_critic={"zero": 2}), setting_of(PPO, cluster, ONE_TRAINER))


def test_zero_has_nothing_to_divide_over_on_a_device():
    batch = batch_of([changed(PLAN, update_actor={"zero": 3})])
    alone = {**batch.columns, "devices.reference": np.array([1], dtype=np.int32)}
    assert follow(type(batch)(1, alone), ONE_ENGINE)["reference_logprob.zero"].tolist() == [0]


def test_what_trains_leaves_the_devices_to_engines_and_only_then():
    swapping = replace(ONE_ENGINE, follows=(), swaps=(Op.UPDATE_ACTOR,))
    apart = presets(setting_of(JOB, CLUSTER))["disaggregated-sync"]
    for plan, wrong, right in ((PLAN, "none", "all"), (PLAN, "optimizer", "all"), (apart, "all", "optimizer")):
        given = changed(plan, update_actor={"offload": wrong})
        with pytest.raises(InputError, match="update_actor-waits-for-engines"):
            check(given, setting_of(JOB, CLUSTER, swapping))
        followed = follow(batch_of([given]), swapping).plan(0)
        assert followed == changed(plan, update_actor={"offload": right})
        check(followed, setting_of(JOB, CLUSTER, swapping))
    assert follow(batch_of([apart]), swapping).plan(0) == apart


def test_engines_that_take_no_changes_are_sent_whole_weights():
    native = Backend(
        name="native", what="FSDP, and engines in bfloat16", values={}, extras=("sync",),
        deltas={"generate.precision": (0,), "update_actor.zero": (2, 3)},
    )  # fmt: skip
    setting = setting_of(JOB, CLUSTER, native)
    apart = msgspec.structs.replace(presets(setting)["verl-separate-async"], sync="delta")
    check(apart, setting)
    assert follow(batch_of([apart]), native).plan(0) == apart
    quantized = changed(apart, generate={"precision": "fp8"})
    with pytest.raises(InputError) as error:
        check(quantized, setting)
    assert error.value.rule == (
        "must send whole weights unless generate.precision is native, for the backend 'native' "
        "(rule deltas-need-generate.precision)"
    )
    assert error.value.got == "delta"
    followed = follow(batch_of([quantized]), native).plan(0)
    assert followed == msgspec.structs.replace(quantized, sync="broadcast")
    check(followed, setting)
