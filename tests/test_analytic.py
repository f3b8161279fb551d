"""The model: pieces against arithmetic, behaviour any layout must show, and one code path for one plan or many."""

from __future__ import annotations

from dataclasses import fields, replace

import build
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytic.comm import collective_seconds, members_by_level
from analytic.compose import cycles
from analytic.device import fit_error, fit_roofline
from analytic.estimate import estimate, estimate_blocks, stage_keys
from analytic.fit import machine_of
from analytic.layers import Spread, Work, forward
from analytic.lengths import Distribution, length_model
from analytic.parallel import exchange
from analytic.training import training
from analytic.weights import copies, gradient_bytes, optimizer_bytes, parameters_on_device, shards, weight_bytes
from ir.backends import backend
from ir.batch import batch_of
from ir.cluster import device_bandwidth
from ir.graph import Op, Stage
from ir.lower import lower
from ir.model import Moe
from ir.plan import Plan
from ir.rules import setting_of
from space.build import default_space
from space.enumerate import enumerate_legal

JOB, CLUSTER = build.job(), build.cluster()
SETTING = setting_of(JOB, CLUSTER, backend("local"))
LEGAL = enumerate_legal(default_space(SETTING), SETTING)
STAGES = stage_keys(JOB)


def spread(**degrees: int) -> Spread:
    columns = {name: np.array([degrees.get(name, 1)]) for name in ("tp", "pp", "cp", "ep", "etp", "dp")}
    return Spread(**columns, shard=np.array([degrees.get("shard", 0)]), fp8=np.array([False]))


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
    work = Work(tokens=np.array([tokens]), squares=np.array([squares]), head_tokens=np.array([head]))
    got = forward(machine_of(CLUSTER.groups[0]), build.SHAPE, spread(), work)
    assert got.kernels[0] == pytest.approx(2 * layer + logits, rel=1e-3)
    assert got.collectives[0] == 0.0


def test_lengths_by_hand() -> None:
    uniform = Distribution((0.0, 100.0))
    assert uniform.mean == pytest.approx(50.0)
    assert uniform.second_moment == pytest.approx(10000 / 3, rel=1e-4)
    assert uniform.expected_largest(np.array([1.0, 9.0])).tolist() == pytest.approx([50.0, 90.0])
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
    levels = CLUSTER.levels
    two = np.array([1, 2, 2])
    assert collective_seconds(levels, "all_reduce", 1 << 20, two).tolist() == pytest.approx(
        [0, 2e-4 + 1.048576e-3, 2e-4 + 1.048576e-3]
    )
    beyond = collective_seconds(levels, "all_reduce", 1 << 25, np.array([2]))[0]
    assert beyond == pytest.approx(2 * (2e-4 + (1 << 24) / 1e9))
    more = collective_seconds(levels, "all_reduce", 1 << 20, np.array([4]))[0]
    assert more == pytest.approx((2e-4 + 1.048576e-3) * 1.5), "a ring of 4 sends 1.5 times what a ring of 2 does"
    half = collective_seconds(levels, "all_gather", 1 << 20, np.array([2]))[0]
    assert half == pytest.approx((2e-4 + 1.048576e-3) / 2), "an all-reduce is a reduce-scatter and an all-gather"


@pytest.mark.parametrize(
    ("ranks", "stride", "members"),
    [
        (8, 1, [8, 1]),
        (16, 1, [8, 2]),
        (16, 2, [4, 4]),
        (4, 8, [1, 4]),
        (2, 4, [2, 1]),
        (6, 4, [2, 3]),
        (64, 1, [8, 8]),
    ],
)
def test_a_group_is_laid_over_the_levels(ranks: int, stride: int, members: list[int]) -> None:
    node = msgspec.structs.replace(CLUSTER.levels[0], size=8, collectives=())
    network = msgspec.structs.replace(node, size=8, latency_s=1e-3, bandwidth=1e9, links=8)
    assert members_by_level((node, network), ranks, stride) == members


def test_a_collective_over_two_levels_by_hand() -> None:
    node = msgspec.structs.replace(CLUSTER.levels[0], size=8, latency_s=1e-5, bandwidth=100e9, links=1, collectives=())
    network = msgspec.structs.replace(node, latency_s=1e-4, bandwidth=10e9, links=8)
    size = 1e9
    # Latency grows by half a message for each doubling of the ranks.
    inner = 2.0 * 1e-5 + 2 * 7 / 8 * size / 100e9
    outer = 1.0 * 1e-4 + 2 * 1 / 2 * (size / 8) / 10e9
    got = collective_seconds((node, network), "all_reduce", size, np.array([16]))[0]
    assert got == pytest.approx(inner + outer)
    one_rail = collective_seconds((node, network), "all_reduce", size, np.array([2]), 8)[0]
    assert one_rail == pytest.approx(1e-4 + size / 10e9)


def test_weights_and_state_by_hand() -> None:
    """Tensor parallelism divides matrices, not norms; experts are divided over their own devices; ZeRO divides the rest."""
    machine = machine_of(CLUSTER.groups[0])
    norms = 2 * (2 * 32 + 2 * 8) + 32
    dense, experts = parameters_on_device(build.SHAPE, spread(tp=2, pp=2))
    assert dense[0] == ((build.SHAPE.parameters - norms) / 2 + norms) / 2
    assert experts[0] == 0
    moe = replace(build.SHAPE, moe=Moe(experts=8, experts_per_token=2, ffn=16))
    _, experts = parameters_on_device(moe, spread(tp=2, ep=4, dp=2))
    assert experts[0] == 2 * 8 * 3 * 32 * 16 / 4
    at, whole = spread(dp=4), float(build.SHAPE.parameters)
    by_zero = [
        [
            float(f[0])
            for f in (
                weight_bytes(machine, build.SHAPE, at, z),
                gradient_bytes(build.SHAPE, at, z),
                optimizer_bytes(machine, build.SHAPE, at, z),
            )
        ]
        for z in (np.array([stage], dtype=np.int32) for stage in range(4))
    ]
    assert by_zero == [
        [4 * whole, 4 * whole, 8 * whole],
        [4 * whole, 4 * whole, 2 * whole],
        [4 * whole, 1 * whole, 2 * whole],
        [1 * whole, 1 * whole, 2 * whole],
    ]


def test_state_in_groups_by_hand() -> None:
    """Of four replicas that divide state in two groups, each device holds a half instead of a quarter; experts that
    lie on more devices than a group are held by every group in part."""
    machine, at, three = machine_of(CLUSTER.groups[0]), spread(dp=4, shard=2), np.array([3], dtype=np.int32)
    whole = float(build.SHAPE.parameters)
    assert weight_bytes(machine, build.SHAPE, at, three)[0] == 2 * whole
    assert gradient_bytes(build.SHAPE, at, three)[0] == 2 * whole
    assert optimizer_bytes(machine, build.SHAPE, at, three)[0] == 4 * whole
    assert [float(n[0]) for n in (*shards(at), *copies(at))] == [2, 2, 2, 2]
    apart = spread(dp=8, ep=4, shard=2)
    assert [float(n[0]) for n in (*shards(apart), *copies(apart))] == [2, 1, 4, 2]


TWO_NODES = machine_of(
    msgspec.structs.replace(
        CLUSTER.groups[0],
        levels=tuple(
            msgspec.structs.replace(
                CLUSTER.levels[0], size=size, latency_s=latency, bandwidth=bandwidth, links=size, collectives=()
            )
            for size, latency, bandwidth in ((4, 1e-5, 100e9), (2, 1e-4, 10e9))
        ),
    )
)


def test_gradients_of_groups_by_hand() -> None:
    """Eight replicas on two nodes that divide state within a node: a ring of 4 reduces inside, then every device
    all-reduces its quarter with its like on the other node."""
    trainer, three = training().trainers["flash"], np.array([3], dtype=np.int32)
    found = exchange(TWO_NODES, build.SHAPE, spread(dp=8, shard=4), three, trainer)
    whole, inner = float(build.SHAPE.parameters), device_bandwidth(TWO_NODES.levels, 0)
    outer = device_bandwidth(TWO_NODES.levels, 1)
    gradients = trainer.gradient_bytes * whole
    assert found.reduce[0] == pytest.approx(1.5 * 1e-5 + 3 / 4 * gradients / inner)
    assert found.across[0] == pytest.approx(1e-4 + gradients / 4 / outer)
    assert found.gather[0] == pytest.approx(1.5 * 1e-5 + 3 / 4 * 4 * whole / inner)
    over_all = exchange(TWO_NODES, build.SHAPE, spread(dp=8), three, trainer)
    assert over_all.gather[0] > found.gather[0], "the network takes part"


def test_one_group_of_all_is_no_group() -> None:
    trainer = training().trainers["flash"]
    for zero in (2, 3):
        stage = np.array([zero], dtype=np.int32)
        plain, grouped = (exchange(TWO_NODES, build.SHAPE, spread(dp=8, shard=n), stage, trainer) for n in (0, 8))
        assert all(np.array_equal(getattr(plain, f.name), getattr(grouped, f.name)) for f in fields(plain))


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
    found_cycles = found.cycles(found.stage_seconds, np.array([0]))
    assert times[4] == pytest.approx(max(found_cycles["rollout pool"][0], found_cycles["train pool"][0]))


def by_hand(plan: Plan, seconds: dict[str, float]) -> dict[str, float]:
    """Cycles of a plan whose stages take the given seconds, without calls."""

    def seconds_of(stage: Stage) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([seconds.get(stage.key, 0.0)])

    found = cycles(lower(JOB, plan), seconds_of, np.ones(1), 0.0, np.array([plan.staleness]))
    return {name: float(values[0]) for name, values in found.items()}


def test_the_cycles_by_hand() -> None:
    times = {"generate": 6.0, "reference_logprob": 1.0, "update_actor": 2.0}
    assert by_hand(build.plan(), times) == {"rollout pool": 6.0, "train pool": 3.0, "staleness circuit": 9.0}
    assert by_hand(build.plan(staleness=1), times)["staleness circuit"] == 4.5
    assert by_hand(build.plan(colocated=True), times) == {"pool": 9.0}
    # A streamed second hides under 6 s but for the last of 4 groups.
    assert by_hand(build.plan(stream=True), times)["staleness circuit"] == 6.0 + 0.25 + 2.0


def test_more_slots_cost_memory_and_save_time() -> None:
    few, many = build.plan(concurrency=4), build.plan(concurrency=16)
    costs = estimate(JOB, batch_of([few, many]), CLUSTER)
    assert costs.step_seconds[1] < costs.step_seconds[0]
    per_slot = 56 * 2 * 2 * 16 * 4
    assert costs.memory.terms["rollout kv cache"].tolist() == [4 * per_slot, 16 * per_slot]


def test_recomputation_saves_memory_and_costs_time() -> None:
    keep, again = build.plan(micro_batch=16), build.plan(micro_batch=16, recompute=True)
    assert seconds(again, Op.UPDATE_ACTOR) > seconds(keep, Op.UPDATE_ACTOR)
    costs = estimate(JOB, batch_of([keep, again]), CLUSTER)
    activations = costs.memory.terms["actor activations"]
    assert activations[1] < activations[0]


def test_data_parallel_training_divides_the_work() -> None:
    one = seconds(build.plan(colocated=True, train=2, dp=1), Op.UPDATE_ACTOR)
    two = seconds(build.plan(colocated=True, train=2, dp=2), Op.UPDATE_ACTOR)
    assert 0.5 * one < two < one
