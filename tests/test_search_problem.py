"""Candidates, budgets and what the axes mean to the stages."""

from __future__ import annotations

from itertools import combinations

import build
import numpy as np
import pytest
import search_world as sw

from ir.errors import InputError
from ir.setting import Devices, Setting
from search import relevance
from search.problem import Budget, Candidates
from search.relevance import determines, relevance_from
from search.runs import locate
from space.build import default_space
from space.enumerate import enumerate_legal

CANDIDATES = sw.make_candidates()


def test_every_candidate_is_found_by_its_plan() -> None:
    rows = np.arange(len(CANDIDATES))
    np.testing.assert_array_equal(CANDIDATES.rows_of(CANDIDATES.levels), rows)
    for row in (0, 7, len(CANDIDATES) - 1):
        assert CANDIDATES.row_of(CANDIDATES.plan(row)) == row


def test_plans_that_are_no_candidates() -> None:
    assert CANDIDATES.row_of(build.plan(rollout=1, train=9)) is None, "no such value on the axis"
    assert CANDIDATES.row_of(build.plan(train=2, rollout=2)) is None, "more devices than there are"


def test_params_are_the_values_of_the_axes() -> None:
    row = CANDIDATES.row_of(build.plan(train=2, colocated=True, concurrency=8, logprob_micro_batch=4))
    assert row is not None
    params = CANDIDATES.params(row)
    assert (params["place.actor"], params["devices.actor"], params["generate.concurrency"]) == ("0", "2", "8")


def test_traces_from_before_an_axis_was_added_are_of_plans_that_have_0_there() -> None:
    setting = Setting(job=build.job(max_staleness=0), groups=(Devices(count=4, domain=2),))
    free = ("update_actor.shard", "update_actor.zero", "update_actor.dp", "devices.", "sync")
    space = default_space(setting, build.pinned(setting, *free))
    levels = enumerate_legal(space, setting).levels
    some = Candidates(
        space=space,
        levels=levels,
        stages=("update_actor",),
        stage_seconds=np.ones((len(levels), 1)),
        memory_bytes=np.ones(len(levels)),
        capacity_bytes=2.0,
        relevance=np.ones((1, len(space.axes)), dtype=bool),
        compose=lambda seconds, rows: seconds[..., 0],
    )
    assert {axis.name for axis in space.axes if axis.is_added} == {"update_actor.shard"}
    shard = [axis.name for axis in space.axes].index("update_actor.shard")
    for row in (int(np.argmax(levels[:, shard] == 0)), int(np.argmax(levels[:, shard] == 1))):
        params = some.params(row)
        assert locate(some, params) == row
        before = {name: value for name, value in params.items() if name != "update_actor.shard"}
        wanted = levels[row].copy()
        wanted[shard] = 0
        assert locate(some, before) == some.rows_of(wanted[None])[0]
    with pytest.raises(InputError, match=r"unlike: \['update_actor.dp'\]"):
        locate(some, {name: value for name, value in params.items() if name != "update_actor.dp"})


@pytest.mark.parametrize("changes", [{"min_steps": 0}, {"min_steps": 6, "max_steps": 5}, {"max_trials": 0}])
def test_budgets_that_make_no_sense(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="budget"):
        Budget(**changes)


def test_relevance_is_what_pairs_of_plans_show() -> None:
    """Against every pair of plans of a small space that differ in one axis and those that it determines."""
    small = sw.make_candidates(prompts=2, max_staleness=1)
    some = np.random.default_rng(0).permutation(len(small))[:400]
    levels, seconds = small.levels[some], small.stage_seconds[some]
    tied = determines(levels) | np.eye(levels.shape[1], dtype=bool)
    expected = np.zeros((len(sw.STAGES), levels.shape[1]), dtype=bool)
    for a, b in combinations(range(len(some)), 2):
        unlike = levels[a] != levels[b]
        for axis in np.flatnonzero(unlike):
            if not (unlike & ~tied[axis]).any():
                expected[:, axis] |= seconds[a] != seconds[b]
    np.testing.assert_array_equal(relevance_from(levels, seconds), expected)


def test_relevance_of_a_sample_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    large = sw.make_candidates(prompts=8, devices=4)
    whole = relevance_from(large.levels, large.stage_seconds)
    monkeypatch.setattr(relevance, "MAX_ROWS", len(large) // 4)
    np.testing.assert_array_equal(relevance_from(large.levels, large.stage_seconds), whole)


def test_the_composition_depends_on_what_runs_side_by_side() -> None:
    names = [axis.name for axis in CANDIDATES.space.axes]
    relevant = {name for name, yes in zip(names, CANDIDATES.composition_relevance, strict=True) if yes}
    assert relevant == {"staleness", "fusions.stream"}


def test_axes_that_follow_from_others_are_found() -> None:
    levels = np.array([[0, 0, 1, 0], [1, 1, 0, 0], [2, 1, 0, 1]])
    assert determines(levels).tolist() == [
        [False, True, True, True],
        [False, False, True, False],
        [False, False, False, False],
        [False, False, False, False],
    ]
