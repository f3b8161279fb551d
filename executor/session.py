"""What a search needs of this machine: workers, the measured cluster, the actor, and real runs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from executor.fleet import Fleet, devices_here
from executor.measure import calibrate, hardware_fingerprint
from executor.result import RunResult
from executor.run import OnStep, Options, execute
from ir.cluster import Cluster
from ir.documents import digest, read_document, write_document
from ir.errors import InputError
from ir.graph import Rpeg
from ir.job import Job, Lengths, with_lengths

Progress = Callable[[str], None]

PACKAGES = ("steptune", "torch", "transformers", "ray", "reasoning-gym", "numpy")
"""Packages whose versions a measurement depends on."""


def cache_directory() -> Path:
    """Where measured clusters and warm-started models are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "steptune"


def software_fingerprint() -> str:
    """Identity of what runs: a trace of other versions is not mixed with this one's."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return digest(found)[:12]


def cached_cluster() -> Cluster | None:
    """This machine as it was measured before, if it was."""
    path = cluster_path()
    try:
        return read_document(path, Cluster) if path.exists() else None
    except InputError:
        # Measured by another version, with other figures: measured anew.
        return None


def cluster_path() -> Path:
    """Where this machine's measurement is kept."""
    return cache_directory() / f"cluster-{hardware_fingerprint(*devices_here())}.toml"


def measure_cluster(fleet: Fleet, progress: Progress) -> Cluster:
    """Measure this machine and keep the result."""
    kind, devices = devices_here()
    cluster = calibrate(fleet, kind, devices, progress)
    write_document(cluster_path(), cluster)
    return cluster


def check_runnable(job: Job) -> None:
    """Refuse what can be planned but is not run here, before any worker meets it.

    Raises:
        InputError: names what the job asks for.
    """
    workload, models = job.workload, job.document.models
    refused = {
        "algorithm.name": (job.algorithm.name != "grpo", "must be grpo to be run", repr(job.algorithm.name)),
        "models.actor.lora_rank": (models.actor.lora_rank is not None, "must not be given to be run", None),
        "models.reference": (models.reference is not None, "must be the initial actor to be run", None),
        "models.reward": (models.reward is not None, "must be a verifier to be run", None),
        "workload.tasks": (not workload.tasks, "must name at least one data set to be run", None),
        "workload.oversampling": (workload.oversampling != 1, "must be 1 to be run", workload.oversampling),
        "workload.turns": (workload.turns is not None, "must not be given to be run", None),
    }
    for key, (is_refused, rule, got) in refused.items():
        if is_refused:
            raise InputError(f"job: {key}", rule, got)


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


def known_lengths(job: Job) -> Job:
    """The job with the lengths that were measured for it before, where it gives none."""
    path = _lengths_path(job)
    if job.workload.lengths is not None or not path.exists():
        return job
    return with_lengths(job, read_document(path, Lengths))


def _lengths_path(job: Job) -> Path:
    return cache_directory() / "lengths" / f"{job.identity}.toml"


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
        write_document(_lengths_path(job), lengths)
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
