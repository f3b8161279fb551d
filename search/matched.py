"""Plans for a backend that runs several sections on one engine.

The space takes each section by itself, so what is found there need not match. Here plans
are made to match and improved, section by section and by other pools. The space's optimum
remains a bound: no plan that matches is faster.
"""

from __future__ import annotations

import numpy as np

from analytic.estimate import Estimate, estimate, estimate_blocks
from analytic.setup import Setup
from ir.batch import PlanBatch, batch_of, concatenate
from ir.followers import follow
from ir.rules import legal
from search.nearest import nearest
from search.relaid import relaid
from space.enumerate import LegalSpace
from space.neighbours import neighbours_in

STARTS = 6
"""Plans that are improved, the best of different structures."""

ROUNDS = 8
"""Times that a plan is changed at most."""


def matched(space: LegalSpace, s: Setup, plans: PlanBatch, given: PlanBatch) -> PlanBatch:
    """Those of the plans that can be made to match, and all that were looked at to improve the best of them.

    Args:
        space: Of a backend whose sections follow others.
        s: The job and cluster.
        plans: Of the space, best first.
        given: Of the space, improved too.
    """
    found = matching(space, plans)
    if not len(found):
        near = [plan for row in range(min(len(plans), STARTS)) if (plan := nearest(plans.plan(row), space.setting))]
        found = matching(space, batch_of(near)) if near else found
    if not len(found):
        return found
    starts = _starts(space, estimate_blocks(s.job, found, s.cluster))
    begun = [*(found.take(np.array([row])) for row in starts), *(given.take(np.array([i])) for i in range(len(given)))]
    return concatenate([found, *(_improved(space, s, plan) for plan in begun)])


def matching(space: LegalSpace, plans: PlanBatch) -> PlanBatch:
    """Those of the plans that are legal when they are made to match."""
    followed = follow(plans, space.setting.backend)
    followed = followed.take(np.flatnonzero(space.space.holds(followed)))
    return followed.take(np.flatnonzero(legal(followed, space.setting)))


def _starts(space: LegalSpace, priced: Estimate) -> list[int]:
    """The fastest plan of each structure, those that fit before those that do not, the best structures first."""
    misfit = priced.memory.fill > 1.0 - space.setting.job.limits.memory_margin
    best: dict[bytes, int] = {}
    for row in np.lexsort((priced.step_seconds, misfit)).tolist():
        structure = np.array([priced.batch[name][row] for name in space.structures]).tobytes()
        best.setdefault(structure, row)
        if len(best) == STARTS:
            break
    return list(best.values())


def _improved(space: LegalSpace, s: Setup, plan: PlanBatch) -> PlanBatch:
    """Change one section after the other, then the pools, for the best, until nothing is gained; the plans that were
    best on the way, the last one last."""
    way = [plan]
    for _ in range(ROUNDS):
        before = plan
        for others in (*relaid(space, plan), neighbours_in(space, plan)):
            plan = _best_of(s, concatenate([plan, matching(space, others)]))
        if all(plan[name][0] == before[name][0] for name in plan.columns):
            break
        way.append(plan)
    return concatenate(way)


def _best_of(s: Setup, plans: PlanBatch) -> PlanBatch:
    """The fastest plan that fits; if none does, the smallest. The first of equals."""
    found = estimate(s.job, plans, s.cluster)
    misfit = found.memory.fill > 1.0 - s.job.limits.memory_margin
    order = np.lexsort((np.where(misfit, found.memory.fill, found.step_seconds), misfit))
    return plans.take(order[:1])
