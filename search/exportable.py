"""Whether a framework can run a plan, which plan near it it can, and what is predicted of it."""

from __future__ import annotations

from ir.backends import backend
from ir.cluster import Cluster
from ir.errors import InputError
from ir.job import Job
from ir.plan import Plan
from ir.rules import check, setting_of
from search.nearest import nearest
from search.prediction import predictions
from search.repair import changes
from search.report import size_text


def require(plan: Plan, job: Job, cluster: Cluster, name: str, *, where: str) -> None:
    """Refuse a plan that the backend of that name cannot run.

    Raises:
        InputError: names the axis, the rule, and the changes that lead to the nearest plan that it can run.
    """
    setting = setting_of(job, cluster, backend(name))
    try:
        check(plan, setting, where=where)
    except InputError as error:
        near = nearest(plan, setting)
        got = "" if error.got is None else f"{error.got}; "
        cure = "it can run no plan of this job" if near is None else f"nearest: {' '.join(changes(plan, near))}"
        raise InputError(error.where, error.rule, got + cure) from error


def predicted_notes(job: Job, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What the model says of a plan, a line each."""
    if job.lengths is None:
        return ("nothing is predicted: the job has no lengths",)
    (told,) = predictions(job, [plan], cluster)
    return (
        f"on {cluster.name}, predicted: {told.step_s:.3g} s a step (+-{told.error:.0%}), set by the {told.bound_by}",
        f"predicted memory: {size_text(told.memory_bytes)} on the fullest device, {told.memory_share:.0%} of it",
        f"staleness: {told.mean_staleness:.2f} versions on average, at most {told.largest_staleness:g}",
    )
