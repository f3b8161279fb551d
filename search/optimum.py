"""The best plans of a whole space by the model, proved.

Branch and bound over structures, pool sizes and layouts. A step that is known to be
possible, or a guess of it, bounds the search: whatever cannot be faster is dropped, and
where nothing is faster the guess is raised. Every plan that is reported was priced whole,
so a mistake of a bound can cost the proof, but never shows a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate, concatenate, estimate
from analytic.memory import Memory
from analytic.setup import Setup
from ir.batch import COLUMNS, FLAGS, PlanBatch
from ir.errors import InputError
from ir.lower import lower
from search.branch import Branch
from search.families import Record, Roots
from search.fronts import ROUNDING
from search.tables import Tables
from search.work import OutOfWorkError, Work
from space.enumerate import LegalSpace

Float = NDArray[np.float64]
Int = NDArray[np.int64]

MOST_WORK = 100_000_000
"""Partial plans after which the search gives up the proof."""

SLACK = 1.5
"""A first guess over what the busiest pool of any plan takes at least."""

RAISES = tuple(float(1.4**i) for i in (0, 1, 2, 4, 8))
"""What a guess that was too low is multiplied by, before there is none any more."""

WORK_GRAPH = 10_000
"""Partial plans that are looked at in the time that a graph takes before the first."""

LOOKS, LOOK_ROOTS, LOOK_WORK = 8, 6, 20_000
"""Graphs that are looked into first, pool sizes and partial plans in each."""

ALIKE = 1e-10
"""Relative; steps that differ by less are told apart by staleness, moves and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best plans of a space."""

    best: Estimate
    """At most as many as were asked for, best first; of equal steps the less stale, less fused and smaller first."""
    proved: bool
    """Whether no plan of the space that fits in memory is faster than the first, and none is missing from the others'
    step times."""
    priced: Estimate
    """All whole plans that were priced on the way, whether or not they fit; each once."""

    @property
    def seconds(self) -> Float:
        """Steps of the best plans, float64[n]."""
        return self.best.step_seconds


def fits(s: Setup, found: Estimate) -> NDArray[np.bool_]:
    """Which plans fit in memory with the job's margin, bool[n]."""
    return np.asarray(found.memory.fill <= 1.0 - s.job.limits.memory_margin)


@dataclass(kw_only=True)
class Priced:
    """Whole plans that were priced, each once."""

    setup: Setup
    ceiling: float
    """Below how many seconds plans are looked for."""
    found: list[Estimate] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    is_sound: bool = True
    """Whether no step was shorter than its bound."""

    @property
    def most(self) -> float:
        """See `search.families.Record`."""
        return self.ceiling

    def add(self, batch: PlanBatch, bounds: Float) -> None:
        """See `search.families.Record`."""
        keys = [row.tobytes() for row in np.stack([batch[name] for name in COLUMNS], axis=1)]
        fresh = np.array([key not in self.known for key in keys])
        self.known.update(keys)
        if fresh.any():
            priced = estimate(self.setup.job, batch.take(fresh), self.setup.cluster)
            seconds = priced.step_seconds
            self.is_sound = self.is_sound and bool((seconds >= bounds[fresh] * (1.0 - ROUNDING)).all())
            self.found.append(priced)
            good = fits(self.setup, priced)
            self.learn(priced.batch.take(good), seconds[good])

    def learn(self, batch: PlanBatch, seconds: Float) -> None:
        """Take in plans that fit and their steps."""
        raise NotImplementedError


@dataclass(kw_only=True)
class _Few(Priced):
    """The `count` fastest plans so far."""

    count: int
    steps: Float = field(default_factory=lambda: np.zeros(0))

    @property
    def most(self) -> float:
        """Seconds below which a plan is news."""
        return min(float(self.steps[-1]), self.ceiling) if len(self.steps) == self.count else self.ceiling

    def limit(self, devices: Int, staleness: Int) -> Float:
        """See `search.families.Record`."""
        return np.full(len(devices), self.most)

    def learn(self, batch: PlanBatch, seconds: Float) -> None:
        """See `Priced.learn`."""
        self.steps = np.sort(np.concatenate([self.steps, seconds]))[: self.count]


def optimum(
    legal: LegalSpace,
    s: Setup,
    *,
    count: int = 1,
    known: PlanBatch | None = None,
    most_work: float = MOST_WORK,
) -> Optimum:
    """The `count` best plans that fit in memory.

    Args:
        legal: The space, taken apart.
        s: Its job and cluster.
        count: How many; more than one take longer, since plans that others beat in everything count too.
        known: Plans of the space that it should improve on, some of which fit.
        most_work: Partial plans that may be looked at; beyond, the best found is returned unproved.

    Raises:
        InputError: no plan fits, or none was found in time.
    """
    tables = Tables(legal=legal, setup=s, count=count, work=Work(most_work))
    record = _Few(setup=s, count=count, ceiling=np.inf)
    if known is not None:
        record.add(known, np.zeros(len(known)))
    guess, complete = _guess(tables), False
    for ceiling in (*(guess * times for times in RAISES), np.inf):
        record.ceiling = ceiling
        complete = explored(tables, record)
        # Plans that are known may be slower than the guess, below which there are none then.
        if not complete or (len(record.steps) >= count and record.steps[-1] <= ceiling):
            break
    if not len(record.steps):
        got = f"{legal.num_plans:,} too large" if complete else None
        raise InputError("job", "must have a plan that fits in memory on this cluster and is found in time", got)
    priced = concatenate(record.found)
    sound = record.is_sound and all(front.is_sound for front in tables.fronts)
    return Optimum(
        best=taken(priced, ranking(s, priced)[:count]),
        proved=complete and sound,
        priced=priced,
    )


def explored(tables: Tables, record: Record) -> bool:
    """Price every plan that is news to a record; whether there was enough work left for that."""
    try:
        _explore(tables, record)
    except OutOfWorkError:
        return False
    return True


def _explore(tables: Tables, record: Record) -> None:
    example: Estimate | None = None
    hopeful = sorted((family for family in tables.families if tables.floor(family) < record.most), key=tables.floor)
    # First a look at a few plans of several graphs, for a limit that is near the best.
    for family in hopeful[:LOOKS]:
        roots = tables.roots(family, record)
        few = roots.take(np.argsort(roots.busy, kind="stable")[:LOOK_ROOTS])
        example = _branch(tables, few, record, example, looks=True)
    for family in hopeful:
        if tables.floor(family) < record.most:
            example = _branch(tables, tables.roots(family, record), record, example, looks=False)


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


def _guess(tables: Tables) -> float:
    """A step that some plan may well beat."""
    try:
        return SLACK * min(tables.floor(family) for family in tables.families)
    except OutOfWorkError:
        return np.inf


def ranking(s: Setup, priced: Estimate) -> NDArray[np.intp]:
    """Rows of the plans that fit, best first."""
    seconds, batch = priced.step_seconds, priced.batch
    moves = sum((batch[flag] for flag in FLAGS), np.zeros(len(batch), dtype=np.int32))
    alike = np.round(np.log(seconds) / ALIKE)
    order = np.lexsort((priced.memory.fill, moves, batch["staleness"], alike))
    return np.asarray(order[fits(s, priced)[order]])


def taken(found: Estimate, rows: NDArray[np.intp]) -> Estimate:
    """Some rows of an estimate."""
    memory = found.memory
    return replace(
        found,
        batch=found.batch.take(rows),
        stage_seconds=found.stage_seconds[rows],
        latency_ratio=found.latency_ratio[rows],
        memory=Memory(
            pools={role: size[rows] for role, size in memory.pools.items()},
            fill=memory.fill[rows],
            terms={name: size[rows] for name, size in memory.terms.items()},
            expected={role: size[rows] for role, size in memory.expected.items()},
        ),
        structure=found.structure[rows],
    )
