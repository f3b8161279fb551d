"""Stopping a run that is clearly losing.

After every measured step a run goes on only while the chance that it is faster than the
leader exceeds 10%, steps being log-normal with a common spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from search.problem import Budget, Monitor
from search.runs import Run, pooled_step_sd

STOP_BELOW = 0.1
"""Chance of being better under which a run is stopped. Lower wastes steps on losers; higher stops winners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What a run is raced against."""

    leader: tuple[float, ...]
    """Measured seconds of the leader's steps; empty if there is no leader."""
    step_sd: float
    """Standard deviation of the log of a step's seconds within a run."""
    min_steps: int
    max_steps: int

    def goes_on(self, step_seconds: Sequence[float]) -> bool:
        """Whether a run with these measured steps is worth another one."""
        num_steps = len(step_seconds)
        if num_steps >= self.max_steps:
            return False
        if num_steps < max(self.min_steps, 2) or not self.leader:
            return True
        return chance_better(step_seconds, self.leader, self.step_sd) > STOP_BELOW


def chance_better(steps: Sequence[float], leader: Sequence[float], step_sd: float) -> float:
    """Probability that a plan is faster than the leader: Phi(gap / sd of the gap), in log seconds.

    As many steps of the leader are taken as the run has: a longer mean would have met more of the long answers.
    """
    num = min(len(steps), len(leader))
    gap = float(np.log(leader[:num]).mean() - np.log(steps[:num]).mean())
    return float(ndtr(gap / (step_sd * math.sqrt(2 / num))))


def race_of(runs: Sequence[Run], budget: Budget) -> Race:
    """The race of the next run: against the shortest mean step so far."""
    done = [(run.seconds, run.step_seconds) for run in runs if run.seconds is not None]
    return Race(
        leader=min(done)[1] if done else (),
        step_sd=pooled_step_sd(runs),
        min_steps=budget.min_steps,
        max_steps=budget.max_steps,
    )


def to_the_end(budget: Budget) -> Monitor:
    """Runs every step: for plans whose time is wanted for itself."""
    return lambda step_seconds: len(step_seconds) < budget.max_steps
