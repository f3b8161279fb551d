"""A search as a person follows it: trials are kept and printed as they end, and the best plan is named."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from ir.plan import Plan
from search.confidence import confidence_of, recommend
from search.problem import Budget, Evaluate
from search.report import accuracy_text, best_seconds, conclusion_text, plan_of, trial_text
from search.runs import runs_of
from search.study import Problem, Result, run_study
from search.survey import Survey
from search.view import Identity, admit
from traces.rundir import RunDirectory
from traces.schema import Span, Step, Trial
from traces.store import read_trials, write_spans, write_steps, write_trial


def search(found: Survey, evaluate: Evaluate, identity: Identity, directory: RunDirectory, budget: Budget) -> Result:
    """Search on from what the directory holds; every trial is on disk before the next one starts."""
    trials = read_trials(directory.path)
    past = list(trials)
    with tqdm(total=budget.max_trials, initial=len(past), unit="trial", file=sys.stderr) as bar:

        def keep(trial: Trial, spans: Sequence[Span], steps: Sequence[Step]) -> None:
            # The trial comes last: it stands for the whole run, so nothing of a kept trial is missing.
            write_spans(directory.path, spans)
            write_steps(directory.path, steps)
            write_trial(directory.path, trial)
            trials.append(trial)
            bar.write(trial_text(found, trial, len(trials), best_seconds(trials)), file=sys.stdout)
            bar.update()

        problem = Problem(
            candidates=found.candidates,
            evaluate=evaluate,
            identity=identity,
            labelled=found.presets,
            seed=found.job.workload.seed,
        )
        result = run_study(problem, budget, past=past, on_trial=keep)
    for left in result.left_out:
        print(f"left out: {left.name}: {left.reason}")
    return result


def conclude(found: Survey, identity: Identity, trials: Sequence[Trial], stopped: str) -> Plan | None:
    """Print the best plan, how sure the search is of it, and how well it was predicted. None without one."""
    mine, _ = admit(found.candidates, identity, trials)
    best = recommend(found.candidates, mine)
    confidence = confidence_of(found.candidates, runs_of(found.candidates, mine))
    if best is None or confidence is None:
        print("no run completed: there is no best plan")
        return None
    print("\n" + conclusion_text(found, mine, best, confidence, stopped))
    print(accuracy_text(found, mine))
    return plan_of(found, best)
