"""A cluster corrected by measurements: constants by measured kernels, kinds of stages by real runs. Records in, cluster
out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate, estimate
from analytic.kernelfit import fit_kernels
from analytic.scales import assumed, kind_of
from ir.batch import PLACED, PlanBatch
from ir.cluster import SCALED, Cluster, Group, StageScale
from ir.job import Job
from traces.schema import Trial, TrialState

Float = NDArray[np.float64]

PRIOR_DEVIATION = 0.2
"""Of the logarithm of a kind's scale around 0, before any run."""

NOISE_PLANS = 4.0
"""Plans that the prior of the spread between plans counts for, with the same deviation: two plans that happen to agree
must not look certain."""

MEDIAN_FACTOR = 1.2533
"""Standard error of a median over that of a mean: the square root of pi / 2."""

ROLE_OF_KIND = {"generate": "rollout", "passes": "reference", "update": "actor", "sync": "actor", "reward": "actor"}
"""On whose pool a kind of stage runs, for the group of devices that it tells about."""


def fitted(cluster: Cluster) -> Cluster:
    """The cluster with the constants of its devices fitted to the kernels that were measured on them; a cluster whose
    devices have none, as cores do, stays as it is."""
    groups = tuple(msgspec.structs.replace(group, device=fit_kernels(group)) for group in cluster.groups)
    return msgspec.structs.replace(cluster, groups=groups)


def refit(cluster: Cluster, job: Job, plans: PlanBatch, trials: Sequence[Trial]) -> Cluster:
    """The cluster with scales of its kinds of stages learnt from real runs. Earlier scales are replaced: the runs given
    are all that is known, so that the same runs twice give the same cluster.

    Args:
        cluster: Where the runs were.
        job: What they ran, with its lengths.
        plans: The plan of each trial, a row each.
        trials: Those that did not complete, and stages without seconds, count for nothing.
    """
    plain = without_scales(cluster)
    good = np.array([t.state is TrialState.COMPLETE and bool(t.stage_seconds) for t in trials], dtype=bool)
    if not good.any():
        return plain
    batch, runs = plans.take(good), [trial for trial, use in zip(trials, good, strict=True) if use]
    ratios = stage_ratios(estimate(job, batch, plain), runs)
    identity = _identity(batch)
    groups = tuple(
        _with_scales(group, {kind: ratios[kind][_here(batch, kind, index)] for kind in SCALED}, {
            kind: identity[_here(batch, kind, index)] for kind in SCALED
        })
        for index, group in enumerate(plain.groups)
    )  # fmt: skip
    return msgspec.structs.replace(plain, groups=groups)


def without_scales(cluster: Cluster) -> Cluster:
    """As it was before any run."""
    groups = tuple(
        msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, scales=None))
        for group in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups)


def stage_ratios(modelled: Estimate, trials: Sequence[Trial]) -> dict[str, Float]:
    """Measured over modelled seconds of each kind of stage, float64[n] each: over a plan's stages of the kind together;
    nan where there is none, or nothing was measured of one that there is."""
    measured = np.array([[trial.stage_seconds.get(key, 0.0) for key in modelled.stages] for trial in trials])
    known = (measured > 0) & (modelled.stage_seconds > 0)
    found = {}
    for kind in SCALED:
        mine = known & np.array([kind_of(key) == kind for key in modelled.stages])
        above, below = (measured * mine).sum(axis=1), (modelled.stage_seconds * mine).sum(axis=1)
        found[kind] = np.divide(above, below, out=np.full(len(trials), np.nan), where=below > 0)
    return found


def shrunk(ratios: Float) -> StageScale | None:
    """The scale that plans with these ratios, one each, speak for; None if there is no plan.

    The posterior of a normal logarithm: its median over plans, with a standard error from their spread (by the median
    absolute deviation, which outliers do not move), against the prior at a factor of 1.
    """
    logs = np.log(ratios[np.isfinite(ratios)])
    if len(logs) == 0:
        return None
    middle = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - middle)))
    variance = (NOISE_PLANS * PRIOR_DEVIATION**2 + len(logs) * spread**2) / (NOISE_PLANS + len(logs))
    precision = len(logs) / (MEDIAN_FACTOR**2 * variance)
    whole = precision + PRIOR_DEVIATION**-2
    return StageScale(factor=math.exp(middle * precision / whole), plans=len(logs), deviation=math.sqrt(1.0 / whole))


def _with_scales(group: Group, ratios: dict[str, Float], identity: dict[str, NDArray[np.intp]]) -> Group:
    scales: dict[str, StageScale] = {}
    for kind in SCALED:
        scale = shrunk(_by_plan(ratios[kind], identity[kind]))
        if scale is not None:
            # Ratios are over what is assumed before any run, which a learnt scale replaces.
            factor = scale.factor * assumed(group.device, kind)
            scales[kind] = msgspec.structs.replace(scale, factor=factor)
    return msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, scales=scales or None))


def _by_plan(ratios: Float, identity: NDArray[np.intp]) -> Float:
    """One ratio a plan: runs of the same plan say the same again. float64[plans], nan where none was measured."""
    logs = np.log(ratios)
    known = np.isfinite(logs)
    return np.array([np.exp(np.mean(logs[known & (identity == plan)])) for plan in np.unique(identity[known])])


def _identity(batch: PlanBatch) -> NDArray[np.intp]:
    """Number of each row's plan, the same for equal plans."""
    table = np.stack([batch[name] for name in batch.columns], axis=-1)
    _, inverse = np.unique(table, axis=0, return_inverse=True)
    return np.asarray(inverse, dtype=np.intp).reshape(-1)


def _here(batch: PlanBatch, kind: str, group: int) -> NDArray[np.bool_]:
    """Plans whose stages of the kind run on this group of devices."""
    role = ROLE_OF_KIND[kind]
    assert role in PLACED
    elsewhere = batch[f"devices.{role}"] == 0
    column = np.where(elsewhere, batch["group.actor"], batch[f"group.{role}"])
    return np.asarray(column == group)
