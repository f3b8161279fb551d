"""The commands that bring a plan into production and a configuration back, as a user gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

import tune
from ir.documents import read_document
from ir.job import JobDocument
from ir.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "tests" / "data" / "public" / "verl" / "grpo-qwen2.5-7b-megatron.txt"
JOB = ROOT / "examples" / "grpo-qwen2.5-1.5b" / "job.toml"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a public configuration was read as."""
    out = tmp_path_factory.mktemp("imported")
    assert tune.main(["import", str(CONFIG), "--from", "verl", "--out", str(out)]) == 0
    return out


def test_an_import_says_what_it_assumed_and_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["import", str(CONFIG), "--from", "verl", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "lengths: lognormal, means 256 (prompt) and 410 (response) tokens" in printed
    assert (
        f"python tune.py compare {tmp_path}/job.toml {tmp_path}/plan.toml --cluster {tmp_path}/cluster.toml" in printed
    )
    job, plan = read_document(tmp_path / "job.toml", JobDocument), read_document(tmp_path / "plan.toml", Plan)
    assert (job.workload.prompts_per_step, job.workload.samples_per_prompt, job.workload.minibatches) == (1024, 5, 4)
    assert job.limits.max_staleness == plan.staleness == 0
    assert (plan.update_actor.tp, plan.update_actor.pp, plan.generate.tp) == (2, 2, 4)


def test_a_round_trip(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    better = tmp_path / "better.toml"
    of = [str(imported / "job.toml"), str(imported / "plan.toml"), "--cluster", str(imported / "cluster.toml")]
    assert tune.main(["compare", *of, "--backend", "verl", "--out", str(better)]) == 0
    printed = capsys.readouterr().out
    assert "from a to b, the change that gains most first:" in printed
    assert "x as fast as a" in printed.splitlines()[-1]
    beside = ["--job", of[0], "--cluster", of[3], "--out", str(tmp_path / "out")]
    assert tune.main(["export", str(better), *beside, "--to", "verl", "--to", "ray-job"]) == 0
    script = (tmp_path / "out" / "verl" / "run.sh").read_text()
    assert "predicted: " in script and "data.train_batch_size=1024" in script
    assert '"entrypoint": "bash verl/run.sh"' in (tmp_path / "out" / "ray-job" / "submission.json").read_text()
    again = tmp_path / "again"
    assert tune.main(["import", str(tmp_path / "out/verl/run.sh"), "--from", "verl", "--out", str(again)]) == 0
    assert read_document(again / "plan.toml", Plan) == read_document(better, Plan)


def test_two_plans_are_compared(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(imported / "plan.toml")
    job, cluster = str(imported / "job.toml"), str(imported / "cluster.toml")
    assert tune.main(["compare", job, plan, plan, "--cluster", cluster]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "they are the same plan"


def test_a_search_for_a_framework_leaves_what_can_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert tune.main(["search", str(JOB), "--cluster", "dgx-a100:8", "--backend", "openrlhf", "--out", str(run)]) == 0
    assert f"python tune.py export {run} --to openrlhf" in capsys.readouterr().out
    assert tune.main(["export", str(run), "--to", "openrlhf"]) == 0
    assert "openrlhf.cli.train_ppo_ray" in (run / "export" / "openrlhf" / "run.sh").read_text()


def test_what_a_framework_cannot_run_is_refused_with_the_nearest_plan(
    imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(["export", str(imported / "plan.toml"), "--to", "trl"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {imported}/plan.toml: ")
    assert "(rule " in line and "nearest: " in line and "update_actor.pp=1" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "PLAN", "--to", "verll"], "must be one of verl, openrlhf, "),
        (["export", "nowhere/plan.toml", "--to", "verl"], "must be given with --job"),
        (["import", "nowhere.sh", "--from", "verl"], "must be a readable file"),
        (["import", str(CONFIG), "--from", "openrlhf"], "must be a flag of OpenRLHF"),
        (["import", str(CONFIG), "--from", "slime"], "must be one of verl, openrlhf, areal, nemo-rl, trl"),
        (["import", str(CONFIG), "--from", "verl", "--system", "dgx-h101"], "dgx-h101"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], said: str, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main([str(imported / "plan.toml") if word == "PLAN" else word for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
