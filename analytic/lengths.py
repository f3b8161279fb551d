"""Response and prompt lengths as a distribution given by quantiles: means, maxima, and padding of micro-batches.

The quantile function is piecewise linear between evenly spaced probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.job import Job

Float = NDArray[np.float64]

GRID = 512
"""Points that integrals over the distribution are summed on."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantiles at evenly spaced probabilities from 0 to 1, ascending."""

    quantiles: tuple[float, ...]

    def quantile(self, p: Float) -> Float:
        """Value that a share `p` stays below."""
        return np.interp(p, np.linspace(0.0, 1.0, len(self.quantiles)), self.quantiles)

    @property
    def mean(self) -> float:
        """E[L]."""
        return float(self.quantile(_midpoints(GRID)).mean())

    @property
    def second_moment(self) -> float:
        """E[L^2]."""
        return float((self.quantile(_midpoints(GRID)) ** 2).mean())

    def largest_of(self, n: Float) -> Float:
        """Expected maximum of n draws (Blom's plotting position)."""
        return self.quantile((n - 0.375) / (n + 0.25))

    def padded(self, count: NDArray[np.int64], size: NDArray[np.int64]) -> Float:
        """Expected sum over `count` sequences of the length they are padded to, when they are sorted by length and cut
        into micro-batches of `size`, longest first. Equal-length arrays."""
        pairs, inverse = np.unique(np.stack([count, size], axis=-1), axis=0, return_inverse=True)
        values = np.array([self._padded(int(n), int(b)) for n, b in pairs])
        return values[inverse.reshape(-1)]

    def padded_squares(self, count: NDArray[np.int64], size: NDArray[np.int64]) -> Float:
        """As `padded`, for the sum of squared padded lengths."""
        pairs, inverse = np.unique(np.stack([count, size], axis=-1), axis=0, return_inverse=True)
        values = np.array([self._padded(int(n), int(b), power=2) for n, b in pairs])
        return values[inverse.reshape(-1)]

    def _padded(self, n: int, b: int, power: int = 1) -> float:
        # The j-th longest of n draws is expected at probability (n - j + 1 - 0.375) / (n + 0.25).
        first = np.arange(0, n, b)
        sizes = np.minimum(b, n - first)
        longest = self.quantile(((n - first - 0.375) / (n + 0.25)).astype(float))
        return float((sizes * longest**power).sum())


def _midpoints(n: int) -> Float:
    return (np.arange(n) + 0.5) / n


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Prompt, response and whole-sequence lengths of a job."""

    prompt: Distribution
    response: Distribution

    @property
    def total(self) -> Distribution:
        """Prompt and response together: longer answers belong to longer prompts, so their quantiles add up."""
        grid = np.linspace(0.0, 1.0, max(len(self.prompt.quantiles), len(self.response.quantiles)))
        total = self.prompt.quantile(grid) + self.response.quantile(grid)
        return Distribution(tuple(float(v) for v in total))


def length_model(job: Job) -> LengthModel:
    """The job's lengths; they must have been given or measured."""
    lengths = job.workload.lengths
    assert lengths is not None, "lengths are given or measured before anything is priced"
    return LengthModel(prompt=_sorted(lengths.prompt), response=_sorted(lengths.response))


def _sorted(quantiles: Sequence[float]) -> Distribution:
    return Distribution(tuple(sorted(quantiles)))
