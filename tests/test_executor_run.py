"""Real runs on Ray: a few worker processes, a tiny model, every kind of layout, and every kind of bad luck."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import build
import msgspec
import numpy as np
import psutil
import pytest

from executor.fleet import Fleet
from executor.measure import calibrate
from executor.result import RunResult, StepReport, stage_seconds
from executor.run import Options, execute
from ir.cluster import Cluster
from ir.documents import read_document, write_document
from ir.graph import Op
from ir.job import Job
from ir.lower import lower
from ir.plan import Pass, Plan, Update
from traces.schema import Span

pytestmark = pytest.mark.runtime

PLENTY = 8 << 30


def go(
    fleet: Fleet,
    job: Job,
    actor: Path,
    plan: Plan,
    *,
    steps: int = 3,
    memory_limit: int = PLENTY,
    hang_seconds: float = 60.0,
    on_step: object = lambda report: True,
) -> RunResult:
    return execute(
        fleet,
        lower(job, plan),
        run_id="test",
        model_path=str(actor),
        memory_limit=memory_limit,
        options=Options(steps=steps, hang_seconds=hang_seconds),
        on_step=on_step,  # type: ignore[arg-type]
    )


def losses(result: RunResult) -> list[float]:
    assert not result.failure, result.failure_detail
    assert max(report.metrics["gradient_norm"] for report in result.steps) > 1e-3, "nothing was learnt"
    return [report.metrics["loss"] for report in result.steps]


def rewards(result: RunResult) -> list[float]:
    return [report.reward for report in result.steps]


ONE = build.plan(colocated=True)


@pytest.mark.parametrize("fusion", ["rollout_logprob", "fold_old_logprob", "merge_logprobs"])
def test_with_fresh_weights_fusions_change_the_spans_and_not_the_learning(
    fleet: Fleet, tiny_job: Job, tiny_actor: Path, fusion: str
) -> None:
    plain = go(fleet, tiny_job, tiny_actor, ONE)
    fused_plan = build.plan(colocated=True, **{fusion: True})
    fused = go(fleet, tiny_job, tiny_actor, fused_plan)
    assert losses(fused) == pytest.approx(losses(plain), abs=1e-4)
    assert rewards(fused)[:2] == pytest.approx(rewards(plain)[:2])
    assert {span.stage for span in fused.spans} == {s.name for s in lower(tiny_job, fused_plan).stages} - {
        "sync_weights"
    }
    assert "old_logprob" in {span.stage for span in plain.spans}
    assert "old_logprob" not in {span.stage for span in fused.spans}


def test_weights_reach_the_other_pool_and_the_other_ranks(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    # The engine of device 0 samples alike in both layouts as long as its weights are the same.
    together = go(fleet, tiny_job, tiny_actor, ONE)
    apart = go(fleet, tiny_job, tiny_actor, build.plan())
    assert losses(apart) == pytest.approx(losses(together), abs=1e-4)
    # Two engines: whether one rank trains and broadcasts, or both train, is the same to them.
    alone = go(fleet, tiny_job, tiny_actor, build.plan(colocated=True, train=2, dp=1))
    both = go(fleet, tiny_job, tiny_actor, build.plan(colocated=True, train=2, dp=2))
    assert losses(both) == pytest.approx(losses(alone), abs=1e-4)
    assert any(span.stage == "sync_weights" for span in alone.spans)


def test_some_ranks_of_a_pool_train_among_themselves(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    one = go(fleet, tiny_job, tiny_actor, build.plan(colocated=True, train=3, dp=1), steps=2)
    two = go(fleet, tiny_job, tiny_actor, build.plan(colocated=True, train=3, dp=2), steps=2)
    assert {span.device for span in two.spans if span.stage == Op.UPDATE_ACTOR} == {0, 1}
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)


def test_passes_have_micro_batches_of_their_own(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    plan = msgspec.structs.replace(
        ONE,
        reference_logprob=Pass(pool="all", micro_batch=16),
        old_logprob=Pass(pool="all", micro_batch=1),
        update_actor=Update(pool="all", micro_batch=3, recompute="full"),
    )
    assert losses(go(fleet, tiny_job, tiny_actor, plan)) == pytest.approx(
        losses(go(fleet, tiny_job, tiny_actor, ONE)), abs=1e-4
    )


def test_streaming_overlaps_generation(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    streamed = go(fleet, tiny_job, tiny_actor, build.plan(stream=True, rollout_logprob=True, concurrency=4))
    assert not streamed.failure
    generating = [s for s in streamed.spans if s.stage == Op.GENERATE]
    reference = [s for s in streamed.spans if s.stage == Op.REFERENCE_LOGPROB]
    assert len(reference) > 3, "more than one visit a step"
    assert any(g.start_s < r.end_s and r.start_s < g.end_s for g in generating for r in reference)
    per_step = {step: sum(s.sequences for s in reference if s.step == step) for step in range(3)}
    assert per_step == {0: 16, 1: 16, 2: 16}


@pytest.mark.parametrize("k", [1, 4])
def test_staleness_is_used_and_bounded(fleet: Fleet, tiny_job: Job, tiny_actor: Path, k: int) -> None:
    result = go(fleet, tiny_job, tiny_actor, build.plan(staleness=k, stream=k == 4, concurrency=16), steps=8)
    assert not result.failure, result.failure_detail
    assert len(result.staleness) == 8 * 16
    assert 0 < max(result.staleness) <= k


def test_a_bound_of_zero_is_exactly_on_policy(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    for plan in (ONE, build.plan(), build.plan(stream=True)):
        assert set(go(fleet, tiny_job, tiny_actor, plan).staleness) == {0}


def test_minibatches_and_epochs_take_that_many_updates(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    job = build.job(directory=tiny_job.directory, minibatches=2, epochs=2)
    one = go(fleet, job, tiny_actor, ONE)
    two = go(fleet, job, tiny_actor, build.plan(colocated=True, train=2, dp=2))
    assert len(losses(one)) == len(losses(two)) == 3


def test_warm_workers_are_used_again_and_start_afresh(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    first = go(fleet, tiny_job, tiny_actor, ONE)
    pools, warm = fleet.acquire(lower(tiny_job, ONE).pools)
    again = go(fleet, tiny_job, tiny_actor, ONE)
    assert warm and again.warm
    assert fleet.acquire(lower(tiny_job, ONE).pools)[0][0].pids == pools[0].pids
    assert losses(again) == pytest.approx(losses(first), abs=1e-6), "nothing is left over from the first run"


def test_a_run_ends_when_its_caller_has_seen_enough(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    seen: list[StepReport] = []

    def on_step(report: StepReport) -> bool:
        seen.append(report)
        return len(seen) < 2

    result = go(fleet, tiny_job, tiny_actor, build.plan(staleness=1), steps=100, on_step=on_step)
    assert len(result.steps) == 2 and result.step_seconds == ()


def test_peak_memory_is_measured(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    result = go(fleet, tiny_job, tiny_actor, ONE)
    assert 100 << 20 < result.peak_bytes < PLENTY


def test_too_little_memory_is_a_result(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    result = go(fleet, tiny_job, tiny_actor, ONE, memory_limit=50 << 20)
    assert result.failure == "oom"
    assert "MiB occupied, the device has 50 MiB" in result.failure_detail
    assert not go(fleet, tiny_job, tiny_actor, ONE).failure, "the next run gets new workers"


@pytest.mark.parametrize(("sent", "kind"), [(signal.SIGKILL, "worker-died"), (signal.SIGSTOP, "timeout")])
def test_a_worker_that_dies_or_hangs_is_a_result(
    fleet: Fleet, tiny_job: Job, tiny_actor: Path, sent: signal.Signals, kind: str
) -> None:
    plan = build.plan(staleness=1)
    assert not go(fleet, tiny_job, tiny_actor, plan, steps=1).failure
    pools, _ = fleet.acquire(lower(tiny_job, plan).pools)
    victim = pools[0].pids[0]

    def strike(report: StepReport) -> bool:
        if report.step == 1:
            os.kill(victim, sent)
        return True

    result = go(fleet, tiny_job, tiny_actor, plan, steps=10**6, on_step=strike, hang_seconds=6.0)
    assert result.failure == kind
    assert result.failure_detail
    deadline = time.monotonic() + 5
    while psutil.pid_exists(victim) and psutil.Process(victim).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker was not ended"
        time.sleep(0.05)
    assert not go(fleet, tiny_job, tiny_actor, plan).failure


def test_a_crash_names_its_cause(fleet: Fleet, tiny_job: Job, tmp_path: Path) -> None:
    result = go(fleet, tiny_job, tmp_path / "no-model", ONE)
    assert result.failure == "crash"
    assert result.failure_detail


def test_a_prompt_that_is_too_long_is_not_cut_in_silence(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    job = build.job(directory=tiny_job.directory, max_prompt_tokens=2)
    result = go(fleet, job, tiny_actor, ONE)
    assert result.failure == "crash"
    assert "workload.max_prompt_tokens: must hold prompt 0" in result.failure_detail


def test_an_interrupt_passes_through(fleet: Fleet, tiny_job: Job, tiny_actor: Path) -> None:
    # A shell that starts the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            go(fleet, tiny_job, tiny_actor, ONE, steps=10**6)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 6.0


def test_a_machine_is_measured_as_a_cluster_that_can_be_kept(fleet: Fleet, tmp_path: Path) -> None:
    cluster = calibrate(fleet, "cpu", 2, lambda text: None)
    write_document(tmp_path / "cluster.toml", cluster)
    assert read_document(tmp_path / "cluster.toml", Cluster) == cluster
    assert (cluster.num_devices, cluster.is_uniform, cluster.groups[0].domain) == (2, True, 2)
    (level,) = cluster.levels
    assert {(point.op, point.ranks) for point in level.collectives} == {("all_reduce", 2), ("broadcast", 2)}
    assert 1e-6 < level.latency_s < 0.1 and 1e7 < level.bandwidth < 1e12
    assert 1e8 < cluster.device.memory_bandwidth < 1e13


def test_stage_seconds_are_what_lies_in_a_step() -> None:
    def span(stage: str, device: int, start: float, end: float) -> Span:
        return Span(run_id="r", step=0, stage=stage, pool="p", device=device, start_s=start, end_s=end)

    spans = [span("generate", 0, 0.0, 5.0), span("generate", 1, 2.5, 3.0), span("update", 0, 3.5, 4.5)]
    # Steps end at 1 (the warm-up), 2, 3 and 4.
    found = stage_seconds(spans, [0.0, 1.0, 2.0, 3.0, 4.0], 1)
    assert found == pytest.approx({"generate": 1.0, "update": 0.5 / 3})
    assert np.isclose(stage_seconds(spans, [0.0, 3.0, 4.0], 1)["update"], 0.5)
