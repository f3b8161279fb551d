"""The space of a job on a cluster, priced: what a search starts from and `predict` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from analytic.bounds import devices_of_group
from analytic.estimate import MODEL_VERSION, Estimate, estimate, estimate_blocks
from analytic.fit import setup
from analytic.money import HOUR_S, price_per_step
from analytic.setup import Setup
from ir.backend import Backend
from ir.batch import PlanBatch, batch_of, concatenate
from ir.cluster import Cluster
from ir.errors import InputError
from ir.job import Job, with_limits
from ir.plan import Plan
from ir.rules import Setting, setting_of
from ir.rules import legal as is_legal
from search.matched import matched
from search.nearest import adapted
from search.optimum import MOST_WORK, Optimum, fits, optimum, ranking
from search.problem import Candidates
from search.relevance import plan_keys, relevance_from
from space.axes import Space
from space.build import default_space
from space.enumerate import LegalPlans, LegalSpace, enumerate_legal, legal_space
from space.neighbours import neighbours_in
from space.presets import presets

__all__ = ["MODEL_VERSION", "Survey", "survey"]

LISTED = 300_000
"""Legal plans up to which all are listed and priced; of a larger space, the best with those around it."""

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
    is_proved: bool
    """Whether the model has no faster plan, that fits, in the whole space than the fastest of those priced."""
    legal: LegalPlans
    """Those that are priced."""
    estimate: Estimate

    @property
    def space(self) -> Space:
        """The axes."""
        return self.legal.space

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
        fits = self.estimate.memory.fill <= 1.0 - self.job.limits.memory_margin
        most = self.job.limits.max_price_per_hour
        return np.asarray(fits if most is None else fits & (self._price_per_hour <= most * (1 + 1e-9)))

    @cached_property
    def _price_per_hour(self) -> NDArray[np.float64]:
        price = price_per_step(self.estimate.batch, self.cluster, np.full(len(self.estimate.batch), HOUR_S))
        if price is None:
            rule = "must be given for the job's objective or limits.max_price_per_hour"
            raise InputError(f"cluster {self.cluster.name}: device.price_per_hour", rule)
        return price

    @cached_property
    def objective(self) -> NDArray[np.float64]:
        """What is to be least of every plan, float64[n]: seconds or dollars a step. All plans of a job train on equally
        many samples, so that the cost of a sample ranks them as that of a step does."""
        if self.job.document.objective in ("step_time", "pareto"):
            return self.step_seconds
        return self.step_seconds * self._price_per_hour / HOUR_S

    @cached_property
    def presets(self) -> dict[str, Plan]:
        """The presets that are legal here; where none is legal for the backend, what is nearest to some."""
        return presets(self.setting) or adapted(self.setting)

    @cached_property
    def preset_estimate(self) -> Estimate:
        """What the presets cost, in their order."""
        return estimate(self.job, batch_of(list(self.presets.values())), self.cluster)

    def ranking(self, count: int) -> list[int]:
        """The best plans that fit, best first by the job's objective; of plans that the model cannot tell apart, the
        one with fewest devices, least staleness and least memory. For a Pareto front, only plans that no other beats
        or equals in step seconds, devices and staleness."""
        rounded = np.round(np.where(self.fits, self.objective, np.inf), 4)
        staleness = self.estimate.batch["staleness"]
        order = np.lexsort((self.estimate.memory.fill, staleness, self._devices, rounded))
        order = order[self.fits[order]]
        if self.job.document.objective == "pareto":
            order = order[_first_of_front(self._devices[order], staleness[order])]
        return _unlike(self.estimate, order, count)

    @cached_property
    def _devices(self) -> NDArray[np.int64]:
        groups = range(len(self.cluster.groups))
        return np.asarray(sum(devices_of_group(self.estimate.batch, group) for group in groups))

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
) -> Survey:
    """Take the space apart and price it, whole if it is small enough.

    Args:
        job: It must have lengths.
        cluster: Where it runs.
        backend: What must be able to run the plans; None for anything.
        fix: Columns of a plan that are given.
        known: Plans to start from too, whose values are worth considering.

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
        batch, proved = enumerate_legal(space, setting).batch, True
        priced = estimate_blocks(job, batch.take(np.flatnonzero(is_legal(batch, setting))), cluster)
    else:
        priced, proved = _searched(legal, job, cluster, given)
        if setting.is_coupled:
            priced, proved = _matched(legal, priced, setup(job, cluster), given, proved=proved)
    plans = LegalPlans(space=space, levels=space.encode(priced.batch), batch=priced.batch)
    return Survey(
        job=job,
        cluster=cluster,
        setting=setting,
        num_legal=len(priced.batch) if legal.num_plans <= LISTED else legal.num_plans,
        is_proved=proved,
        legal=plans,
        estimate=priced,
    )


def _first_of_front(devices: NDArray[np.int64], staleness: NDArray[np.int32]) -> NDArray[np.intp]:
    """Rows, in order of their seconds, that use fewer devices or are less stale than every row before them."""
    least: list[tuple[int, int]] = []
    kept = []
    for row, (used, age) in enumerate(zip(devices.tolist(), staleness.tolist(), strict=True)):
        if not any(d <= used and a <= age for d, a in least):
            least.append((used, age))
            kept.append(row)
    return np.array(kept, dtype=np.intp)


def _parts(legal: LegalSpace) -> list[LegalSpace]:
    """The space; for objectives that fewer devices may serve better, each number of devices that is asked for, or at
    most all, half of them, a quarter, and so on."""
    limits, setting = legal.setting.job.limits, legal.setting
    if setting.job.document.objective == "step_time" or isinstance(limits.devices, int):
        return [legal]
    if limits.devices is not None:
        wanted = [msgspec.structs.replace(limits, devices=count) for count in limits.devices]
    else:
        most = limits.most_devices(setting.num_devices)
        wanted = [msgspec.structs.replace(limits, max_devices=most >> i) for i in range(most.bit_length())]
    return [legal_space(legal.space, replace(setting, job=with_limits(setting.job, limits))) for limits in wanted]


def _searched(legal: LegalSpace, job: Job, cluster: Cluster, given: PlanBatch) -> tuple[Estimate, bool]:
    """The best plan with those priced on the way to it, presets, and neighbours of the best few; and whether it is
    proved the best."""
    s, parts = setup(job, cluster), _parts(legal)
    named = batch_of(list(presets(legal.setting).values()))
    named = concatenate([given, named.take(np.flatnonzero(legal.space.holds(named)))])
    found = [(part, best) for part in parts if (best := _best(part, s, named, MOST_WORK // len(parts)))]
    if not found:
        rule = "must have a plan that fits in memory on this cluster and is found in time"
        raise InputError("job", rule, f"{legal.num_plans:,} legal ones")
    around = [
        neighbours_in(part, best.priced.batch.take(np.array([row])))
        for part, best in found
        for row in _unlike(best.priced, ranking(s, best.priced), max(AROUND // len(parts), 1))
    ]
    batch = concatenate([*(best.priced.batch for _, best in found), named, *around])
    proved = job.document.objective == "step_time" and found[0][1].proved
    return estimate_blocks(job, _distinct(legal, batch), cluster), proved


def _matched(legal: LegalSpace, found: Estimate, s: Setup, given: PlanBatch, *, proved: bool) -> tuple[Estimate, bool]:
    """Plans for a backend that runs several sections on one engine, and whether the best is proved so: if it is as
    fast as the best plan whose sections need not match."""
    order = np.lexsort((found.step_seconds, ~fits(s, found)))
    batch = matched(legal, s, found.batch.take(order), given)
    if not len(batch):
        rule = "must have a plan whose sections match where the backend runs them on one engine"
        raise InputError("job", rule, "none that is near the best plans")
    priced = estimate_blocks(s.job, _distinct(legal, batch), s.cluster)
    least = np.where(fits(s, priced), priced.step_seconds, np.inf).min()
    return priced, proved and bool(least <= found.step_seconds[order[0]] * (1 + 1e-9))


def _best(legal: LegalSpace, s: Setup, named: PlanBatch, most_work: int) -> Optimum | None:
    """The best plan of a space, or of some named ones if there is not work enough; None if none fits."""
    if legal.num_plans == 0:
        return None
    limits, devices = legal.setting.job.limits, legal.setting.num_devices
    used = np.array([named.plan(row).num_devices for row in range(len(named))], dtype=np.int64)
    known = named.take(np.flatnonzero(limits.allows(used, devices)))
    try:
        return optimum(legal, s, known=known if len(known) else None, most_work=most_work)
    except InputError:
        return None


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
