"""Two plans compared: the changes that lead from one to the other, and what each costs or gains."""

from __future__ import annotations

import msgspec
import pytest
from build import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_examples import FOLDER

from analytic.estimate import estimate
from ir.backends import backend
from ir.batch import batch_of
from ir.job import load_job
from ir.rules import check, setting_of
from ir.systems import load_cluster
from search.compare import compare, comparison_text
from search.nearest import nearest
from space.presets import presets

JOB = load_job(FOLDER / "ppo-70b" / "job.toml")
CLUSTER = load_cluster("alps-gh200:64")
SETTING = setting_of(JOB, CLUSTER)
PRESETS = presets(SETTING)


def test_a_plan_and_itself():
    plan = PRESETS["verl-colocated"]
    found = compare(SETTING, CLUSTER, plan, plan)
    assert found.changes == ()
    assert found.gain == 1.0
    assert comparison_text(found).splitlines()[-1] == "they are the same plan"


def test_a_single_axis_is_told_with_the_stage_that_it_moves():
    plan = PRESETS["real"]
    found = compare(SETTING, CLUSTER, plan, changed(plan, update_actor={"recompute": "selective"}))
    (change,) = found.changes
    assert change.words == ("update_actor.recompute full -> selective",)
    assert [name for name, _, _ in change.stages] == ["update_actor"]
    assert change.saved_s > 0
    assert change.fill_after > change.fill_before


def test_units_of_micro_batches_change_together():
    plan = PRESETS["verl-colocated"]
    found = compare(SETTING, CLUSTER, plan, changed(plan, update_critic={"micro_batch": 1, "micro_tokens": 0}))
    assert [change.words for change in found.changes] == [
        ("update_critic.micro_batch 0 -> 1", "update_critic.micro_tokens 2048 -> 0")
    ]


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(sorted(PRESETS)), st.sampled_from(sorted(PRESETS)))
def test_savings_add_up_and_every_plan_between_is_a_step(first: str, second: str):
    found = compare(SETTING, CLUSTER, PRESETS[first], PRESETS[second])
    before, after = estimate(JOB, batch_of([PRESETS[first], PRESETS[second]]), CLUSTER).step_seconds
    assert sum(change.saved_s for change in found.changes) == pytest.approx(before - after, abs=1e-9 * before)
    assert found.gain == pytest.approx(before / after)
    for one, other in zip(found.changes, found.changes[1:], strict=False):
        assert one.after_s == pytest.approx(other.before_s)


def test_a_section_that_a_fusion_removes_is_one_word():
    plan = PRESETS["verl-colocated"]
    other = msgspec.structs.replace(
        plan, old_logprob=None, fusions=msgspec.structs.replace(plan.fusions, rollout_logprob=True)
    )
    (change,) = compare(SETTING, CLUSTER, plan, other).changes
    assert change.words == ("fusions.rollout_logprob false -> true", "no stage old_logprob")
    (back,) = compare(SETTING, CLUSTER, other, plan).changes
    assert back.words[0] == "fusions.rollout_logprob true -> false"
    assert back.words[1].startswith("a stage old_logprob (tp 1")


def test_a_plan_that_does_not_fit_is_told_why():
    plan = changed(PRESETS["verl-colocated"], update_actor={"recompute": "none", "micro_tokens": 32768})
    text = comparison_text(compare(SETTING, CLUSTER, plan, PRESETS["verl-colocated"]), ("mine", "theirs"))
    assert "mine does not fit: " in text
    assert "theirs is predicted" in text and "and mine does not fit" in text


# The nearest plan that a backend can run


def test_a_plan_that_a_backend_runs_is_its_own_nearest():
    plan = PRESETS["verl-colocated"]
    assert nearest(plan, setting_of(JOB, CLUSTER, backend("torch"))) is plan


@pytest.mark.parametrize("name", ["torch", "deepspeed", "megatron"])
@pytest.mark.parametrize("preset", ["verl-colocated", "real", "nemo-rl-one-step-off", "verl-separate-async"])
def test_the_nearest_plan_is_legal_and_keeps_the_structure(name: str, preset: str):
    setting = setting_of(JOB, CLUSTER, backend(name))
    near = nearest(PRESETS[preset], setting)
    assert near is not None
    check(near, setting)
    assert near.pools == PRESETS[preset].pools
    assert near.staleness == PRESETS[preset].staleness


def test_the_nearest_plan_changes_only_what_it_must():
    plan = changed(PRESETS["verl-colocated"], update_critic={"zero": 2})
    near = nearest(plan, setting_of(JOB, CLUSTER, backend("megatron")))
    assert near is not None
    assert near.generate == plan.generate
    assert (near.update_actor.zero, near.update_actor.dp, near.update_actor.recompute) == (1, 64, "full")
