"""Steps that take in prompts while sequences decode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from analytic.engine import Engine, engine_of
from analytic.fit import machine_of
from analytic.mixed import graphless_seconds, launch_waits, launches, met
from analytic.spread import Spread
from ir.known_models import known_config
from ir.model import shape_from_config
from ir.systems import system


def engine(model: str, tp: int = 1) -> Engine:
    """Of a known model on H100."""
    one, machine = np.ones(1, dtype=np.int64), machine_of(system("dgx-h100", 8, where="test").groups[0])
    at = Spread(tp=tp * one, pp=one, cp=one, ep=one, etp=tp * one, dp=one, shard=0 * one, fp8=one > 1)
    return engine_of(machine, shape_from_config(known_config(model, where="test"), where="test"), at)


def of(*values: float) -> NDArray[np.float64]:
    return np.array(values)


def test_kernels_of_a_step() -> None:
    """Four products, attention and five small kernels in each of 32 layers; two all-reduces more with two ranks."""
    assert launches(engine("Llama-3.1-8B-Instruct"))[0] == 32 * 10
    assert launches(engine("Llama-3.1-8B-Instruct", tp=2))[0] == 32 * 12
    # A router's product and two kernels, and five of experts, in place of two products.
    assert launches(engine("Qwen3-235B-A22B"))[0] == 94 * 16


def test_few_prompts_wait_for_launches_and_many_do_not() -> None:
    e = engine("Llama-3.1-8B-Instruct")
    host = graphless_seconds(e)[0]
    assert host == pytest.approx(320 * 41e-6)
    step, tenth = of(0.005), of(0.1)
    assert launch_waits(e, step, of(0.001), tenth, of(1.0))[0] == pytest.approx(0.1 * (host - 0.006))
    assert launch_waits(e, step, of(0.001), tenth, of(2.0))[0] == pytest.approx(0.05 * (host - 0.007))
    assert launch_waits(e, step, of(0.1), tenth, of(1.0))[0] == 0.0


def test_prompts_that_come_at_random_meet() -> None:
    assert met(of(1e-9, 1.0, 20.0)) == pytest.approx([1.0, 1.0 / (1.0 - np.exp(-1.0)), 20.0])


@given(st.floats(1e-4, 0.1), st.floats(1e-5, 1.0), st.floats(1e-6, 1.0))
def test_waits_are_bounded_by_a_step_without_graphs(step: float, prompt: float, arrivals: float) -> None:
    e = engine("Llama-3.1-8B-Instruct")
    waits = launch_waits(e, of(step), of(prompt), of(arrivals), met(of(arrivals)))[0]
    assert 0.0 <= waits <= graphless_seconds(e)[0] * -np.expm1(-arrivals)
    assert waits <= launch_waits(e, of(step / 2), of(prompt), of(arrivals), met(of(arrivals)))[0]
