"""The command line as a user meets it: mistakes, a search killed and resumed, an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import build
import psutil
import pytest

from ir.documents import write_document
from traces.schema import TrialState
from traces.store import read_spans, read_steps, read_trials

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small job and a cache of its own."""
    folder = tmp_path_factory.mktemp("place")
    job = build.job(warm_start=200)
    (folder / "config.json").write_text(json.dumps(build.QWEN3_CONFIG | {"initializer_range": 0.1}))
    write_document(folder / "job.toml", job.document)
    write_document(folder / "plan.toml", build.plan(rollout_logprob=True, staleness=1))
    return folder


def start(place: Path, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
    command = [sys.executable, str(ROOT / "tune.py"), *map(str, arguments)]
    pipe = subprocess.PIPE
    # A shell that starts the tests in the background has them ignore this signal, which a child would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=place)
    finally:
        signal.signal(signal.SIGINT, before)


def tune(place: Path, *arguments: object, timeout: float = 180) -> tuple[int, str, str]:
    process = start(place, *arguments)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nimport tune\n"
        "try:\n    tune.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'ray', 'optuna', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip().endswith("[]")
    for command in ("search", "resume", "run", "predict", "space", "describe", "calibrate", "show"):
        assert command in done.stdout


def with_line(place: Path, name: str, source: str, old: str, new: str) -> Path:
    text = (place / source).read_text()
    assert old in text
    (place / name).write_text(text.replace(old, new, 1))
    return place / name


def test_mistakes_are_one_sentence_and_exit_code_2(place: Path) -> None:
    unknown = with_line(place, "unknown.toml", "job.toml", "prompts_per_step", "prompts_per_stp")
    missing = with_line(place, "missing.toml", "job.toml", 'path = "config.json"', 'path = "no-such-model"')
    cases = [
        (("search", unknown), "unknown.toml: workload: unknown key `prompts_per_stp`"),
        (("predict", missing), "models.actor.path: must be a directory or config.json that exists, got"),
        (("search", place / "nothing.toml"), "nothing.toml: must be a readable file"),
        (("resume", place), "must be a run directory, which holds a job.toml"),
        (("show", place / "nothing"), "nothing: must be a run directory"),
    ]
    (place / "elsewhere").mkdir()
    for arguments, message in cases:
        if arguments == ("resume", place):
            arguments = ("resume", place / "elsewhere")
        code, out, err = tune(place, *arguments)
        assert (code, out) == (2, ""), err
        assert message in err
        assert len(err.strip().splitlines()) == 1
    assert not (place / "runs").exists(), "nothing was written"


@pytest.fixture(scope="module")
def killed(place: Path) -> Path:
    """A run directory whose search was killed after some trials."""
    process = start(place, "search", "job.toml", "--out", "run", "--trials", "40", "--steps", "3", "--seconds", "300")
    run = place / "run"
    deadline = time.monotonic() + 150
    while len(list((run / "trials").glob("part-*.parquet"))) < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive, "a killed tuner leaves no process"
    return run


@pytest.mark.runtime
def test_a_killed_search_resumes_and_runs_nothing_again(place: Path, killed: Path) -> None:
    before = read_trials(killed)
    assert len(before) >= 5
    code, out, err = tune(place, "resume", "run", "--trials", "3", "--steps", "3", "--final-steps", "2")
    assert code == 0, err
    after = read_trials(killed)
    assert after[: len(before)] == before
    # At most three more: fewer if the search is already sure of its best plan.
    assert len(before) < len(after) <= len(before) + 3
    plans = [trial.plan_id for trial in after if trial.state is not TrialState.FAILED]
    assert len(set(plans)) == len(plans)
    assert {trial.label for trial in after} == {"colocated-sync", "disaggregated-sync", "one-step-off", "async", ""}
    for text in ("best plan:", "x as fast as colocated-sync", "mean reward", "probability"):
        assert text in out
    assert (killed / "best.plan.toml").exists() and (killed / "cluster.toml").exists()
    assert len(list((killed / "trials").iterdir())) == len(list((killed / "spans").iterdir())) == 1, "files are merged"
    for trial in after:
        steps = read_steps(killed, trial.run_id)
        assert len(steps) == len(trial.step_seconds) + 1 + int(trial.params["staleness"])
        assert max(max(step.staleness) for step in steps) == trial.max_staleness <= int(trial.params["staleness"])
        assert {span.stage for span in read_spans(killed, trial.run_id)} >= {"generate", "reward", "advantage"}
        assert trial.others_share is not None and 0.0 <= trial.others_share <= 1.0


@pytest.mark.runtime
def test_a_run_directory_of_another_job_is_refused(place: Path, killed: Path) -> None:
    other = with_line(place, "other.toml", "job.toml", "prompts_per_step = 4", "prompts_per_step = 8")
    before = sorted(p.name for p in (killed / "trials").iterdir())
    code, _, err = tune(place, "search", other, "--out", "run")
    assert code == 2
    assert "job.toml: must be the job searched" in err
    assert sorted(p.name for p in (killed / "trials").iterdir()) == before


@pytest.mark.runtime
def test_a_plan_runs_or_is_refused_by_name(place: Path, killed: Path) -> None:
    code, out, err = tune(place, "run", "plan.toml", "job.toml", "--steps", "3")
    assert code == 0, err
    assert "mean reward" in out
    bad = with_line(place, "bad.toml", "plan.toml", "stream = false", "stream = true\nmerge_logprobs = true\n#")
    bad.write_text(bad.read_text().replace("\nmerge_logprobs = false", "", 1))
    code, _, err = tune(place, "run", bad, "job.toml")
    assert code == 2
    assert "bad.toml: fusions.rollout_logprob: at most one of" in err and "(rule one-source-of-old-logprobs)" in err


@pytest.mark.runtime
def test_a_hugging_face_directory_runs_as_it_is(place: Path, killed: Path) -> None:
    (actor,) = (place / "cache" / "steptune" / "actors").iterdir()
    text = (place / "job.toml").read_text()
    start_, end = text.index("[models.actor.warm_start]"), text.index("[workload]")
    text = (text[:start_] + text[end:]).replace('path = "config.json"', f'path = "{actor}"')
    (place / "directory.toml").write_text(text)
    code, out, err = tune(place, "run", "plan.toml", "directory.toml", "--steps", "3")
    assert code == 0, err
    assert "mean reward" in out


@pytest.mark.runtime
def test_predict_and_show_need_no_real_runs(place: Path, killed: Path) -> None:
    code, out, err = tune(place, "predict", "job.toml", "--cluster", killed / "cluster.toml", timeout=30)
    assert code == 0, err
    assert "legal" in out and "bound by" in out and "on the fullest device" in out
    code, out, err = tune(place, "show", killed, timeout=30)
    assert code == 0, err
    assert "#1" in out and "Kendall tau" in out


@pytest.mark.runtime
def test_an_interrupt_stops_soon_and_leaves_a_run_that_resumes(place: Path, killed: Path) -> None:
    process = start(place, "search", "job.toml", "--out", "stopped", "--trials", "40", "--steps", "50")
    deadline = time.monotonic() + 120
    while not list((place / "stopped" / "trials").glob("part-*.parquet")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    workers = psutil.Process(process.pid).children(recursive=True)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - begun < 5.0
    assert process.returncode == 130
    assert "go on with: python tune.py resume stopped" in err
    _, alive = psutil.wait_procs(workers, timeout=3)
    assert not alive
    assert len(read_trials(place / "stopped")) >= 1
