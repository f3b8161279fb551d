"""What is known while plans are looked for: those that were priced, and which others would be news."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate, estimate
from analytic.setup import Setup
from ir.batch import COLUMNS, PlanBatch
from search.families import Family
from search.fronts import ROUNDING
from search.prices import price_of_groups, price_per_hour

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

CENT = 1e-9
"""Relative; a price above a limit by less is the limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reached:
    """What is chosen of partial plans of a family, arrays of one length."""

    family: Family
    sizes: Int
    """Devices of each pool, int64[n, pools], 0 where open."""
    staleness: Int

    @property
    def devices(self) -> Int:
        """Of all pools that have some, int64[n]."""
        return np.asarray(self.sizes.sum(axis=1))

    def price(self, of_groups: Float) -> Float:
        """Of those devices, given a device's of each group, float64[n]."""
        return np.asarray(self.sizes @ of_groups[[group for _, group in self.family.case.pools]])

    @staticmethod
    def nothing(family: Family) -> Reached:
        """A family's plans of which only the staleness is chosen, one of each."""
        ages = np.array(list(dict.fromkeys(staleness for staleness, _ in family.ages)), dtype=np.int64)
        sizes = np.zeros((len(ages), len(family.case.pools)), dtype=np.int64)
        return Reached(family=family, sizes=sizes, staleness=ages)


class Record(Protocol):
    """What is known."""

    def limit(self, reached: Reached) -> Float:
        """Below how many seconds a step must be to be news, float64[n]; not more for plans with more devices."""
        ...

    def add(self, batch: PlanBatch, bounds: Float) -> None:
        """Price whole plans, whose steps were expected to take `bounds` seconds."""
        ...


def most(record: Record, family: Family) -> float:
    """Seconds that no news of a family may reach."""
    return float(record.limit(Reached.nothing(family)).max())


def fits(s: Setup, found: Estimate) -> Mask:
    """Which plans fit, in memory with the job's margin and in its price, bool[n]."""
    limits = s.job.limits
    fits = found.memory.fill <= 1.0 - limits.memory_margin
    if limits.max_price_per_hour is not None:
        fits = fits & (price_per_hour(found.batch, s.cluster) <= limits.max_price_per_hour * (1.0 + CENT))
    return np.asarray(fits)


@dataclass(kw_only=True)
class Priced:
    """Whole plans that were priced, each once."""

    setup: Setup
    found: list[Estimate] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    is_sound: bool = True
    """Whether no step was shorter than its bound."""

    def limit(self, reached: Reached) -> Float:
        """See `Record.limit`."""
        most, dearest = self.news(reached), self.setup.job.limits.max_price_per_hour
        if dearest is None:
            return most
        return np.where(reached.price(self.of_groups) <= dearest * (1.0 + CENT), most, 0.0)

    @cached_property
    def of_groups(self) -> Float:
        """Price of a device of each group, see `price_of_groups`."""
        return price_of_groups(self.setup.cluster)

    def add(self, batch: PlanBatch, bounds: Float) -> None:
        """See `Record.add`."""
        keys = [row.tobytes() for row in np.stack([batch[name] for name in COLUMNS], axis=1)]
        fresh = np.array([key not in self.known for key in keys])
        self.known.update(keys)
        if fresh.any():
            priced = estimate(self.setup.job, batch.take(fresh), self.setup.cluster)
            seconds = priced.step_seconds
            self.is_sound = self.is_sound and bool((seconds >= bounds[fresh] * (1.0 - ROUNDING)).all())
            self.found.append(priced)
            self.learn(priced, seconds, fits(self.setup, priced))

    def news(self, reached: Reached) -> Float:
        """As `limit`, whatever the price."""
        raise NotImplementedError

    def learn(self, priced: Estimate, seconds: Float, fits: Mask) -> None:
        """Take in plans, their steps, and whether they fit."""
        raise NotImplementedError
