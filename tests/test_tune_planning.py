"""Commands that plan without running anything: predict, space and describe, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
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
    code, out, err = call(capsys, "predict", job, "--cluster", EXAMPLES[name], "--top", 3, "--out", best)
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
