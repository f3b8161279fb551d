"""Runs as the search sees them: trials located among the candidates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ir.errors import InputError
from search.problem import Candidates
from traces.schema import Trial, TrialState
from traces.store import objective

MAX_ATTEMPTS = 2
"""Runs of a plan that crashes. A crash may be bad luck once; twice, it is the plan's."""

STEP_SD = 0.05
"""Prior for the standard deviation of the log of a step's seconds within a run."""
STEP_SD_WEIGHT = 8.0
"""Measured steps that the prior counts for: a handful of lucky steps must not look noiseless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the search learns from one trial."""

    row: int
    """The plan, as an index of `Candidates`."""
    state: TrialState
    step_seconds: tuple[float, ...] = ()
    stage_seconds: Mapping[str, float]
    peak_bytes: int = 0

    @property
    def seconds(self) -> float | None:
        """Mean step of a completed run, None of any other."""
        return objective(self.step_seconds) if self.state is TrialState.COMPLETE else None


def locate(candidates: Candidates, params: Mapping[str, str]) -> int:
    """The candidate with the given values of the axes; an axis that older traces lack is 0 in them.

    Raises:
        InputError: says why there is none: an axis that is missing or unknown, a value the axis
            lacks, or a combination that is not legal.
    """
    axes = candidates.space.axes
    params = {axis.name: "0" for axis in axes if axis.is_added} | dict(params)
    unlike = {axis.name for axis in axes} ^ set(params)
    if unlike:
        raise InputError("params", f"must name the axes of the space; unlike: {sorted(unlike)}")
    levels = []
    for axis in axes:
        names = [str(value) for value in axis.values]
        if params[axis.name] not in names:
            raise InputError(f"axis {axis.name}", f"must be one of {names}", params[axis.name])
        levels.append(names.index(params[axis.name]))
    row = int(candidates.rows_of(np.array([levels], dtype=np.int64))[0])
    if row < 0:
        raise InputError("params", "must be a legal plan of this job on these devices")
    return row


def run_of(candidates: Candidates, trial: Trial) -> Run:
    """A trial as a run.

    Raises:
        InputError: as `locate`.
    """
    return Run(
        row=locate(candidates, trial.params),
        state=trial.state,
        step_seconds=trial.step_seconds,
        stage_seconds=trial.stage_seconds,
        peak_bytes=trial.peak_bytes,
    )


def runs_of(candidates: Candidates, trials: Sequence[Trial]) -> list[Run]:
    """Trials that were admitted to a study, as runs."""
    return [run_of(candidates, trial) for trial in trials]


def settled_rows(runs: Sequence[Run]) -> set[int]:
    """Plans that are not run again: measured, out of memory, or failed for good."""
    failures = Counter(run.row for run in runs if run.state is TrialState.FAILED)
    known = {run.row for run in runs if run.state is not TrialState.FAILED}
    return known | {row for row, count in failures.items() if count >= MAX_ATTEMPTS}


def usable(step_seconds: Sequence[float]) -> bool:
    """Whether there are measured steps and all of them are times."""
    return bool(step_seconds) and all(math.isfinite(seconds) and seconds > 0 for seconds in step_seconds)


def pooled_step_sd(runs: Sequence[Run]) -> float:
    """Standard deviation of log step seconds within a run, pooled over completed runs.

    The estimate is the prior's variance and the pooled one, weighted by their numbers of steps.
    """
    squares, freedom = STEP_SD_WEIGHT * STEP_SD**2, STEP_SD_WEIGHT
    for run in runs:
        if run.seconds is not None:
            logs = np.log(run.step_seconds)
            squares += float(((logs - logs.mean()) ** 2).sum())
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom)
