"""What the search knows at the end: the plan it recommends, how sure it is, how well it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.choose import fitting, normals, promising
from search.problem import Candidates, Floats, Rows
from search.runs import Run, runs_of, settled_rows
from search.surrogate import Surrogate, fit_surrogate
from traces.schema import Trial, TrialState

WITHIN = 1.03
"""The leader is good enough if it is within 3% of the best."""
_NUM_RIVALS = 200
_NUM_DRAWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How sure the search is of its leader, by the surrogate's joint posterior."""

    leader: int
    """The recommended plan, as an index of `Candidates`."""
    p3: float
    """Probability that no plan is faster than the leader by more than 3%."""
    expected_gap: float
    """Mean share of the leader's step that the best plan would save; 0.02 is 2%."""


def leader_of(surrogate: Surrogate, runs: Sequence[Run]) -> int | None:
    """The completed plan with the least predicted step, None if none completed.

    Not the one with the least measured step: that one was lucky too.
    """
    rows = np.unique([run.row for run in runs if run.seconds is not None]).astype(np.intp)
    if len(rows) == 0:
        return None
    drawn = surrogate.draws(rows, normals(surrogate.num_normals, np.random.default_rng(0)))
    return int(rows[drawn.mean(axis=0).argmin()])


def confidence_of(candidates: Candidates, runs: Sequence[Run], seed: int = 0) -> Confidence | None:
    """How sure the search is after these runs, None if none completed (stopping rule of Wilson 2024)."""
    surrogate = fit_surrogate(candidates, runs)
    leader = leader_of(surrogate, runs)
    if leader is None:
        return None
    rivals, chance = _rivals(surrogate, runs, leader)
    if len(rivals) == 0:
        return Confidence(leader=leader, p3=1.0, expected_gap=0.0)
    rng = np.random.default_rng((seed, len(runs)))
    rows = np.append(rivals, leader)
    drawn = surrogate.joint_draws(rows, rng.standard_normal((surrogate.num_normals, _NUM_DRAWS, len(rows))))
    exists = rng.random((_NUM_DRAWS, len(rivals))) < chance
    best = np.where(exists, drawn[:, :-1], np.inf).min(axis=1)
    gap = drawn[:, -1] - best
    return Confidence(
        leader=leader,
        p3=float((gap <= np.log(WITHIN)).mean()),
        expected_gap=float((1 - np.exp(-np.maximum(gap, 0.0))).mean()),
    )


def _rivals(surrogate: Surrogate, runs: Sequence[Run], leader: int) -> tuple[Rows, Floats]:
    """The 200 plans of least predicted step that might replace the leader, and their chance to fit.

    Measured plans are among them, certain to fit; those that cannot run are not.
    """
    measured = {run.row for run in runs if run.seconds is not None}
    refused = (settled_rows(runs) - measured) | {leader}
    rows = np.union1d(promising(surrogate), list(measured)).astype(np.intp)
    rows = rows[~np.isin(rows, list(refused))]
    order = rows[np.argsort(surrogate.mean(rows), kind="stable")]
    rivals, chance = fitting(surrogate, order, _NUM_RIVALS)
    return rivals, np.where(np.isin(rivals, list(measured)), 1.0, chance)


def recommend(candidates: Candidates, trials: Sequence[Trial]) -> Trial | None:
    """The last completed trial of the plan that the search recommends, None if none completed."""
    runs = runs_of(candidates, trials)
    leader = leader_of(fit_surrogate(candidates, runs), runs)
    of_leader = [
        trial for trial, run in zip(trials, runs, strict=True) if run.row == leader and run.seconds is not None
    ]
    return of_leader[-1] if of_leader else None


def leave_one_out(candidates: Candidates, trials: Sequence[Trial]) -> Floats:
    """Step seconds predicted for each trial from all trials of other plans, float64[n].

    NaN for trials that did not complete: there is nothing to compare with.
    """
    runs = runs_of(candidates, trials)
    predicted = np.full(len(runs), np.nan)
    for row in {run.row for run in runs if run.state is TrialState.COMPLETE}:
        surrogate = fit_surrogate(candidates, [run for run in runs if run.row != row])
        of_row = [i for i, run in enumerate(runs) if run.row == row and run.seconds is not None]
        drawn = surrogate.draws(
            np.array([row], dtype=np.intp), normals(surrogate.num_normals, np.random.default_rng(0))
        )
        predicted[of_row] = np.exp(drawn.mean())
    return predicted
