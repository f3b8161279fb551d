"""The best plan by the model, as a plan."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ir.backend import Backend
from ir.batch import CODES
from ir.cluster import Cluster
from ir.errors import InputError
from ir.job import Job, with_limits
from ir.plan import Generate, Plan, Update
from search.survey import survey


def best_against(
    plan: Plan, job: Job, cluster: Cluster, *, backend: Backend | None = None, fix: Mapping[str, int] | None = None
) -> Plan:
    """The best plan on at most as many devices as a plan has, and in its number formats, that the model says fits.

    Args:
        plan: What is to be bettered; its values are considered too.
        job: It must have lengths.
        cluster: Where both run.
        backend: What must be able to run the better plan.
        fix: Columns that are given, number formats among them.

    Raises:
        InputError: no plan is legal, or none fits.
    """
    limits = msgspec.structs.replace(job.limits, devices=None, max_devices=plan.num_devices)
    fixed = {**_formats(plan), **(fix or {})}
    found = survey(with_limits(job, limits), cluster, backend=backend, fix=fixed, known=[plan], designs=1)
    rows = found.ranking(1)
    if not rows:
        raise InputError("job", f"must have a plan that fits on {plan.num_devices} devices", "none")
    return found.legal.batch.plan(rows[0])


def _formats(plan: Plan) -> dict[str, int]:
    """Columns of number formats: a faster format changes what is learnt."""
    sections = {op: section for op, section in plan.sections.items() if isinstance(section, Generate | Update)}
    return {f"{op}.precision": CODES["precision"].index(section.precision) for op, section in sections.items()}
