"""Benchmarks: a JSON line per figure. `make bench`; give a run directory to measure an existing search instead."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


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
    example = EXAMPLES / "arithmetic" / "job.toml"
    command = [sys.executable, str(ROOT / "tune.py"), "search", str(example), "--out", str(run)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return run, time.monotonic() - begun


def median_rate(work: Callable[[], int], repeats: int = 8) -> float:
    """Things done per second: median over repeats, the first left out."""
    rates = []
    for _ in range(repeats):
        begun = time.perf_counter()
        count = work()
        rates.append(count / (time.perf_counter() - begun))
    return float(np.median(rates[1:]))


def model_speed() -> None:
    """Plans priced per second on one core, composition included, over a space of this machine's kind."""
    from analytic.estimate import estimate_blocks
    from ir.backends import backend
    from ir.job import load_job
    from ir.setting import Devices, Setting
    from ir.systems import load_cluster
    from space.build import default_space
    from space.enumerate import enumerate_legal

    job = load_job(EXAMPLES / "arithmetic" / "job.toml")
    cluster = load_cluster(str(EXAMPLES / "arithmetic" / "cluster.toml"))
    setting = Setting(job=job, groups=(Devices(count=4, domain=4),), backend=backend("local"))
    batch = enumerate_legal(default_space(setting), setting).batch

    def price() -> int:
        assert estimate_blocks(job, batch, cluster, jobs=1).step_seconds.min() > 0
        return len(batch)

    emit("model.plans_per_s", median_rate(price), "plans/s", plans=len(batch))


def space_figures() -> None:
    """The space of PPO with a 70B actor on 256 GH200: counted without listing, and listed into arrays, on one core."""
    from ir.job import load_job
    from ir.rules import setting_of
    from ir.systems import load_cluster
    from space.build import default_space
    from space.enumerate import legal_space

    setting = setting_of(load_job(EXAMPLES / "ppo-70b" / "job.toml"), load_cluster("alps-gh200:256"))
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        legal = legal_space(default_space(setting), setting)
        plans = legal.num_plans
        seconds.append(time.perf_counter() - begun)
    emit("space.count_256gh200_s", float(np.median(seconds)), "s", repeats=len(seconds))
    emit("space.count_256gh200_plans", plans, "plans")
    # Many structures, of which each gives its first plans, so that factors begin as they do in a whole listing.
    factors = list(islice(legal.factors(), 0, 200_000, 2_000))
    numbers = [np.arange(min(1 << 16, factor.num_plans), dtype=np.int64) for factor in factors]

    def enumerate_some() -> int:
        return sum(len(factor.plans(some)) for factor, some in zip(factors, numbers, strict=True))

    columns = len(factors[-1].plans(numbers[-1]).columns)
    emit("space.enumerate_plans_per_s", median_rate(enumerate_some, 5), "plans/s", columns=columns)


def exact_figures() -> None:
    """PPO with four models on GH200, on one core: from the job to the best plan of its space, and whether that is proved;
    on few devices, of a smaller actor."""
    import msgspec

    from analytic.fit import setup
    from ir.job import load_job, resolve
    from ir.rules import setting_of
    from ir.systems import load_cluster
    from search.optimum import optimum
    from space.build import default_space
    from space.enumerate import legal_space

    large = load_job(EXAMPLES / "ppo-70b" / "job.toml")
    critic = large.document.models.critic
    models = msgspec.structs.replace(large.document.models, actor=critic)
    small = resolve(msgspec.structs.replace(large.document, models=models), EXAMPLES / "ppo-70b", where="bench")
    for devices, job in ((8, small), (64, large), (256, large), (1024, large), (16384, large)):
        begun = time.process_time()
        cluster = load_cluster(f"alps-gh200:{devices}")
        setting = setting_of(job, cluster)
        found = optimum(legal_space(default_space(setting), setting), setup(job, cluster))
        seconds = time.process_time() - begun
        emit(f"search.exact_{devices}_s", seconds, "s", proved=found.proved, step_s=round(float(found.seconds[0]), 4))


def front_figures() -> None:
    """The same job on 64 devices: the best plan of ten designs, and the front of time, devices, staleness and memory."""
    from analytic.fit import setup
    from ir.job import load_job
    from ir.rules import setting_of
    from ir.systems import load_cluster
    from search.optimum import optimum
    from search.pareto import front
    from space.build import default_space
    from space.enumerate import legal_space

    job, cluster = load_job(EXAMPLES / "ppo-70b" / "job.toml"), load_cluster("alps-gh200:64")
    setting = setting_of(job, cluster)
    legal, s = legal_space(default_space(setting), setting), setup(job, cluster)
    begun = time.process_time()
    best = optimum(legal, s, count=10)
    emit("search.designs_64_s", time.process_time() - begun, "s", designs=len(best.seconds), proved=best.num_proved)
    begun = time.process_time()
    found = front(legal, s)
    emit("search.front_64_s", time.process_time() - begun, "s", plans=len(found.plans.batch), proved=found.proved)


def over_presets() -> None:
    """Predicted steps of the presets of verl and ReaL over the best plan's, PPO with a 70B actor on 256 GH200."""
    from ir.job import load_job
    from ir.systems import load_cluster
    from search.survey import survey

    found = survey(load_job(EXAMPLES / "ppo-70b" / "job.toml"), load_cluster("alps-gh200:256"))
    best = float(found.step_seconds[found.ranking(1)[0]])
    steps = dict(zip(found.presets, found.preset_estimate.step_seconds.tolist(), strict=True))
    for framework in ("verl", "real"):
        of = {name: step for name, step in steps.items() if name.startswith(framework)}
        if of:
            name = min(of, key=lambda name: of[name])
            emit(f"predict.gh200_over_{framework}", of[name] / best, "ratio", preset=name)


def ir_figures() -> None:
    """Lowering, and models whose published parameter count is met."""
    from ir.job import load_job
    from ir.known_models import KNOWN, known_config, published_parameters
    from ir.lower import lower
    from ir.model import shape_from_config
    from ir.rules import setting_of
    from ir.systems import load_cluster
    from space.build import default_space
    from space.enumerate import legal_space

    job = load_job(EXAMPLES / "ppo-70b" / "job.toml")
    setting = setting_of(job, load_cluster("alps-gh200:256"))
    batch = legal_space(default_space(setting), setting).sample(500, np.random.default_rng(0))
    plans = [batch.plan(row) for row in range(len(batch))]

    def lower_all() -> int:
        return sum(bool(lower(job, plan).stages) for plan in plans)

    emit("ir.lower_per_s", median_rate(lower_all), "plans/s")
    # Names of one model, such as those of its instruction-tuned forms, count once.
    met = {}
    for name in KNOWN:
        shape = shape_from_config(known_config(name, where=name), where=name)
        met[shape] = abs(shape.parameters / published_parameters(name)[0] - 1.0) <= 0.005
    emit("ir.models_within_half_percent", sum(met.values()), "models", of=len(met))


def trial_figures(run: Path, total_s: float | None) -> None:
    """What the trials of one search say."""
    from ir.backends import backend
    from search.report import accuracy
    from search.runs import locate
    from search.survey import survey
    from traces.rundir import RunDirectory
    from traces.store import read_trials

    directory = RunDirectory(run)
    found = survey(directory.job(), directory.cluster(), backend=backend("local"))
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
    from executor.fleet import Fleet
    from executor.machine import devices_here
    from executor.result import warm_up_steps
    from executor.run import Options
    from executor.session import Session, ready_actor
    from ir.backends import backend
    from ir.documents import read_document
    from ir.lower import lower
    from ir.plan import Plan
    from ir.rules import setting_of
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

        for name, plan in presets(setting_of(job, cluster, backend("local"))).items():
            theirs, ours = [], []
            for _ in range(PAIRED_ROUNDS):
                theirs += seconds(plan)
                ours += seconds(best)
            value = float(np.median(theirs) / np.median(ours))
            emit(f"run.best_over_{name.replace('-', '_')}", value, "ratio", steps=len(ours))


def public_figures() -> None:
    """Public configurations that are read, judged and compared with the best plan that their framework can run on as
    many devices; the median of the predicted step over that plan's."""
    from public_configs import CONFIGS

    gains = [config.compared().gain for config in CONFIGS]
    emit("import.public_configs", len(gains), "configurations")
    emit("compare.median_predicted_gain", float(np.median(gains)), "ratio", least=min(gains), most=max(gains))


def export_figures() -> None:
    """Plans that frameworks' own loaders take, each in an environment that is made if it is not there."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "exports" / "run.py")], stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, file=sys.stderr)
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith("{")), flush=True)


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
    space_figures()
    exact_figures()
    front_figures()
    over_presets()
    ir_figures()
    model_speed()
    public_figures()
    export_figures()
    with run_directory() as (run, total_s):
        trial_figures(run, total_s)
        compare(run)


if __name__ == "__main__":
    main()
