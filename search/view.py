"""The Optuna study as a view of stored trials: built anew for every search, never stored itself.

Optuna's states carry the meanings of `TrialState`: COMPLETE has a value, PRUNED with a
`memory` constraint above 0 ran out of memory, FAIL says nothing about its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, create_trial
from optuna.trial import TrialState as OptunaState

from ir.errors import InputError
from search.problem import Candidates
from search.runs import Run, locate, usable
from space.axes import VERSION, Space
from traces.schema import Trial, TrialState
from traces.store import objective

PLAN_ATTRIBUTE = "steptune:plan"
"""System attribute of a trial that holds its plan, written the moment it is chosen."""
MEMORY = "memory"
"""Name of the constraint: above 0 if a plan ran out of memory."""

_STATES = {
    TrialState.COMPLETE: OptunaState.COMPLETE,
    TrialState.INFEASIBLE: OptunaState.PRUNED,
    TrialState.FAILED: OptunaState.FAIL,
}
_CONSTRAINTS = {
    TrialState.COMPLETE: {MEMORY: 0.0},
    TrialState.INFEASIBLE: {MEMORY: 1.0},
    TrialState.FAILED: {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a measurement depends on besides its plan."""

    study: str
    """Identity of the job."""
    hardware: str
    software: str
    model_version: str
    """Recorded only: modelled times are computed anew for old trials."""
    space_version: str = VERSION
    host: str = ""
    """Recorded only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A trial or labelled plan that takes no part in a study."""

    name: str
    """Run id or label."""
    reason: str


def admit(candidates: Candidates, identity: Identity, trials: Sequence[Trial]) -> tuple[list[Trial], list[LeftOut]]:
    """Which stored trials belong to a study, by start time, and which do not and why."""
    admitted, left_out = [], []
    for trial in sorted(trials, key=lambda trial: (trial.started_at, trial.run_id)):
        reason = _unlike(identity, trial) or _misplaced(candidates, trial)
        if reason:
            left_out.append(LeftOut(name=trial.run_id, reason=reason))
        else:
            admitted.append(trial)
    return admitted, left_out


def _unlike(identity: Identity, trial: Trial) -> str:
    for name, what in (
        ("study", "another job"),
        ("hardware", "other hardware"),
        ("software", "other software"),
        ("space_version", "another version of the space"),
    ):
        got = getattr(trial, name)
        if got != getattr(identity, name):
            return f"{what}: {got!r}"
    return ""


def _misplaced(candidates: Candidates, trial: Trial) -> str:
    try:
        locate(candidates, trial.params)
    except InputError as error:
        return str(error)
    if trial.state is TrialState.COMPLETE and not usable(trial.step_seconds):
        return f"complete, but its steps are not positive and finite: {list(trial.step_seconds)}"
    return ""


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """One per axis, always the same: levels of ordered axes, values of the others."""
    return {
        axis.name: IntDistribution(0, len(axis.values) - 1) if axis.ordered else CategoricalDistribution(axis.values)
        for axis in space.axes
    }


def study_params(candidates: Candidates, row: int) -> dict[str, int]:
    """A plan under `distributions`; plain ints, for NumPy's do not survive a storage."""
    return {
        axis.name: int(level) if axis.ordered else int(axis.values[int(level)])
        for axis, level in zip(candidates.space.axes, candidates.levels[row], strict=True)
    }


def build_study(candidates: Candidates, sampler: BaseSampler, trials: Sequence[Trial]) -> optuna.Study:
    """A study in memory that holds the admitted trials, in their order."""
    with _quiet():
        study = optuna.create_study(
            storage=optuna.storages.InMemoryStorage(), sampler=sampler, pruner=optuna.pruners.NopPruner()
        )
    study.add_trials([_frozen(candidates, trial) for trial in trials])
    return study


def _frozen(candidates: Candidates, trial: Trial) -> FrozenTrial:
    row = locate(candidates, trial.params)
    complete = trial.state is TrialState.COMPLETE
    frozen = create_trial(
        state=_STATES[trial.state],
        value=objective(trial.step_seconds) if complete else None,
        params=study_params(candidates, row),
        distributions=distributions(candidates.space),
        user_attrs=_attributes(trial),
        constraints=_CONSTRAINTS[trial.state],
    )
    frozen.datetime_start, frozen.datetime_complete = trial.started_at, trial.ended_at
    return frozen


def _attributes(trial: Trial) -> dict[str, Any]:
    return {
        "run_id": trial.run_id,
        "failure": trial.failure,
        "steps": list(trial.step_seconds),
        "stages": dict(trial.stage_seconds),
        "peak": trial.peak_bytes,
    }


def tell(study: optuna.Study, asked: optuna.Trial, trial: Trial) -> None:
    """Finish an asked trial as the stored one ended."""
    for name, value in _attributes(trial).items():
        asked.set_user_attr(name, value)
    for name, value in _CONSTRAINTS[trial.state].items():
        asked.set_constraint(name, value)
    complete = trial.state is TrialState.COMPLETE
    study.tell(asked, objective(trial.step_seconds) if complete else None, _STATES[trial.state])


def read_study(candidates: Candidates, trials: Sequence[FrozenTrial]) -> tuple[list[Run], list[int]]:
    """Finished trials as runs, and the plans being run or waiting to be."""
    finished, pending = [], []
    for trial in trials:
        row = _row_of(candidates, trial)
        if row is None:
            continue
        if trial.state.is_finished():
            finished.append(_run(trial, row))
        else:
            pending.append(row)
    return finished, pending


def _row_of(candidates: Candidates, trial: FrozenTrial) -> int | None:
    """The plan of a trial, which a trial has from the moment it is chosen or enqueued."""
    attributes = trial.system_attrs
    return row_of_params(candidates, attributes.get(PLAN_ATTRIBUTE) or attributes.get("fixed_params") or trial.params)


def row_of_params(candidates: Candidates, params: Mapping[str, Any]) -> int | None:
    """The candidate with these values under `distributions`, None if there is none."""
    levels = []
    for axis in candidates.space.axes:
        value = params.get(axis.name)
        choices: Sequence[int] = range(len(axis.values)) if axis.ordered else axis.values
        if value not in choices:
            return None
        levels.append(choices.index(value))
    row = int(candidates.rows_of(np.array([levels], dtype=np.int64))[0])
    return row if row >= 0 else None


def _run(trial: FrozenTrial, row: int) -> Run:
    state = next(state for state, optuna_state in _STATES.items() if optuna_state == trial.state)
    return Run(
        row=row,
        state=state,
        step_seconds=tuple(trial.user_attrs.get("steps", trial.values or ())),
        stage_seconds=trial.user_attrs.get("stages", {}),
        peak_bytes=trial.user_attrs.get("peak", 0),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna says on stderr that it made a study in memory; that is no news here."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
