"""The contract between the search and its caller: what may be chosen, and what a run gives.

The search sees a finite list of legal plans with the model's view of each, and a
callable that runs one. It never knows what stands behind the callable: real
devices, a recorded trace or the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ir.batch import batch_of
from ir.errors import InputError
from ir.plan import Plan
from search.relevance import plan_keys, relevance_from
from space.axes import Levels, Space
from traces.outcome import Outcome

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
"""Indices of candidates."""

Compose = Callable[[Floats, Rows], Floats]
"""Step seconds [..., m] of the candidates rows[m] whose stages take seconds [..., m, S]."""

Monitor = Callable[[Sequence[float]], bool]
"""Called after every measured step with the seconds of all of them so far (the warm-up step left out);
returns whether the run goes on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Every legal plan and what the model says of it."""

    space: Space
    levels: Levels
    """int64[n, axes], no two rows alike."""
    stages: tuple[str, ...]
    """The names that `Outcome.stage_seconds` uses."""
    stage_seconds: Floats
    """float64[n, S], modelled; 0 where a plan has no such stage."""
    memory_bytes: Floats
    """float64[n], modelled peak of the fullest device; above 0."""
    capacity_bytes: float
    """What a device has."""
    relevance: NDArray[np.bool_]
    """bool[S, axes], the axes on which the modelled seconds of a stage depend."""
    compose: Compose

    def __post_init__(self) -> None:
        n, axes = self.levels.shape
        shapes = {
            "stage_seconds": (self.stage_seconds.shape, (n, len(self.stages))),
            "memory_bytes": (self.memory_bytes.shape, (n,)),
            "relevance": (self.relevance.shape, (len(self.stages), axes)),
        }
        for name, (got, wanted) in shapes.items():
            assert got == wanted, f"{name} must have shape {wanted}, got {got}"
        if n == 0:
            raise InputError("candidates", "must hold a legal plan", 0)
        assert bool((self.memory_bytes > 0).all()), "memory_bytes must be above 0"

    def __len__(self) -> int:
        return len(self.levels)

    @cached_property
    def step_seconds(self) -> Floats:
        """Modelled step of every plan, float64[n]."""
        seconds = self.compose(self.stage_seconds, np.arange(len(self), dtype=np.intp))
        assert bool((seconds > 0).all()), "every plan must take time"
        return seconds

    @cached_property
    def composition_relevance(self) -> NDArray[np.bool_]:
        """Axes on which the step depends though all stages take the same time, bool[axes].

        Every stage is lengthened in turn, for a maximum hides what is not its largest term.
        """
        present = np.maximum((self.stage_seconds > 0).sum(axis=0), 1)
        typical = self.stage_seconds.sum(axis=0) / present
        rows = np.arange(len(self), dtype=np.intp)
        steps = []
        for scale in (1.0, *(1.0 + 3.0 * np.eye(len(self.stages)))):
            same = np.broadcast_to(typical * scale, self.stage_seconds.shape)
            steps.append(self.compose(same, rows))
        depends = relevance_from(self.levels, np.stack(steps, axis=1))
        return np.asarray(depends.any(axis=0), dtype=np.bool_)

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """Levels of every plan as one number, uint64[n]."""
        return plan_keys(self.levels)

    @cached_property
    def _by_key(self) -> Rows:
        return np.argsort(self.keys, kind="stable")

    def rows_of(self, levels: Levels) -> Rows:
        """Candidates with the given levels int64[m, axes], intp[m]; -1 where there is none."""
        wanted = plan_keys(levels)
        at = np.minimum(np.searchsorted(self.keys, wanted, sorter=self._by_key), len(self) - 1)
        rows = self._by_key[at]
        return np.where(self.keys[rows] == wanted, rows, -1)

    def row_of(self, plan: Plan) -> int | None:
        """The candidate that lays a step out as the plan does, or None if there is none."""
        try:
            levels = self.space.encode(batch_of([plan]))
        except InputError:
            return None
        row = int(self.rows_of(levels)[0])
        return row if row >= 0 else None

    def plan(self, row: int) -> Plan:
        """A candidate as a plan."""
        return self.space.decode(self.levels[row : row + 1]).plan(0)

    def params(self, row: int) -> dict[str, str]:
        """Value of every axis in decimal, as traces keep them."""
        return {
            axis.name: str(axis.values[int(level)])
            for axis, level in zip(self.space.axes, self.levels[row], strict=True)
        }


Evaluate = Callable[[Plan, Monitor], Outcome]
"""Runs a plan. One that cannot run is an outcome or an `Infeasible`; any other exception ends the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a study ends, and how long a run is."""

    max_trials: int = 24
    """Runs of the study in all, those of earlier calls included."""
    max_seconds: float = float("inf")
    """Seconds that all runs of the study together may take; no run starts after that."""
    min_steps: int = 2
    """Measured steps before a run may be stopped as losing."""
    max_steps: int = 5
    """Measured steps after which a run always stops."""
    confidence: float = 0.9
    """Stop when the leader is within 3% of the best with this probability; above 1: never."""
    min_completed: int = 8
    """Completed runs before confidence may end the study."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_steps <= self.max_steps:
            got = (self.min_steps, self.max_steps)
            raise InputError("budget", "must have 1 <= min_steps <= max_steps", got)
        if self.max_trials < 1:
            raise InputError("budget: max_trials", "must be at least 1", self.max_trials)
