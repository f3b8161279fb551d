"""Why a plan does not fit in memory, and the plan nearest to it that does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analytic.estimate import estimate, section_cost
from analytic.fit import setup
from analytic.memory import Shortfall, shortfall
from ir.batch import COLUMNS, PlanBatch, batch_of, concatenate
from ir.cluster import Cluster
from ir.documents import plain
from ir.plan import SECTIONS, Plan
from ir.setting import Setting
from search.relaid import relaid
from search.report import size_text
from space.axes import Space
from space.enumerate import LegalSpace, legal_space

SECTIONS_CHANGED = 4
"""Most sections that change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A plan that needs more memory than there is."""

    short: Shortfall
    nearest: Plan | None
    """A legal plan on the same pools that fits, of fewest changes, the fastest of those; None if none was found."""
    changes: tuple[str, ...]
    """AXIS=VALUE of what it has otherwise."""


def misfit(space: Space, setting: Setting, cluster: Cluster, plan: Plan) -> Misfit | None:
    """Why a plan does not fit, by the model; None if it does."""
    job, batch = setting.job, batch_of([plan])
    s = setup(job, cluster)
    costs = {op: section_cost(s, op, batch.section(op)) for op in SECTIONS if batch.has(op)[0]}
    short = shortfall(s, batch, costs, margin=job.limits.memory_margin)
    if short is None:
        return None
    nearest = _nearest(legal_space(space, setting), cluster, batch)
    return Misfit(short=short, nearest=nearest, changes=() if nearest is None else changes(plan, nearest))


def misfit_text(found: Misfit) -> str:
    """In a sentence."""
    short = found.short
    held = ", ".join(f"{name} {size_text(size)}" for name, size in short.terms[:4])
    cure = "no plan near it fits" if found.nearest is None else f"fits with {' '.join(found.changes)}"
    return (
        f"does not fit: the {short.pool} pool needs {size_text(short.needed)} a device at {short.phase}, "
        f"{size_text(short.missing)} too many (largest: {held}); {cure}"
    )


def _nearest(legal: LegalSpace, cluster: Cluster, plan: PlanBatch) -> Plan | None:
    """Section by section: of all single changes the least that suffices, or else the one that helps most and go on."""
    job, now = legal.setting.job, plan
    for _ in range(SECTIONS_CHANGED):
        near = concatenate([now, *relaid(legal, now)])
        found = estimate(job, near, cluster)
        changed = np.sum([near[name] != plan[name][0] for name in COLUMNS], axis=0)
        fits = np.flatnonzero(found.memory.fill <= 1.0 - job.limits.memory_margin)
        if len(fits):
            return near.plan(int(fits[np.lexsort((found.step_seconds[fits], changed[fits]))[0]]))
        least = int(np.lexsort((changed, np.round(found.memory.fill, 3)))[0])
        if least == 0:
            return None
        now = near.take(np.array([least]))
    return None


def changes(plan: Plan, other: Plan) -> tuple[str, ...]:
    """AXIS=VALUE of `other` where it is not like `plan`; stages that it lacks come last."""
    before, after = plain(plan), plain(other)
    found = [f"{name}={after[name]}" for name in ("staleness", "in_flight", "sync") if before[name] != after[name]]
    if before["pools"] != after["pools"]:
        found.insert(0, "pools " + " + ".join(f"{pool.name} {pool.devices}" for pool in other.pools))
    for section, fields in after.items():
        if isinstance(fields, dict):
            old = before.get(section, {})
            names = [name for name in dict.fromkeys([*fields, *old]) if old.get(name) != fields.get(name)]
            found += [f"{section}.{name}={_written(fields.get(name))}" for name in names if name != "pool"]
    gone = [section for section, fields in before.items() if isinstance(fields, dict) and section not in after]
    return (*found, *(f"no stage {section}" for section in gone))


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
