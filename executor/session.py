"""What a search needs of this machine: workers, the measured cluster, the actor, and real runs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from executor.fleet import Fleet, devices_here
from executor.measure import calibrate, hardware_fingerprint
from executor.result import RunResult
from executor.run import OnStep, Options, execute
from ir.backends import backend
from ir.cluster import Cluster
from ir.documents import digest, read_document, write_document
from ir.errors import InputError
from ir.graph import Rpeg
from ir.job import RUNNABLE_ACTOR, Job, Lengths, with_lengths
from ir.model import ModelShape
from ir.plan import Plan
from ir.rules import Setting, check
from ir.setting import Devices

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


def _has_weights(job: Job) -> bool:
    source = job.document.models.actor
    return source.path is not None and (source.warm_start is not None or job.actor_path.is_dir())


def _is_plain(shape: ModelShape, longest: int) -> bool:
    """Whether the engine's own decode attention is the model's: it knows no latent vectors, sinks, or windows that
    close before a sequence is over, and nothing of what comes with more than two norms a layer (soft caps)."""
    windowed = any(0 < window < longest for window in shape.windows)
    return shape.mla is None and shape.moe is None and not shape.sinks and shape.norms_per_layer == 2 and not windowed


@dataclass(frozen=True, slots=True)
class _Need:
    """What a job must be to be run here; planning asks less."""

    path: str
    """The key of job.toml that is wrong; its value is reported where it is one word."""
    holds: Callable[[Job], bool]
    rule: str


_NEEDS = (
    _Need("algorithm.name", lambda j: j.algorithm.name == "grpo", "must be grpo to be run"),
    _Need("models.actor.lora_rank", lambda j: j.actor.lora_rank == 0, "must not be given to be run"),
    _Need("models.reference", lambda j: j.document.models.reference is None, "must be the initial actor to be run"),
    _Need("models.reward", lambda j: j.document.models.reward is None, "must be a verifier to be run"),
    _Need("workload.tasks", lambda j: bool(j.workload.tasks), "must name at least one data set to be run"),
    _Need("workload.oversampling", lambda j: j.workload.oversampling == 1, "must be 1 to be run"),
    _Need("workload.turns", lambda j: j.workload.turns is None, "must not be given to be run"),
    _Need(
        "workload.shared_prefix_tokens",
        lambda j: j.workload.shared_prefix_tokens == 0,
        "must be 0 to be run: the engine here reads every prompt whole",
    ),
    _Need("models.actor.path", _has_weights, RUNNABLE_ACTOR),
    _Need(
        "models.actor",
        lambda j: _is_plain(j.actor, j.workload.max_tokens),
        "must be a dense decoder with full attention over `max_prompt_tokens` + `max_response_tokens` to be run",
    ),
)


def check_runnable(job: Job) -> None:
    """Refuse what can be planned but is not run here, before any worker meets it.

    Raises:
        InputError: names what the job asks for.
    """
    for need in _NEEDS:
        if not need.holds(job):
            got: object = reduce(getattr, need.path.split("."), job.document)
            word = repr(got) if isinstance(got, str) else got
            raise InputError(f"job: {need.path}", need.rule, word if isinstance(word, str | int | float) else None)


def check_plan(plan: Plan, job: Job, devices: int, *, where: str = "plan") -> None:
    """Refuse a plan that this executor would not run as it says on a machine of so many `devices`, before any worker
    starts.

    Raises:
        InputError: names what the plan or the job asks for.
    """
    check_runnable(job)
    for pool in plan.pools:
        if pool.group:
            raise InputError(f"{where}: pools", "must lie in group 0 to be run: a machine is one group", pool.group)
    machine = Devices(count=devices, domain=devices)
    check(plan, Setting(job=job, groups=(machine,), backend=backend("local")), where=where)


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
