"""Event simulation of continuous batching: slots, a cache in blocks, optimistic admission, recompute preemption.

Between two events every live sequence gains a token a step, so the simulation jumps from event to event: a response
ends, the cache is full, or a waiting sequence can be admitted. It judges the closed form in `analytic/makespan.py`.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int = NDArray[np.int64]

BLOCK = 16
WATERMARK = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A rollout phase."""

    prompts: int
    """Of an engine."""
    samples: int = 8
    prompt_tokens: int = 512
    mean: float
    """Of the response before it is cut off."""
    sigma: float
    cap: int
    share: float = 0.4
    """Of the variance of the logarithm, what the prompt explains."""
    slots: int
    capacity: float = np.inf
    """Tokens that the cache holds."""
    engines: int = 1
    used: float = 1.0
    """Share of the sequences after which the phase ends; with a cache without limit only."""
    draft: int = 0
    """Tokens guessed for a sequence in a step, all checked in it; with a cache without limit only."""
    acceptance: float = 0.0
    """Chance that one is right, those before it being so."""
    step: tuple[float, float, float] = (6e-3, 3e-5, 6e-9)
    """Seconds a step, per token checked in it, and per cached token that a sequence reads."""
    prefill: float = 2e-5
    """Seconds per token that is read."""

    @property
    def count(self) -> int:
        """Sequences of an engine."""
        return self.prompts * self.samples


@dataclass(slots=True)
class Run:
    """What an engine did."""

    seconds: float = 0.0
    steps: float = 0.0
    generated: float = 0.0
    recomputed: float = 0.0


@dataclass(slots=True)
class _Engine:
    case: Case
    length: Int
    waiting: deque[int]
    done: Int
    """Tokens that each sequence has."""
    sharing: Int
    """Live sequences of each prompt, whose blocks they share."""
    live: Int
    """In the order of admission."""
    run: Run = field(default_factory=Run)


def response_lengths(case: Case, rng: np.random.Generator) -> Int:
    """Lognormal, alike within a prompt, cut off; int64[engines, count]."""
    shape = (case.engines, case.prompts, case.samples)
    common = rng.standard_normal((*shape[:2], 1)) * np.sqrt(case.share)
    score = common + rng.standard_normal(shape) * np.sqrt(1.0 - case.share)
    mu = np.log(case.mean) - case.sigma**2 / 2.0
    values = np.clip(np.exp(mu + case.sigma * score), 1.0, case.cap)
    return np.maximum(np.rint(values), 1).astype(np.int64).reshape(case.engines, -1)


def simulate(case: Case, seed: int) -> Run:
    """The engine that is longest at its share."""
    rng = np.random.default_rng(seed)
    lengths = response_lengths(case, rng)
    return max((_engine(case, row, rng) for row in lengths), key=lambda run: run.seconds)


def _engine(case: Case, length: Int, rng: np.random.Generator) -> Run:
    if case.draft:
        return _guessing(case, length, rng)
    if case.capacity == np.inf:
        return _unlimited(case, length)
    none = np.zeros(0, dtype=np.int64)
    e = _Engine(
        case, length, deque(range(len(length))), np.zeros_like(length), np.zeros(case.prompts, dtype=np.int64), none
    )
    while e.waiting or len(e.live):
        _admit(e)
        while not _advance(e):
            # Nothing is admitted in a step that had to drop a sequence.
            pass
    return e.run


def _unlimited(case: Case, length: Int) -> Run:
    """With room for all, a sequence begins in the step after the first slot is free: steps follow without events."""
    begin = _begin(case, length)
    steps = np.sort(begin + length)[int(np.ceil(case.used * len(length))) - 1]
    done = np.clip(steps - begin, 0, length).astype(float)
    a0, a1, a2 = case.step
    keys = case.prompt_tokens * done.sum() + (done * (done + 1)).sum() / 2.0
    read = case.prefill * case.prompts * case.prompt_tokens
    seconds = float(a0 * steps + a1 * done.sum() + a2 * keys + read)
    return Run(seconds=seconds, steps=float(steps), generated=float(done.sum()))


def _begin(case: Case, steps: Int) -> Int:
    """The step after which each sequence begins, given those that it takes."""
    free, begun = [0] * min(case.slots, len(steps)), []
    for each in steps.tolist():
        begun.append(free[0])
        heapq.heapreplace(free, free[0] + each)
    return np.array(begun)


def _guessing(case: Case, length: Int, rng: np.random.Generator) -> Run:
    """Every step gives a sequence the guesses before the first wrong one, and a token more; it checks all of them."""
    taken, keys = [], 0.0
    for tokens in length.tolist():
        right = np.minimum(rng.geometric(1.0 - case.acceptance, size=tokens) - 1, case.draft)
        done = np.cumsum(1 + right)
        steps = int(np.searchsorted(done, tokens)) + 1
        taken.append(steps)
        keys += steps * (case.prompt_tokens + 1.0) + float(done[: steps - 1].sum())
    each = np.array(taken)
    steps, checked = float((_begin(case, each) + each).max()), float(each.sum()) * (1 + case.draft)
    a0, a1, a2 = case.step
    read = case.prefill * case.prompts * case.prompt_tokens
    return Run(seconds=a0 * steps + a1 * checked + a2 * keys + read, steps=steps, generated=float(length.sum()))


def _admit(e: _Engine) -> None:
    """First come, first served, while there are slots and blocks for what a sequence has already."""
    free = _blocks(e) * (1.0 - WATERMARK) - _used(e, 0)
    taken: list[int] = []
    while e.waiting and len(e.live) + len(taken) < e.case.slots:
        index = e.waiting[0]
        group = index // e.case.samples
        prompt = 0 if e.sharing[group] else e.case.prompt_tokens
        need = -(-prompt // BLOCK) + int(e.done[index]) // BLOCK + 1
        if need > free and len(e.live) + len(taken):
            break
        taken.append(e.waiting.popleft())
        e.sharing[group] += 1
        free -= need
        e.run.seconds += e.case.prefill * (prompt + int(e.done[index]))
        e.run.recomputed += float(e.done[index])
    if taken:
        e.live = np.concatenate([e.live, np.array(taken)])


def _advance(e: _Engine) -> bool:
    """All live sequences to the next event; False if there was no room for a step and the youngest was dropped."""
    done = e.done[e.live]
    steps = int((e.length[e.live] - done).min())
    if _used(e, steps) > _blocks(e):
        steps = _until_full(e, steps)
        if steps == 0 and len(e.live) > 1:
            e.waiting.appendleft(int(e.live[-1]))
            _release(e, np.arange(len(e.live)) == len(e.live) - 1)
            return False
        steps = max(steps, 1)
    a0, a1, a2 = e.case.step
    batch, keys = len(e.live), float(done.sum()) + len(e.live) * e.case.prompt_tokens
    e.run.seconds += steps * (a0 + a1 * batch) + a2 * (steps * keys + batch * steps * (steps + 1) / 2.0)
    e.run.steps += steps
    e.run.generated += steps * batch
    e.done[e.live] += steps
    _release(e, e.done[e.live] >= e.length[e.live])
    return True


def _release(e: _Engine, which: NDArray[np.bool_]) -> None:
    np.subtract.at(e.sharing, e.live[which] // e.case.samples, 1)
    e.live = e.live[~which]


def _until_full(e: _Engine, most: int) -> int:
    """The most steps below `most` after which everything is still in the cache."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _used(e, middle) <= _blocks(e) else (low, middle)
    return low


def _blocks(e: _Engine) -> float:
    return e.case.capacity / BLOCK


def _used(e: _Engine, steps: int) -> float:
    prompts = np.count_nonzero(e.sharing) * -(-e.case.prompt_tokens // BLOCK)
    return prompts + float((-(-(e.done[e.live] + steps) // BLOCK)).sum())
