"""Plans for a backend that runs several sections on one engine.

The space takes each section by itself, so what is found there need not match. Here plans
are made to match and improved section by section. The space's optimum remains a bound:
no plan that matches is faster.
"""

from __future__ import annotations

import numpy as np

from analytic.estimate import Estimate, estimate, estimate_blocks
from analytic.setup import Setup
from ir.batch import PlanBatch, concatenate
from ir.followers import follow
from ir.rules import legal
from search.relaid import relaid
from space.enumerate import LegalSpace

STARTS = 6
"""Plans that are improved, the best of different structures."""

ROUNDS = 4
"""Times that all sections of a plan are gone through at most."""


def matched(space: LegalSpace, s: Setup, plans: PlanBatch) -> PlanBatch:
    """Those of the plans that can be made to match, and what the best of them become when they are improved."""
    found = _matching(space, plans)
    if not len(found):
        return found
    priced = estimate_blocks(s.job, found, s.cluster)
    starts = _starts(space, priced)
    return concatenate([found, *(_improved(space, s, found.take(np.array([row]))) for row in starts)])


def _matching(space: LegalSpace, plans: PlanBatch) -> PlanBatch:
    followed = follow(plans, space.setting.backend)
    return followed.take(np.flatnonzero(legal(followed, space.setting)))


def _starts(space: LegalSpace, priced: Estimate) -> list[int]:
    """The fastest plan of each structure, those that fit before those that do not, the best structures first."""
    margin = space.setting.job.limits.memory_margin
    misfit = priced.memory.fill > 1.0 - margin
    best: dict[bytes, int] = {}
    for row in np.lexsort((priced.step_seconds, misfit)).tolist():
        structure = np.array([priced.batch[name][row] for name in space.structures]).tobytes()
        best.setdefault(structure, row)
        if len(best) == STARTS:
            break
    return list(best.values())


def _improved(space: LegalSpace, s: Setup, plan: PlanBatch) -> PlanBatch:
    """Change one section after the other for the best, until nothing is gained."""
    margin, before = space.setting.job.limits.memory_margin, np.inf
    for _ in range(ROUNDS):
        for others in relaid(space, plan):
            near = concatenate([plan, _matching(space, others)])
            found = estimate(s.job, near, s.cluster)
            seconds = np.where(found.memory.fill <= 1.0 - margin, found.step_seconds, 1e9 * found.memory.fill)
            plan, after = near.take(np.array([int(np.argmin(seconds))])), float(seconds.min())
        if after >= before * (1 - 1e-4):
            break
        before = after
    return plan
