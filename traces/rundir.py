"""The run directory: documents beside the traces, and the check that they belong together."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ir.cluster import Cluster
from ir.documents import read_document, write_document
from ir.errors import InputError
from ir.job import Job, Models, load_job
from ir.plan import Plan

JOB = "job.toml"
CLUSTER = "cluster.toml"
BEST = "best.plan.toml"
ACTOR = "actor.config.json"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where one search keeps everything."""

    path: Path

    def check(self, job: Job) -> None:
        """Refuse to mix two jobs.

        Raises:
            InputError: the directory holds another job.
        """
        if (self.path / JOB).exists() and (other := self.job()).identity != job.identity:
            got = f"another ({other.document.name}, {other.identity})"
            raise InputError(
                str(self.path / JOB), f"must be the job searched ({job.document.name}, {job.identity})", got
            )

    def create(self, job: Job, cluster: Cluster) -> None:
        """Write the documents that a resume needs; the job's model is referred to by an absolute path, or copied
        if it is only a configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        actor = str(job.actor_path.resolve())
        if job.actor_path.is_file():
            shutil.copyfile(job.actor_path, self.path / ACTOR)
            actor = ACTOR
        source = msgspec.structs.replace(job.document.models.actor, path=actor)
        document = msgspec.structs.replace(job.document, models=Models(actor=source))
        write_document(self.path / JOB, document)
        write_document(self.path / CLUSTER, cluster)

    def job(self) -> Job:
        """The job searched here."""
        if not (self.path / JOB).exists():
            raise InputError(str(self.path), f"must be a run directory, which holds a {JOB}")
        return load_job(self.path / JOB)

    def cluster(self) -> Cluster:
        """The cluster it was searched on."""
        return read_document(self.path / CLUSTER, Cluster)

    def write_best(self, plan: Plan) -> Path:
        """Keep the best plan so far."""
        write_document(self.path / BEST, plan)
        return self.path / BEST
