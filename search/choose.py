"""The next plan, as a pure function of all runs.

The first few plans are fast by the model and unlike each other; after that, the plan with
the largest expected improvement over the leader times its chance to fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from search.problem import Candidates, Floats, Rows
from search.runs import Run, settled_rows
from search.surrogate import Surrogate, fit_surrogate

NUM_FIRST = 4
"""Trials chosen by the model alone."""
_FIRST_LISTED = 8
_FIRST_ROOM = 0.9
"""A first plan needs at most this share of the memory: the model's memory is unproven yet."""
_UNLIKE = 0.05
"""Log seconds that each further axis of difference is worth to a first plan."""
_LIKELY = 0.5
_SLOWEST, _FULLEST = 2.2, 1.15
"""Plans modelled at over 2.2 x the best step, or taken to need over 1.15 x the memory, come last."""
NUM_BEST, _NUM_RANDOM = 2000, 200
_WORTH_A_TRY = 0.05
"""Least chance to fit of a plan on the short list."""
_NUM_DRAWS = 32
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Chooser:
    """Chooses among candidates; remembers only what follows from the candidates themselves."""

    candidates: Candidates

    @cached_property
    def first(self) -> Rows:
        """Up to 8 plans, fast by the model and unlike each other, the fastest first."""
        model, levels = self.candidates, self.candidates.levels
        order = np.argsort(model.step_seconds, kind="stable")
        order = order[model.memory_bytes[order] <= _FIRST_ROOM * model.capacity_bytes]
        fast = order[: max(200, len(order) // 20)]
        cost = np.log(model.step_seconds[fast])
        unlike = np.full(len(fast), levels.shape[1])
        chosen: list[int] = []
        while len(chosen) < min(_FIRST_LISTED, len(fast)):
            score = cost - _UNLIKE * unlike * bool(chosen)
            score[np.isin(fast, chosen)] = np.inf
            chosen.append(int(fast[score.argmin()]))
            unlike = np.minimum(unlike, (levels[fast] != levels[chosen[-1]]).sum(axis=1))
        return np.array(chosen, dtype=np.intp)

    def next_row(self, runs: Sequence[Run], running: Sequence[int], seed: tuple[int, int]) -> int | None:
        """The plan to run next, None if every plan was tried.

        Args:
            runs: All finished runs.
            running: Plans being run now; believed to turn out as predicted.
            seed: Of the draws; the same arguments give the same plan.
        """
        surrogate = fit_surrogate(self.candidates, runs)
        completed = [run.row for run in runs if run.seconds is not None]
        if len(runs) + len(running) < NUM_FIRST or not completed:
            row = self._first_row(surrogate, {run.row for run in runs} | set(running))
            if row is not None:
                return row
        excluded = settled_rows(runs) | set(running)
        if not completed:
            return self._safest(surrogate, excluded)
        rng = np.random.default_rng(seed)
        surrogate = surrogate.believing(np.array(running, dtype=np.intp))
        rows, chance = self._short_list(surrogate, excluded, rng)
        if len(rows) == 0:
            return self._safest(surrogate, excluded)
        leaders = np.unique(np.array(completed, dtype=np.intp))
        draws = surrogate.draws(np.concatenate([leaders, rows]), normals(surrogate.num_normals, rng))
        best = draws[:, : len(leaders)].mean(axis=0).min()
        steps = draws[:, len(leaders) :]
        improvement = np.maximum(best - steps, 0.0).mean(axis=0)
        score = np.log(improvement + _TINY * np.exp(-steps.mean(axis=0))) + np.log(chance)
        return int(rows[score.argmax()])

    def _first_row(self, surrogate: Surrogate, tried: set[int]) -> int | None:
        """The first listed plan that is new and likely to fit; failing that, the safest."""
        left = _without(self.first, tried)
        likely = left[surrogate.fit_chance(left) >= _LIKELY]
        return int(likely[0]) if len(likely) else self._safest(surrogate, tried)

    def _safest(self, surrogate: Surrogate, excluded: set[int]) -> int | None:
        """The plan with the least predicted memory."""
        left = _without(np.arange(len(self.candidates)), excluded)
        if len(left) == 0:
            return None
        peak = np.log(self.candidates.memory_bytes[left])
        peak += surrogate.memory.mean(self.candidates.levels[left])
        return int(left[peak.argmin()])

    def _short_list(self, surrogate: Surrogate, excluded: set[int], rng: np.random.Generator) -> tuple[Rows, Floats]:
        """The plans with the least predicted step that may fit, others at random, and their chance to fit."""
        left = _without(promising(surrogate), excluded)
        if len(left) == 0:
            left = _without(np.arange(len(self.candidates)), excluded)
        rows, chance = fitting(surrogate, left[np.argsort(surrogate.mean(left), kind="stable")], NUM_BEST)
        others = left[~np.isin(left, rows)]
        others = rng.choice(others, size=min(_NUM_RANDOM, len(others)), replace=False)
        more, more_chance = fitting(surrogate, others, _NUM_RANDOM)
        return np.concatenate([rows, more]), np.concatenate([chance, more_chance])


def promising(surrogate: Surrogate) -> Rows:
    """Plans that the model finds not hopelessly slow and, as corrected, not hopelessly large."""
    model = surrogate.candidates
    peak = np.log(model.memory_bytes) + surrogate.memory.mean(model.levels)
    rows = np.flatnonzero(peak <= np.log(_FULLEST * surrogate.capacity_bytes))
    best = model.step_seconds[rows].min(initial=np.inf)
    not_slow: Rows = rows[model.step_seconds[rows] <= _SLOWEST * best]
    return not_slow


def fitting(surrogate: Surrogate, order: Rows, num: int) -> tuple[Rows, Floats]:
    """The first `num` of the given plans that have a chance to fit into memory, and that chance."""
    rows, chances, found = [order[:0]], [np.empty(0)], 0
    for start in range(0, len(order), num):
        block = order[start : start + num]
        chance = surrogate.fit_chance(block)
        may_fit = np.flatnonzero(chance > _WORTH_A_TRY)
        rows.append(block[may_fit])
        chances.append(chance[may_fit])
        found += len(may_fit)
        if found >= num:
            break
    return np.concatenate(rows)[:num], np.concatenate(chances)[:num]


def normals(num: int, rng: np.random.Generator) -> Floats:
    """Quasi-random standard normals float64[32, num] (scrambled Sobol points; Owen 1998)."""
    from scipy.stats import qmc

    points = qmc.Sobol(num, scramble=True, seed=rng).random(_NUM_DRAWS)
    drawn: Floats = ndtri(np.clip(points, 1e-6, 1 - 1e-6))
    return drawn


def _without(rows: Rows, excluded: set[int]) -> Rows:
    return rows[~np.isin(rows, list(excluded))]
