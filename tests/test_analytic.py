"""The model: pieces against arithmetic, behaviour any layout must show, and one code path for one plan or many."""

from __future__ import annotations

import build
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytic.comm import collective_seconds
from analytic.compose import Terms, period
from analytic.device import fit_error, fit_roofline
from analytic.estimate import STAGES, estimate, estimate_blocks
from analytic.lengths import Distribution, length_model
from analytic.stages import forward_seconds, setup
from ir.batch import batch_of
from ir.graph import Op
from ir.lower import lower
from ir.plan import Plan
from ir.rules import Setting
from space.axes import default_space
from space.enumerate import enumerate_legal

JOB, CLUSTER = build.job(), build.cluster()
LEGAL = enumerate_legal(default_space(JOB, 2), Setting(job=JOB, devices=2))


def seconds(plan: Plan, stage: Op) -> float:
    return float(estimate(JOB, batch_of([plan]), CLUSTER).stage_seconds[0, STAGES.index(stage)])


def step(plan: Plan, cluster: object = CLUSTER) -> float:
    return float(estimate(JOB, batch_of([plan]), cluster).step_seconds[0])  # type: ignore[arg-type]


def test_the_roofline_finds_the_constants_that_made_the_measurements() -> None:
    roofline = fit_roofline(CLUSTER.device)
    assert 1 / roofline.seconds_per_flop == pytest.approx(50e9, rel=1e-3)
    assert 1 / roofline.seconds_per_byte == pytest.approx(10e9, rel=1e-3)
    assert roofline.launch_s == pytest.approx(5e-6, rel=1e-2)
    assert fit_error(roofline, CLUSTER.device.matmul) < 1e-6


def test_a_forward_pass_by_hand() -> None:
    tokens, squares, head = 100.0, 2000.0, 40.0
    weights = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    flops = 2 * tokens * weights
    traffic = 4 * (tokens * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 64)) + weights)
    elementwise = 4 * tokens * (26 * 32 + 22 * (32 + 16) + 5 * 64)
    attention = 2 * 32 * squares / 20e9
    layer = flops / 50e9 + traffic / 10e9 + elementwise / 10e9 + attention
    logits = 2 * head * 32 * 64 / 50e9 + 4 * (head * 96 + 32 * 64) / 10e9 + 6 * head * 64 * 4 / 10e9
    got = forward_seconds(setup(JOB, CLUSTER), *(np.array([v]) for v in (tokens, squares, head)))
    assert got[0] == pytest.approx(2 * layer + logits, rel=1e-3)


def test_lengths_by_hand() -> None:
    uniform = Distribution((0.0, 100.0))
    assert uniform.mean == pytest.approx(50.0)
    assert uniform.second_moment == pytest.approx(10000 / 3, rel=1e-4)
    assert uniform.largest_of(np.array([1.0, 9.0])).tolist() == pytest.approx([50.0, 93.243], rel=1e-4)
    one = uniform.padded(np.array([9, 9, 9]), np.array([1, 9, 3]))
    assert one[0] == pytest.approx(450.0), "alone, nothing is padded"
    assert one[1] == pytest.approx(9 * 93.243, rel=1e-4), "together, all are as long as the longest"
    assert one[0] < one[2] < one[1]


@given(st.lists(st.floats(1, 500), min_size=2, max_size=20), st.integers(1, 64), st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_padding_only_adds_and_grows_with_the_micro_batch(values: list[float], count: int, power: int) -> None:
    lengths = Distribution(tuple(sorted(values)))
    counts = np.array([count] * 3)
    sizes = np.minimum(np.array([1, 1 << power, 2 << power]), count)
    padded = lengths.padded(counts, sizes)
    assert padded[0] <= padded[1] * (1 + 1e-9)
    assert padded[1] <= padded[2] * (1 + 1e-9)
    assert padded[2] <= count * max(values) * (1 + 1e-9)


def test_lengths_of_prompt_and_response_add_up() -> None:
    total = length_model(JOB).total
    assert (total.quantiles[0], total.quantiles[-1]) == (14.0, 44.0)


def test_collectives_meet_measured_points_and_go_beyond() -> None:
    level = CLUSTER.levels[0]
    two = np.array([1, 2, 2])
    assert collective_seconds(level, "all_reduce", 1 << 20, two).tolist() == pytest.approx(
        [0, 2e-4 + 1.048576e-3, 2e-4 + 1.048576e-3]
    )
    beyond = collective_seconds(level, "all_reduce", 1 << 25, np.array([2]))[0]
    assert beyond == pytest.approx(2 * (2e-4 + (1 << 24) / 1e9))
    more = collective_seconds(level, "all_reduce", 1 << 20, np.array([4]))[0]
    assert more == pytest.approx((2e-4 + 1.048576e-3) * 1.5), "a ring of 4 sends 1.5 times what a ring of 2 does"


def test_one_plan_or_all_of_them_cost_the_same() -> None:
    whole = estimate(JOB, LEGAL.batch, CLUSTER)
    for row in range(0, len(LEGAL.batch), 97):
        alone = estimate(JOB, batch_of([LEGAL.batch.plan(row)]), CLUSTER)
        assert alone.step_seconds[0] == pytest.approx(whole.step_seconds[row])
        assert alone.stage_seconds[0] == pytest.approx(whole.stage_seconds[row])
        assert alone.memory.peak[0] == pytest.approx(whole.memory.peak[row])


@pytest.mark.parametrize("jobs", [1, 2])
def test_blocks_and_processes_change_nothing(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    whole = estimate(JOB, LEGAL.batch, CLUSTER)
    monkeypatch.setattr("analytic.estimate.BLOCK", 700)
    monkeypatch.setattr("analytic.estimate.PARALLEL_FROM", 100)
    parts = estimate_blocks(JOB, LEGAL.batch, CLUSTER, jobs=jobs)
    assert np.allclose(parts.step_seconds, whole.step_seconds)
    assert np.allclose(parts.memory.peak, whole.memory.peak)
    assert len(parts.structures) == len(whole.structures)


def test_every_stage_of_a_plan_is_priced_and_no_other() -> None:
    whole = estimate(JOB, LEGAL.batch, CLUSTER)
    for row in range(0, len(LEGAL.batch), 211):
        rpeg = lower(JOB, LEGAL.batch.plan(row))
        priced = {name for name, s in zip(STAGES, whole.stage_seconds[row], strict=True) if s > 0}
        wanted = {stage.key for stage in rpeg.stages} - {Op.ADVANTAGE}
        assert priced == wanted or (wanted - priced == {Op.SYNC_WEIGHTS} and rpeg.colocated)


def test_fusions_save_what_they_remove() -> None:
    base, fold = build.plan(), build.plan(fold_old_logprob=True)
    merged, rollout = build.plan(merge_logprobs=True), build.plan(rollout_logprob=True)
    old = seconds(base, Op.OLD_LOGPROB)
    assert step(base) - step(fold) == pytest.approx(old + CLUSTER.call_s, rel=1e-6)
    assert step(rollout) == pytest.approx(step(fold))
    assert step(base) - step(merged) == pytest.approx(CLUSTER.call_s, rel=1e-6)


def test_streaming_hides_the_reference_pass() -> None:
    assert step(build.plan(stream=True, rollout_logprob=True)) < step(build.plan(rollout_logprob=True))


def test_staleness_approaches_the_busier_pool() -> None:
    times = [step(build.plan(staleness=k, concurrency=8)) for k in range(5)]
    assert times == sorted(times, reverse=True)
    found = estimate(JOB, batch_of([build.plan(staleness=4, concurrency=8)]), CLUSTER)
    cycles = found.cycles(found.stage_seconds, np.array([0]))
    assert times[4] == pytest.approx(max(cycles["rollout pool"][0], cycles["training pool"][0]))


def test_the_staleness_circuit_by_hand() -> None:
    def terms(k: int, streamed: float = 0.0) -> Terms:
        one = {"generate": 6.0, "latency": 6.0, "streamed": streamed, "serial": 3.0, "calls": 0.0}
        return Terms(**{n: np.array([v]) for n, v in one.items()}, staleness=np.array([k]))

    apart, together = lower(JOB, build.plan()), lower(JOB, build.plan(colocated=True))
    assert max(v[0] for v in period(apart, terms(0)).values()) == 9.0
    assert max(v[0] for v in period(apart, terms(1)).values()) == 6.0
    assert max(v[0] for v in period(together, terms(0)).values()) == 9.0
    # Streamed 2 s hide under 6 s but for the last of 4 groups.
    assert period(apart, terms(0, streamed=2.0))["staleness circuit"][0] == 9.5


def test_more_slots_cost_memory_and_save_time() -> None:
    few, many = build.plan(concurrency=4), build.plan(concurrency=16)
    costs = estimate(JOB, batch_of([few, many]), CLUSTER)
    assert costs.step_seconds[1] < costs.step_seconds[0]
    per_slot = 56 * 2 * 2 * 16 * 4
    assert costs.memory.terms["kv_cache"].tolist() == [4 * per_slot, 16 * per_slot]


def test_recomputation_saves_memory_and_costs_time() -> None:
    keep, again = build.plan(micro_batch=16), build.plan(micro_batch=16, recompute=True)
    assert seconds(again, Op.UPDATE_ACTOR) > seconds(keep, Op.UPDATE_ACTOR)
    costs = estimate(JOB, batch_of([keep, again]), CLUSTER)
    assert costs.memory.terms["activations"][1] < costs.memory.terms["activations"][0]


def test_data_parallel_training_divides_the_work() -> None:
    one = seconds(build.plan(colocated=True, train=2, dp=1), Op.UPDATE_ACTOR)
    two = seconds(build.plan(colocated=True, train=2, dp=2), Op.UPDATE_ACTOR)
    assert 0.5 * one < two < one
