"""The space of a job on a cluster, priced: what a search starts from and `predict` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import MODEL_VERSION, Estimate, estimate, estimate_blocks
from analytic.fit import setup
from analytic.money import HOUR_S
from analytic.setup import Setup
from ir.backend import Backend
from ir.batch import PlanBatch, batch_of, concatenate
from ir.cluster import Cluster
from ir.errors import InputError
from ir.job import Job
from ir.plan import Plan
from ir.rules import Setting, setting_of
from ir.rules import legal as is_legal
from search.cheapest import cheapest
from search.designs import leaders
from search.matched import matched
from search.nearest import adapted
from search.optimum import optimum
from search.pareto import devices_of, first_under, front, limits_of, points_of
from search.prices import price_per_hour
from search.problem import Candidates
from search.records import fits
from search.relevance import plan_keys, relevance_from
from space.axes import Space
from space.build import default_space
from space.enumerate import LegalPlans, LegalSpace, enumerate_legal, legal_space
from space.neighbours import neighbours_in
from space.presets import presets

__all__ = ["MODEL_VERSION", "Survey", "survey"]

LISTED = 300_000
"""Legal plans up to which all are listed and priced; of a larger space, the best with those around it."""

DESIGNS = 10
"""Of a large space, those whose best plan is found."""

AROUND = 6
"""Plans whose neighbours are priced too."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Legal plans with their price: all of them, or of a large space the best with those around it."""

    job: Job
    cluster: Cluster
    setting: Setting
    num_legal: int
    """Legal plans of the whole space; at most so many where the backend runs several sections on one engine."""
    num_proved: int
    """Of how many designs the best plan is proved, the best ones first; for money 1 if the cheapest is, for a Pareto
    front see `search.pareto.Front.proved`."""
    legal: LegalPlans
    """Those that are priced."""
    estimate: Estimate

    @property
    def space(self) -> Space:
        """The axes."""
        return self.legal.space

    @property
    def is_proved(self) -> bool:
        """Whether no plan of the whole space that fits is better, by the model and the job's objective, than the best
        of those priced."""
        return self.num_proved > 0

    @property
    def is_whole(self) -> bool:
        """Whether every legal plan is priced."""
        return self.num_legal == len(self.legal.batch)

    @property
    def capacity_bytes(self) -> float:
        """What the model may fill of a device, of the first group's."""
        return self.cluster.device.memory_bytes * (1.0 - self.job.limits.memory_margin)

    @cached_property
    def candidates(self) -> Candidates:
        """The plans as a search takes them."""
        return Candidates(
            space=self.space,
            levels=self.legal.levels,
            stages=self.estimate.stages,
            stage_seconds=self.estimate.stage_seconds,
            # Devices of several kinds are compared by the share of memory taken.
            memory_bytes=self.estimate.memory.fill * self.cluster.device.memory_bytes,
            capacity_bytes=self.capacity_bytes,
            relevance=relevance_from(self.legal.levels, self.estimate.stage_seconds),
            compose=self.estimate.compose,
        )

    @cached_property
    def step_seconds(self) -> NDArray[np.float64]:
        """Modelled step of every plan, float64[n]."""
        return self.estimate.step_seconds

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Whether the model says a plan fits, in memory and in the job's price, bool[n]."""
        return fits(setup(self.job, self.cluster), self.estimate)

    @cached_property
    def objective(self) -> NDArray[np.float64]:
        """What is to be least of every plan, float64[n]: seconds or dollars a step. All plans of a job train on equally
        many samples, so that the cost of a sample ranks them as that of a step does."""
        if self.job.document.objective in ("step_time", "pareto"):
            return self.step_seconds
        return self.step_seconds * price_per_hour(self.estimate.batch, self.cluster) / HOUR_S

    @cached_property
    def presets(self) -> dict[str, Plan]:
        """The presets that are legal here; where none is legal for the backend, what is nearest to some."""
        return presets(self.setting) or adapted(self.setting)

    @cached_property
    def preset_estimate(self) -> Estimate:
        """What the presets cost, in their order."""
        return estimate(self.job, batch_of(list(self.presets.values())), self.cluster)

    def ranking(self, count: int) -> list[int]:
        """The best plans that fit, best first by the job's objective: the best of each design, and others that the
        model can tell apart if there are not enough; of plans that it cannot, the one with fewest devices, least
        staleness and least memory. For a Pareto front, its plans, fastest first."""
        if self.job.document.objective == "pareto":
            rows = np.flatnonzero(self.fits)
            return list(rows[first_under(limits_of(self.setting), points_of(self.estimate)[rows])][:count].tolist())
        rounded = np.round(np.where(self.fits, self.objective, np.inf), 4)
        used = devices_of(self.estimate.batch)
        order = np.lexsort((self.estimate.memory.fill, self.estimate.batch["staleness"], used, rounded))
        order = order[self.fits[order]]
        best = order[leaders(self.estimate.batch.take(order), rounded[order])][:count].tolist()
        others = [row for row in _unlike(self.estimate, order, count + len(best)) if row not in best]
        place = {row: i for i, row in enumerate(order.tolist())}
        return sorted([*best, *others[: count - len(best)]], key=lambda row: place[row])

    def bound_by(self, row: int, measured: Mapping[str, float] | None = None) -> str:
        """The cycle that sets a plan's step time, by the model's stage seconds or by measured ones."""
        rows = np.array([row])
        seconds = self.estimate.stage_seconds[rows]
        if measured is not None:
            seconds = np.array([[measured.get(stage, 0.0) for stage in self.estimate.stages]])
        cycles = self.estimate.cycles(seconds, rows)
        return max(cycles, key=lambda name: float(cycles[name][0]))


def survey(
    job: Job,
    cluster: Cluster,
    *,
    backend: Backend | None = None,
    fix: Mapping[str, int] | None = None,
    known: Sequence[Plan] = (),
    designs: int = DESIGNS,
) -> Survey:
    """Take the space apart and price it, whole if it is small enough.

    Args:
        job: It must have lengths.
        cluster: Where it runs.
        backend: What must be able to run the plans; None for anything.
        fix: Columns of a plan that are given.
        known: Plans to start from too, whose values are worth considering.
        designs: Of a large space, how many designs to find the best plan of, see `search.optimum.optimum`.

    Raises:
        InputError: the job has no lengths, or no plan is legal.
    """
    if job.lengths is None:
        raise InputError("job: workload.lengths", "must be given, or measured by a search of this job first")
    setting = setting_of(job, cluster, backend).with_fixed(frozenset(fix or {}))
    given = batch_of([plan for plan in known if is_legal(batch_of([plan]), setting)[0]])
    space = default_space(setting, fix, also=given)
    legal = legal_space(space, setting)
    given = given.take(np.flatnonzero(space.holds(given)))
    if legal.num_plans == 0:
        raise InputError("job", "must have a legal plan on this cluster", "none")
    if legal.num_plans <= LISTED:
        batch, proved = enumerate_legal(space, setting).batch, designs
        priced = estimate_blocks(job, batch.take(np.flatnonzero(is_legal(batch, setting))), cluster)
    else:
        priced, proved = _searched(legal, setup(job, cluster), given, designs)
        if setting.is_coupled:
            priced, proved = _matched(legal, priced, setup(job, cluster), given, proved=proved > 0)
    plans = LegalPlans(space=space, levels=space.encode(priced.batch), batch=priced.batch)
    return Survey(
        job=job,
        cluster=cluster,
        setting=setting,
        num_legal=len(priced.batch) if legal.num_plans <= LISTED else legal.num_plans,
        num_proved=proved,
        legal=plans,
        estimate=priced,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a search by the model found."""

    best: Estimate
    priced: Estimate
    num_proved: int


def _found(legal: LegalSpace, s: Setup, known: PlanBatch, designs: int) -> _Found:
    """The best plans by the job's objective."""
    objective = s.job.document.objective
    if objective == "pareto":
        whole = front(legal, s, known=known)
        return _Found(best=whole.plans, priced=whole.priced, num_proved=int(whole.proved))
    if objective == "step_time":
        found = optimum(legal, s, count=designs, known=known)
    else:
        found = cheapest(legal, s, known=known)
    return _Found(best=found.best, priced=found.priced, num_proved=found.num_proved)


def _searched(legal: LegalSpace, s: Setup, given: PlanBatch, designs: int) -> tuple[Estimate, int]:
    """The best plans with those priced on the way to them, presets, and neighbours of the best few; and how many are
    proved the best."""
    named = batch_of(list(presets(legal.setting).values()))
    named = concatenate([given, named.take(np.flatnonzero(legal.space.holds(named)))])
    allowed = s.job.limits.allows(devices_of(named), legal.setting.num_devices)
    found = _found(legal, s, named.take(np.flatnonzero(allowed)), designs)
    rows = _unlike(found.best, np.arange(len(found.best.batch)), AROUND)
    starts = [found.best.batch.take(np.array([row])) for row in rows]
    batch = concatenate([found.best.batch, found.priced.batch, named, *(neighbours_in(legal, one) for one in starts)])
    return estimate_blocks(s.job, _distinct(legal, batch), s.cluster), found.num_proved


def _matched(legal: LegalSpace, found: Estimate, s: Setup, given: PlanBatch, *, proved: bool) -> tuple[Estimate, int]:
    """Plans for a backend that runs several sections on one engine, and 1 if the best is proved so: if it is as fast as
    the best plan whose sections need not match."""
    order = np.lexsort((found.step_seconds, ~fits(s, found)))
    batch = matched(legal, s, found.batch.take(order), given)
    if not len(batch):
        rule = "must have a plan whose sections match where the backend runs them on one engine"
        raise InputError("job", rule, "none that is near the best plans")
    priced = estimate_blocks(s.job, _distinct(legal, batch), s.cluster)
    least = np.where(fits(s, priced), priced.step_seconds, np.inf).min()
    proved = proved and s.job.document.objective == "step_time"
    return priced, int(proved and least <= found.step_seconds[order[0]] * (1 + 1e-9))


def _unlike(found: Estimate, order: NDArray[np.intp], count: int) -> list[int]:
    """The first few rows, in an order, that the model can tell apart."""
    rows, steps = dict[bytes, int](), found.step_seconds
    for row in order.tolist():
        rows.setdefault(np.round(np.append(found.stage_seconds[row], steps[row]), 4).tobytes(), row)
        if len(rows) == count:
            break
    return list(rows.values())


def _distinct(legal: LegalSpace, batch: PlanBatch) -> PlanBatch:
    """Each plan once."""
    _, first = np.unique(plan_keys(legal.space.encode(batch)), return_index=True)
    return batch.take(np.sort(first))
