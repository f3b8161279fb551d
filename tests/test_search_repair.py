"""Plans that do not fit: why, and what is the least change that lets them fit."""

from __future__ import annotations

import pytest
from build import changed
from test_examples import FOLDER

from analytic.estimate import estimate
from ir.batch import batch_of
from ir.job import load_job
from ir.rules import check, setting_of
from ir.systems import load_cluster
from search.repair import misfit, misfit_text
from space.build import default_space
from space.presets import presets

CLUSTER = load_cluster("dgx-a100:8")
JOB = load_job(FOLDER / "grpo-qwen2.5-7b" / "job.toml")
SETTING = setting_of(JOB, CLUSTER)
SPACE = default_space(SETTING)
PRESETS = presets(SETTING)


def test_a_plan_that_fits_needs_no_cure() -> None:
    assert all(misfit(SPACE, SETTING, CLUSTER, plan) is None for plan in PRESETS.values())


@pytest.mark.parametrize(
    ("sections", "phase", "term", "most_changes"),
    [
        ({"update_actor": {"recompute": "none", "micro_batch": 64}}, "update_actor", "actor activations", 1),
        ({"update_actor": {"zero": 0}}, "generate", "actor optimizer", 1),
        ({"update_actor": {"zero": 0, "recompute": "none", "micro_batch": 64}}, "update_actor", "actor activations", 3),
    ],
)
def test_what_is_too_large_is_named_and_the_least_change_cures_it(
    sections: dict[str, dict[str, object]], phase: str, term: str, most_changes: int
) -> None:
    plan = changed(PRESETS["colocated-sync"], **sections)
    check(plan, SETTING)
    found = misfit(SPACE, SETTING, CLUSTER, plan)
    assert found is not None and found.nearest is not None
    assert found.short.phase == phase
    assert term in [name for name, _ in found.short.terms[:4]]
    assert found.short.missing > 0
    assert 1 <= len(found.changes) <= most_changes
    check(found.nearest, SETTING)
    fill = estimate(JOB, batch_of([found.nearest]), CLUSTER).memory.fill[0]
    assert fill <= 1.0 - JOB.limits.memory_margin
    for text in (f"a device at {phase}", term, f"fits with {found.changes[0]}"):
        assert text in misfit_text(found)
