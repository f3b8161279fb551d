"""The best plans of a whole space by the model, proved.

Branch and bound over structures, pool sizes and layouts. A step that is known to be
possible, or a guess of it, bounds the search: whatever cannot be faster is dropped, and
where nothing is faster the guess is raised. Every plan that is reported was priced whole,
so a mistake of a bound can cost the proof, but never shows a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate, concatenate
from analytic.setup import Setup
from ir.batch import FLAGS, PlanBatch
from ir.errors import InputError
from search.designs import Designs, leaders
from search.explore import explored, raised
from search.families import Within
from search.records import fits
from search.tables import Tables
from search.work import Work
from space.enumerate import LegalSpace

Float = NDArray[np.float64]

MOST_WORK = 100_000_000
"""Partial plans after which the search gives up the proof."""

WORK_FURTHER = 10_000_000
"""Partial plans after which it gives up the proof of other designs than the first."""

FURTHER = tuple(float(1.25**i) for i in range(1, 9))
"""Times the best step up to which other designs are looked for, until there are enough."""

ALIKE = 1e-10
"""Relative; steps that differ by less are told apart by staleness, moves and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best plans of a space."""

    best: Estimate
    """The best plan of each of the best designs, best first; of equal steps the less stale, less fused and smaller."""
    num_proved: int
    """Of how many of them it is proved that no plan that fits is faster, but for those of the designs before."""
    priced: Estimate
    """All whole plans that were priced on the way, whether or not they fit; each once."""

    @property
    def seconds(self) -> Float:
        """Steps of the best plans, float64[n]."""
        return self.best.step_seconds

    @property
    def proved(self) -> bool:
        """Whether no plan of the space that fits in memory is faster than the first."""
        return self.num_proved > 0


def optimum(
    legal: LegalSpace,
    s: Setup,
    *,
    count: int = 1,
    known: PlanBatch | None = None,
    most_work: float = MOST_WORK,
) -> Optimum:
    """The best plan that fits in memory of each of the `count` best designs.

    Args:
        legal: The space, taken apart.
        s: Its job and cluster.
        count: How many: plans differ in which stages share devices, or in staleness, and the staler is faster.
            Designs that are slower than the first by more than the last of `FURTHER` are left out.
        known: Plans of the space that it should improve on, some of which fit.
        most_work: Partial plans that may be looked at; beyond, the best found are returned unproved.

    Raises:
        InputError: no plan fits, or none was found in time.
    """
    tables = Tables(legal=legal, setup=s, within=within_of(legal), work=Work(most_work))
    record = Designs(setup=s, roles=legal.setting.roles)
    if known is not None:
        record.add(known, np.zeros(len(known)))
    complete = raised(tables, record)
    if not record.best:
        got = f"{legal.num_plans:,} too large" if complete else None
        raise InputError("job", "must have a plan that fits in memory on this cluster and is found in time", got)
    if complete:
        record.settle()
        _others(tables, record, count)
    priced = concatenate(record.found)
    ranked = priced.take(ranking(s, priced))
    best = ranked.take(leaders(ranked.batch, ranked.step_seconds)[:count])
    sound = record.is_sound and all(front.is_sound for front in tables.fronts)
    settled = best.step_seconds <= record.settled * (1.0 + ALIKE)
    return Optimum(best=best, num_proved=int(settled.sum()) if sound else 0, priced=priced)


def within_of(legal: LegalSpace) -> Within:
    """What plans of a space may use."""
    limits = legal.setting.job.limits
    return Within(devices=limits.most_devices(legal.setting.num_devices), staleness=limits.max_staleness)


def _others(tables: Tables, record: Designs, count: int) -> None:
    """Find the best plans of the next designs, slower and slower ones until there are enough or work ends."""
    first, record.count = record.last, count
    tables.work.reserve = max(tables.work.left - WORK_FURTHER, 0.0)
    for times in FURTHER if count > 1 else ():
        record.ceiling = first * times
        if not explored(tables, record):
            return
        record.settle()
        if record.last <= record.ceiling:
            return


def ranking(s: Setup, priced: Estimate) -> NDArray[np.intp]:
    """Rows of the plans that fit, best first."""
    seconds, batch = priced.step_seconds, priced.batch
    moves = sum((batch[flag] for flag in FLAGS), np.zeros(len(batch), dtype=np.int32))
    alike = np.round(np.log(seconds) / ALIKE)
    order = np.lexsort((priced.memory.fill, moves, batch["staleness"], alike))
    return np.asarray(order[fits(s, priced)[order]])
