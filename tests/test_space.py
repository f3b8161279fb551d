"""The space: counts that can be checked by hand, the bijection, and the presets."""

from __future__ import annotations

import build
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.batch import COLUMNS
from ir.errors import InputError
from ir.rules import RULES, Setting, check
from space.axes import Axis, Space, default_space
from space.enumerate import enumerate_legal
from space.presets import PRESETS, presets

JOB = build.job()
SETTING = Setting(job=JOB, devices=2)
SPACE = default_space(JOB, 2)


def test_counts_by_hand() -> None:
    found = enumerate_legal(SPACE, SETTING)
    # 16 sequences. Colocated: 4 ways to get old log-probs x recompute; on 1 device 2 concurrencies {8, 16},
    # micro-batches {4, 8, 16} for either pass and dp 1; on 2 devices concurrency {8}, log-prob {4, 8},
    # and (dp, micro-batch) in {1} x {4, 8, 16} or {2} x {4, 8}.
    colocated = 8 * (2 * 3 * 3 + 1 * 2 * (3 + 2))
    # Disaggregated 1 + 1: 4 + 3 ways with streaming x recompute, 3 x 3 micro-batches; concurrencies up to
    # 16 (1 + k): 2, 3, 3, 4, 4 for k = 0..4.
    disaggregated = 14 * 9 * (2 + 3 + 3 + 4 + 4)
    assert len(found.batch) == colocated + disaggregated
    assert len(np.unique(found.levels, axis=0)) == len(found.levels)


def test_enumeration_by_blocks_agrees_with_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = enumerate_legal(SPACE, SETTING).levels
    monkeypatch.setattr("space.enumerate.BLOCK", 1000)
    assert np.array_equal(enumerate_legal(SPACE, SETTING).levels, whole)


def test_every_rule_refuses_something_or_cannot_here() -> None:
    sizes = [len(axis.values) for axis in SPACE.axes]
    everything = SPACE.decode(np.stack(np.unravel_index(np.arange(SPACE.num_combinations), sizes), axis=1))
    counts = {rule.name: int((~rule.holds(everything, SETTING)).sum()) for rule in RULES}
    cannot = {
        "fold-needs-a-single-update",
        "merge-needs-a-reference",
        "staleness-within-limit",
        "dp-divides-the-minibatch",
    }
    assert {name for name, count in counts.items() if count == 0} == cannot


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_levels_and_plans_are_a_bijection(data: st.DataObject) -> None:
    levels = np.array([[data.draw(st.integers(0, len(axis.values) - 1)) for axis in SPACE.axes]])
    assert np.array_equal(SPACE.encode(SPACE.decode(levels)), levels)


def test_a_value_off_its_axis_is_refused() -> None:
    from ir.batch import batch_of

    with pytest.raises(InputError, match=r"axis concurrency: must be one of \[8, 16, 32, 64\], got 12"):
        SPACE.encode(batch_of([build.plan(concurrency=12)]))


def test_axes_are_the_columns_of_a_plan() -> None:
    assert tuple(axis.name for axis in SPACE.axes) == COLUMNS
    assert all(list(axis.values) == sorted(set(axis.values)) for axis in SPACE.axes)
    tiny = Space(axes=(Axis(name="dp", values=(1, 2), ordered=True), Axis(name="stream", values=(0, 1), ordered=False)))
    assert tiny.num_combinations == 4


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sequences", [(4, 4), (16, 8), (6, 2)])
def test_presets_are_legal_and_in_the_space(devices: int, sequences: tuple[int, int]) -> None:
    job = build.job(prompts_per_step=sequences[0], samples_per_prompt=sequences[1])
    space = default_space(job, devices)
    found = presets(job, devices)
    assert set(found) == (set(PRESETS) if devices > 1 else {"colocated-sync"})
    for plan in found.values():
        check(plan, Setting(job=job, devices=devices))
        from ir.batch import batch_of

        assert space.encode(batch_of([plan])).shape == (1, len(space.axes))


def test_presets_have_the_shape_they_are_named_for() -> None:
    found = presets(JOB, 4)
    assert found["colocated-sync"].colocated and found["colocated-sync"].update.dp == 4
    assert found["disaggregated-sync"].staleness == 0 and not found["disaggregated-sync"].colocated
    assert found["one-step-off"].staleness == 1
    assert found["async"].staleness == 4
    assert (found["async"].devices_of("rollout"), found["async"].devices_of("train")) == (3, 1)
    assert "async" not in presets(build.job(max_staleness=2), 4)
