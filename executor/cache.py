"""What is kept between runs: this machine as it was measured, and lengths of a job's responses."""

from __future__ import annotations

import os
from pathlib import Path

from executor.machine import devices_here, hardware_fingerprint
from ir.cluster import Cluster
from ir.documents import read_document
from ir.errors import InputError
from ir.job import Job, Lengths, with_lengths


def cache_directory() -> Path:
    """Where measured clusters and warm-started models are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "steptune"


def cluster_path() -> Path:
    """Where this machine's measurement is kept."""
    return cache_directory() / f"cluster-{hardware_fingerprint(*devices_here())}.toml"


def cached_cluster() -> Cluster | None:
    """This machine as it was measured before, if it was."""
    path = cluster_path()
    try:
        return read_document(path, Cluster) if path.exists() else None
    except InputError:
        # Measured by another version, with other figures: measured anew.
        return None


def known_lengths(job: Job) -> Job:
    """The job with the lengths that were measured for it before, where it gives none."""
    path = lengths_path(job)
    if job.workload.lengths is not None or not path.exists():
        return job
    return with_lengths(job, read_document(path, Lengths))


def lengths_path(job: Job) -> Path:
    """Where the lengths that were measured for a job are kept."""
    return cache_directory() / "lengths" / f"{job.identity}.toml"
