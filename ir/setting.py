"""What plans are judged against, and what a rule is.

Rules on one section's layout are kept apart from those on the plan's structure, and each
says which columns it reads, so that a space can be built up column by column, dropping
what breaks a rule at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.backend import Backend
from ir.batch import HOME, ROLES
from ir.cluster import Cluster
from ir.graph import ROLE_OF, Op
from ir.job import Job, Role
from ir.model import ModelShape
from ir.plan import SECTIONS, Update
from ir.recipes import RECIPES

Mask = NDArray[np.bool_]
Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """One group of like devices, as far as plans are judged by it."""

    count: int
    node: int = 1
    """Devices of one server: those that the innermost level joins."""
    domain: int = 1
    """Devices that the innermost, fastest links join."""
    fp8: bool = False
    host: bool = False
    """Whether there is host memory apart from the device's own."""
    memory_bytes: int = 1 << 50
    """Memory of one; the default is more than anything needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What plans are judged against."""

    job: Job
    groups: tuple[Devices, ...]
    backend: Backend | None = None
    """What must be able to run the plan; None: anything."""
    fixed: frozenset[str] = frozenset()
    """Columns that the user asked for: advice is no rule for them."""
    ops: frozenset[Op] = field(init=False)
    """Operations of the algorithm's recipe."""

    def __post_init__(self) -> None:
        stages = RECIPES[self.job.algorithm.name](self.job).stages
        object.__setattr__(self, "ops", frozenset(op for stage in stages for op in stage.ops))

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        return sum(group.count for group in self.groups)

    @property
    def sections(self) -> tuple[Op, ...]:
        """Sections that the job's plans may have, in order: a verifier needs none."""
        return tuple(op for op in SECTIONS if op in self.ops and ROLE_OF[op] in self.job.models)

    @property
    def roles(self) -> tuple[str, ...]:
        """What is put on pools."""
        homes = {HOME[op] for op in self.sections}
        return tuple(role for role in ROLES if role in homes)

    @property
    def is_coupled(self) -> bool:
        """Whether the backend makes the layout of a section depend on more than its own pool."""
        return self.backend is not None and bool(self.backend.follows or self.backend.swaps or self.backend.deltas)

    def shape(self, op: Op) -> ModelShape:
        """The model of a section."""
        return self.job.models[ROLE_OF[op]]

    def is_like_the_actor(self, role: Role) -> bool:
        """Whether the job has a model of that role that is the actor but for its head."""
        shape = self.job.models.get(role)
        return shape is not None and replace(shape, scores=False) == self.job.actor

    def with_fixed(self, columns: frozenset[str]) -> Setting:
        """The same with columns that the user asked for."""
        return replace(self, fixed=columns)


def setting_of(job: Job, cluster: Cluster, backend: Backend | None = None) -> Setting:
    """The setting of a job on a cluster."""
    groups = tuple(
        Devices(
            count=group.num_devices,
            node=group.levels[0].size,
            domain=group.domain,
            fp8="fp8" in group.device.peak_flops,
            host=group.device.host_link is not None,
            memory_bytes=group.device.memory_bytes,
        )
        for group in cluster.groups
    )
    return Setting(job=job, groups=groups, backend=backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a section's layouts are judged against."""

    op: Op
    setting: Setting

    @property
    def shape(self) -> ModelShape:
        """Its model."""
        return self.setting.shape(self.op)

    @property
    def sequences(self) -> int:
        """Sequences it handles at once: of a step, or of a minibatch where it updates."""
        workload = self.setting.job.workload
        return workload.sequences // workload.minibatches if SECTIONS[self.op] is Update else workload.sequences

    def of_group(self, group: NDArray[Any], name: str) -> NDArray[Any]:
        """A property of the group of devices that each plan's pool lies in; of the last for a group there is not."""
        of_groups = np.array([getattr(devices, name) for devices in self.setting.groups])
        return np.asarray(of_groups[np.minimum(group, len(of_groups) - 1)])

    def is_fixed(self, field_name: str) -> bool:
        """Whether the user asked for the field's value."""
        return f"{self.op}.{field_name}" in self.setting.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named condition on the plan's structure."""

    name: str
    path: str
    """The key of plan.toml that breaks it; its value is reported."""
    reads: tuple[str, ...]
    """Columns it depends on."""
    holds: Callable[[Columns, Setting], Mask | bool]
    message: str
    """What must be true, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRule:
    """A named condition on one section; columns are fields of the section, `devices` and `group` of its pool, and
    the plan's `staleness`."""

    name: str
    ops: tuple[Op, ...]
    """Sections it is about."""
    path: str
    """The field that breaks it."""
    reads: tuple[str, ...]
    """Columns it depends on; those that a kind of section lacks are passed over."""
    holds: Callable[[Columns, Section], Mask | bool]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A rule and the plans that break it."""

    name: str
    path: str
    message: str
    broken: Mask
    """bool[n]."""
