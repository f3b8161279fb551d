"""What a faster step costs: the plans that no other beats in step time, devices, staleness and memory.

Such plans are many and mostly alike, so devices and memory come in steps. Under each limit
of them the fastest plan is looked for, from the widest to the narrowest: what is known
under wider limits is a bound, and often the plan itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from analytic.estimate import Estimate, concatenate
from analytic.setup import Setup
from ir.batch import ROLES, PlanBatch
from ir.errors import InputError
from ir.setting import Setting
from search.explore import raised
from search.families import Within
from search.records import Mask, Priced, Reached
from search.tables import Tables
from search.work import Work
from space.enumerate import LegalSpace

Float = NDArray[np.float64]
Int = NDArray[np.int64]

MOST_WORK = 400_000_000
"""Partial plans after which the search gives up the proof,"""

MOST_AT_ONCE = 50_000_000
"""and after which it goes on with the next limits."""

SLOWEST = 8.0
"""Steps that are of interest, over the shortest."""

MATTERS = 0.05
"""Relative; a plan that uses more of anything is of interest if it is faster by more."""

ALIKE = 0.01
"""Relative; of this, a plan that is shown may be slower than one that is left out and uses more."""

FEWER = 0.75
"""From one limit of devices to the next."""

MEMORY = (1.0, 0.75, 0.5)
"""Limits of the share of a device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Plans of which none beats another, fastest first."""

    plans: Estimate
    proved: bool
    """Whether under each limit of devices, staleness and memory no plan that fits is faster by `MATTERS` than one of
    these, but for steps that are slower than is of interest."""
    priced: Estimate
    """All whole plans that were priced on the way, whether or not they fit; each once."""


def devices_of(batch: PlanBatch) -> Int:
    """Devices of all pools of each plan, int64[n]."""
    leads = [np.where(batch[f"place.{role}"] == i, batch[f"devices.{role}"], 0) for i, role in enumerate(ROLES)]
    return np.asarray(sum(leads), dtype=np.int64)


def points_of(found: Estimate) -> Float:
    """Seconds, devices, staleness and share of memory of plans, float64[n, 4]."""
    return np.column_stack(
        [found.step_seconds, devices_of(found.batch), found.batch["staleness"], found.memory.fill]
    ).astype(np.float64)


def limits_of(setting: Setting) -> tuple[Within, ...]:
    """The limits under which the fastest plans are of interest, widest first."""
    ages = range(setting.job.limits.max_staleness, -1, -1)
    return tuple(
        Within(devices=devices, staleness=age, memory=memory)
        for devices, age, memory in product(numbers_of_devices(setting), ages, MEMORY)
    )


def numbers_of_devices(setting: Setting) -> list[int]:
    """All that may be used, and fewer and fewer: whole nodes where there are several; or those that are asked for."""
    limits = setting.job.limits
    if limits.devices is not None:
        asked = (limits.devices,) if isinstance(limits.devices, int) else limits.devices
        return sorted({count for count in asked if count <= setting.num_devices}, reverse=True)
    numbers, node = [limits.most_devices(setting.num_devices)], min(group.node for group in setting.groups)
    while numbers[-1] > 1:
        fewer = max(min(int(numbers[-1] * FEWER), numbers[-1] - 1), 1)
        numbers.append(fewer - fewer % node if fewer > node else fewer)
    return numbers


def first_under(limits: tuple[Within, ...], points: Float) -> NDArray[np.intp]:
    """Rows of the fastest plan under each limit, each once and fastest first, without those that another beats or that
    are slower than is of interest.

    Args:
        limits: The limits.
        points: See `points_of`; of plans that fit.
    """
    if len(points) == 0:
        return np.zeros(0, dtype=np.intp)
    # Of equally fast plans the one that uses least.
    order = np.lexsort((points[:, 3], points[:, 2], points[:, 1], np.round(points[:, 0], 9)))
    points = points[order]
    points = points[points[:, 0] <= SLOWEST * points[0, 0]]
    best = sorted({int(np.argmax(inside)) for within in limits if (inside := _inside(within, points)).any()})
    kept = list[int]()
    for row in reversed(best):
        least = points[kept] * (1.0 - ALIKE, 1.0, 1.0, 1.0)
        if row == 0 or not (least <= points[row]).all(axis=1).any():
            kept.append(row)
    return np.asarray(order[kept[::-1]], dtype=np.intp)


def _inside(within: Within, points: Float) -> Mask:
    """Which plans keep to some limits."""
    return np.asarray((points[:, 1:] <= (within.devices, within.staleness, within.memory)).all(axis=1))


@dataclass(kw_only=True)
class _Fastest(Priced):
    """The fastest plan so far under some limits."""

    within: Within
    ceiling: float = np.inf
    """Below how many seconds plans are looked for."""
    enough: float = np.inf
    """Below how many seconds they are of interest, by what was known before."""
    points: Float = field(default_factory=lambda: np.zeros((0, 4)))
    """See `points_of`; infinite seconds where a plan does not fit."""

    def news(self, reached: Reached) -> Float:
        """See `Priced.news`."""
        inside = (reached.devices <= self.within.devices) & (reached.staleness <= self.within.staleness)
        return np.where(inside, min(self.goal, self.ceiling), 0.0)

    def learn(self, priced: Estimate, seconds: Float, fits: Mask) -> None:
        """See `Priced.learn`."""
        points = points_of(priced)
        points[~fits, 0] = np.inf
        self.points = np.concatenate([self.points, points])

    @property
    def goal(self) -> float:
        """See `search.explore.Sought`."""
        return min(self.best, self.enough)

    @property
    def best(self) -> float:
        """Seconds of the fastest under the limits, infinite if none is known."""
        return float(self.points[_inside(self.within, self.points), 0].min(initial=np.inf))


def front(legal: LegalSpace, s: Setup, *, known: PlanBatch | None = None, most_work: float = MOST_WORK) -> Front:
    """The fastest plans that fit under each limit of devices, staleness and memory.

    Args:
        legal: The space, taken apart.
        s: Its job and cluster.
        known: Plans of the space to start from.
        most_work: Partial plans that may be looked at; beyond, the front found is returned unproved.

    Raises:
        InputError: no plan fits, or none was found in time.
    """
    limits = limits_of(legal.setting)
    tables = Tables(legal=legal, setup=s, within=limits[0], by_memory=True, work=Work(most_work))
    record = _Fastest(setup=s, within=limits[0])
    if known is not None:
        record.add(known, np.zeros(len(known)))
    least, proved = dict[Within, float](), True
    # A bar for who waits at a terminal; nothing elsewhere.
    for within in tqdm(limits, unit="limit", leave=False, disable=None, file=sys.stderr):
        bound = max((seconds for wider, seconds in least.items() if _is_wider(wider, within)), default=0.0)
        slowest = SLOWEST * float(record.points[:, 0].min(initial=np.inf))
        record.within = tables.within = within
        record.enough = min(record.best * ((1.0 - MATTERS) / (1.0 - ALIKE) if least else 1.0), slowest)
        if record.enough <= bound:
            continue
        tables.work.reserve = max(tables.work.left - MOST_AT_ONCE, 0.0)
        complete = raised(tables, record, bound)
        least[within] = record.goal if complete else bound
        proved = proved and complete
    rows = np.flatnonzero(np.isfinite(record.points[:, 0]))
    if not len(rows):
        got = f"{legal.num_plans:,} too large" if proved else None
        raise InputError("job", "must have a plan that fits in memory on this cluster and is found in time", got)
    priced = concatenate(record.found)
    rows = rows[first_under(limits, record.points[rows])]
    sound = record.is_sound and all(section.is_sound for section in tables.fronts)
    return Front(plans=priced.take(rows), proved=proved and sound, priced=priced)


def _is_wider(one: Within, other: Within) -> bool:
    return one.devices >= other.devices and one.staleness >= other.staleness and one.memory >= other.memory
