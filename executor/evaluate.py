"""Real runs as measurements of plans, for a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from executor.load import core_seconds, others_share
from executor.result import StepReport, warm_up_steps
from executor.run import HANG_SECONDS, HANG_STEPS, Options
from executor.session import Session
from ir.job import Job
from ir.lower import lower
from ir.plan import Plan
from traces.outcome import Outcome
from traces.schema import TrialState

_STATES = {"": TrialState.COMPLETE, "oom": TrialState.INFEASIBLE}


class RealRuns:
    """Evaluates plans by running them; remembers when the last one ended."""

    def __init__(self, session: Session, job: Job, predicted: Callable[[Plan], float]) -> None:
        self._session = session
        self._job = job
        self._predicted = predicted
        self._last_step_at = time.monotonic()

    def __call__(self, plan: Plan, monitor: Callable[[Sequence[float]], bool]) -> Outcome:
        """Run until the monitor, which is shown the measured steps so far, has seen enough."""
        measured: list[float] = []

        def on_step(report: StepReport) -> bool:
            self._last_step_at = time.monotonic()
            if report.step < warm_up_steps(plan.staleness):
                return True
            measured.append(report.seconds)
            return monitor(measured)

        started, before = datetime.now(UTC), core_seconds()
        # The monitor ends the run; the number of steps only has to be large enough.
        hang_seconds = max(HANG_SECONDS, HANG_STEPS * self._predicted(plan))
        options = Options(steps=1 << 20, hang_seconds=hang_seconds)
        since_last_step = time.monotonic() - self._last_step_at
        result = self._session.run(lower(self._job, plan), options, on_step)
        done = bool(result.step_seconds) and not result.failure
        return Outcome(
            state=_STATES.get(result.failure, TrialState.FAILED),
            failure=result.failure,
            failure_detail=result.failure_detail,
            step_seconds=result.step_seconds if done else (),
            stage_seconds=result.stage_seconds if done else {},
            peak_bytes=result.peak_bytes,
            max_staleness=max(result.staleness, default=0),
            mean_reward=_mean([step.reward for step in result.steps]),
            response_tokens=_mean([step.response_tokens for step in result.steps]),
            setup_seconds=since_last_step + result.setup_seconds,
            warm=result.warm,
            others_share=others_share(before, core_seconds()),
            started_at=started,
            ended_at=datetime.now(UTC),
            spans=result.spans,
            steps=tuple(result.steps_as("")),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
