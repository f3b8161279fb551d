"""Steps that take in prompts while sequences decode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from analytic.engine import Engine, engine_of
from analytic.fit import machine_of
from analytic.mixed import graphless_seconds, interleaved_seconds, launches
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


def test_few_prompts_cost_launches_and_many_cost_work() -> None:
    e = engine("Llama-3.1-8B-Instruct")
    host = graphless_seconds(e)[0]
    assert host == pytest.approx(320 * 41e-6)
    step, one = of(0.005), of(1.0)
    quick = interleaved_seconds(e, step, of(0.001), of(0.1), one)[0]
    assert quick == pytest.approx(0.9 * 0.005 + 0.1 * host)
    slow = interleaved_seconds(e, step, of(0.1), of(0.1), one)[0]
    assert slow == pytest.approx(0.005 + 0.1 * 0.1)
    together = interleaved_seconds(e, step, of(0.001), of(0.1), of(2.0))[0]
    assert together == pytest.approx(0.95 * 0.005 + 0.05 * host), "half as many steps take any in"


def test_passes_of_prompts_alone_hold_decoding_up() -> None:
    e = engine("Llama-3.1-8B-Instruct")
    along, apart = (
        interleaved_seconds(e, of(0.005), of(0.1), of(0.1), of(1.0), alone)[0] for alone in (None, of(0.004))
    )
    assert apart - along == pytest.approx(0.1 * 0.004)


@given(st.floats(1e-4, 0.1), st.floats(1e-5, 1.0), st.floats(1e-6, 1.0), st.floats(1.0, 16.0))
def test_prompts_never_speed_up_decoding(step: float, prompt: float, arrivals: float, together: float) -> None:
    e = engine("Llama-3.1-8B-Instruct")
    mean = interleaved_seconds(e, of(step), of(prompt), of(arrivals), of(together))[0]
    assert mean >= step * (1 - 1e-12)
    assert mean >= step + arrivals * prompt - 1e-12 - arrivals / together * 1e-12
    more = interleaved_seconds(replace(e), of(step), of(prompt), of(2 * arrivals), of(together))[0]
    assert more >= mean * (1 - 1e-12)
