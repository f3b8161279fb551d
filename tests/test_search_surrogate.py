"""What the surrogate learns from runs."""

from __future__ import annotations

import numpy as np
import pytest
import search_world as sw

from search.gp import Data, Prior, axis_tables, correlations, fit
from search.problem import Floats
from search.runs import Run, pooled_step_sd
from search.surrogate import Surrogate, fit_surrogate
from traces.schema import TrialState

CANDIDATES = sw.make_candidates()
RNG = np.random.default_rng(0)
ROWS = RNG.permutation(len(CANDIDATES))
NORMALS = np.zeros((1, len(sw.STAGES) + 1))


def run(row: int, stage_factor: Floats | float = 1.0, *, stages: bool = True, memory: float = 1.0) -> Run:
    """A noiseless run in a world whose stages are `stage_factor` x and whose memory is `memory` x the model's."""
    seconds = CANDIDATES.stage_seconds[row] * stage_factor
    step = float(CANDIDATES.compose(seconds[None], np.array([row]))[0])
    return Run(
        row=int(row),
        state=TrialState.COMPLETE,
        step_seconds=(step,) * 5,
        stage_seconds=dict(zip(sw.STAGES, seconds.tolist(), strict=True)) if stages else {},
        peak_bytes=int(CANDIDATES.memory_bytes[row] * memory),
    )


def out_of_memory(row: int) -> Run:
    return Run(row=int(row), state=TrialState.INFEASIBLE, stage_seconds={})


def step_of(surrogate: Surrogate, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Floats:
    return np.exp(surrogate.draws(rows, NORMALS)[0])


def test_a_process_is_the_textbook_formula() -> None:
    """Mean and spread against k(x, X) K^-1 y and k(x, x) - k(x, X) K^-1 k(X, x)."""
    tables = axis_tables(CANDIDATES.space)
    data = Data(levels=CANDIDATES.levels[ROWS[:9]], targets=RNG.normal(0, 0.2, 9), variance=np.full(9, 1e-3))
    weights = np.linspace(0.1, 1.0, len(tables))
    prior = Prior(constant_sd=0.4, weights=weights, effect_sd=(0.1,), noise_sd=(0.05,))
    posterior = fit(prior, tables, data)

    def kernel(a: Floats, b: Floats) -> Floats:
        return 0.4**2 + 0.1**2 * np.tensordot(weights, correlations(tables, a, b), 1)

    test = CANDIDATES.levels[ROWS[9:20]]
    solve = np.linalg.inv(kernel(data.levels, data.levels) + (0.05**2 + 1e-3) * np.eye(9))
    cross = kernel(test, data.levels)
    covariance = kernel(test, test) - cross @ solve @ cross.T
    np.testing.assert_allclose(posterior.mean(test), cross @ solve @ data.targets, atol=1e-10)
    spread = posterior.sd(correlations(tables, test, data.levels))
    np.testing.assert_allclose(spread, np.sqrt(np.diag(covariance)), atol=1e-6)
    factor = posterior.factor(correlations(tables, test, data.levels), correlations(tables, test, test))
    np.testing.assert_allclose(factor @ factor.T, covariance, atol=1e-6)


def test_without_runs_the_model_stands() -> None:
    surrogate = fit_surrogate(CANDIDATES, [])
    np.testing.assert_allclose(step_of(surrogate, ROWS[:50]), CANDIDATES.step_seconds[ROWS[:50]], rtol=1e-9)
    assert surrogate.fit_chance(np.array([CANDIDATES.memory_bytes.argmin()]))[0] > 0.99


def test_a_stage_that_is_slower_than_modelled_is_learnt_for_all_plans() -> None:
    factor = np.array([1.0, 1.0, 1.0, 1.6, 1.0])
    surrogate = fit_surrogate(CANDIDATES, [run(row, factor) for row in ROWS[:8]])
    others = ROWS[100:300]
    truth = CANDIDATES.compose(CANDIDATES.stage_seconds[others] * factor, others)
    error = np.abs(step_of(surrogate, others) / truth - 1)
    assert error.max() < 0.04
    assert np.abs(CANDIDATES.step_seconds[others] / truth - 1).mean() > 0.1, "what the model alone is off"


def test_without_stage_times_the_step_itself_is_learnt() -> None:
    surrogate = fit_surrogate(CANDIDATES, [run(row, 1.5, stages=False) for row in ROWS[:8]])
    assert not surrogate.timed
    others = ROWS[100:300]
    np.testing.assert_allclose(step_of(surrogate, others), 1.5 * CANDIDATES.step_seconds[others], rtol=0.04)


def test_a_run_without_stage_times_among_others_spoils_nothing() -> None:
    runs = [run(row, 1.5, stages=i != 3) for i, row in enumerate(ROWS[:8])]
    surrogate = fit_surrogate(CANDIDATES, runs)
    others = ROWS[100:300]
    np.testing.assert_allclose(step_of(surrogate, others), 1.5 * CANDIDATES.step_seconds[others], rtol=0.04)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0])
def test_a_stage_time_that_is_none_is_passed_over(bad: float) -> None:
    runs = [run(row) for row in ROWS[:4]]
    broken = Run(
        row=int(ROWS[5]),
        state=TrialState.COMPLETE,
        step_seconds=runs[0].step_seconds,
        stage_seconds={"generate": bad, "no such stage": 3.0},
    )
    assert np.isfinite(step_of(fit_surrogate(CANDIDATES, [*runs, broken]), ROWS[:50])).all()


def test_memory_is_learnt_from_peaks_and_from_plans_that_did_not_fit() -> None:
    room = CANDIDATES.memory_bytes / CANDIDATES.capacity_bytes
    (tight,) = np.flatnonzero((room > 0.8) & (room < 0.85))[[0]]
    small = np.flatnonzero(room < 0.6)[::40][:4]
    chances = [
        float(fit_surrogate(CANDIDATES, runs).fit_chance(np.array([tight]))[0])
        for runs in (
            [run(row, memory=0.8) for row in small],
            [],
            [run(row, memory=1.5) for row in small],
        )
    ]
    assert chances[0] > 0.99 and chances[0] > chances[1] > chances[2] and chances[2] < 0.01
    (other,) = np.flatnonzero((room > 0.6) & (room < 0.7))[[0]]
    after = fit_surrogate(CANDIDATES, [out_of_memory(other)]).fit_chance(np.array([tight, other]))
    assert after[0] < 0.01 and after[1] < 0.5


def test_out_of_memory_is_a_bound_and_no_value() -> None:
    """A plan that could not fit, as the peaks of others foretell, does not make the model look better."""
    order = np.argsort(CANDIDATES.memory_bytes)
    peaks = [run(row, memory=2.0) for row in order[:4]]
    largest = out_of_memory(order[-1])
    before, after = (
        fit_surrogate(CANDIDATES, runs).memory.mean(CANDIDATES.levels) for runs in (peaks, [*peaks, largest])
    )
    np.testing.assert_allclose(after, before, atol=1e-9)


def test_what_did_fit_raises_the_capacity() -> None:
    largest = int(CANDIDATES.memory_bytes.argmax())
    one = run(largest, memory=1.5)
    assert fit_surrogate(CANDIDATES, [one]).capacity_bytes == one.peak_bytes > CANDIDATES.capacity_bytes


def test_a_plan_out_of_memory_says_nothing_of_time() -> None:
    surrogate = fit_surrogate(CANDIDATES, [out_of_memory(row) for row in ROWS[:3]])
    np.testing.assert_allclose(step_of(surrogate, ROWS[:50]), CANDIDATES.step_seconds[ROWS[:50]], rtol=1e-9)


def test_believing_a_running_plan_narrows_it_and_moves_nothing() -> None:
    surrogate = fit_surrogate(CANDIDATES, [run(row, 1.3) for row in ROWS[:5]])
    running = ROWS[20:22]
    after = surrogate.believing(running)
    np.testing.assert_allclose(after.mean(ROWS[:200]), surrogate.mean(ROWS[:200]), atol=1e-9)
    normals = np.random.default_rng(0).standard_normal((64, len(sw.STAGES) + 1))
    before_sd, after_sd = (s.draws(running, normals).std(axis=0) for s in (surrogate, after))
    assert (after_sd < before_sd).all()


def test_the_spread_of_steps_is_pooled_within_runs() -> None:
    """Runs far apart but each steady: little spread. The prior counts as 8 steps at 5%."""
    assert pooled_step_sd([]) == pytest.approx(0.05)
    steady = [
        Run(row=i, state=TrialState.COMPLETE, step_seconds=(t, t, t), stage_seconds={})
        for i, t in enumerate((1.0, 9.0))
    ]
    assert pooled_step_sd(steady) == pytest.approx(0.05 * np.sqrt(8 / 12))
    failed = Run(row=9, state=TrialState.FAILED, step_seconds=(0.0, 5.0), stage_seconds={})
    assert pooled_step_sd([*steady, failed]) == pooled_step_sd(steady)
