"""The plan whose step costs least money, proved.

Fewer devices are cheaper an hour and take longer, so that the cost of a step alone bounds
little. It is looked for by numbers of devices, range by range: within one, the price an
hour is at least that of its fewest devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate, concatenate
from analytic.money import HOUR_S
from analytic.setup import Setup
from ir.batch import PlanBatch
from ir.errors import InputError
from search.explore import RAISES, explored, least_seconds
from search.families import Within
from search.optimum import MOST_WORK, Optimum, ranking
from search.pareto import numbers_of_devices
from search.prices import price_per_hour
from search.records import Mask, Priced, Reached, fits
from search.tables import Tables
from search.work import Work
from space.enumerate import LegalSpace

Float = NDArray[np.float64]


@dataclass(kw_only=True)
class _Cheapest(Priced):
    """The cheapest plan so far, and where it is looked for."""

    within: Within
    fewest: int = 0
    """Devices that plans have at least."""
    ceiling: float = np.inf
    """Below what price of a step they are looked for, in US dollars."""
    best: float = np.inf
    """Price of a step."""

    def news(self, reached: Reached) -> Float:
        """See `Priced.news`."""
        least = np.maximum(reached.price(self.of_groups), self.of_groups.min() * self.fewest)
        limit = min(self.best, self.ceiling) * HOUR_S / np.maximum(least, np.finfo(float).tiny)
        return np.where(reached.devices <= self.within.devices, limit, 0.0)

    def learn(self, priced: Estimate, seconds: Float, fits: Mask) -> None:
        """See `Priced.learn`."""
        price = price_per_hour(priced.batch, self.setup.cluster) / HOUR_S * seconds
        self.best = min(self.best, float(price[fits].min(initial=np.inf)))


def cheapest(legal: LegalSpace, s: Setup, *, known: PlanBatch | None = None, most_work: float = MOST_WORK) -> Optimum:
    """The plan that fits in memory whose step costs least.

    Args:
        legal: The space, taken apart.
        s: Its job and cluster.
        known: Plans of the space that it should improve on.
        most_work: Partial plans that may be looked at; beyond, the best found is returned unproved.

    Raises:
        InputError: no plan fits, none was found in time, or a price is not known.
    """
    age = legal.setting.job.limits.max_staleness
    ranges = [
        (Within(devices=most, staleness=age), fewer + 1)
        for most, fewer in pairwise([*numbers_of_devices(legal.setting), 0])
    ]
    tables = Tables(legal=legal, setup=s, within=ranges[0][0], work=Work(most_work))
    record = _Cheapest(setup=s, within=ranges[0][0])
    if known is not None:
        record.add(known, np.zeros(len(known)))
    complete = _raised(tables, record, ranges)
    if not np.isfinite(record.best):
        got = f"{legal.num_plans:,} too large" if complete else None
        raise InputError("job", "must have a plan that fits in memory on this cluster and is found in time", got)
    priced = concatenate(record.found)
    price = np.where(fits(s, priced), price_per_hour(priced.batch, s.cluster) * priced.step_seconds, np.inf)
    order = ranking(s, priced)
    best = order[np.argmin(price[order])]
    sound = record.is_sound and all(section.is_sound for section in tables.fronts)
    return Optimum(best=priced.take(np.array([best])), num_proved=int(complete and sound), priced=priced)


def _raised(tables: Tables, record: _Cheapest, ranges: list[tuple[Within, int]]) -> bool:
    """Look through all ranges, below a guess that is raised until there is a plan; whether there was work enough."""
    floors = [_floor(tables, record, *one) for one in ranges]
    for ceiling in (*(min(floors) * times for times in (1.5 * raise_ for raise_ in RAISES)), np.inf):
        record.ceiling = ceiling
        for floor, (within, fewest) in sorted(zip(floors, ranges, strict=True), key=lambda one: one[0]):
            if floor >= min(record.best, ceiling):
                continue
            tables.within, record.within, record.fewest = within, within, fewest
            if not explored(tables, record):
                return False
        if record.best <= ceiling:
            break
    return True


def _floor(tables: Tables, record: _Cheapest, within: Within, fewest: int) -> float:
    """Price that no plan of a range is below."""
    tables.within = within
    return least_seconds(tables) * float(record.of_groups.min()) * fewest / HOUR_S
