"""A whole study: ask, run, record, tell, until the leader is good enough or the budget is spent.

All state is in the trials. A study that is killed and called again with the trials it
recorded runs none of them again and goes on with the plans it would have run.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum

import optuna

from ir.errors import Infeasible
from ir.plan import Plan
from search.confidence import Confidence, confidence_of
from search.problem import Budget, Candidates, Evaluate, Monitor
from search.racing import race_of, to_the_end
from search.runs import runs_of, settled_rows, usable
from search.sampler import StageResidualSampler
from search.view import (
    Identity,
    LeftOut,
    admit,
    build_study,
    distributions,
    row_of_params,
    study_params,
    tell,
)
from traces.outcome import Outcome
from traces.schema import Span, Step, Trial, TrialState

OUT_OF_MEMORY = "oom"
"""The kind of `Infeasible` that says something about a plan; any other is a failure like a crash."""

_MEASURED = tuple(f.name for f in fields(Outcome) if f.name not in ("spans", "steps"))
"""What a trial takes over from its outcome."""

OnTrial = Callable[[Trial, Sequence[Span], Sequence[Step]], None]
"""Called once per run, before the study goes on: the place to store the trial."""


class Stop(StrEnum):
    """Why a study ended."""

    CONFIDENT = "confident"
    """The leader is within 3% of the best with the wanted probability."""
    TRIALS = "trials"
    """The budget's runs are used up."""
    SECONDS = "seconds"
    """The budget's time is used up."""
    EXHAUSTED = "exhausted"
    """Every plan was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is searched."""

    candidates: Candidates
    evaluate: Evaluate
    identity: Identity
    labelled: Mapping[str, Plan] = field(default_factory=dict)
    """Plans that are measured first and never stopped early, by label: presets and the like."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a study ended."""

    trials: tuple[Trial, ...]
    """All of the study's, by start time; earlier ones included."""
    left_out: tuple[LeftOut, ...]
    """Stored trials and labelled plans that took no part."""
    stop: Stop
    confidence: Confidence | None
    """None if no run completed."""


def run_study(
    problem: Problem, budget: Budget, *, past: Sequence[Trial] = (), on_trial: OnTrial | None = None
) -> Result:
    """Search until a reason to stop.

    Args:
        problem: What is searched.
        budget: How long, counting past trials that belong to the study.
        past: Trials recorded earlier, of this study or others.
        on_trial: Called with every finished trial, its spans and its steps.
    """
    trials, left_out = admit(problem.candidates, problem.identity, past)
    labels, unknown = _label_rows(problem)
    sampler = StageResidualSampler(problem.candidates, seed=problem.seed)
    study = build_study(problem.candidates, sampler, trials)
    while (stop := _stop(problem, budget, trials, labels)) is None:
        row, asked = _ask(problem, study, _pending(problem.candidates, trials, labels))
        trial, spans, steps = _run(problem, budget, trials, row, labels.get(row, ""))
        if on_trial is not None:
            on_trial(trial, spans, steps)
        tell(study, asked, trial)
        trials.append(trial)
    return Result(
        trials=tuple(trials),
        left_out=(*left_out, *unknown),
        stop=stop,
        confidence=confidence_of(problem.candidates, runs_of(problem.candidates, trials), problem.seed),
    )


def _label_rows(problem: Problem) -> tuple[dict[int, str], list[LeftOut]]:
    """Label of each labelled plan; of labels for the same plan, the first."""
    labels: dict[int, str] = {}
    unknown = []
    for label, plan in problem.labelled.items():
        row = problem.candidates.row_of(plan)
        if row is None:
            unknown.append(LeftOut(name=label, reason="not among the legal plans of the space"))
        else:
            labels.setdefault(row, label)
    return labels, unknown


def _pending(candidates: Candidates, trials: Sequence[Trial], labels: Mapping[int, str]) -> int | None:
    """The first labelled plan that is still to be measured."""
    settled = settled_rows(runs_of(candidates, trials))
    return next((row for row in labels if row not in settled), None)


def _stop(problem: Problem, budget: Budget, trials: Sequence[Trial], labels: Mapping[int, str]) -> Stop | None:
    if len(trials) >= budget.max_trials:
        return Stop.TRIALS
    if sum((trial.ended_at - trial.started_at).total_seconds() for trial in trials) >= budget.max_seconds:
        return Stop.SECONDS
    runs = runs_of(problem.candidates, trials)
    if len(settled_rows(runs)) == len(problem.candidates):
        return Stop.EXHAUSTED
    completed = sum(run.seconds is not None for run in runs)
    if completed < budget.min_completed or budget.confidence > 1:
        return None
    if _pending(problem.candidates, trials, labels) is not None:
        return None
    confidence = confidence_of(problem.candidates, runs, problem.seed)
    confident = confidence is not None and confidence.p3 >= budget.confidence
    return Stop.CONFIDENT if confident else None


def _ask(problem: Problem, study: optuna.Study, pending: int | None) -> tuple[int, optuna.Trial]:
    """The next plan: a labelled one that is still to be measured, else the sampler's."""
    if pending is not None:
        study.enqueue_trial(study_params(problem.candidates, pending))
    asked = study.ask(distributions(problem.candidates.space))
    row = row_of_params(problem.candidates, asked.params)
    assert row is not None
    return row, asked


def _run(
    problem: Problem, budget: Budget, trials: Sequence[Trial], row: int, label: str
) -> tuple[Trial, tuple[Span, ...], tuple[Step, ...]]:
    """Run one plan and record what became of it."""
    race = race_of(runs_of(problem.candidates, trials), budget)
    plan = problem.candidates.plan(row)
    outcome = _attempt(problem.evaluate, plan, to_the_end(budget) if label else race.goes_on)
    run_id = uuid.uuid4().hex
    identity = problem.identity
    trial = Trial(
        run_id=run_id,
        study=identity.study,
        plan_id=plan.identity,
        label=label,
        params=problem.candidates.params(row),
        space_version=identity.space_version,
        model_version=identity.model_version,
        hardware=identity.hardware,
        software=identity.software,
        host=identity.host,
        **{name: getattr(outcome, name) for name in _MEASURED},
    )
    spans = tuple(replace(span, run_id=run_id) for span in outcome.spans)
    return trial, spans, tuple(replace(step, run_id=run_id) for step in outcome.steps)


def _attempt(evaluate: Evaluate, plan: Plan, monitor: Monitor) -> Outcome:
    """Run a plan; a plan that cannot run, or ran without a usable time, is an outcome too."""
    started_at = datetime.now(UTC)
    try:
        outcome = evaluate(plan, monitor)
    except Infeasible as error:
        out_of_memory = error.kind == OUT_OF_MEMORY
        return Outcome(
            state=TrialState.INFEASIBLE if out_of_memory else TrialState.FAILED,
            failure=error.kind,
            failure_detail=error.reason,
            started_at=started_at,
            ended_at=datetime.now(UTC),
        )
    steps = outcome.step_seconds
    if outcome.state is TrialState.COMPLETE and not usable(steps):
        detail = f"step_seconds must be positive and finite, got {list(steps)}"
        return replace(outcome, state=TrialState.FAILED, failure="no-time", failure_detail=detail, step_seconds=())
    return outcome
