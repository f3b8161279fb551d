"""How many decode steps an engine takes for its sequences, and how full they are: slots, saturation and drain.

Whatever the schedule, live sequences summed over all steps are the generated tokens, and the keys they see are
`sum(p L + L^2 / 2)`. The schedule decides the number of steps only: as many as the longest sequence if all fit at
once, else steps with full slots, until none waits, and a drain as long as the longest of the residual lives then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from analytic.lengths import LengthModel
from analytic.serving import serving

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine is given in an RL step, float64[n] each where it says so."""

    count: Float
    """Sequences of a step, float64[n]."""
    members: int
    """Samples of a prompt."""
    engines: Float
    """Engines that share a step's sequences, float64[n]."""
    wanted: Float
    """Sequences decoded together at most, were there room for all, float64[n]."""
    capacity: Float
    """Tokens that the cache holds, float64[n]."""
    held: float
    """Prompt tokens that a live sequence holds of its own: those it shares with others count in part."""
    used: float = 1.0
    """Share of the sequences after which a step ends: the others are abandoned."""
    decoded: float = 1.0
    """Share of a response's tokens that are generated; the others are read."""
    idle: Float | float = 0.0
    """Decode steps that a sequence waits for its environment, in all its turns, float64[n]."""
    idle_longest: Float | float = 0.0
    """The same of the one that waits longest, float64[n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """An engine's work for an RL step, float64[n] each."""

    slots: Float
    """Sequences live together while others wait."""
    full: Float
    """Decode steps with full slots."""
    batch: Float
    """Sequences decoded in each of them: those that are not waiting for their environment."""
    drain: Float
    """Decode steps from then on, until the last sequence that counts is done."""
    last: Float
    """Mean sequences decoded in those."""
    share: Float
    """Of all tokens, those that are generated before the step ends."""
    recomputed: Float
    """Tokens read again because the cache had no room for them."""

    @property
    def steps(self) -> Float:
        """Decode steps in all."""
        return self.full + self.drain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """Steps for which a sequence holds a slot, float64[n] or float."""

    mean: Float | float
    residual: Float | float
    """Mean left at a random time."""


def slots_of(lengths: LengthModel, load: Load) -> Float:
    """Sequences that are live together, one at least: at most those that the cache holds in the long run."""
    room = np.maximum(load.capacity / _resident(lengths, load), 1.0)
    slots: Float = np.minimum(np.minimum(load.wanted, np.maximum(load.count, 1.0)), room)
    return slots


def drained(lengths: LengthModel, load: Load) -> Phase:
    """A step whose sequences are all begun and ended by the same weights: slots run empty at its end."""
    life, response = _life(lengths, load), lengths.response
    once = load.count * response.most_resident(load.held) <= load.capacity
    one_wave = (load.count <= load.wanted) & once
    slots = np.where(one_wave, np.maximum(load.count, 1.0), slots_of(lengths, load))
    # Where the cache limits the slots, engines begin more sequences than it holds and drop the youngest for a while:
    # by event simulation about the geometric mean of what it holds and what is wanted.
    begun = np.sqrt(slots * np.maximum(np.minimum(load.wanted, np.maximum(load.count, 1.0)), slots))
    over = begun / slots
    full = np.maximum(load.count * life.mean / slots - over * life.residual, 0.0)
    longest = load.decoded * lengths.longest(load.count * load.engines / load.members, load.members)
    longest = longest + load.idle_longest
    last = load.decoded * (response.residual.expected_largest(begun) - response.residual.mean) + life.residual
    last = np.maximum(last, over * life.residual)
    full = np.where(one_wave, 0.0, full + _imbalance(lengths, load, slots))
    drain = np.where(one_wave, longest, np.maximum(longest - full, last))
    done = np.ones_like(drain)
    if load.used < 1.0:
        full, drain, done = _cut(lengths, load, slots, full, one_wave)
    batch = slots * load.decoded * response.mean / life.mean
    tokens = done * load.decoded * load.count * response.mean
    return Phase(
        slots=slots,
        full=full,
        batch=batch,
        drain=drain,
        last=np.maximum(tokens - full * batch, 0.0) / np.maximum(drain, 1e-9),
        share=done,
        recomputed=np.where(one_wave, 0.0, _recomputed(lengths, load)),
    )


def continuous(lengths: LengthModel, load: Load, ahead: Float) -> Phase:
    """The share of one step in a run that never drains: `ahead` further steps' sequences fill the slots."""
    life = _life(lengths, load)
    several = replace(load, count=load.count * (1.0 + ahead))
    slots = slots_of(lengths, several)
    full = load.count * life.mean / slots
    return Phase(
        slots=slots,
        full=full,
        batch=slots * load.decoded * lengths.response.mean / life.mean,
        drain=np.zeros_like(full),
        last=np.ones_like(full),
        share=np.ones_like(full),
        recomputed=_recomputed(lengths, several) / (1.0 + ahead),
    )


def latency_steps(lengths: LengthModel, load: Load, slots: Float) -> Float:
    """Decode steps from the first sequence of a step to its last, in a run that never drains."""
    life, residual = _life(lengths, load), lengths.response.residual
    longest = load.decoded * lengths.longest(load.count * load.engines / load.members, load.members)
    last = load.decoded * (residual.expected_largest(np.maximum(slots, 1.0)) - residual.mean)
    behind = np.where(slots < load.count, load.count * life.mean / slots + last, 0.0)
    steps: Float = np.maximum(longest + load.idle_longest, behind)
    return steps


def _life(lengths: LengthModel, load: Load) -> _Life:
    mean, second = load.decoded * lengths.response.mean, load.decoded**2 * lengths.response.second_moment
    whole = mean + load.idle
    return _Life(mean=whole, residual=(second + 2.0 * mean * load.idle + np.square(load.idle)) / (2.0 * whole))


def _resident(lengths: LengthModel, load: Load) -> float:
    """Tokens that a live sequence holds in the long run: half a block is empty."""
    return load.held + lengths.response.residual.mean + serving().block_tokens / 2.0


def _recomputed(lengths: LengthModel, load: Load) -> Float:
    """Engines admit as long as prompts fit and drop what later does not."""
    c, wanted = serving(), np.minimum(load.wanted, load.count)
    short = np.maximum(1.0 - load.capacity / np.maximum(wanted * _resident(lengths, load), 1.0), 0.0)
    share = c.recompute * np.exp(-c.recompute_waves * (1.0 - short) * wanted / np.maximum(load.count, 1.0)) * short
    return np.where(load.capacity < np.inf, share * load.count * lengths.response.mean, 0.0)


def _imbalance(lengths: LengthModel, load: Load, slots: Float) -> Float:
    """Steps that the engine with the most tokens takes more than the mean one: prompts are dealt out beforehand, and
    samples of a prompt are alike."""
    response = lengths.response
    variance = max(response.second_moment - response.mean**2, 0.0)
    alike = 1.0 + (load.members - 1) * lengths.prompt_share
    spread = load.decoded * np.sqrt(variance * alike * load.count) / slots
    return spread * largest_normal(load.engines)


def largest_normal(n: Float) -> Float:
    """Expected largest of n standard normals, by Blom's plotting position; 0 for one."""
    return np.asarray(ndtri((n - 0.375) / (n + 0.25)))


def _cut(
    lengths: LengthModel, load: Load, slots: Float, full: Float, one_wave: NDArray[np.bool_]
) -> tuple[Float, Float, Float]:
    """(full steps, drain, share of tokens generated) where a step ends once a share of its sequences is done."""
    response, residual = lengths.response, lengths.response.residual
    life, left = _life(lengths, load), load.count * (1.0 - load.used)
    end = response.quantile(np.full_like(slots, load.used))
    stop = residual.quantile(np.clip(1.0 - left / slots, 0.0, 1.0))
    # With more abandoned than slots, the step ends before one is empty.
    early = left >= slots
    full = np.where(early, load.used * load.count * life.mean / slots, full)
    drain = np.where(early, 0.0, load.decoded * stop + np.minimum(load.idle, life.residual))
    tokens = load.count * response.mean
    undone = np.where(early, left / load.count, slots * residual.excess(stop) / tokens)
    wave = response.excess(end) / response.mean
    return (
        np.where(one_wave, 0.0, full),
        np.where(one_wave, load.decoded * end + load.idle, drain),
        1.0 - np.where(one_wave, wave, undone),
    )
