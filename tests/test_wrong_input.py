"""Configurations and documents with values that none can have are refused in a sentence, whatever they are."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from public_configs import FOLDER

import tune

CONFIGS = {
    "verl": "ppo-qwen3-8b-megatron.txt",
    "openrlhf": "ppo-hybrid-engine.txt",
    "areal": "gsm8k-ppo-megatron.txt",
    "nemo-rl": "grpo-qwen3-30ba3b-4n8g.txt",
    "trl": "open-r1-distill-1.5b.txt",
}
VALUES = (
    "0", "-1", "1", "3", "1.5", "-0.5", "1e-9", "1e30", "1e400", "nan", "inf", "-inf", "99999999999999999999", "text",
    "''", "null", "true", "[]", "[1, 2]", "{}", "{a: 1}", "${x}", "'",
)  # fmt: skip
_VALUE = re.compile(r"(?:=|:[ ]+|--[\w.-]+[ ]+)[ ]*([^\s=\\'\"]+)")
"""What stands behind `key=`, `key: ` or `--key `."""


def mutated(text: str, place: float, value: str) -> str:
    """The text with another value at a place between 0 and 1."""
    found = list(_VALUE.finditer(text))
    at = found[int(place * len(found))]
    return text[: at.start(1)] + value + text[at.end(1) :]


def call(*arguments: object) -> tuple[int, str]:
    """The exit code of a command, and what it printed of errors."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = tune.main([str(argument) for argument in arguments])
    return code, errors.getvalue()


def check(*arguments: object) -> int:
    """A command either does what it is for, or says in one sentence why not."""
    code, errors = call(*arguments)
    assert code == 0 or (code == 2 and errors.startswith("error: ") and len(errors.splitlines()) == 1), errors
    return code


def look(folder: Path, framework: str) -> None:
    """Read the documents of a folder for what can be had of them without a search."""
    job, plan, cluster = (folder / name for name in ("job.toml", "plan.toml", "cluster.toml"))
    check("describe", job, "--plan", plan, "--cluster", cluster, "--out", folder / "plan.svg")
    check("export", plan, "--job", job, "--cluster", cluster, "--to", framework, "--out", folder / "export")


@pytest.mark.parametrize("framework", CONFIGS)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), value=st.sampled_from(VALUES))
def test_a_configuration_is_read_or_refused(framework: str, tmp_path: Path, place: float, value: str) -> None:
    file = tmp_path / "config.txt"
    file.write_text(mutated((FOLDER / framework / CONFIGS[framework]).read_text(), place, value))
    if check("import", file, "--from", framework, "--out", tmp_path / "out") == 0:
        look(tmp_path / "out", framework)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A job, a plan and a cluster."""
    folder = tmp_path_factory.mktemp("documents")
    config = FOLDER / "verl" / CONFIGS["verl"]
    assert check("import", config, "--from", "verl", "--out", folder) == 0
    return {name: (folder / name).read_text() for name in ("job.toml", "plan.toml", "cluster.toml")}


@pytest.mark.parametrize("name", ["job.toml", "plan.toml", "cluster.toml"])
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), value=st.sampled_from(VALUES))
def test_a_document_is_read_or_refused(
    name: str, documents: dict[str, str], tmp_path: Path, place: float, value: str
) -> None:
    for other, text in documents.items():
        (tmp_path / other).write_text(mutated(text, place, value) if other == name else text)
    look(tmp_path, "verl")


ONE = "must be a whole number of at least 1"
MOST = "must be a whole number of at most 1000000000"
SHARE = "must be above 0 and at most 1"


@pytest.mark.parametrize(
    ("framework", "line", "said"),
    [
        ("nemo-rl", "policy.train_global_batch_size=0", f"policy.train_global_batch_size: {ONE}, got 0"),
        ("nemo-rl", "grpo.num_prompts_per_step=0", f"grpo.num_prompts_per_step: {ONE}, got 0"),
        ("nemo-rl", "grpo.num_generations_per_prompt=0", f"grpo.num_generations_per_prompt: {ONE}, got 0"),
        (
            "nemo-rl",
            "cluster.num_nodes=262145\ncluster.gpus_per_node=8",
            "dgx-h100:2097160: must have at most 2097152 dev",
        ),
        ("nemo-rl", "cluster.num_nodes=0", f"cluster.num_nodes: {ONE}, got 0"),
        ("nemo-rl", "cluster.num_nodes=1e20", f"cluster.num_nodes: {MOST}, got '1e20'"),
        (
            "nemo-rl",
            "policy.generation.vllm_cfg.gpu_memory_utilization=1e400",
            "policy.generation.vllm_cfg.gpu_memory_utilization: must be a number, got '1e400'",
        ),
        (
            "verl",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=0",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size: {ONE}, got 0",
        ),
        (
            "verl",
            "actor_rollout_ref.rollout.gpu_memory_utilization=1.5",
            f"actor_rollout_ref.rollout.gpu_memory_utilization: {SHARE}, got 1.5",
        ),
        (
            "verl",
            "actor_rollout_ref.actor.ppo_mini_batch_size=0",
            f"actor_rollout_ref.actor.ppo_mini_batch_size: {ONE}, got 0",
        ),
        ("verl", "data.max_response_length=99999999999999999999", f"data.max_response_length: {MOST}, got 999999"),
        ("verl", "actor_rollout_ref.actor.optim.lr=0", "job: algorithm.learning_rate: expected `float` > 0.0"),
        ("openrlhf", "--vllm_gpu_memory_utilization nan", "vllm.gpu_memory_utilization: must be a number, got 'nan'"),
        ("openrlhf", "--vllm_gpu_memory_utilization 0", f"vllm.gpu_memory_utilization: {SHARE}, got 0.0"),
        ("openrlhf", "--init_kl_coef -1", "algo.kl.init_coef: must be at least 0, got '-1'"),
        ("openrlhf", "--prompt_max_len 1e30", f"prompt_max_len: {MOST}, got '1e30'"),
        ("areal", "gconfig.n_samples=-1", f"gconfig.n_samples: {ONE}, got -1"),
        ("areal", "train_dataset.batch_size=[]", "train_dataset.batch_size: must be a whole number, got []"),
        ("areal", "actor.ppo_n_minibatches=0", f"actor.ppo_n_minibatches: {ONE}, got 0"),
        ("areal", "train_dataset.max_length='", "must be a script whose quotes close (No closing quotation)"),
        ("trl", "--vllm_gpu_memory_utilization inf", "vllm_gpu_memory_utilization: must be a number, got 'inf'"),
        ("trl", "--num_processes 99999999999999999999", f"num_processes: {MOST}, got '99999999999999999999'"),
    ],
)
def test_what_no_configuration_can_say(framework: str, line: str, said: str, tmp_path: Path) -> None:
    """The last of several values of a key counts. Most of these ended in a traceback once."""
    file = tmp_path / "x.txt"
    file.write_text(f"{(FOLDER / framework / CONFIGS[framework]).read_text().rstrip()}\n{line}\n")
    code, errors = call("import", file, "--from", framework, "--out", tmp_path / "out")
    assert code == 2
    where = "" if said.startswith("dgx") else f"{file}: "
    assert errors.startswith(f"error: {where}{said}") and len(errors.splitlines()) == 1


def test_a_configuration_of_another_framework_is_not_read_as_defaults(tmp_path: Path) -> None:
    config = FOLDER / "verl" / CONFIGS["verl"]
    code, errors = call("import", config, "--from", "nemo-rl", "--out", tmp_path)
    assert code == 2
    assert "must have keys of NeMo-RL, which begin with policy., grpo., " in errors


@pytest.mark.parametrize("cluster", ["dgx-a100:80000000000000000000", "alps-gh200:2097156"])
def test_a_cluster_has_no_more_devices_than_can_be_counted(cluster: str) -> None:
    job = FOLDER.parents[2] / "examples" / "grpo-qwen2.5-1.5b" / "job.toml"
    code, errors = call("predict", job, "--cluster", cluster)
    assert code == 2
    assert f"{cluster}: must have at most 2097152 devices, got {cluster.partition(':')[2]}" in errors
