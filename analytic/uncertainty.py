"""How far off a predicted step may be: errors of each kind of cost, carried to stages and to the step.

Errors are relative standard deviations. Kinds of one stage are independent; the same kind
errs alike in all stages in part, for they use the same constants of a device. A stage
counts for as much of the step as it lies on the step's longest cycle.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from analytic.costs import KINDS
from analytic.estimate import Estimate, section_cost
from analytic.fit import setup
from analytic.steps import steps
from ir.cluster import Cluster
from ir.plan import SECTIONS

Float = NDArray[np.float64]

NUDGE = 1e-4
"""Relative change of a stage's seconds that shows its weight in the step."""


def stage_error(kinds: Mapping[str, Float], seconds: Float) -> Float:
    """Relative error of a stage, float64[n], from its seconds by kind; what is not told apart counts as `other`."""
    told = sum(kinds.values(), np.zeros_like(seconds))
    parts = {**kinds, "other": kinds.get("other", 0.0) + np.maximum(seconds - told, 0.0) * (not kinds)}
    squares = sum((steps().errors[kind] * values) ** 2 for kind, values in parts.items())
    return np.asarray(np.sqrt(squares) / np.maximum(seconds, 1e-300))


def stage_errors(estimate: Estimate, cluster: Cluster) -> Float:
    """Relative errors float64[n, stages] of all stages of plans; 0 where a plan has no such stage."""
    s, batch = setup(estimate.job, cluster), estimate.batch
    errors = np.where(estimate.stage_seconds > 0, steps().errors["other"], 0.0)
    for op in SECTIONS:
        rows = np.flatnonzero(batch.has(op))
        columns = [i for i, key in enumerate(estimate.stages) if str(op) in key.split("+")]
        if not len(rows) or not columns:
            continue
        cost = section_cost(s, op, {name: column[rows] for name, column in batch.section(op).items()})
        assert set(cost.kinds) <= set(KINDS), "kinds are those of the table"
        found = stage_error(cost.kinds, cost.seconds)
        for column in columns:
            errors[rows, column] = np.where(estimate.stage_seconds[rows, column] > 0, found, 0.0)
    return errors


def stage_weights(estimate: Estimate) -> Float:
    """Relative change of the step over that of each stage, float64[n, stages]."""
    rows = np.arange(len(estimate.batch))
    base = estimate.compose(estimate.stage_seconds, rows)
    nudged = estimate.stage_seconds[None] * (1.0 + NUDGE * np.eye(len(estimate.stages))[:, None, :])
    return np.asarray(((estimate.compose(nudged, rows) / base - 1.0) / NUDGE).T)


def step_error(estimate: Estimate, cluster: Cluster, *, calibrated: bool = False) -> Float:
    """Relative error of each plan's step, float64[n], to first order: of its stages, of runs, and of what a framework
    adds, all of it or once it was `calibrated` by a measured run, what differs between models."""
    stages = propagated(stage_weights(estimate), stage_errors(estimate, cluster))
    beside = steps().noise ** 2 + steps().models ** 2 + (0.0 if calibrated else steps().framework ** 2)
    return np.asarray(np.sqrt(stages**2 + beside))


def propagated(weights: Float, errors: Float) -> Float:
    """Relative error float64[n] of a step from its stages' weights and errors, float64[n, stages] each: the share of
    variance that stages have in common adds up before it is squared."""
    parts, shared = weights * errors, steps().shared
    return np.asarray(np.sqrt(shared * parts.sum(axis=1) ** 2 + (1.0 - shared) * (parts**2).sum(axis=1)))
