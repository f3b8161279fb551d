"""Configurations that frameworks publish are read as jobs and plans, judged, and bettered."""

from __future__ import annotations

import numpy as np
import pytest
from public_configs import CONFIGS, PublicConfig

from analytic.estimate import estimate
from ir.batch import batch_of
from ir.rules import check
from ir.setting import setting_of
from search.compare import comparison_text


def test_there_are_many() -> None:
    assert len(CONFIGS) >= 20
    assert {config.framework for config in CONFIGS} == {"areal", "nemo-rl", "openrlhf", "trl", "verl"}


@pytest.mark.parametrize("config", CONFIGS, ids=[config.name for config in CONFIGS])
def test_a_public_configuration_is_read_and_priced(config: PublicConfig) -> None:
    found = config.imported
    assert found.plan.num_devices <= found.devices == found.nodes * found.per_node
    check(found.plan, setting_of(config.job, config.cluster), where=config.name)
    priced = estimate(config.job, batch_of([found.plan]), config.cluster)
    assert np.isfinite(priced.step_seconds).all() and (priced.step_seconds > 0).all()
    assert (priced.memory.fill > 0).all()


@pytest.mark.parametrize(
    "name", ["verl/grpo-qwen2.5-7b-megatron", "openrlhf/reinforce-hybrid-engine", "areal/gsm8k-grpo-megatron"]
)
def test_a_better_plan_is_offered_that_the_framework_can_run(name: str) -> None:
    config = next(config for config in CONFIGS if config.name == name)
    found, best = config.compared(), config.best()
    assert found.gain > 1.05 and found.misfits[1] is None
    check(best, config.setting)
    assert best.num_devices <= config.plan.num_devices and best.staleness <= config.plan.staleness
    assert best.generate.precision == config.plan.generate.precision
    text = comparison_text(found)
    assert "the change that gains most first" in text and "x as fast as" in text
