"""The closed form of a rollout phase against event simulation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
from accuracy import Evaluation, constant_rate
from numpy.typing import NDArray
from simulate import Case, Run, simulate

from analytic.lengths import Distribution, LengthModel
from analytic.makespan import Load, Phase, drained
from analytic.speculation import tokens_per_step
from ir.lengths import GRID, Lengths, Lognormal, tabulate
from ir.workload import Speculation

Float = NDArray[np.float64]

SEEDS = 6


def cases() -> list[Case]:
    """36 phases: sizes, lengths, spreads, caps, slots, and caches that hold all, half or a third of what is asked."""
    sizes = ((256, 128), (256, 256), (512, 256), (512, 1024), (1024, 256), (1024, 512))
    lengths = ((2000.0, 0.5, 16384), (3000.0, 0.8, 16384), (4000.0, 1.1, 32768), (6000.0, 1.3, 32768))
    room = (np.inf, 0.7, 0.4)
    found = []
    for index, ((count, slots), (mean, sigma, cap)) in enumerate(product(sizes, lengths)):
        share = room[index % 3] if index % 2 else np.inf
        found.append(_case(count, slots, (mean, sigma, cap), share, engines=1 + 3 * (index % 5 == 0)))
    for index, (mean, sigma, cap) in enumerate(lengths * 3):
        found.append(
            _case(512, (192, 320, 512)[index // 4], (mean, sigma, cap), (0.5, 0.8, 0.3)[index // 4], engines=1)
        )
    return found


def _case(count: int, slots: int, length: tuple[float, float, int], room: float, *, engines: int) -> Case:
    mean, sigma, cap = length
    capacity = room * min(slots, count) * mean
    return Case(prompts=count // 8, mean=mean, sigma=sigma, cap=cap, slots=slots, capacity=capacity, engines=engines)


def length_model(case: Case) -> LengthModel:
    form = Lengths(
        prompt=(float(case.prompt_tokens),) * len(GRID),
        response=tuple(_quantiles(case)),
        probabilities=GRID,
    )
    table = tabulate(form, max_prompt_tokens=case.prompt_tokens, max_response_tokens=case.cap)
    return LengthModel(
        prompt=Distribution(table.prompt.values, table.prompt.probabilities),
        response=Distribution(table.response.values, table.response.probabilities),
        prompt_share=case.share,
    )


def _quantiles(case: Case) -> tuple[float, ...]:
    form = Lengths(prompt=Lognormal(mean=1.0, sigma=1.0), response=Lognormal(mean=case.mean, sigma=case.sigma))
    return tabulate(form, max_prompt_tokens=1, max_response_tokens=case.cap).response.values


def phase(case: Case, lengths: LengthModel) -> Phase:
    one = np.ones(1)
    load = Load(
        count=one * case.count,
        members=case.samples,
        engines=one * case.engines,
        wanted=one * case.slots,
        capacity=one * case.capacity,
        held=case.prompt_tokens / case.samples,
        used=case.used,
    )
    return drained(lengths, load)


def seconds(case: Case) -> float:
    """By the identity, whose planes are given; a step of guesses gives a sequence several tokens."""
    lengths = length_model(case)
    found = phase(case, lengths)
    a0, a1, a2 = case.step
    tokens = case.count * lengths.response.mean
    keys = case.count * lengths.response.keys_seen(case.prompt_tokens, 0)
    read = case.prompts * case.prompt_tokens + float(found.recomputed[0])
    speculation = Speculation(acceptance=case.acceptance) if case.draft else None
    gained = float(tokens_per_step(speculation, np.array([float(case.draft)]))[0])
    decoded = a0 * found.steps[0] + a1 * (1 + case.draft) * tokens + a2 * keys
    return float(decoded / gained + case.prefill * read)


def judged(case: Case, first: int) -> list[Run]:
    return [simulate(case, first + seed) for seed in range(SEEDS)]


def makespan(_: Path) -> Evaluation:
    """Seconds of a phase; a constant rate is of the tokens that are generated."""
    given = cases()
    measured = np.array([np.mean([run.seconds for run in judged(case, 100 * i)]) for i, case in enumerate(given)])
    tokens = np.array([case.count * length_model(case).response.mean for case in given])
    groups = ["simulated"] * len(given)
    return Evaluation(
        predicted=np.array([seconds(case) for case in given]),
        measured=measured,
        groups=groups,
        baseline=constant_rate(tokens, measured, groups),
    )
