#!/usr/bin/env python
"""Find the fastest layout of a reinforcement-learning step on a machine, run it, and keep what was measured."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ir.errors import InputError

if TYPE_CHECKING:
    from executor.load import CoreSeconds
    from executor.result import RunResult, StepReport
    from executor.session import Session
    from ir.backend import Backend
    from ir.cluster import Cluster
    from ir.job import Job
    from ir.plan import Plan
    from ir.setting import Setting
    from search.survey import Survey
    from search.view import Identity
    from space.axes import Space
    from traces.rundir import RunDirectory

    Commands = argparse._SubParsersAction["_Parser"]

TRIALS, MORE_TRIALS = 20, 8
"""Real runs of a search and of its resumption."""
SECONDS, STEPS, FINAL_STEPS = 170.0, 4, 60
"""What real runs may take, measured RL steps of one, and RL steps of the best plan at the end."""

EXAMPLE = Path(__file__).resolve().parent / "examples" / "arithmetic" / "job.toml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; without one, search the example job. Returns the exit code."""
    # Threads of this process would fight with the workers for their cores. numpy reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments or ["search", str(EXAMPLE)])
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing more may be written to it on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    """A mistake in arguments is told as one in a file."""

    def error(self, message: str) -> NoReturn:
        raise InputError(self.prog, message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tune.py", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (_running, _planning_commands, _production, _records):
        group(commands)
    return parser


def _running(commands: Commands) -> None:
    search = _cluster_option(
        _job(_command(commands, search_, "find the best plan of a job with real runs, then run it"))
    )
    search.add_argument("--backend", metavar="NAME", help="plans for a framework, by the model: as in `predict`")
    search.add_argument("--out", type=Path, metavar="DIR", help="run directory (runs/NAME-TIME)")
    _budget(search, TRIALS, "real runs at most")
    resume = _command(commands, resume_, "go on with a search from its traces")
    resume.add_argument("run_dir", type=Path, help="run directory")
    _budget(resume, MORE_TRIALS, "more real runs at most")
    run = _command(commands, run_, "run a plan for real")
    run.add_argument("plan", type=Path, help="plan.toml")
    _job(run).add_argument("--steps", type=_count, default=60, metavar="N", help="RL steps (60)")


def _planning_commands(commands: Commands) -> None:
    predict = _kept_to(
        _cluster_option(_job(_command(commands, predict_, "rank the space by the model alone, without real runs")))
    )
    predict.add_argument("--top", type=_count, metavar="N", help="plans shown (10; of a Pareto front all)")
    predict.add_argument("--json", action="store_true", help="print predictions in full, for machines")
    predict.add_argument("--out", type=Path, metavar="FILE", help="write the best as plan.toml")
    _kept_to(
        _cluster_option(
            _job(_command(commands, space_, "print the axes of a job's plans, and how many plans are legal"))
        )
    )
    describe = _cluster_option(_job(_command(commands, describe_, "draw a plan's step: a tree, and an SVG file")))
    describe.add_argument("--plan", metavar="PLAN", help="plan.toml or the name of a preset (the first that is legal)")
    describe.add_argument("--out", type=Path, metavar="FILE", help="the SVG (NAME.svg)")
    describe.add_argument("--mermaid", action="store_true", help="print Mermaid in place of the tree")


def _production(commands: Commands) -> None:
    export = _command(commands, export_, "write a plan as the configuration of a framework")
    export.add_argument("plan", help="plan.toml, a folder of a search or an import, or the name of a preset")
    export.add_argument("--to", action="append", required=True, metavar="NAME", help="framework; repeatable")
    export.add_argument("--job", type=Path, metavar="JOB", help="job.toml (the one beside the plan)")
    _cluster_option(export).add_argument("--out", type=Path, metavar="DIR", help="folder (export, beside the plan)")
    import_ = _command(commands, import__, "turn a framework's configuration into a job, a plan and a cluster")
    import_.add_argument("config", type=Path, help="launch script, list of arguments, or YAML file")
    import_.add_argument("--from", dest="framework", required=True, metavar="NAME", help="framework it is for")
    text = "a known system; its number of devices is the configuration's (dgx-h100)"
    import_.add_argument("--system", default="dgx-h100", metavar="NAME", help=text)
    import_.add_argument("--out", type=Path, metavar="DIR", help="folder (named as the configuration)")
    compare = _kept_to(
        _cluster_option(_job(_command(commands, compare_, "say what differs between two plans, and what it gains")))
    )
    compare.add_argument("plan", metavar="PLAN_A", help="plan.toml or the name of a preset")
    compare.add_argument(
        "other", metavar="PLAN_B", nargs="?", help="(the best on as many devices, in the same precision)"
    )
    compare.add_argument("--out", type=Path, metavar="FILE", help="write the second as plan.toml")


def _records(commands: Commands) -> None:
    calibrate = _command(commands, calibrate_, "measure this machine anew")
    calibrate.add_argument(
        "--from", dest="run_dir", type=Path, metavar="RUN_DIR", help="learn from its real runs instead"
    )
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="write the cluster.toml here too")
    show = _command(commands, show_, "print what a run directory holds")
    show.add_argument("run_dir", type=Path, help="run directory")


def _command(commands: Commands, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(run.__name__.rstrip("_"), help=help, description=help)
    sub.set_defaults(command=run)
    return sub


def _budget(sub: argparse.ArgumentParser, trials: int, text: str) -> None:
    """Without defaults of their own: where nothing is run, none may be given."""
    sub.add_argument("--trials", type=_count, metavar="N", help=f"{text} ({trials})")
    sub.add_argument("--seconds", type=_duration, metavar="S", help=f"time that they may take ({SECONDS:.0f})")
    sub.add_argument("--steps", type=_count, metavar="N", help=f"measured RL steps of a real run ({STEPS})")
    text = f"RL steps of the best plan at the end, 0 for no such run ({FINAL_STEPS})"
    sub.add_argument("--final-steps", type=lambda value: _count(value, 0), metavar="N", help=text)


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


def _duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0.0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _job(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    sub.add_argument("job", type=Path, help="job.toml")
    return sub


def _cluster_option(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    text = "cluster.toml, or a known system and its devices, as in dgx-h100:64 (this machine, measured)"
    sub.add_argument("--cluster", metavar="CLUSTER", help=text)
    return sub


def _kept_to(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    sub.add_argument("--backend", metavar="NAME", help="only plans that it runs: local, megatron, verl, ...")
    sub.add_argument("--fix", action="append", default=[], metavar="AXIS=VALUE", help="pin an axis; repeatable")
    return sub


# Commands


def search_(options: argparse.Namespace) -> int:
    """Tune a job from scratch, or from what its run directory already holds."""
    from executor.cache import known_lengths
    from ir.job import load_job
    from traces.rundir import RunDirectory

    planned = options.backend not in (None, "local")
    if planned:
        _refuse(options, "trials", "seconds", "steps", "final_steps", why="with a --backend that is not run here")
    job = load_job(options.job)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    directory = RunDirectory(options.out or Path("runs") / f"{job.document.name}-{stamp}")
    directory.check(job)
    if planned:
        return _plan_for(known_lengths(job), directory, options)
    with _session(job, _cluster(options.cluster)) as (session, job):
        directory.create(job, session.cluster)
        return _tune(session, job, directory, options, more=False)


def resume_(options: argparse.Namespace) -> int:
    """Go on with a search."""
    from traces.rundir import RunDirectory

    directory = RunDirectory(options.run_dir)
    with _session(directory.job(), directory.cluster()) as (session, job):
        return _tune(session, job, directory, options, more=True)


def run_(options: argparse.Namespace) -> int:
    """Run one plan."""
    from executor.machine import devices_here
    from executor.support import check_plan
    from ir.documents import read_document
    from ir.job import load_job
    from ir.plan import Plan

    job = load_job(options.job)
    plan = read_document(options.plan, Plan)
    check_plan(plan, job, devices_here()[1], where=str(options.plan))
    with _session(job, None) as (session, job):
        result = _run_final(session, job, plan, options.steps, run_id="run")
    return 1 if result.failure else 0


def predict_(options: argparse.Namespace) -> int:
    """Rank by the model."""
    from ir.documents import write_document
    from search.prediction import prediction_text, predictions
    from search.report import best_text, space_text, speedup_text
    from search.survey import DESIGNS, survey

    job, cluster, backend, fix = _planning(options)
    found = survey(job, cluster, backend=backend, fix=fix, designs=options.top or DESIGNS)
    count = options.top or (len(found.legal.batch) if job.document.objective == "pareto" else DESIGNS)
    plans = [found.legal.batch.plan(row) for row in found.ranking(count)]
    if options.json:
        import json

        print(json.dumps([told.as_data() for told in predictions(job, plans, cluster)], indent=1))
    else:
        print(f"{space_text(found)}\n\n{best_text(found, count)}\n{speedup_text(found)}")
        lines = _misfits(job, cluster, found.presets, found.space, found.setting)
        told = [f"#1: {prediction_text(best)}" for best in predictions(job, plans[:1], cluster)]
        print("\n".join([*lines, "", *told]))
    if options.out and plans:
        write_document(options.out, plans[0])
    return 0


def space_(options: argparse.Namespace) -> int:
    """Print a space."""
    from ir.rules import setting_of
    from space.build import default_space
    from space.enumerate import legal_space
    from space.report import axes_text, counts_text, selectivity_text

    job, cluster, backend, fix = _planning(options)
    setting = setting_of(job, cluster, backend).with_fixed(frozenset(fix))
    space = default_space(setting, fix)
    print(axes_text(space))
    print(counts_text(legal_space(space, setting)))
    print(selectivity_text(space, setting))
    return 0


def describe_(options: argparse.Namespace) -> int:
    """Draw a plan."""
    from ir.documents import write_atomically
    from ir.job import load_job
    from ir.lower import lower
    from ir.render import mermaid, svg, tree_text
    from ir.rules import setting_of
    from space.build import default_space
    from space.plans import load_plan

    job = load_job(options.job)
    cluster = _cluster(options.cluster) or _measured_cluster()
    setting = setting_of(job, cluster)
    plan = load_plan(options.plan, setting)
    rpeg = lower(job, plan)
    out = options.out or Path(f"{job.document.name}.svg")
    write_atomically(out, svg(rpeg, title=job.document.name).encode())
    print(mermaid(rpeg) if options.mermaid else tree_text(rpeg))
    for line in _misfits(job, cluster, {"plan": plan}, default_space(setting), setting):
        print(line, file=sys.stderr if options.mermaid else sys.stdout)
    print(f"drawn in {out}", file=sys.stderr)
    return 0


def _misfits(job: Job, cluster: Cluster, plans: Mapping[str, Plan], space: Space, setting: Setting) -> list[str]:
    """A line on each plan that does not fit in memory."""
    from search.repair import misfit, misfit_text

    if job.lengths is None:
        return []
    found = {name: misfit(space, setting, cluster, plan) for name, plan in plans.items()}
    return [f"{name} {misfit_text(why)}" for name, why in found.items() if why is not None]


def export_(options: argparse.Namespace) -> int:
    """Write a plan for frameworks."""
    from executor.export.exporters import exporter
    from executor.export.production import Production
    from executor.export.write import write_exports
    from executor.imports.write import PLAN
    from ir.job import load_job
    from ir.lower import lower
    from ir.rules import setting_of
    from search.exportable import predicted_notes, require
    from space.plans import load_plan
    from traces.rundir import BEST, CLUSTER, JOB

    path = Path(options.plan)
    home = path if path.is_dir() else path.parent
    beside = str(home / CLUSTER) if (home / CLUSTER).exists() else None
    if options.job is None and not (home / JOB).exists():
        raise InputError("job", "must be given with --job where no job.toml is beside the plan", home / JOB)
    job, cluster = load_job(options.job or home / JOB), _cluster(options.cluster or beside) or _measured_cluster()
    name = options.plan
    if path.is_dir():
        name = str(next((path / plan for plan in (BEST, PLAN) if (path / plan).exists()), path / BEST))
    plan = load_plan(name, setting_of(job, cluster))
    targets = [exporter(to) for to in options.to]
    for target in targets:
        if target.backend is not None:
            require(plan, job, cluster, target.backend, where=name)
    notes = predicted_notes(job, plan, cluster)
    production = Production(plan=plan, rpeg=lower(job, plan), cluster=cluster, notes=notes)
    out: Path = options.out or (home / "export" if path.exists() else Path("export"))
    print("\n".join(production.header))
    for file in write_exports(production, targets, out):
        print(f"written to {file}")
    return 0


def import__(options: argparse.Namespace) -> int:
    """Read a framework's configuration."""
    from executor.imports.importers import importer
    from executor.imports.write import write_import
    from ir.documents import read_text
    from ir.systems import load_cluster

    found = importer(options.framework)(read_text(options.config), where=str(options.config))
    out: Path = options.out or Path(options.config.stem)
    write_import(found, load_cluster(f"{options.system}:{found.devices}"), out)
    print(f"plan: {found.plan.describe()}")
    if found.assumed:
        print("\n  ".join(["what the configuration does not say was assumed:", *found.assumed]))
    print(f"written to {out}; what a better plan would gain:")
    print(f"  python tune.py compare {out}/job.toml {out}/plan.toml --cluster {out}/cluster.toml")
    return 0


def compare_(options: argparse.Namespace) -> int:
    """Compare two plans, or one with the best on as many devices."""
    from ir.documents import write_document
    from ir.rules import setting_of
    from search.best import best_against
    from search.compare import compare, comparison_text
    from space.plans import load_plan

    if options.other:
        _refuse(options, "fix", why="with PLAN_B, for no plan is looked for")
    job, cluster, backend, fix = _planning(options)
    setting = setting_of(job, cluster, backend)
    plan = load_plan(options.plan, setting)
    if options.other:
        other = load_plan(options.other, setting)
    else:
        other = best_against(plan, job, cluster, backend=backend, fix=fix)
    print(comparison_text(compare(setting, cluster, plan, other), ("a", "b")))
    if options.out:
        write_document(options.out, other)
    return 0


def calibrate_(options: argparse.Namespace) -> int:
    """Measure this machine, or learn from what ran on it."""
    from executor.cache import cluster_path
    from ir.documents import write_document
    from search.report import cluster_text

    cluster = _refitted(options.run_dir) if options.run_dir else _measure()
    print(cluster_text(cluster))
    out = options.out or cluster_path()
    if options.out or options.run_dir:
        write_document(out, cluster)
    print(f"written to {out}")
    return 0


def _refitted(run_dir: Path) -> Cluster:
    """The cluster of a run directory with what its real runs say of the model."""
    import numpy as np

    from analytic.calibrate import refit
    from ir.backends import backend
    from search.runs import locate
    from search.survey import survey
    from search.view import admit
    from traces.rundir import RunDirectory
    from traces.store import read_trials

    directory = RunDirectory(run_dir)
    found = survey(directory.job(), directory.cluster(), backend=backend("local"))
    trials, _ = admit(found.candidates, _identity(found), read_trials(directory.path))
    rows = np.array([locate(found.candidates, trial.params) for trial in trials], dtype=np.intp)
    return refit(found.cluster, found.job, found.legal.batch.take(rows), trials)


def show_(options: argparse.Namespace) -> int:
    """Print a run directory."""
    from ir.backends import backend
    from search.report import reward_text, trials_text
    from search.survey import survey
    from search.tuning import conclude
    from traces.rundir import RunDirectory
    from traces.store import read_steps, read_trials

    directory = RunDirectory(options.run_dir)
    found = survey(directory.job(), directory.cluster(), backend=backend("local"))
    trials = read_trials(directory.path)
    print(trials_text(found, trials))
    if trials:
        conclude(found, _identity(found), trials, "no, shown from traces")
    final = [step for step in read_steps(directory.path) if step.run_id == "final"]
    if final:
        print(reward_text([step.reward for step in final]))
    return 0


def _refuse(options: argparse.Namespace, *names: str, why: str) -> None:
    """Refuse options that would have no effect."""
    for name in names:
        if getattr(options, name) not in (None, []):
            raise InputError(f"--{name.replace('_', '-')}", f"must not be given {why}")


# Steps of a search


def _plan_for(job: Job, directory: RunDirectory, options: argparse.Namespace) -> int:
    """The best plan for a framework, by the model: this machine does not run that framework."""
    from executor.export.exporters import EXPORTERS
    from ir.backends import backend
    from search.report import best_text, space_text, speedup_text
    from search.survey import survey

    asked, cluster = backend(options.backend), _cluster(options.cluster) or _measured_cluster()
    found = survey(job, cluster, backend=asked)
    print(f"{space_text(found)}\n\n{best_text(found)}\n{speedup_text(found)}")
    rows = found.ranking(1)
    if not rows:
        return 1
    directory.create(job, cluster)
    directory.write_best(found.legal.batch.plan(rows[0]))
    print(f"\nby the model alone, for only {asked.name} itself can measure its plans; written to {directory.path}")
    if asked.name in EXPORTERS:
        print(f"hand it over with: python tune.py export {directory.path} --to {asked.name}")
    return 0


def _tune(session: Session, job: Job, directory: RunDirectory, options: argparse.Namespace, *, more: bool) -> int:
    from executor.evaluate import RealRuns
    from ir.backends import backend
    from search.problem import Budget
    from search.report import best_text, space_text
    from search.survey import survey
    from search.tuning import conclude, search
    from traces.store import compact, read_trials

    found = survey(job, session.cluster, backend=backend("local"))
    print(space_text(found))
    print(f"\n{best_text(found)}\n")
    past = read_trials(directory.path)
    spent = sum((trial.ended_at - trial.started_at).total_seconds() for trial in past)
    steps = options.steps or STEPS
    budget = Budget(
        max_trials=(options.trials or MORE_TRIALS) + len(past) if more else options.trials or TRIALS,
        max_seconds=(options.seconds or SECONDS) + (spent if more else 0.0),
        max_steps=steps,
        min_steps=min(2, steps),
    )
    try:
        result = search(found, RealRuns(session, job, _predicted(found)), _identity(found), directory, budget)
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: python tune.py resume {directory.path}", file=sys.stderr)
        raise
    plan = conclude(found, _identity(found), result.trials, result.stop)
    if plan is None:
        return 1
    directory.write_best(plan)
    final_steps = FINAL_STEPS if options.final_steps is None else options.final_steps
    if final_steps:
        _run_final(session, job, plan, final_steps, run_id="final", keep=directory)
    compact(directory.path)
    print(f"\neverything is in {directory.path}; go on with: python tune.py resume {directory.path}")
    return 0


def _predicted(found: Survey) -> Callable[[Plan], float]:
    """Modelled seconds of a step, 0 for a plan that is not among those priced."""

    def seconds(plan: Plan) -> float:
        row = found.candidates.row_of(plan)
        return float(found.step_seconds[row]) if row is not None else 0.0

    return seconds


def _run_final(
    session: Session, job: Job, plan: Plan, steps: int, *, run_id: str, keep: RunDirectory | None = None
) -> RunResult:
    """Run a plan for its own sake and show the reward."""
    from tqdm import tqdm

    from executor.load import core_seconds, others_share
    from executor.run import Options
    from ir.lower import lower
    from search.report import busy_text, reward_text
    from traces.store import write_spans, write_steps

    print(f"\nrunning for {steps} steps: {plan.describe()}")
    before = core_seconds()
    with tqdm(total=steps, unit="step", file=sys.stderr) as bar:

        def on_step(report: StepReport) -> bool:
            bar.set_postfix_str(f"reward {report.reward:.3f}, staleness {max(report.staleness)}")
            bar.update()
            return True

        result = session.run(lower(job, plan), Options(steps=steps, ahead=False), on_step, run_id)
    if keep is not None:
        write_spans(keep.path, result.spans)
        write_steps(keep.path, result.steps_as(run_id))
    if result.failure:
        print(f"failed: {result.failure} ({result.failure_detail})")
    else:
        # Very short runs end before any step counts as measured.
        seconds = _mean(result.step_seconds or [step.seconds for step in result.steps])
        rewards, busy = [step.reward for step in result.steps], busy_text(others_share(before, core_seconds()))
        print(f"{seconds:.3f} s a step; {reward_text(rewards)}{'; ' + busy if busy else ''}")
    return result


# The machine


@contextmanager
def _session(job: Job, cluster: Cluster | None) -> Iterator[tuple[Session, Job]]:
    """Workers, the measured machine, and the job's actor; everything is ended on leaving."""
    from analytic.calibrate import fitted
    from executor.cache import cached_cluster
    from executor.fleet import Fleet
    from executor.load import core_seconds
    from executor.machine import devices_here
    from executor.session import Session, measure_cluster, ready_actor
    from executor.support import check_runnable
    from search.report import cluster_text

    check_runnable(job)
    kind, devices = devices_here()
    if cluster is not None and (cluster.num_devices > devices or cluster.device.kind != kind or not cluster.is_uniform):
        raise InputError(
            "cluster",
            f"must be a part of this machine for real runs ({devices} x {kind})",
            " + ".join(f"{group.num_devices} x {group.device.kind}" for group in cluster.groups),
        )
    before = core_seconds()
    with Fleet(devices, kind) as fleet:
        cluster = cluster or cached_cluster() or measure_cluster(fleet, _say, fitted)
        print(cluster_text(cluster))
        _warn_if_busy(before)
        session = Session(fleet=fleet, cluster=cluster, actor=ready_actor(job, _say))
        yield session, session.measured_lengths(job)


def _measured_cluster() -> Cluster:
    from executor.cache import cached_cluster

    return cached_cluster() or _measure()


def _measure() -> Cluster:
    from analytic.calibrate import fitted
    from executor.fleet import Fleet
    from executor.load import core_seconds
    from executor.machine import devices_here
    from executor.session import measure_cluster

    kind, devices = devices_here()
    before = core_seconds()
    with Fleet(devices, kind) as fleet:
        cluster = measure_cluster(fleet, _say, fitted)
    _warn_if_busy(before)
    return cluster


def _warn_if_busy(before: CoreSeconds) -> None:
    """Say what other processes took of the cores since then."""
    from executor.load import core_seconds, others_share
    from search.report import busy_text

    if busy := busy_text(others_share(before, core_seconds())):
        print(f"warning: {busy}, and what is measured beside them is too slow", file=sys.stderr)


def _cluster(text: str | None) -> Cluster | None:
    from ir.systems import load_cluster

    return load_cluster(text) if text else None


def _planning(options: argparse.Namespace) -> tuple[Job, Cluster, Backend | None, dict[str, int]]:
    """What plans are made for: on cores, which nothing else uses, this project's executor; else anything legal."""
    from executor.cache import known_lengths
    from ir.backends import backend
    from ir.job import load_job
    from space.build import parse_fix

    job = known_lengths(load_job(options.job))
    fix = dict(parse_fix(text) for text in options.fix)
    asked = backend(options.backend) if options.backend else None
    cluster = _cluster(options.cluster) or _measured_cluster()
    return job, cluster, asked or (backend("local") if cluster.device.kind == "cpu" else None), fix


def _identity(found: Survey) -> Identity:
    import platform

    from executor.machine import software_fingerprint
    from search.survey import MODEL_VERSION
    from search.view import Identity
    from space.axes import VERSION

    return Identity(
        study=found.job.identity,
        space_version=VERSION,
        model_version=MODEL_VERSION,
        hardware=found.cluster.fingerprint,
        software=software_fingerprint(),
        host=platform.node(),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
