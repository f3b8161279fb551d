"""The model corrected by what was measured: stage by stage, then the step, then memory.

Every stage has a Gaussian process on log(measured / modelled seconds). Corrected stages go
back through the model's own composition, whose residual has a process too, as has the
peak of memory (composite Bayesian optimisation, Astudillo & Frazier 2019). Without any
stage timing the composition's process carries the whole residual of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from search.gp import (
    EFFECT_GRID,
    NOISE_GRID,
    Data,
    Posterior,
    Prior,
    append,
    axis_tables,
    correlations,
    fit,
)
from search.problem import Candidates, Floats, Rows
from search.runs import Run, pooled_step_sd
from space.axes import Levels
from traces.schema import TrialState

STAGE_CONSTANT = 0.4
"""The model may be this wrong about a stage of all plans alike."""
SMALL_CONSTANT = 0.1
"""The same for the composition of stages and for memory."""
OTHER_AXIS_WEIGHT = 0.09
"""Weight of an axis on which the model says a stage does not depend: a hidden effect can still be found."""
MEMORY_EFFECT, MEMORY_NOISE = 0.02, 0.01
"""Memory is counted rather than timed, so its residual is smooth and nearly free of noise."""
OVERSHOOT, OVERSHOOT_SD = 1.03, 0.03
"""A plan out of memory is taken to need 3% +- 3% more than there is."""
FIT_SD = 0.01
"""Uncertainty of the capacity itself, in log bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    """Beliefs about every candidate after some runs."""

    candidates: Candidates
    timed: bool
    """Whether any run reported its stages; if none did, stages are taken as modelled."""
    stages: tuple[Posterior, ...]
    """Of log(measured / modelled) of each stage."""
    composition: Posterior
    """Of log(measured step / composition of its stages)."""
    memory: Posterior
    """Of log(measured / modelled peak)."""
    capacity_bytes: float

    @property
    def num_normals(self) -> int:
        """Independent normals that one draw of a step takes."""
        return len(self.stages) + 1

    def mean(self, rows: Rows) -> Floats:
        """Log step seconds with every residual at its mean, float64[m]."""
        levels = self.candidates.levels[rows]
        residuals = np.stack([stage.mean(levels) for stage in self.stages], axis=-1) * self.timed
        return self._log_step(residuals, rows) + self.composition.mean(levels)

    def draws(self, rows: Rows, normals: Floats) -> Floats:
        """Log step seconds float64[Z, m] for normals float64[Z, S + 1], the same for all plans."""
        levels = self.candidates.levels[rows]
        means, sds = [], []
        for posterior, cross in self._crosses(levels):
            means.append(posterior.mean(levels))
            sds.append(posterior.sd(cross))
        mean, sd = np.stack(means, axis=-1), np.stack(sds, axis=-1)
        return self._combine(mean + sd * normals[:, None, :], rows)

    def joint_draws(self, rows: Rows, normals: Floats) -> Floats:
        """Log step seconds float64[Z, m], plans depending on each other, for normals float64[S + 1, Z, m]."""
        levels = self.candidates.levels[rows]
        among = correlations(self.composition.tables, levels, levels)
        residuals = [
            posterior.mean(levels) + normal @ posterior.factor(cross, among).T
            for normal, (posterior, cross) in zip(normals, self._crosses(levels), strict=True)
        ]
        return self._combine(np.stack(residuals, axis=-1), rows)

    def fit_chance(self, rows: Rows) -> Floats:
        """Probability that plans stay within a device's memory, float64[m]."""
        levels = self.candidates.levels[rows]
        sd = self.memory.sd(correlations(self.memory.tables, levels, self.memory.data.levels))
        room = np.log(self.capacity_bytes / self.candidates.memory_bytes[rows]) - self.memory.mean(levels)
        chance: Floats = ndtr(room / np.sqrt(sd**2 + FIT_SD**2))
        return chance

    def believing(self, rows: Rows) -> Surrogate:
        """After also running the given plans, with the outcomes predicted now."""
        if len(rows) == 0:
            return self
        levels = self.candidates.levels[rows]
        return replace(
            self,
            stages=tuple(stage.believing(levels) for stage in self.stages),
            composition=self.composition.believing(levels),
            memory=self.memory.believing(levels),
        )

    def _crosses(self, levels: Levels) -> list[tuple[Posterior, Floats]]:
        """Each process of the step with the correlations of plans and its data."""
        known: dict[bytes, Floats] = {}  # Most processes have the same runs as data.
        crosses = []
        for posterior in (*self.stages, self.composition):
            key = posterior.data.levels.tobytes()
            if key not in known:
                known[key] = correlations(posterior.tables, levels, posterior.data.levels)
            crosses.append((posterior, known[key]))
        return crosses

    def _combine(self, residuals: Floats, rows: Rows) -> Floats:
        """Log steps [..., m] of residuals [..., m, S + 1]."""
        return self._log_step(residuals[..., :-1] * self.timed, rows) + residuals[..., -1]

    def _log_step(self, residuals: Floats, rows: Rows) -> Floats:
        corrected = self.candidates.stage_seconds[rows] * np.exp(residuals)
        return np.log(self.candidates.compose(corrected, rows))


def fit_surrogate(candidates: Candidates, runs: Sequence[Run]) -> Surrogate:
    """What the runs teach; with none, the model as it is and its prior spread."""
    tables = axis_tables(candidates.space)
    done = [run for run in runs if run.seconds is not None]
    rows = np.array([run.row for run in done], dtype=np.intp)
    step_variance = pooled_step_sd(done) ** 2 / np.array([len(run.step_seconds) for run in done])
    times = _stage_times(candidates, done)
    modelled = candidates.stage_seconds[rows]
    stages = []
    for s in range(len(candidates.stages)):
        known = np.flatnonzero(np.isfinite(times[:, s]))
        data = Data(
            levels=candidates.levels[rows[known]],
            targets=np.log(times[known, s] / modelled[known, s]),
            variance=step_variance[known],
        )
        stages.append(fit(_step_prior(STAGE_CONSTANT, candidates.relevance[s]), tables, data))
    timed = bool(np.isfinite(times).any())
    filled = _fill(candidates, rows, times, stages) if timed else modelled
    data = Data(
        levels=candidates.levels[rows],
        targets=np.log(np.array([run.seconds for run in done], dtype=float) / candidates.compose(filled, rows)),
        variance=step_variance,
    )
    # Without stages the composition's residual is that of the whole step, which may depend on any axis.
    relevant = candidates.composition_relevance if timed else np.ones(len(tables), dtype=bool)
    constant = SMALL_CONSTANT if timed else STAGE_CONSTANT
    return Surrogate(
        candidates=candidates,
        timed=timed,
        stages=tuple(stages),
        composition=fit(_step_prior(constant, relevant), tables, data),
        memory=_fit_memory(candidates, runs, tables),
        capacity_bytes=_capacity(candidates, runs),
    )


def _step_prior(constant: float, relevant: NDArray[np.bool_]) -> Prior:
    return Prior(
        constant_sd=constant,
        weights=np.where(relevant, 1.0, OTHER_AXIS_WEIGHT),
        effect_sd=EFFECT_GRID,
        noise_sd=NOISE_GRID,
    )


def _stage_times(candidates: Candidates, done: Sequence[Run]) -> Floats:
    """Measured stage seconds float64[runs, S]; NaN where a run reports none or the model knows none."""
    times = np.array(
        [[run.stage_seconds.get(stage, np.nan) for stage in candidates.stages] for run in done], dtype=float
    ).reshape(len(done), len(candidates.stages))
    modelled = candidates.stage_seconds[[run.row for run in done]]
    return np.where((times > 0) & np.isfinite(times) & (modelled > 0), times, np.nan)


def _fill(candidates: Candidates, rows: Rows, times: Floats, stages: Sequence[Posterior]) -> Floats:
    """Stage seconds with the gaps of a run filled by their corrected model."""
    levels = candidates.levels[rows]
    means = np.stack([stage.mean(levels) for stage in stages], axis=-1)
    return np.where(np.isfinite(times), times, candidates.stage_seconds[rows] * np.exp(means))


def _capacity(candidates: Candidates, runs: Sequence[Run]) -> float:
    """The model's capacity, or the largest peak that did fit."""
    peaks = [float(run.peak_bytes) for run in runs if run.state is TrialState.COMPLETE]
    return max([candidates.capacity_bytes, *peaks])


def _fit_memory(candidates: Candidates, runs: Sequence[Run], tables: tuple[Floats, ...]) -> Posterior:
    """Peaks of completed runs; and of plans out of memory, that they need more than there is.

    The latter is a bound, not a value: such a plan is taken to need what the others let expect
    if that is more. The smallest by the model bind most, so they go first.
    """
    prior = Prior(
        constant_sd=SMALL_CONSTANT,
        weights=np.ones(len(tables)),
        effect_sd=(MEMORY_EFFECT,),
        noise_sd=(MEMORY_NOISE,),
    )
    measured = [run for run in runs if run.state is TrialState.COMPLETE and run.peak_bytes > 0]
    rows = np.array([run.row for run in measured], dtype=np.intp)
    peaks = np.array([run.peak_bytes for run in measured], dtype=float)
    data = Data(
        levels=candidates.levels[rows],
        targets=np.log(peaks / candidates.memory_bytes[rows]),
        variance=np.zeros(len(rows)),
    )
    posterior = fit(prior, tables, data)
    failed = {run.row for run in runs if run.state is TrialState.INFEASIBLE}
    for row in sorted(failed, key=lambda row: (candidates.memory_bytes[row], row)):
        levels = candidates.levels[[row]]
        bound = np.log(OVERSHOOT * _capacity(candidates, runs) / candidates.memory_bytes[row])
        data = append(data, levels, np.maximum(bound, posterior.mean(levels)), OVERSHOOT_SD**2)
        posterior = fit(prior, tables, data)
    return posterior
