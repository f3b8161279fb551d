"""What an exporter is given: a plan laid out, on the nodes it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ir.cluster import Cluster
from ir.graph import Rpeg
from ir.job import Job, Role
from ir.plan import Plan

Files = Mapping[str, str]
"""Texts by file name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    """A legal plan of a job on a cluster."""

    plan: Plan
    rpeg: Rpeg
    """The plan lowered."""
    cluster: Cluster
    notes: tuple[str, ...] = ()
    """What is predicted of it, a line each."""

    @property
    def job(self) -> Job:
        """What is trained."""
        return self.rpeg.job

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.cluster.levels[0].size

    def nodes(self, pool: str) -> int:
        """Nodes of a pool; 1 if it is part of a node."""
        return max(self.plan.devices_of(pool) // self.node, 1)

    def per_node(self, pool: str) -> int:
        """Devices of a pool on each of its nodes."""
        return min(self.plan.devices_of(pool), self.node)

    def model(self, role: Role) -> str:
        """Name or path of a role's model; a reference that is not given is the actor."""
        models = self.job.document.models
        source = getattr(models, role.value) or models.actor
        return source.name if source.name is not None else str(source.path)

    @property
    def step_tokens(self) -> int:
        """Tokens that a step of an engine must hold: of prompts, and one of each sequence that decodes; where prompts
        are not cut, the longest sequence."""
        engine = self.plan.generate
        if engine.prefill_tokens:
            return engine.prefill_tokens + engine.concurrency
        return max(self.job.workload.max_tokens, engine.concurrency)

    @property
    def header(self) -> tuple[str, ...]:
        """First lines of every file: which plan this is, and what is predicted of it."""
        return (f"{self.job.document.name}: {self.plan.describe()}", *self.notes)
