"""Speculative decoding: a step checks tokens that were guessed for each sequence, and gives it those that are right.

With a chance `a` that a guess is accepted, a step of `g` guesses gives `(1 - a^(g + 1)) / (1 - a)` tokens (arXiv:
2211.17192, equation 1). It takes the products of `g + 1` tokens a sequence, and reads a sequence's cached keys once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.decode import key_seconds, step_seconds
from analytic.engine import Engine, Seconds
from ir.workload import Speculation

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """An engine that decodes, with or without guesses."""

    engine: Engine
    keys: Float | float
    """Cached keys that a sequence reads in a step, summed over layers, on average over its steps."""
    guesses: Float
    """Tokens guessed for a sequence in a step, float64[n]."""
    speculation: Speculation | None

    def seconds(self, batch: Float) -> Seconds:
        """Seconds in which each of `batch` sequences (float64[n]) gains a token."""
        if self.speculation is None or not self.guesses.any():
            return self._step(batch, 1.0)
        step = self._step(batch, 1.0 + self.guesses)
        if self.speculation.cost > 0:
            step = step + self._step(batch, 1.0).times(self.speculation.cost * self.guesses)
        return step.times(1.0 / tokens_per_step(self.speculation, self.guesses))

    def _step(self, batch: Float, checked: Float | float) -> Seconds:
        """Of so many tokens of each sequence."""
        return step_seconds(self.engine, batch * checked, batch * self.keys * key_seconds(self.engine, checked))


def tokens_per_step(speculation: Speculation | None, guesses: Float) -> Float:
    """Tokens that a sequence gains in a decode step, expected, float64[n]; 1 without guesses."""
    if speculation is None:
        return np.ones_like(guesses)
    chance = speculation.acceptance
    return np.asarray((1.0 - chance ** (guesses + 1.0)) / (1.0 - chance))


def draft_bytes(speculation: Speculation | None, guesses: Float, weights: Float) -> Float:
    """Bytes of what guesses, float64[n]: reading weights bounds a decode step, so that a draft model is about as much
    smaller than the actor as it is faster. N-grams need none."""
    cost = 0.0 if speculation is None else speculation.cost
    return np.asarray(weights * min(cost, 1.0) * (guesses > 0))
