"""Generation on described accelerators: pieces against arithmetic and simulation, and behaviour any engine must show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import build
import numpy as np
import pytest
from accuracy_makespan import judged, length_model, phase
from accuracy_makespan import seconds as makespan_seconds
from simulate import Case, simulate

from analytic import mixed
from analytic.costs import Cost
from analytic.fit import setup
from analytic.lengths import Distribution, LengthModel
from analytic.makespan import Load, continuous, drained
from analytic.rollout import generate_cost
from analytic.serving import serving
from analytic.speculation import tokens_per_step
from ir.job import Job, Lengths
from ir.known_models import known_config
from ir.lengths import Lognormal
from ir.model import shape_from_config
from ir.systems import system
from ir.workload import Latency, Speculation, Turns

ONE = np.ones(1)
DENSE = shape_from_config(known_config("Qwen/Qwen2.5-7B", where="test"), where="test")
EXPERTS = shape_from_config(known_config("Qwen/Qwen3-30B-A3B", where="test"), where="test")
LATENT = shape_from_config(known_config("deepseek-ai/DeepSeek-V2-Lite", where="test"), where="test")


def a_job(share: float = 0.0, **workload: Any) -> Job:
    lengths = Lengths(
        prompt=Lognormal(mean=400.0, sigma=0.3), response=Lognormal(mean=2000.0, sigma=0.9), prompt_share=share
    )
    plain: dict[str, Any] = {
        "prompts_per_step": 64, "samples_per_prompt": 16, "max_prompt_tokens": 1024, "max_response_tokens": 8192,
        "lengths": lengths,
    }  # fmt: skip
    return build.job(shape=DENSE, **plain | workload)


def cost(job: Job | None = None, shape: Any = DENSE, **columns: int) -> Cost:
    job = replace(job or a_job(), actor=shape)
    s = setup(job, system("dgx-h100", 8, where="test"))
    plain = {
        "tp": 1, "pp": 1, "ep": 1, "concurrency": 256, "memory_percent": 0, "prefill_tokens": 0, "precision": 0,
        "draft_tokens": 0, "devices": 8, "group": 0, "staleness": 0,
    }  # fmt: skip
    x = {name: np.array([value], dtype=np.int32) for name, value in (plain | columns).items()}
    return generate_cost(s, s.machines[0], shape, x)


def seconds(job: Job | None = None, shape: Any = DENSE, **columns: int) -> float:
    return float(cost(job, shape, **columns).seconds[0])


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, LATENT])
@pytest.mark.parametrize(
    "columns",
    [{}, {"tp": 4}, {"staleness": 2}, {"pp": 2}, {"memory_percent": 40, "concurrency": 1024}, {"precision": 1}],
)
def test_parts_add_up(shape: Any, columns: dict[str, int]) -> None:
    found = cost(None, shape, **columns)
    assert sum(part[0] for part in found.kinds.values()) == pytest.approx(found.seconds[0])
    assert all(part[0] >= 0 for part in found.kinds.values())
    assert found.latency[0] >= found.seconds[0] * (1 - 1e-9)


def test_sequences_that_are_taken_in_later_wait_for_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 7B on four devices is done in less than its 28 layers are launched, 12 kernels of 41 us each."""
    job = a_job(prompts_per_step=16)
    columns = [
        {"tp": 4, "concurrency": 256},
        {"tp": 4, "concurrency": 16},
        {"tp": 4, "concurrency": 16, "staleness": 2},
    ]
    host = [cost(job, **one).kinds["host"][0] for one in columns]
    monkeypatch.setattr(mixed, "serving", lambda: replace(serving(), launch_s=0.0))
    at_once, refilled, flowing = (h - cost(job, **one).kinds["host"][0] for h, one in zip(host, columns, strict=True))
    assert at_once == 0.0
    assert 0.0 < refilled < flowing < 128 * 28 * 12 * 41e-6


def test_equal_lengths_by_hand() -> None:
    """Of 8 sequences of 100 tokens, 4 at a time take 200 steps, and 8 at a time 100."""
    lengths = LengthModel(prompt=Distribution((10.0, 10.0)), response=Distribution((100.0, 100.0)))
    load = Load(count=8 * ONE, members=1, engines=ONE, wanted=4 * ONE, capacity=np.inf * ONE, held=10.0)
    found = drained(lengths, load)
    # The drain of four that are begun together is told by their residual lives: it errs by less than half of one.
    assert found.steps[0] == pytest.approx(200, abs=50)
    assert (found.full * found.batch + found.drain * found.last)[0] == pytest.approx(800)
    together = drained(lengths, replace(load, wanted=8 * ONE))
    assert (together.full[0], together.drain[0], together.last[0]) == (0.0, pytest.approx(100), pytest.approx(8))
    flowing = continuous(lengths, load, ONE)
    assert (flowing.full[0], flowing.batch[0], flowing.drain[0]) == (200.0, 4.0, 0.0)


def test_waiting_for_an_environment_holds_slots() -> None:
    """Sequences of 100 tokens that wait for 100 steps are decoded half of the time: the closed network of 5.10."""
    lengths = LengthModel(prompt=Distribution((10.0, 10.0)), response=Distribution((100.0, 100.0)))
    load = Load(
        count=8 * ONE, members=1, engines=ONE, wanted=4 * ONE, capacity=np.inf * ONE, held=10.0, idle=100.0 * ONE,
        idle_longest=100.0 * ONE,
    )  # fmt: skip
    flowing = continuous(lengths, load, ONE)
    assert (flowing.full[0], flowing.batch[0]) == (400.0, 2.0)


def test_the_longest_of_like_samples_is_shorter() -> None:
    job = a_job()
    assert job.lengths is not None
    table = job.lengths.response
    alone = LengthModel(
        prompt=Distribution((1.0, 1.0)), response=Distribution(table.values, table.probabilities), prompt_share=0.0
    )
    alike = [replace(alone, prompt_share=share).longest(8 * ONE, 16)[0] for share in (0.0, 0.5, 0.9, 0.999)]
    assert alike == sorted(alike, reverse=True)
    assert alike[-1] == pytest.approx(alone.longest(8 * ONE, 1)[0], rel=0.06), "all samples of a prompt are one"


@pytest.mark.parametrize(("count", "slots"), [(512, 512), (1024, 128)])
def test_abandoning_the_slowest_agrees_with_simulation(count: int, slots: int) -> None:
    case = Case(prompts=count // 8, mean=2000.0, sigma=0.6, cap=16384, slots=slots, used=0.8)
    runs = judged(case, 3)
    found = phase(case, length_model(case))
    assert found.steps[0] == pytest.approx(np.mean([run.steps for run in runs]), rel=0.08)
    tokens = (found.full * found.batch + found.drain * found.last)[0]
    assert tokens == pytest.approx(np.mean([run.generated for run in runs]), rel=0.05)


def test_simulated_events_agree_with_a_cache_that_holds_all() -> None:
    """Blocks that are never short change nothing."""
    case = Case(prompts=16, mean=500.0, sigma=0.8, cap=4096, slots=48)
    plain, blocks = simulate(case, 1), simulate(replace(case, capacity=1e9), 1)
    assert (plain.steps, plain.generated) == (blocks.steps, blocks.generated)
    assert plain.seconds == pytest.approx(blocks.seconds)
    assert blocks.recomputed == 0.0


def test_tokens_of_a_step_by_hand() -> None:
    """Three guesses of which each is right with 0.5: 1 + 0.5 + 0.25 + 0.125 tokens."""
    found = tokens_per_step(Speculation(acceptance=0.5), np.array([0.0, 1.0, 3.0]))
    assert found.tolist() == [1.0, 1.5, 1.875]
    assert tokens_per_step(None, np.array([3.0])).tolist() == [1.0]


@pytest.mark.parametrize(("draft", "acceptance"), [(1, 0.9), (3, 0.5), (4, 0.8)])
@pytest.mark.parametrize("slots", [64, 256])
def test_guesses_agree_with_simulation(draft: int, acceptance: float, slots: int) -> None:
    """What guesses save of the time that the same sequences take without."""
    plain = Case(prompts=64, mean=1500.0, sigma=0.8, cap=8192, slots=slots)
    case = replace(plain, draft=draft, acceptance=acceptance)
    with_guesses, without = (np.mean([run.seconds for run in judged(c, 100)]) for c in (case, plain))
    assert makespan_seconds(case) / makespan_seconds(plain) == pytest.approx(with_guesses / without, rel=0.02)


def speculating(acceptance: float = 0.8, draft_cost: float = 0.0) -> Job:
    return a_job(speculation=Speculation(acceptance=acceptance, cost=draft_cost))


def test_guesses_pay_where_weights_are_streamed() -> None:
    """With few sequences a step of five tokens takes hardly longer than one of one; with many, products do."""
    few, many = ({"concurrency": n, "devices": 1} for n in (8, 1024))
    gained = float(tokens_per_step(Speculation(acceptance=0.8), np.array([4.0]))[0])
    saved = seconds(speculating(), **few) / seconds(speculating(), **few, draft_tokens=4)
    assert 0.8 * gained < saved < gained
    assert seconds(speculating(), **many) / seconds(speculating(), **many, draft_tokens=4) < 0.7 * saved
    assert seconds(speculating(0.05), **many, draft_tokens=4) > seconds(speculating(0.05), **many), "most are wrong"


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, LATENT])
def test_no_guesses_are_plain_decoding_and_better_ones_are_faster(shape: Any) -> None:
    assert seconds(speculating(), shape) == seconds(None, shape)
    times = [seconds(speculating(chance), shape, draft_tokens=2) for chance in (0.3, 0.6, 0.9)]
    assert times == sorted(times, reverse=True)


def test_a_draft_model_costs_time_and_memory() -> None:
    free, dear = (cost(speculating(draft_cost=c), draft_tokens=4) for c in (0.0, 0.1))
    assert dear.seconds[0] > free.seconds[0]
    assert free.transient["draft model"][0] == 0.0
    assert dear.transient["draft model"][0] == pytest.approx(0.1 * dear.transient["rollout weights"][0])
    none = cost(speculating(draft_cost=0.1))
    assert none.transient["draft model"][0] == 0.0


def test_staleness_saves_the_drain() -> None:
    fresh, stale = cost(), cost(staleness=2)
    assert stale.seconds[0] < fresh.seconds[0]
    assert stale.kinds["tail"][0] == 0.0 < fresh.kinds["tail"][0]
    assert stale.latency[0] > stale.seconds[0]
    assert seconds(staleness=2, in_flight=0) == pytest.approx(fresh.seconds[0]), "whole sequences drain at each version"


def test_more_devices_an_engine_cost_collectives() -> None:
    one, four = cost(devices=1), cost(devices=4, tp=4)
    assert four.seconds[0] < one.seconds[0]
    assert one.kinds["communication"][0] == 0.0 < four.kinds["communication"][0]


def test_narrow_weights_are_read_faster() -> None:
    assert seconds(precision=1, concurrency=16) < seconds(concurrency=16)
    wide, narrow = cost(), cost(precision=1)
    assert narrow.transient["rollout weights"][0] == pytest.approx(wide.transient["rollout weights"][0] / 2)


def test_a_small_cache_is_waited_for() -> None:
    wide = seconds(concurrency=256, devices=1, memory_percent=90)
    tight = seconds(concurrency=256, devices=1, memory_percent=35)
    assert tight > 1.1 * wide


def test_abandoning_the_slowest_saves_the_tail() -> None:
    """A tenth more is begun, which costs less than the longest responses do."""
    assert seconds(a_job(oversampling=1.1), concurrency=1024) < seconds(concurrency=1024)


def test_turns_wait_and_read() -> None:
    single = seconds()
    reads = seconds(a_job(turns=Turns(mean=4.0, observation_tokens=100.0)))
    waits = seconds(a_job(turns=Turns(mean=4.0, observation_tokens=100.0, latency=Latency(mean_s=5.0, cv=1.0))))
    assert reads < single, "what is read is not generated"
    assert reads + 15.0 < waits < reads + 60.0, "the last sequence waits for three answers, and some take long"


def test_a_shared_prefix_is_read_once() -> None:
    assert seconds(a_job(shared_prefix_tokens=300)) < seconds()
