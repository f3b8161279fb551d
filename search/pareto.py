"""What a faster step costs: the plans that no other beats in step time, devices and staleness."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate, concatenate
from analytic.setup import Setup
from ir.batch import ROLES, PlanBatch
from search.optimum import MOST_WORK, Priced, explored, fits, optimum, taken
from search.skyline import beaten_by_few
from search.tables import Tables
from search.work import Work
from space.enumerate import LegalSpace

Float = NDArray[np.float64]
Int = NDArray[np.int64]

SLOWEST = 8.0
"""Steps that are of interest, over the shortest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Plans of which none is faster with as few devices and as little staleness, fastest first."""

    plans: Estimate
    devices: Int
    """Of all pools together, int64[n]."""
    proved: bool
    """Whether no plan is missing of those that are fast enough to be of interest."""


def devices_of(batch: PlanBatch) -> Int:
    """Devices of all pools of each plan, int64[n]."""
    leads = [np.where(batch[f"place.{role}"] == i, batch[f"devices.{role}"], 0) for i, role in enumerate(ROLES)]
    return np.asarray(sum(leads), dtype=np.int64)


@dataclass(kw_only=True)
class _Grid(Priced):
    """The fastest plan so far by devices and staleness at most."""

    steps: Float = field(default_factory=lambda: np.zeros((0, 0)))
    """float64[devices + 1, staleness + 1], falling along both."""

    def limit(self, devices: Int, staleness: Int) -> Float:
        """See `search.families.Record`."""
        return np.minimum(self.steps[devices, staleness], self.ceiling)

    def learn(self, batch: PlanBatch, seconds: Float) -> None:
        """See `Priced.learn`."""
        staleness = batch["staleness"].tolist()
        for devices, stale, step in zip(devices_of(batch).tolist(), staleness, seconds.tolist(), strict=True):
            self.steps[devices:, stale:] = np.minimum(self.steps[devices:, stale:], step)


def front(legal: LegalSpace, s: Setup, *, slowest: float = SLOWEST, most_work: float = MOST_WORK) -> Front:
    """The plans that fit in memory and that none beats in step time, devices and staleness together.

    Args:
        legal: The space, taken apart.
        s: Its job and cluster.
        slowest: Steps that are of interest, over the shortest of all.
        most_work: As for `search.optimum.optimum`.

    Raises:
        InputError: no plan fits.
    """
    first = optimum(legal, s, most_work=most_work)
    shape = (legal.setting.num_devices + 1, max(legal.space["staleness"]) + 1)
    grid = _Grid(setup=s, ceiling=slowest * float(first.seconds[0]), steps=np.full(shape, np.inf))
    tables = Tables(legal=legal, setup=s, count=1, work=Work(most_work))
    grid.add(first.best.batch, np.zeros(len(first.seconds)))
    complete = explored(tables, grid)
    found = concatenate(grid.found)
    rows = np.flatnonzero(fits(s, found))
    devices = devices_of(found.batch)[rows]
    points = np.stack([found.step_seconds[rows], devices, found.batch["staleness"][rows]], axis=1)
    kept = beaten_by_few(points, count=1)
    kept = kept[np.lexsort(points[kept].T[::-1])]
    sound = grid.is_sound and all(front.is_sound for front in tables.fronts)
    return Front(plans=taken(found, rows[kept]), devices=devices[kept], proved=complete and sound)
