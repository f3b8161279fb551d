"""The best plan by the model, as a plan."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ir.backend import Backend
from ir.cluster import Cluster
from ir.errors import InputError
from ir.job import Job, with_limits
from ir.plan import Plan
from search.survey import survey


def best_within(
    job: Job, cluster: Cluster, devices: int, *, backend: Backend | None = None, fix: Mapping[str, int] | None = None
) -> Plan:
    """The best plan on at most that many devices that the model says fits.

    Raises:
        InputError: no plan is legal, or none fits.
    """
    limits = msgspec.structs.replace(job.limits, devices=None, max_devices=devices)
    found = survey(with_limits(job, limits), cluster, backend=backend, fix=fix)
    rows = found.ranking(1)
    if not rows:
        raise InputError("job", f"must have a plan that fits on {devices} devices", "none")
    return found.legal.batch.plan(rows[0])
