"""Training steps and memory: what was reached on published rows, with slack; and their parts against arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pipelines
import pytest
from accuracy_training import SETS
from build import changed
from pipelines import Pipeline, makespan
from training_rows import Row, gpt, machine, step_seconds

from analytic.activations import held, in_flight, put_off
from analytic.costs import KINDS, Cost
from analytic.estimate import section_cost
from analytic.fit import setup
from analytic.layers import spread_of
from analytic.lengths import Distribution
from analytic.memory import memory, shortfall
from analytic.microbatch import Batch, cut, straggling
from analytic.passes import update_memory
from analytic.stages import filled_share, flight_seconds, slowest_stage
from analytic.training import training
from analytic.update import train_step
from ir.batch import batch_of
from ir.graph import Op
from ir.job import load_job
from ir.plan import SECTIONS
from ir.rules import setting_of
from ir.shape import Moe
from ir.systems import load_cluster
from space.presets import presets

DATA = Path(__file__).resolve().parent / "data"
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

GPT = gpt(layers=24, hidden=2048, heads=16, ffn=5461, vocab=51200, tied=True)
ROW = Row(
    framework="test",
    gpu="a100",
    num_gpus=8,
    shape=GPT,
    seq_len=2048,
    global_batch=64,
    micro_batch=4,
    seconds=1.0,
    zero=1,
)


@pytest.mark.parametrize(
    ("name", "mean", "tau"),
    [
        ("training_dense", 0.07, 0.94),
        ("training_moe", 0.145, 0.78),
        ("training_sweep", 0.11, 0.88),
        ("memory", 0.055, 0.94),
        ("memory.memory_seqpar", 0.03, 0.97),
    ],
)
def test_errors_stay_where_they_were_reached(name: str, mean: float, tau: float) -> None:
    found = SETS[name](DATA)
    assert found is not None
    figures = found.figures()
    assert figures["mean"] <= mean
    assert figures["tau"] >= tau


def test_the_dense_rows_are_priced_better_than_by_a_constant_rate() -> None:
    found = SETS["training_dense"](DATA)
    assert found is not None
    figures = found.figures()
    assert figures["mean"] < figures["baseline_mean"]


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values)


def test_a_pipeline_by_hand() -> None:
    """Four ranks of 1 s each with a head of 0.5 s on the last; 8 micro-batches, in one or two pieces."""
    slowest = slowest_stage(GPT, ints(4), np.array([4.0]), np.array([0.5]))
    assert slowest[0] == 1.5
    for pieces, wait in ((1, 3.0), (2, 1.5)):
        busy, bubble = flight_seconds(slowest, np.array([4.5]), ints(8), ints(4), ints(pieces))
        assert (busy[0], bubble[0]) == (12.0, wait)


@pytest.mark.parametrize("zero_bubble", [False, True])
@pytest.mark.parametrize(
    "seconds", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 1.3), (0.5, 1.0, 1.4)]
)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 2), (4, 4), (4, 9), (8, 32)])
def test_schedules_of_pipelines_agree_with_simulation(
    ranks: int, batches: int, seconds: tuple[float, float, float], zero_bubble: bool
) -> None:
    forward, inputs, weights = seconds
    pipeline = Pipeline(
        ranks=ranks, batches=batches, forward=forward, inputs=inputs, weights=weights, zero_bubble=zero_bubble
    )
    each = np.array([sum(seconds)])
    filled = filled_share(np.array([forward]), np.array([weights]), each) * zero_bubble
    busy, bubble = flight_seconds(each, ranks * each, ints(batches), ints(ranks), ints(1), filled)
    assert busy[0] + bubble[0] == pytest.approx(makespan(pipeline))


def test_a_zero_bubble_by_hand() -> None:
    """Where all three parts of a micro-batch take equally long, a third of the bubble is left (arXiv:2401.10241)."""
    one, three = np.array([1.0]), np.array([3.0])
    assert filled_share(one, one, three)[0] == pytest.approx(2 / 3)
    assert filled_share(one, np.zeros(1), three)[0] == 0.0, "frozen weights have nothing to put off"


def test_a_zero_bubble_keeps_as_many_micro_batches_on_every_rank() -> None:
    pipeline = Pipeline(ranks=4, batches=16, forward=1.0, inputs=1.0, weights=1.0, zero_bubble=True)
    assert [pipelines.in_flight(pipeline, rank) for rank in range(4)] == [(4, 1), (4, 2), (4, 3), (4, 4)]
    row = replace(ROW, pp=4, global_batch=64, micro_batch=1)
    x, m = row.columns(), machine("a100", 8)
    at, micro = spread_of(x, ints(2)), cut(m, x, row.batch, ints(1))
    late = x | {"schedule": np.array([1], dtype=np.int32)}
    assert (put_off(at, x, micro)[0], put_off(at, late, micro)[0]) == (0.0, 3.0)


def test_a_zero_bubble_takes_less_time_and_no_less_memory() -> None:
    row = replace(ROW, pp=8, global_batch=64, micro_batch=1)

    def found(schedule: int, recompute: int) -> tuple[dict[str, float], float]:
        x = row.columns() | {
            name: np.array([v], dtype=np.int32) for name, v in (("schedule", schedule), ("recompute", recompute))
        }
        at, m = spread_of(x, ints(1)), machine("a100", 8)
        kinds, micro = train_step(m, GPT, at, x, row.batch, row.traits)
        kept = held(m, GPT, at, x, micro, row.traits, micro.mean.tokens)
        return {kind: float(values[0]) for kind, values in kinds.items()}, float(kept.peak[0])

    (plain, bytes_plain), (late, bytes_late) = found(0, 0), found(1, 0)
    assert 0.3 * plain["bubble"] < late["bubble"] < 0.6 * plain["bubble"], "attention has no weights"
    assert {k: v for k, v in late.items() if k != "bubble"} == {k: v for k, v in plain.items() if k != "bubble"}
    assert bytes_plain <= bytes_late < 1.3 * bytes_plain, "the last rank keeps as much as the first"
    # What was dropped is there again when gradients of inputs are made, and stays until those of weights are.
    assert found(1, 2)[1] > 3 * found(0, 2)[1]


def test_ranks_of_unequal_layers_put_the_head_with_the_fewer() -> None:
    assert slowest_stage(replace(GPT, layers=10), ints(4), np.array([10.0]), np.array([0.5]))[0] == 3.0


def test_kinds_are_not_negative_and_more_devices_take_less() -> None:
    one, two = step_seconds(ROW), step_seconds(replace(ROW, num_gpus=16))
    assert all(seconds >= 0 for seconds in one.values())
    assert 0.45 * sum(one.values()) < sum(two.values()) < sum(one.values())


@pytest.mark.parametrize(
    "change",
    [{"recompute": "full"}, {"zero": 3}, {"tp": 8}, {"pp": 8}, {"micro_batch": 1}, {"trainer": "unfused"}],
)
def test_what_costs_time(change: dict[str, object]) -> None:
    assert sum(step_seconds(replace(ROW, **change)).values()) > sum(step_seconds(ROW).values())  # type: ignore[arg-type]


def test_state_in_groups_saves_network_traffic_and_costs_memory() -> None:
    """64 replicas on 8 nodes: a copy in each node is gathered inside it, and gradients cross the network once a step;
    the more micro-batches a step has, the more that saves."""
    shape, m, trainer = gpt(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000), machine("h100", 64), ROW.traits
    row = replace(ROW, gpu="h100", num_gpus=64, shape=shape, micro_batch=1, zero=3, recompute="full")

    def seconds_and_bytes(shard: int, micro_batches: int) -> tuple[float, float]:
        batch = replace(row, global_batch=64 * micro_batches).batch
        x = row.columns() | {"shard": np.array([shard], dtype=np.int32)}
        at = spread_of(x, ints(64))
        kinds, micro = train_step(m, shape, at, x, batch, trainer)
        resident, _ = update_memory(m, shape, at, x, micro, trainer)
        return float(kinds["communication"][0]), float(resident["optimizer"][0])

    (whole, held), (grouped, more) = seconds_and_bytes(0, 4), seconds_and_bytes(8, 4)
    assert grouped < whole
    assert more == pytest.approx(8 * held)
    later = seconds_and_bytes(0, 16)[0] - seconds_and_bytes(8, 16)[0]
    assert later > whole - grouped


def test_a_pass_in_groups_saves_network_traffic_and_costs_memory() -> None:
    """A reference of 64 replicas on 8 nodes, gathered inside each node."""
    job, cluster = load_job(EXAMPLES / "grpo-qwen2.5-7b" / "job.toml"), load_cluster("dgx-h100:64")
    plan = presets(setting_of(job, cluster))["verl-colocated"]

    def cost(shard: int) -> Cost:
        section = {"zero": 3, "shard": shard, "offload": "none"}
        batch = batch_of([changed(plan, reference_logprob=section)])
        return section_cost(setup(job, cluster), Op.REFERENCE_LOGPROB, batch.section(Op.REFERENCE_LOGPROB))

    whole, grouped = cost(0), cost(8)
    assert grouped.kinds["communication"][0] < whole.kinds["communication"][0]
    assert grouped.resident["weights"][0] == pytest.approx(8 * whole.resident["weights"][0])
    assert grouped.transient["gathered layers"][0] == whole.transient["gathered layers"][0]


def test_what_graphs_and_overlaps_save_layers_with_experts() -> None:
    shape = replace(GPT, moe=Moe(experts=64, experts_per_token=8, ffn=1024))
    row = replace(ROW, gpu="h100", num_gpus=8, ep=8, shape=shape, micro_batch=1)
    host = training().trainers["flash"].expert_launches * machine("h100", 8).device.host.train_layer_s
    whole = step_seconds(row)
    assert sum(whole.values()) >= 24 * 8 * host, "24 layers and 8 micro-batches, launched one by one"
    assert step_seconds(replace(row, launched=0.0))["host"] == 0.0 < whole["host"]
    hidden = step_seconds(replace(row, overlaps_experts=True))["communication"]
    assert hidden < 0.5 * step_seconds(row)["communication"]


def test_frozen_weights_save_time_and_fp8_too() -> None:
    whole = sum(step_seconds(replace(ROW, gpu="h100")).values())
    assert sum(step_seconds(replace(ROW, gpu="h100", shape=replace(GPT, lora_rank=16))).values()) < whole
    assert sum(step_seconds(replace(ROW, gpu="h100", fp8=True)).values()) < whole


def test_activations_by_hand() -> None:
    """arXiv:2205.05198: sbh (10 + 24/t + 5as/ht) bytes a layer without, sbh/t (34 + 5as/h) with sequence parallelism."""
    row = replace(ROW, tp=8, trainer="unfused", micro_batch=1, global_batch=1)
    x, m = row.columns(), machine("a100", 8)
    at = spread_of(x, ints(1))
    micro = cut(m, x, row.batch, at.cp)
    sbh, scores = 2048 * 2048.0, 5 * 16 * 2048 / 2048
    for parallel, each in ((False, 10 + (24 + scores) / 8), (True, (34 + scores) / 8)):
        trainer = replace(training().trainers["unfused"], sequence_parallel=parallel)
        kept = held(m, GPT, at, x, micro, trainer, micro.mean.tokens)
        assert kept.layers[0] == pytest.approx(24 * sbh * each, rel=1e-3)


def test_micro_batches_in_flight_by_hand() -> None:
    row = replace(ROW, pp=4, global_batch=64, micro_batch=1)
    for pieces, wanted in ((1, 4.0), (2, 4.0 * (1 + 3 / 8))):
        x = {**row.columns(), "vpp": np.array([pieces], dtype=np.int32)}
        at = spread_of(x, ints(2))
        assert in_flight(at, x, cut(machine("a100", 8), x, row.batch, at.cp))[0] == wanted


def test_the_slowest_of_replicas_by_hand() -> None:
    """Lengths between 0 and 200 have a coefficient of variation of 1/sqrt(3); 8 replicas of 12 sequences."""
    batch = Batch(count=ints(12), lengths=Distribution((0.0, 200.0)), head_share=1.0, longest=200.0)
    x = {**ROW.columns(), "micro_batch": np.array([4], dtype=np.int32)}
    micro = cut(machine("a100", 8), x, batch, ints(1))
    share, core = straggling(batch, micro, ints(8), np.array([False]), np.array([False]))
    assert share[0] == pytest.approx(np.sqrt(2 * np.log(8) / 12 / 3), rel=1e-3)
    assert core[0] == 0
    share, core = straggling(batch, micro, ints(8), np.array([True]), np.array([False]))
    assert share[0] == 0
    assert core[0] > 0


def test_equal_lengths_leave_no_one_waiting() -> None:
    micro = cut(machine("a100", 8), ROW.columns(), ROW.batch, ints(1))
    share, core = straggling(ROW.batch, micro, ints(8), np.array([False]), np.array([True]))
    assert (share[0], core[0]) == (0, 0)


def test_one_row_or_many_cost_the_same() -> None:
    rows = [replace(ROW, tp=tp, zero=zero, micro_batch=mb) for tp in (1, 2) for zero in (1, 3) for mb in (1, 4)]
    m, trainer = machine("a100", 8), training().trainers["flash"]
    x = {name: np.concatenate([row.columns()[name] for row in rows]) for name in ROW.columns()}
    at = spread_of(x, x["dp"].astype(np.int64))
    batch = replace(ROW.batch, count=np.concatenate([row.batch.count for row in rows]))
    kinds, _ = train_step(m, GPT, at, x, batch, trainer)
    assert sum(kinds.values()).tolist() == pytest.approx([sum(step_seconds(row).values()) for row in rows])


def test_kinds_of_sections_add_up_and_a_plan_that_does_not_fit_is_explained() -> None:
    cluster = load_cluster("dgx-a100:8")
    job = load_job(EXAMPLES / "grpo-qwen2.5-7b" / "job.toml")
    plan = presets(setting_of(job, cluster))["colocated-sync"]
    s, b = setup(job, cluster), batch_of([plan])
    costs = {op: section_cost(s, op, b.section(op)) for op in SECTIONS if b.has(op).any()}
    for op in (Op.UPDATE_ACTOR, Op.OLD_LOGPROB):
        assert set(costs[op].kinds) <= set(KINDS)
        assert sum(costs[op].kinds.values())[0] == pytest.approx(costs[op].seconds[0])
    found = memory(s, b, costs)
    assert found.expected["rollout"][0] <= found.pools["rollout"][0]
    assert shortfall(s, b, costs) is None
    needed = found.peak[0] / cluster.device.memory_bytes
    short = shortfall(s, b, costs, margin=1.0 - needed / 1.01)
    assert short is not None
    assert short.pool == "rollout"
    assert sum(size for _, size in short.terms) == pytest.approx(found.peak[0])
    assert short.missing == pytest.approx(found.peak[0] * (1 - 1 / 1.01))
