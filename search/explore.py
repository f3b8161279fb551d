"""Looking through all families of a space for plans that are news."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from analytic.estimate import Estimate, estimate
from ir.lower import lower
from search.branch import Branch
from search.families import Family, Roots
from search.records import Record, most
from search.tables import Tables
from search.work import OutOfWorkError

SLACK = 1.5
"""A first guess over what the busiest pool of any plan takes at least."""

WORK_GRAPH = 10_000
"""Partial plans that are looked at in the time that a graph takes before the first."""

RAISES = tuple(float(1.4**i) for i in (0, 1, 2, 4, 8))
"""What a guess that was too low is multiplied by, before there is none any more."""

LOOKS, LOOK_ROOTS, LOOK_WORK = 4, 6, 20_000
"""Graphs that are looked into first, pool sizes and partial plans in each."""


class Sought(Record, Protocol):
    """A record of plans that are looked for below a number of seconds."""

    ceiling: float

    @property
    def goal(self) -> float:
        """Seconds below which nothing is news any more, if all that is were known."""
        ...


def raised(tables: Tables, record: Sought, bound: float = 0.0) -> bool:
    """Price every plan that is news, below a guess that is raised until there is one; whether there was enough work for
    that. No plan takes less than `bound` seconds."""
    least = max(SLACK * least_seconds(tables), bound)
    for ceiling in (*(least * times for times in RAISES), np.inf):
        record.ceiling = ceiling
        if not explored(tables, record):
            return False
        # What is known may be slower than the guess, below which there is nothing then.
        if record.goal <= ceiling:
            break
    return True


def explored(tables: Tables, record: Record) -> bool:
    """Price every plan that is news to a record; whether there was enough work left for that."""
    try:
        _explore(tables, record)
    except OutOfWorkError:
        return False
    return True


def _explore(tables: Tables, record: Record) -> None:
    example: Estimate | None = None
    hopeful = sorted((f for f in tables.families if _may_be_news(tables, f, record)), key=tables.floor)
    # First a look at a few plans of several graphs, for a limit that is near the best.
    for family in hopeful[:LOOKS]:
        roots = tables.roots(family, record)
        few = roots.take(np.argsort(roots.busy, kind="stable")[:LOOK_ROOTS])
        example = _branch(tables, few, record, example, looks=True)
    for family in hopeful:
        if _may_be_news(tables, family, record):
            example = _branch(tables, tables.roots(family, record), record, example, looks=False)


def _may_be_news(tables: Tables, family: Family, record: Record) -> bool:
    limit = most(record, family)
    return tables.floor(family, limit) < limit


def _branch(tables: Tables, roots: Roots, record: Record, example: Estimate | None, *, looks: bool) -> Estimate | None:
    """Price the plans of some roots that are news, or a few of them; an estimate that the next ones may be like."""
    if len(roots.variant) == 0:
        return example
    tables.work.spend(WORK_GRAPH)
    example = _example(tables, roots, example)
    branch = Branch(tables=tables, roots=roots, example=example, record=record, looks=looks)
    branch.run(LOOK_WORK if looks else np.inf)
    return example


def _example(tables: Tables, roots: Roots, like: Estimate | None) -> Estimate:
    """An estimate of the family's graph."""
    structure = int(roots.family.variants[roots.variant[0], 3])
    case = roots.family.case
    smallest = [min(tables.legal.counts_by_size(tables.legal.pool_case(pool, case))) for pool in case.pools]
    batch = tables.legal.factor(structure, tuple(smallest)).plans(np.zeros(1, dtype=np.int64))
    job = tables.setup.job
    if like is None:
        return estimate(job, batch, tables.setup.cluster)
    return replace(like, structures=(lower(job, batch.plan(0)),))


def least_seconds(tables: Tables) -> float:
    """Seconds that no plan is below; 0 if there is not work enough to say."""
    try:
        return min(tables.floor(family) for family in tables.families)
    except OutOfWorkError:
        return 0.0
