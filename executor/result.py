"""What a run gives: its steps, and how long each stage took in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Rpeg
from traces.schema import Span, Step


def warm_up_steps(staleness: int) -> int:
    """Steps at the start whose times are dropped: caches fill in the first, and what was generated ahead in it is
    used up in the next `staleness`."""
    return 1 + staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    step: int
    seconds: float
    """From the publication of the previous step to this one's."""
    reward: float
    """Mean over the samples that were trained on."""
    response_tokens: float
    staleness: tuple[int, ...]
    """Of every sample: updates between the oldest weights that sampled it and those it trained."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run gave. `failure` is empty, or `oom`, `timeout`, `worker-died` or `crash`."""

    steps: tuple[StepReport, ...]
    spans: tuple[Span, ...]
    stage_seconds: dict[str, float]
    """Mean over the measured steps of the busiest device's seconds in each stage."""
    peak_bytes: int
    setup_seconds: float
    warm: bool
    warm_up: int
    """Steps at the start that are not measured."""
    failure: str = ""
    failure_detail: str = ""

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of the steps after the warm-up."""
        return tuple(report.seconds for report in self.steps[self.warm_up :])

    @property
    def staleness(self) -> tuple[int, ...]:
        """Of every sample that was trained on."""
        return tuple(age for report in self.steps for age in report.staleness)

    def steps_as(self, run_id: str) -> list[Step]:
        """The steps as a trace keeps them."""
        return [
            Step(
                run_id=run_id,
                step=report.step,
                seconds=report.seconds,
                reward=report.reward,
                response_tokens=report.response_tokens,
                staleness=report.staleness,
                loss=report.metrics.get("loss", 0.0),
                gradient_norm=report.metrics.get("gradient_norm", 0.0),
            )
            for report in self.steps
        ]


def stage_seconds(spans: Sequence[Span], step_ends: Sequence[float], warm_up: int) -> dict[str, float]:
    """Mean over the measured steps of the busiest device's seconds in each stage.

    A step is the interval between two publications; a span counts with what lies in it, so that the same
    definition holds where stages of several steps overlap.
    """
    windows = list(zip(step_ends[warm_up:-1], step_ends[warm_up + 1 :], strict=True))
    if not windows:
        return {}
    result = {}
    for stage in sorted({span.stage for span in spans}):
        mine = [span for span in spans if span.stage == stage]
        devices = sorted({span.device for span in mine})
        busy = np.zeros((len(devices), len(windows)))
        for span in mine:
            for index, (low, high) in enumerate(windows):
                busy[devices.index(span.device), index] += max(min(span.end_s, high) - max(span.start_s, low), 0.0)
        result[stage] = float(busy.mean(axis=1).max())
    return result


def by_key(rpeg: Rpeg, seconds: dict[str, float]) -> dict[str, float]:
    """Stage seconds under the stages' keys, so that plans with and without a fusion compare."""
    keys = {stage.name: stage.key for stage in rpeg.stages}
    return {keys.get(name, name): value for name, value in seconds.items()}
