"""Benchmarks: a JSON line per figure. `make bench`; give a run directory to measure an existing search instead."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent

PAIRED_STEPS = 6
"""Measured steps of a run in a comparison of two plans."""

PAIRED_ROUNDS = 2
"""Runs of each plan, in turn, so that a drift of the machine meets both."""


def emit(name: str, value: float, unit: str, **more: object) -> None:
    """Print a figure."""
    print(json.dumps({"name": name, "value": round(value, 6), "unit": unit} | more), flush=True)


def search(folder: Path) -> tuple[Path, float]:
    """Tune the example as a user does; the run directory and the seconds it took."""
    begun = time.monotonic()
    run = folder / "run"
    example = ROOT / "examples" / "arithmetic" / "job.toml"
    command = [sys.executable, str(ROOT / "tune.py"), "search", str(example), "--out", str(run)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return run, time.monotonic() - begun


def model_speed() -> None:
    """Plans priced per second on one core, composition included: median of 7 passes over a space of this kind."""
    from analytic.estimate import estimate_blocks
    from ir.cluster import Cluster
    from ir.documents import read_document
    from ir.job import load_job
    from ir.rules import Setting
    from space.axes import default_space
    from space.enumerate import enumerate_legal

    job = load_job(ROOT / "examples" / "arithmetic" / "job.toml")
    cluster = read_document(ROOT / "examples" / "arithmetic" / "cluster.toml", Cluster)
    legal = enumerate_legal(default_space(job, 4), Setting(job=job, devices=4))
    rates = []
    for _ in range(8):
        begun = time.perf_counter()
        found = estimate_blocks(job, legal.batch, cluster, jobs=1)
        assert found.step_seconds.min() > 0
        rates.append(len(legal.batch) / (time.perf_counter() - begun))
    emit("model.plans_per_s", float(np.median(rates[1:])), "plans/s", plans=len(legal.batch))


def trial_figures(run: Path, total_s: float | None) -> None:
    """What the trials of one search say."""
    from search.report import accuracy
    from search.runs import locate
    from search.survey import survey
    from traces.rundir import RunDirectory
    from traces.store import read_trials

    directory = RunDirectory(run)
    found = survey(directory.job(), directory.cluster())
    trials = read_trials(run)
    for trial in trials:
        locate(found.candidates, trial.params)
    switches = [trial.setup_seconds for trial in trials[1:] if trial.warm]
    emit("trial.switch_s", float(np.median(switches)), "s", trials=len(switches), largest=round(max(switches), 3))
    figures = accuracy(found, trials)
    emit("predict.median_error_before", figures.median_before, "ratio", plans=figures.num_plans)
    emit("predict.median_error_after", figures.median_after, "ratio", plans=figures.num_plans)
    emit("predict.kendall_tau", figures.tau, "1", plans=figures.num_plans)
    if total_s is not None:
        emit("tune.total_s", total_s, "s")
    emit("tune.search_s", (trials[-1].ended_at - trials[0].started_at).total_seconds(), "s")
    emit("tune.trials", len(trials), "1")


def compare(run: Path) -> None:
    """The best plan against each preset: the same prompts, in turn, step by step."""
    from executor.fleet import Fleet, devices_here
    from executor.result import warm_up_steps
    from executor.run import Options
    from executor.session import Session, ready_actor
    from ir.documents import read_document
    from ir.lower import lower
    from ir.plan import Plan
    from space.presets import presets
    from traces.rundir import BEST, RunDirectory

    directory = RunDirectory(run)
    job, cluster = directory.job(), directory.cluster()
    best = read_document(run / BEST, Plan)
    kind, devices = devices_here()

    with Fleet(devices, kind) as fleet:
        session = Session(fleet=fleet, cluster=cluster, actor=ready_actor(job, print))

        def seconds(plan: Plan) -> tuple[float, ...]:
            result = session.run(
                lower(job, plan), Options(steps=PAIRED_STEPS + warm_up_steps(plan.staleness)), lambda report: True
            )
            assert not result.failure, result.failure_detail
            return result.step_seconds

        for name, plan in presets(job, devices).items():
            theirs, ours = [], []
            for _ in range(PAIRED_ROUNDS):
                theirs += seconds(plan)
                ours += seconds(best)
            value = float(np.median(theirs) / np.median(ours))
            emit(f"run.best_over_{name.replace('-', '_')}", value, "ratio", steps=len(ours))


@contextmanager
def run_directory() -> Iterator[tuple[Path, float | None]]:
    """The one given on the command line, or that of a search made now."""
    if len(sys.argv) > 1:
        yield Path(sys.argv[1]), None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield search(Path(folder))


def main() -> None:
    """All figures."""
    model_speed()
    with run_directory() as (run, total_s):
        trial_figures(run, total_s)
        compare(run)


if __name__ == "__main__":
    main()
