"""The whole space of a job on a cluster, priced: what a search starts from and `predict` shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analytic.estimate import MODEL_VERSION, STAGES, Estimate, estimate_blocks
from ir.cluster import Cluster
from ir.errors import InputError
from ir.job import Job
from ir.plan import Plan
from ir.rules import Setting
from search.problem import Candidates
from search.relevance import relevance_from
from space.axes import Space, default_space
from space.enumerate import LegalPlans, enumerate_legal
from space.presets import presets

__all__ = ["MODEL_VERSION", "Survey", "survey"]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Every legal plan with its price."""

    job: Job
    cluster: Cluster
    devices: int
    """Devices a plan may use."""
    legal: LegalPlans
    estimate: Estimate

    @property
    def space(self) -> Space:
        """The axes."""
        return self.legal.space

    @property
    def capacity_bytes(self) -> float:
        """What the model may fill of a device."""
        return self.cluster.device.memory_bytes * (1.0 - self.job.limits.memory_margin)

    @cached_property
    def candidates(self) -> Candidates:
        """The space as a search takes it."""
        return Candidates(
            space=self.space,
            levels=self.legal.levels,
            stages=STAGES,
            stage_seconds=self.estimate.stage_seconds,
            memory_bytes=self.estimate.memory.peak,
            capacity_bytes=self.capacity_bytes,
            relevance=relevance_from(self.space, self.legal.levels, self.estimate.stage_seconds),
            compose=self.estimate.compose,
        )

    @cached_property
    def step_seconds(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Modelled step of every plan, float64[n]."""
        return self.estimate.step_seconds

    @property
    def fits(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether the model says a plan fits, bool[n]."""
        return self.estimate.memory.peak <= self.capacity_bytes

    @cached_property
    def presets(self) -> dict[str, Plan]:
        """The presets that are legal here."""
        return {
            name: plan
            for name, plan in presets(self.job, self.devices).items()
            if self.candidates.row_of(plan) is not None
        }

    def ranking(self, count: int) -> list[int]:
        """The fastest plans that fit, best first; of plans that the model cannot tell apart, one."""
        order = np.argsort(np.where(self.fits, self.step_seconds, np.inf), kind="stable")
        found: dict[bytes, int] = {}
        for row in order[self.fits[order]]:
            seconds = np.append(self.estimate.stage_seconds[row], self.step_seconds[row])
            found.setdefault(np.round(seconds, 4).tobytes(), int(row))
            if len(found) == count:
                break
        return list(found.values())

    def bound_by(self, row: int, measured: Mapping[str, float] | None = None) -> str:
        """The cycle that sets a plan's step time, by the model's stage seconds or by measured ones."""
        rows = np.array([row])
        seconds = self.estimate.stage_seconds[rows]
        if measured is not None:
            seconds = np.array([[measured.get(stage, 0.0) for stage in STAGES]])
        cycles = self.estimate.cycles(seconds, rows)
        return max(cycles, key=lambda name: float(cycles[name][0]))


def survey(job: Job, cluster: Cluster) -> Survey:
    """Enumerate and price the space.

    Raises:
        InputError: the job has no lengths, or no plan is legal.
    """
    if job.workload.lengths is None:
        raise InputError("job: workload.lengths", "must be given, or measured by a search of this job first")
    devices = min(cluster.num_devices, job.limits.max_devices or cluster.num_devices)
    space = default_space(job, devices)
    legal = enumerate_legal(space, Setting(job=job, devices=devices))
    if len(legal.batch) == 0:
        raise InputError("job", "must have a legal plan on this cluster", "none")
    return Survey(
        job=job,
        cluster=cluster,
        devices=devices,
        legal=legal,
        estimate=estimate_blocks(job, legal.batch, cluster),
    )
