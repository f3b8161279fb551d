"""Response and prompt lengths as a distribution given by quantiles: means, maxima, and padding of micro-batches.

The quantile function Q is linear between the points, so moments are exact integrals of it over [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from ir.job import Job
from ir.lengths import QuantileTable

Float = NDArray[np.float64]

_FINE = np.union1d(np.linspace(0.0, 0.5, 256), 1.0 - 2.0 ** -np.linspace(1.0, 24.0, 256))
_FINE = np.append(_FINE, 1.0)
"""Probabilities, closer together towards 1, that integrals over a distribution are summed at."""


# No slots, so that what is integrated once can be kept.
@dataclass(frozen=True)
class Distribution:
    """Quantiles, ascending."""

    quantiles: tuple[float, ...]
    probabilities: tuple[float, ...] = ()
    """Ascending from 0 to 1, one for each quantile; empty for even spacing."""

    def quantile(self, p: Float) -> Float:
        """Value that a share `p` stays below."""
        return np.interp(p, self.at, self.quantiles)

    @cached_property
    def mean(self) -> float:
        """E[L]: between two points Q has the mean of their values."""
        low, high, weight = self._pieces
        return float((weight * (low + high)).sum() / 2.0)

    @cached_property
    def second_moment(self) -> float:
        """E[L^2]: between a and b, Q^2 has the mean (a^2 + ab + b^2) / 3."""
        low, high, weight = self._pieces
        return float((weight * (low * low + low * high + high * high)).sum() / 3.0)

    def expected_largest(self, n: Float) -> Float:
        """Expected maximum of n >= 1 draws, exactly: the integral of Q(p) d(p^n), by parts Q(1) less that of
        Q'(p) p^n. A plotting position is short of it where the tail is heavy, by 5 % for 512 draws at sigma 0.8."""
        draws, inverse = np.unique(n, return_inverse=True)
        low, high, weight = self._pieces
        powers = np.diff(self.at ** (draws[:, None] + 1.0), axis=1) / (draws[:, None] + 1.0)
        largest: Float = self.quantiles[-1] - powers @ ((high - low) / weight)
        return largest[inverse.reshape(-1)]

    def keys_seen(self, before: float, window: int) -> float:
        """Expected sum over a sequence's tokens of the keys that each sees, when `before` tokens precede them; no more
        than a window, which 0 leaves open."""
        whole = before * self.mean + self.second_moment / 2.0
        if not window:
            return whole
        # Tokens beyond the window see those that it holds: min(before + x, window), summed over x up to L.
        room = max(window - before, 0.0)
        inside = np.minimum(self._fine, room)
        seen = before * inside + inside**2 / 2.0 + (self._fine - inside) * window
        return Distribution(tuple(seen.tolist()), tuple(_FINE.tolist())).mean

    def most_resident(self, before: float) -> float:
        """Largest tokens per sequence that sequences begun together hold at a time: max over x of S(x) (before + x)."""
        return float(((1.0 - _FINE) * (before + self._fine)).max())

    @cached_property
    def residual(self) -> Distribution:
        """Tokens that are left of a sequence found at work at a random time: density S(x) / E[L]."""
        values = np.concatenate([[0.0], self._fine])
        survival = np.concatenate([[1.0], 1.0 - _FINE])
        below = np.concatenate([[0.0], np.cumsum(np.diff(values) * (survival[1:] + survival[:-1]) / 2.0)])
        at, first = np.unique(below / below[-1], return_index=True)
        return Distribution(tuple(values[first].tolist()), tuple(at.tolist()))

    def excess(self, limit: Float) -> Float:
        """E[(L - limit)+], float64 of any shape."""
        at = np.concatenate([[0.0], self._fine])
        survival = np.concatenate([[1.0], 1.0 - _FINE])
        pieces = np.diff(at) * (survival[1:] + survival[:-1]) / 2.0
        beyond = np.concatenate([np.cumsum(pieces[::-1])[::-1], [0.0]])
        left: Float = np.interp(limit, at, beyond)
        return left

    @cached_property
    def _fine(self) -> Float:
        """Values at `_FINE`."""
        return self.quantile(_FINE)

    def padded(self, count: NDArray[np.int64], size: NDArray[np.int64]) -> Float:
        """Expected sum over `count` sequences of the length they are padded to, when they are sorted by length and cut
        into micro-batches of `size`, longest first. Equal-length arrays."""
        return self._padded(count, size, power=1)

    def padded_squares(self, count: NDArray[np.int64], size: NDArray[np.int64]) -> Float:
        """As `padded`, for the sum of squared padded lengths."""
        return self._padded(count, size, power=2)

    def _padded(self, count: NDArray[np.int64], size: NDArray[np.int64], *, power: int) -> Float:
        pairs, inverse = np.unique(np.stack([count, size], axis=-1), axis=0, return_inverse=True)
        n, b = pairs[:, 0], pairs[:, 1]
        batches = -(-n // b)
        # One row a micro-batch of every pair: which pair it belongs to, and where in its order it begins.
        pair = np.repeat(np.arange(len(pairs)), batches)
        first = (np.arange(len(pair)) - np.repeat(np.cumsum(batches) - batches, batches)) * b[pair]
        members = np.minimum(b[pair], n[pair] - first)
        # The j-th longest of n draws is expected at probability (n - j + 1 - 0.375) / (n + 0.25).
        longest = self.quantile((n[pair] - first - 0.375) / (n[pair] + 0.25))
        sums = np.bincount(pair, weights=members * longest**power, minlength=len(pairs)).astype(np.float64)
        return sums[inverse.reshape(-1)]

    @cached_property
    def at(self) -> Float:
        """The probability of each quantile."""
        return np.array(self.probabilities) if self.probabilities else np.linspace(0.0, 1.0, len(self.quantiles))

    @cached_property
    def _pieces(self) -> tuple[Float, Float, Float]:
        """(value at the lower end, at the upper end, share of the draws) of each stretch between two points."""
        values = np.array(self.quantiles, dtype=np.float64)
        return values[:-1], values[1:], np.diff(self.at)


# No slots here either.
@dataclass(frozen=True, kw_only=True)
class LengthModel:
    """Prompt, response and whole-sequence lengths of a job."""

    prompt: Distribution
    response: Distribution
    prompt_share: float = 0.0
    """Part of the variance of log(response) that the prompt explains."""

    def longest(self, groups: Float, members: int) -> Float:
        """Expected longest response of so many groups of `members` samples of one prompt, float64[n]: samples of a
        prompt are alike, so that they hold fewer extremes than as many of different prompts. Their logarithms share a
        normal part, over which the members are independent: P(all <= x) = E_z[P(L <= x | z)^members]^groups."""
        if self.prompt_share == 0.0 or members == 1:
            return self.response.expected_largest(groups * members)
        share = min(self.prompt_share, 0.999)
        nodes, weights = hermegauss(32)
        score = ndtri(np.clip(_FINE, 1e-12, 1.0 - 1e-12))[:, None]
        each = ndtr((score - np.sqrt(share) * nodes) / np.sqrt(1.0 - share))
        below = (each**members) @ (weights / weights.sum())
        below[0], below[-1] = 0.0, 1.0
        values = self.response.quantile(_FINE)
        draws, inverse = np.unique(groups, return_inverse=True)
        powers = below ** draws[:, None]
        lost = (powers[:, 1:] + powers[:, :-1]) / 2.0 @ np.diff(values)
        largest: Float = values[-1] - lost
        return largest[inverse.reshape(-1)]

    @cached_property
    def total(self) -> Distribution:
        """Prompt and response together: longer answers belong to longer prompts, so their quantiles add up."""
        at = np.union1d(self.prompt.at, self.response.at)
        total = self.prompt.quantile(at) + self.response.quantile(at)
        return Distribution(tuple(total.tolist()), tuple(at.tolist()))


def length_model(job: Job) -> LengthModel:
    """The job's lengths; they must have been given or measured."""
    lengths = job.lengths
    assert lengths is not None, "lengths are given or measured before anything is priced"
    return LengthModel(
        prompt=_distribution(lengths.prompt),
        response=_distribution(lengths.response),
        prompt_share=lengths.prompt_share,
    )


def _distribution(table: QuantileTable) -> Distribution:
    return Distribution(table.values, table.probabilities)
