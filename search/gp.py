"""Gaussian processes on levels, with one effect per axis.

The kernel is k(x, x') = a0^2 + a1^2 sum_j w_j kappa_j(x_j, x'_j): a constant that all plans
share, and per axis an effect of its own (additive Gaussian processes, Duvenaud et al. 2011).
Posterior means are therefore sums of one number per axis and level, so a million plans
cost a table look-up per axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from search.problem import Floats
from space.axes import Levels, Space

_LEVELS_APART = 1.5
"""Levels after which the correlation of an ordered axis falls by e."""
_JITTER = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prior:
    """What is believed of a target before any run."""

    constant_sd: float
    """a0: by how much the model may be wrong for all plans alike."""
    weights: Floats
    """w_j, float64[axes]."""
    effect_sd: tuple[float, ...]
    """Grid of a1, the standard deviation of one axis's effect."""
    noise_sd: tuple[float, ...]
    """Grid of the standard deviation from run to run."""


EFFECT_GRID = (0.04, 0.08, 0.16, 0.3)
NOISE_GRID = (0.025, 0.05, 0.09)
_EFFECT_CENTRE, _EFFECT_SPREAD = 0.08, 0.7
_NOISE_CENTRE, _NOISE_SPREAD = 0.05, 0.5
"""Log-normal priors over the two grids: median, and standard deviation of the logarithm."""


def axis_tables(space: Space) -> tuple[Floats, ...]:
    """Correlation of every two levels of each axis, float64[levels, levels] per axis.

    exp(-|difference| / 1.5) on ordered axes; on others 1 if alike, else 0.
    """
    tables = []
    for axis in space.axes:
        level = np.arange(len(axis.values))
        apart = np.abs(level[:, None] - level[None, :])
        tables.append(np.exp(-apart / _LEVELS_APART) if axis.ordered else np.eye(len(level)))
    return tuple(tables)


def correlations(tables: tuple[Floats, ...], left: Levels, right: Levels) -> Floats:
    """Correlation per axis of every two plans, float64[axes, m, n]."""
    return np.stack([table[left[:, [j]], right[None, :, j]] for j, table in enumerate(tables)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """Measurements of one target."""

    levels: Levels
    """int64[n, axes]."""
    targets: Floats
    """float64[n], zero where the model is right."""
    variance: Floats
    """float64[n], noise of each beyond that from run to run."""


def append(data: Data, levels: Levels, targets: Floats, variance: float) -> Data:
    """With the given measurements added, all of one variance."""
    return Data(
        levels=np.concatenate([data.levels, levels]),
        targets=np.concatenate([data.targets, targets]),
        variance=np.concatenate([data.variance, np.full(len(levels), variance)]),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """What is believed after the runs."""

    tables: tuple[Floats, ...]
    prior: Prior
    """With the fitted standard deviations alone in its grids."""
    data: Data
    whitener: Floats
    """Inverse of the Cholesky factor of the data's covariance, float64[n, n]."""
    solved: Floats
    """Inverse covariance times targets, float64[n]."""

    def mean(self, levels: Levels) -> Floats:
        """float64[m]."""
        total = np.full(len(levels), self.prior.constant_sd**2 * self.solved.sum())
        scale = self.prior.effect_sd[0] ** 2 * self.prior.weights
        for axis, table in enumerate(self.tables):
            effect = scale[axis] * (table[:, self.data.levels[:, axis]] @ self.solved)
            total += effect[levels[:, axis]]
        return total

    def sd(self, cross: Floats) -> Floats:
        """Standard deviations float64[m], given `correlations` float64[axes, m, n] with the data."""
        explained = self.whitener @ self._covariance(cross).T
        before = self.prior.constant_sd**2 + self.prior.effect_sd[0] ** 2 * self.prior.weights.sum()
        left: Floats = np.sqrt(np.maximum(before - (explained**2).sum(axis=0), _JITTER))
        return left

    def factor(self, cross: Floats, among: Floats) -> Floats:
        """Cholesky factor float64[m, m] of the joint covariance of m plans, given their correlations
        float64[axes, m, n] with the data and float64[axes, m, m] with each other."""
        explained = self.whitener @ self._covariance(cross).T
        joint = self._covariance(among) - explained.T @ explained
        # An additive kernel has a low rank, so rounding may leave eigenvalues just below 0.
        padded = joint + 10 * _JITTER * len(joint) * np.eye(len(joint))
        return np.asarray(np.linalg.cholesky(padded), dtype=np.float64)

    def _covariance(self, correlation: Floats) -> Floats:
        effects = np.asarray(np.tensordot(self.prior.weights, correlation, 1), dtype=np.float64)
        return self.prior.constant_sd**2 + self.prior.effect_sd[0] ** 2 * effects

    def believing(self, levels: Levels) -> Posterior:
        """After also measuring the given plans as predicted now: means stay, spreads shrink."""
        return fit(self.prior, self.tables, append(self.data, levels, self.mean(levels), 0.0))


def fit(prior: Prior, tables: tuple[Floats, ...], data: Data) -> Posterior:
    """The posterior under the grid's most probable pair of standard deviations."""
    n = len(data.targets)
    effects = np.tensordot(prior.weights, correlations(tables, data.levels, data.levels), 1)
    grid = [(effect, noise) for effect in prior.effect_sd for noise in prior.noise_sd]
    effect, noise = np.array(grid).T
    covariances = (
        prior.constant_sd**2
        + effect[:, None, None] ** 2 * effects
        + (noise[:, None, None] ** 2 + data.variance) * np.eye(n)
    )
    factors = np.linalg.cholesky(covariances)
    whiteners = np.linalg.inv(factors)
    white = whiteners @ data.targets
    evidence = -0.5 * (white**2).sum(axis=-1) - np.log(np.einsum("gii->gi", factors)).sum(axis=-1)
    evidence -= 0.5 * (np.log(effect / _EFFECT_CENTRE) / _EFFECT_SPREAD) ** 2
    evidence -= 0.5 * (np.log(noise / _NOISE_CENTRE) / _NOISE_SPREAD) ** 2
    best = int(evidence.argmax())
    return Posterior(
        tables=tables,
        prior=replace(prior, effect_sd=(grid[best][0],), noise_sd=(grid[best][1],)),
        data=data,
        whitener=whiteners[best],
        solved=whiteners[best].T @ white[best],
    )
