"""What a replica is given and how it is cut up into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.layers import Work
from analytic.lengths import Distribution
from analytic.setup import Machine, Setup
from analytic.training import training

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a replica passes through a model between two optimizer steps."""

    count: Int
    """Sequences of a replica, int64[n]."""
    lengths: Distribution
    """Tokens of a whole sequence."""
    head_share: float
    """Of the tokens, those that go through the output head: responses in RL, all in pre-training."""
    longest: float
    """Most tokens a sequence may have."""
    imbalance: float | None = None
    """Load of the fullest expert-parallel device over the mean; 1: balanced by force; None: as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """How a replica's sequences are cut up, arrays over layouts."""

    batches: Int
    """Micro-batches, one after the other."""
    sequences: Float
    """Of one of them, on average."""
    mean: Work
    """Of one of them."""
    largest_tokens: Float
    """Tokens that the largest may have: memory must hold them, however rare they are."""
    imbalance: float | None = None
    """See `Batch`."""


def batch_of_job(s: Setup, count: Int) -> Batch:
    """`count` sequences a replica of an RL step."""
    mean = s.lengths.total.mean
    return Batch(
        count=count,
        lengths=s.lengths.total,
        head_share=s.lengths.response.mean / mean,
        longest=float(s.job.workload.max_tokens),
    )


def cut(machine: Machine, x: Mapping[str, NDArray[np.int32]], batch: Batch, cp: Int, limit: Int | None = None) -> Micro:
    """Cut a replica's sequences into micro-batches. By sequences, a core pads them to the longest, while other
    engines pack them; by tokens, micro-batches are filled up. At most `limit` sequences come at a time."""
    total, count = batch.lengths, batch.count
    size = np.maximum(np.minimum(x["micro_batch"], count), 1).astype(np.int64)
    size = size if limit is None else np.minimum(size, limit)
    budget = x["micro_tokens"].astype(np.float64) * cp
    tokens: Float = count * np.float64(total.mean)
    squares: Float = count * np.float64(total.second_moment)
    head: Float = tokens * batch.head_share
    if machine.is_host:
        tokens, squares = total.padded(count, size), total.padded_squares(count, size)
    by_tokens = np.maximum(np.ceil(tokens / np.maximum(budget, 1.0)), 1.0)
    batches = np.where(budget > 0, by_tokens, -(-count // size)).astype(np.int64)
    mean = Work(tokens=tokens, squares=squares, head_tokens=head).scaled(1.0 / batches)
    largest = size * batch.longest if machine.is_host else _largest(batch, size)
    # A sequence that is longer than the budget is a micro-batch of its own.
    largest = np.where(budget > 0, budget if machine.is_host else np.maximum(budget, batch.longest), largest)
    return Micro(
        batches=batches,
        sequences=count / batches,
        mean=mean,
        largest_tokens=largest,
        imbalance=batch.imbalance,
    )


def _largest(batch: Batch, size: Int) -> Float:
    """Tokens of the largest of many micro-batches of `size`: one sequence of full length, and others whose sum is some
    standard deviations above its mean."""
    others = size - 1.0
    deviation = np.sqrt(np.maximum(batch.lengths.second_moment - batch.lengths.mean**2, 0.0))
    likely = batch.longest + others * batch.lengths.mean + training().deviations * deviation * np.sqrt(others)
    return np.asarray(np.minimum(likely, size * batch.longest))


def straggling(
    batch: Batch, micro: Micro, dp: Int, by_tokens: NDArray[np.bool_], each: NDArray[np.bool_]
) -> tuple[Float, Float]:
    """What the slowest of `dp` replicas has more than the mean, as shares of (its whole work, its attention cores).

    Args:
        batch: What replicas are given.
        micro: How it is cut.
        dp: Replicas, which wait for each other.
        by_tokens: Where micro-batches are filled by tokens and replicas balanced, which leaves only attention unequal.
        each: Where replicas wait for each other after every micro-batch, as those with sharded weights do.

    The largest of dp sums of n draws is expected `sqrt(2 ln dp / n)` coefficients of variation above the mean
    (extreme value of normal variables).
    """
    drawn = np.where(each, micro.sequences, batch.count)
    spread = np.sqrt(2.0 * np.log(np.maximum(dp, 1)) / np.maximum(drawn, 1.0))
    lengths = batch.lengths
    squares = lengths.quantile(_MIDDLES) ** 2
    of_lengths = np.sqrt(max(lengths.second_moment / lengths.mean**2 - 1.0, 0.0))
    return np.where(by_tokens, 0.0, of_lengths * spread), spread * float(squares.std() / squares.mean()) * by_tokens


_MIDDLES: Float = (np.arange(64, dtype=np.float64) + 0.5) / 64.0
"""Of equal shares of the draws."""
