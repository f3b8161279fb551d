"""The run directory: documents beside the traces, and the check that they belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from ir.cluster import Cluster
from ir.documents import read_document, write_atomically, write_document
from ir.errors import InputError
from ir.job import Job, ModelSource, Role, load_job
from ir.plan import Plan

JOB = "job.toml"
CLUSTER = "cluster.toml"
BEST = "best.plan.toml"


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
        """Write the documents that a resume needs. They do not depend on where the job was: a model by a relative path
        is referred to by an absolute one, or copied if it is only a configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        models = msgspec.structs.replace(job.document.models, **{role.value: self._kept(role, job) for role in Role})
        write_document(self.path / JOB, msgspec.structs.replace(job.document, models=models))
        write_document(self.path / CLUSTER, cluster)

    def _kept(self, role: Role, job: Job) -> ModelSource | None:
        source: ModelSource | None = getattr(job.document.models, role.value)
        if source is None or source.path is None or Path(source.path).is_absolute():
            return source
        path = (job.directory / source.path).resolve()
        if not path.is_file():
            return msgspec.structs.replace(source, path=str(path))
        copy = self.path / f"{role}.config.json"
        write_atomically(copy, path.read_bytes())
        return msgspec.structs.replace(source, path=copy.name)

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
