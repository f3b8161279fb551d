"""What a search needs of this machine: workers, the measured cluster, the actor, and real runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from executor.cache import cache_directory, cluster_path, known_lengths, lengths_path
from executor.fleet import Fleet
from executor.machine import devices_here
from executor.measure import calibrate
from executor.result import RunResult
from executor.run import OnStep, Options, execute
from executor.support import check_runnable
from ir.cluster import Cluster
from ir.documents import write_document
from ir.graph import Rpeg
from ir.job import Job, with_lengths

Progress = Callable[[str], None]


def measure_cluster(fleet: Fleet, progress: Progress, fit: Callable[[Cluster], Cluster]) -> Cluster:
    """Measure this machine, `fit` the model's curves to what was measured, and keep the result."""
    kind, devices = devices_here()
    cluster = fit(calibrate(fleet, kind, devices, progress))
    write_document(cluster_path(), cluster)
    return cluster


def ready_actor(job: Job, progress: Progress) -> Path:
    """The directory of the job's initial actor, warm-started if it is not there yet.

    Raises:
        InputError: real runs cannot do what the job asks for, or its actor has no weights.
    """
    check_runnable(job)
    finished = cache_directory() / "actors" / job.identity
    if job.actor_path.is_file() and finished.is_dir():
        return finished
    # Only a warm start and the check of a directory need torch in this process.
    from executor.policy import prepare_actor

    def step(done: int, steps: int, loss: float) -> None:
        if done == 1 or done % 50 == 0 or done == steps:
            progress(f"warm start {done}/{steps}, loss {loss:.3f}")

    return prepare_actor(job, cache_directory() / "actors", step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Workers with a job's actor: ready for real runs."""

    fleet: Fleet
    cluster: Cluster
    actor: Path

    def measured_lengths(self, job: Job) -> Job:
        """The job with lengths: its own, those measured before, or else sampled from the actor now."""
        job = known_lengths(job)
        if job.workload.lengths is not None:
            return job
        lengths = self.fleet.sample_lengths(job, str(self.actor.resolve()))
        write_document(lengths_path(job), lengths)
        return with_lengths(job, lengths)

    def run(self, rpeg: Rpeg, options: Options, on_step: OnStep, run_id: str = "") -> RunResult:
        """Run an RPEG for real."""
        return execute(
            self.fleet,
            rpeg,
            run_id=run_id or uuid.uuid4().hex,
            model_path=str(self.actor.resolve()),
            memory_limit=self.cluster.device.memory_bytes,
            options=options,
            on_step=on_step,
        )
