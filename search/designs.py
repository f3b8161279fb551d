"""The best plan of each design: which stages share devices, and how stale what they train on is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate
from ir.batch import ROLES, PlanBatch
from search.families import Family
from search.options import distinct
from search.records import Mask, Priced, Reached

Float = NDArray[np.float64]

Placement = tuple[int, ...]
"""Which stages share devices: the pool and the group of devices of each role."""

ALIKE = 1e-8
"""Relative; a staler plan is news only if it saves more of the step, which is more than rounding."""


@dataclass(kw_only=True)
class Designs(Priced):
    """The fastest plan so far of each design, of the `count` best placements."""

    roles: tuple[str, ...]
    """Whose places make a placement."""
    count: int = 1
    ceiling: float = np.inf
    """Below how many seconds plans are looked for."""
    best: dict[Placement, Float] = field(default_factory=dict)
    """Steps by staleness, float64[staleness + 1]; infinite where none is known."""
    settled: float = 0.0
    """Seconds up to which there are no faster plans of the designs that are known."""

    def news(self, reached: Reached) -> Float:
        """See `Priced.news`."""
        best, most = self.best.get(self._placement(reached.family), self._none), min(self.last, self.ceiling)
        # A fresher plan that is as fast takes the place of one of the best.
        staler = np.minimum.accumulate(np.append(best[1:], np.inf)[::-1])[::-1]
        limits = np.minimum(_needed(best), np.maximum(most, np.where(staler <= most, staler * (1.0 + ALIKE), 0.0)))
        return np.where(limits <= self.settled, 0.0, limits)[reached.staleness]

    @property
    def last(self) -> float:
        """The best step of the last of the placements, infinite if there are fewer."""
        steps = sorted(float(best.min()) for best in self.best.values())
        return steps[self.count - 1] if len(steps) >= self.count else np.inf

    @property
    def goal(self) -> float:
        """See `search.explore.Sought`."""
        return self.last

    def settle(self) -> None:
        """All that was news has been priced."""
        self.settled = min(self.last, self.ceiling)

    def learn(self, priced: Estimate, seconds: Float, fits: Mask) -> None:
        """See `Priced.learn`."""
        batch = priced.batch.take(fits)
        for place, age, step in zip(
            self._placements(batch), batch["staleness"].tolist(), seconds[fits].tolist(), strict=True
        ):
            best = self.best.setdefault(place, self._none)
            best[age] = min(best[age], step)

    @property
    def _none(self) -> Float:
        return np.full(self.setup.job.limits.max_staleness + 1, np.inf)

    def _placement(self, family: Family) -> Placement:
        pool_of = {role: pool for pool in family.case.pools for role in pool[0]}
        leads = [ROLES.index(pool_of[role][0][0]) for role in self.roles]
        return (*leads, *(pool_of[role][1] for role in self.roles))

    def _placements(self, batch: PlanBatch) -> list[Placement]:
        names = [f"{what}.{role}" for what in ("place", "group") for role in self.roles]
        return [tuple(row) for row in np.stack([batch[name] for name in names], axis=1).tolist()]


def _needed(best: Float) -> Float:
    """Below how many seconds plans of each staleness are news, given the best by staleness float64[..., k]."""
    none = np.full((*best.shape[:-1], 1), np.inf)
    fresher = np.minimum.accumulate(np.concatenate([none, best[..., :-1]], axis=-1), axis=-1) * (1.0 - ALIKE)
    return np.minimum(best, fresher)


def leaders(batch: PlanBatch, values: Float) -> NDArray[np.intp]:
    """Rows of the best plan of each design, in their order, if it is better than all fresher ones of its placement.

    Args:
        batch: Plans, of equal ones the better first.
        values: What is to be least of each, float64[n].
    """
    place = distinct(*(batch[f"{what}.{role}"] for what in ("place", "group") for role in ROLES))[1]
    ages = batch["staleness"].astype(np.int64)
    best = np.full((int(place.max(initial=0)) + 1, int(ages.max(initial=0)) + 1), np.inf)
    np.minimum.at(best, (place, ages), values)
    good = np.flatnonzero(values <= _needed(best)[place, ages])
    return np.sort(good[np.unique(place[good] * best.shape[1] + ages[good], return_index=True)[1]])
