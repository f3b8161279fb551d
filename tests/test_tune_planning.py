"""Commands that plan without running anything: predict, space and describe, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_examples import EXAMPLES, FOLDER

import tune
from ir.documents import read_document
from ir.plan import Plan


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = tune.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", EXAMPLES)
def test_predict_ranks_plans_of_every_example(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, best = FOLDER / name / "job.toml", tmp_path / "best.toml"
    # Further designs of the largest space take as long again.
    top = 1 if name == "grpo-deepseek-v3" else 3
    code, out, err = call(capsys, "predict", job, "--cluster", EXAMPLES[name], "--top", top, "--out", best)
    assert (code, err) == (0, "")
    assert "legal plans" in out and "bound by" in out and "on the fullest device" in out
    for text in ("+-", "no schedule of this work beats", "idle:", "staleness:"):
        assert text in out
    code, out, err = call(
        capsys, "describe", job, "--cluster", EXAMPLES[name], "--plan", best, "--out", tmp_path / "best.svg"
    )
    assert code == 0, err
    assert ElementTree.parse(tmp_path / "best.svg").getroot().tag.endswith("svg")
    assert "update_actor" in out


def test_the_best_plan_keeps_to_what_is_fixed_and_to_the_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, best = FOLDER / "grpo-qwen2.5-7b" / "job.toml", tmp_path / "best.toml"
    options = ("--backend", "deepspeed", "--fix", "generate.tp=2", "--fix", "update_actor.recompute=full")
    code, _, err = call(capsys, "predict", job, "--cluster", "dgx-a100:8", *options, "--out", best)
    assert code == 0, err
    plan = read_document(best, Plan)
    assert (plan.generate.tp, plan.update_actor.recompute) == (2, "full")
    assert (plan.update_actor.pp, plan.update_actor.precision) == (1, "native"), "DeepSpeed here has no pipeline or fp8"


def test_predictions_for_machines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    job = FOLDER / "grpo-qwen2.5-7b" / "job.toml"
    code, out, _ = call(capsys, "predict", job, "--cluster", "dgx-a100:8", "--top", 3, "--json")
    assert code == 0
    first, *others = json.loads(out)
    assert len(others) == 2
    assert first["lower_bound_s"] < first["step_s"] <= others[0]["step_s"]
    assert first["price"] == pytest.approx(8 * 1.30 / 3600 * first["step_s"])
    stage = first["kinds_s"]["update_actor"]
    assert sum(stage.values()) > 0 and set(stage) <= {"compute", "memory", "communication", "bubble", "host", "other"}


def test_space_prints_axes_counts_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    job = FOLDER / "grpo-qwen2.5-1.5b" / "job.toml"
    code, out, _ = call(capsys, "space", job, "--cluster", "rtx4090:8", "--fix", "staleness=0")
    assert code == 0
    for text in ("axes:", "  generate\n", "    tp ", "unless fusions.rollout_logprob", "legal plans of"):
        assert text in out
    assert "staleness=0" in out.partition("constant: ")[2]
    assert "one-unit-of-micro-batch" in out


def test_describe_draws_a_preset_as_mermaid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = FOLDER / "ppo-70b" / "job.toml"
    arguments = ("--cluster", "alps-gh200:256", "--plan", "openrlhf-separate", "--mermaid", "--out", tmp_path / "x.svg")
    code, out, _ = call(capsys, "describe", job, *arguments)
    assert code == 0
    assert out.startswith("flowchart LR") and "update_critic" in out


def changed(folder: Path, **lines: str) -> Path:
    """The 7B example with another objective or limits."""
    text = (FOLDER / "grpo-qwen2.5-7b" / "job.toml").read_text()
    objective = lines.get("objective", "step_time")
    (folder / "job.toml").write_text(f'objective = "{objective}"\n{text}\n[limits]\n{lines.get("limits", "")}\n')
    return folder / "job.toml"


def predicted(
    capsys: pytest.CaptureFixture[str], job: Path, cluster: str = "dgx-a100:8", *fix: str
) -> list[dict[str, Any]]:
    code, out, err = call(capsys, "predict", job, "--cluster", cluster, "--json", *fix)
    assert code == 0, err
    return list(json.loads(out))


def test_a_front_holds_plans_that_none_beats_and_starts_with_the_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = predicted(capsys, changed(tmp_path, objective="pareto"))
    fastest = predicted(capsys, changed(tmp_path))[0]
    points = [
        (plan["step_s"], plan["price"] / plan["step_s"], plan["plan"]["staleness"], plan["memory_share"])
        for plan in found
    ]
    assert len(points) > 3 and points[0][0] == pytest.approx(fastest["step_s"])
    for i, point in enumerate(points):
        assert not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in points[:i] + points[i + 1 :])


def test_cost_ranks_by_money_and_may_leave_devices_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = predicted(capsys, changed(tmp_path, objective="cost_per_sample"))
    front = predicted(capsys, changed(tmp_path, objective="pareto"))
    assert [plan["price"] for plan in cost] == sorted(plan["price"] for plan in cost)
    assert cost[0]["price"] <= min(plan["price"] for plan in front) * (1 + 1e-6)


def test_a_price_limit_leaves_only_what_it_pays_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = "max_devices = 8\nmax_price_per_hour = 5.3"
    for plan in predicted(capsys, changed(tmp_path, objective="pareto", limits=limits)):
        assert plan["price"] / plan["step_s"] * 3600 / 1.30 <= 4.01, "4 x 1.30 is within 5.30 an hour, 5 x 1.30 is not"


def test_each_number_of_devices_that_is_asked_for_is_on_the_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = changed(tmp_path, objective="pareto", limits="devices = [2, 4, 8]")
    found = {round(plan["price"] / plan["step_s"] * 3600 / 1.30) for plan in predicted(capsys, job)}
    assert found == {2, 4, 8}


def test_money_needs_a_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = changed(tmp_path, objective="cost_per_step")
    code, out, err = call(capsys, "predict", job, "--cluster", "alps-gh200:8")
    assert (code, out) == (2, "")
    assert "device.price_per_hour: must be given" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "dgx-h200:12"), "must be a multiple of the 8 devices of a node"),
        (("--cluster", "dgx-h1000:8"), "the closest is dgx-h100"),
        (("--cluster", "dgx-a100:8", "--backend", "megatrn"), "did you mean 'megatron'?"),
        (("--cluster", "dgx-a100:8", "--fix", "generate.tp"), "must be AXIS=VALUE"),
        (("--cluster", "dgx-a100:8", "--fix", "generate.tq=1"), "must be AXIS=VALUE"),
        (("--cluster", "dgx-a100:8", "--fix", "generate.tp=3"), "must have a value that the job"),
        (("--cluster", "dgx-a100:8", "--fix", "sync=carrier-pigeon"), "must be reshard or broadcast or p2p or disk"),
        (("--cluster", "dgx-a100:8", "--fix", "values.tp=2"), "must be an axis of this job's plans"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "predict", FOLDER / "grpo-qwen2.5-7b" / "job.toml", *arguments)
    assert (code, out) == (2, "")
    assert message in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search", "JOB", "--backend", "verl", "--trials", "20"), "--trials: must not be given with a --backend that"),
        (("search", "JOB", "--backend", "verl", "--seconds", "60"), "--seconds: must not be given with a --backend"),
        (("search", "JOB", "--backend", "verl", "--steps", "3"), "--steps: must not be given with a --backend that"),
        (("search", "JOB", "--backend", "verl", "--final-steps", "0"), "--final-steps: must not be given with a"),
        (("compare", "JOB", "a.toml", "b.toml", "--fix", "sync=disk"), "--fix: must not be given with PLAN_B"),
        (("search", "JOB", "--trials", "0"), "--trials: must be a whole number of at least 1, got '0'"),
        (("search", "JOB", "--final-steps", "-1"), "--final-steps: must be a whole number of at least 0, got '-1'"),
        (("resume", "run", "--seconds", "nan"), "--seconds: must be a number of seconds above 0, got 'nan'"),
        (("run", "plan.toml", "JOB", "--steps", "few"), "--steps: must be a whole number of at least 1, got 'few'"),
        (("predict", "JOB", "--top", "-3"), "--top: must be a whole number of at least 1, got '-3'"),
        (("predict",), "error: tune.py predict: the following arguments are required: job"),
        (("pedict", "JOB"), "error: tune.py: argument COMMAND: invalid choice: 'pedict'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = FOLDER / "grpo-qwen2.5-7b" / "job.toml"
    code, out, err = call(capsys, *(job if word == "JOB" else word for word in arguments))
    assert (code, out) == (2, "")
    assert message in err and len(err.strip().splitlines()) == 1
