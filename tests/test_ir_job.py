"""Jobs: what each algorithm asks for, what is refused and how it is said, and the forms of lengths."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, get_args

import build
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from scipy.special import ndtri

from analytic.lengths import Distribution, length_model
from executor.policy import prepare_actor
from executor.support import check_runnable
from executor.tasks import prompts
from ir.algorithm import Algorithm, Name
from ir.documents import from_data, read_document, write_document
from ir.errors import InputError
from ir.job import Job, JobDocument, Lengths, Limits, Role, Workload, load_job, with_lengths
from ir.lengths import Lognormal, tabulate

CRITIC_JSON = build.QWEN3_CONFIG | {"num_hidden_layers": 1}

TRAITS = ("uses_critic", "uses_groups", "kl_in_reward", "dynamic_sampling", "greedy_baseline", "uses_teacher", "uses_reward")  # fmt: skip


def data(**changes: Any) -> dict[str, Any]:
    """A small job as plain data; `changes` replace keys, named with __ for each dot."""
    job: dict[str, Any] = {
        "name": "small",
        "algorithm": {"name": "grpo", "learning_rate": 3e-4},
        "models": {"actor": {"path": "config.json"}},
        "workload": {
            "prompts_per_step": 4, "samples_per_prompt": 4, "max_prompt_tokens": 32, "max_response_tokens": 24,
        },
        "limits": {},
    }  # fmt: skip
    for name, value in changes.items():
        *path, key = name.split("__")
        section = job
        for part in path:
            section = section[part]
        section[key] = value
    return job


def load(folder: Path, **changes: Any) -> Job:
    (folder / "config.json").write_text(json.dumps(build.QWEN3_CONFIG))
    (folder / "critic.json").write_text(json.dumps(CRITIC_JSON))
    write_document(folder / "job.toml", data(**changes))
    return load_job(folder / "job.toml")


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        #                        critic groups reward dapo greedy teacher scored
        ("ppo",                  (True, False, True, False, False, False, True)),
        ("grpo",                 (False, True, False, False, False, False, True)),
        ("dr-grpo",              (False, True, False, False, False, False, True)),
        ("dapo",                 (False, True, False, True, False, False, True)),
        ("rloo",                 (False, True, True, False, False, False, True)),
        ("reinforce++",          (False, False, True, False, False, False, True)),
        ("reinforce++-baseline", (False, True, True, False, False, False, True)),
        ("remax",                (False, False, True, False, True, False, True)),
        ("gspo",                 (False, True, False, False, False, False, True)),
        ("cispo",                (False, True, False, False, False, False, True)),
        ("distillation",         (False, False, False, False, False, True, False)),
    ],
)  # fmt: skip
def test_what_an_algorithm_asks_for(name: Name, traits: tuple[bool, ...]) -> None:
    algorithm = Algorithm(name=name, learning_rate=1e-6)
    assert tuple(getattr(algorithm, trait) for trait in TRAITS) == traits


NEEDS: dict[str, dict[str, Any]] = {
    "ppo": {"models__critic": {"path": "critic.json"}},
    "dapo": {"workload__useful_groups": 0.5},
    "distillation": {"models__teacher": {"path": "critic.json"}},
}


@pytest.mark.parametrize("name", get_args(Name))
def test_every_algorithm_makes_a_job(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, algorithm__name=name, **NEEDS.get(name, {})).algorithm.name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"workload__max_response_tokens": 100_000_000},
            "workload.max_response_tokens: must, with `max_prompt_tokens`, be at most 100000000, got 100000000",
        ),
        (
            {"workload__samples_per_prompt": 2, "workload__oversampling": 5e7},
            "workload.samples_per_prompt: must be so that a step starts at most 100000000 sequences, got 2",
        ),
        ({"workload__temperature": 1e31}, "workload.temperature: expected `float` <= 1e+30"),
        ({"workload__prompts_per_step": 10**9 + 1}, "workload.prompts_per_step: expected `int` <= 1000000000"),
        ({"workload__minibatches": 3}, "workload.minibatches: must divide `prompts_per_step` = 4, got 3"),
        (
            {"workload__samples_per_prompt": 1},
            "workload.samples_per_prompt: must be at least 2 for grpo, whose baseline is taken over the samples of a "
            "prompt, got 1",
        ),
        (
            {"workload__shared_prefix_tokens": 33},
            "workload.shared_prefix_tokens: must not exceed `max_prompt_tokens` = 32, got 33",
        ),
        (
            {"algorithm__name": "dapo"},
            "workload.useful_groups: must be given for dapo, which replaces groups of equal rewards, and for no other "
            "algorithm",
        ),
        (
            {"workload__useful_groups": 0.5},
            "workload.useful_groups: must be given for dapo, which replaces groups of equal rewards, and for no other "
            "algorithm, got 0.5",
        ),
        (
            {"workload__reward_seconds": 0.5, "models__reward": {"path": "critic.json"}},
            "workload.reward_seconds: must not be given where no verifier scores responses, got 0.5",
        ),
        ({"algorithm__name": "ppo"}, "models.critic: must be given for ppo and for no other algorithm"),
        ({"models__critic": {"path": "x"}}, "models.critic: must be given for ppo and for no other algorithm"),
        (
            {"algorithm__name": "distillation"},
            "models.teacher: must be given for distillation and for no other algorithm",
        ),
        ({"models__teacher": {"path": "x"}}, "models.teacher: must be given for distillation and for no other algorithm"),
        (
            {"algorithm__name": "distillation", "models__teacher": {"path": "x"}, "models__reward": {"path": "x"}},
            "models.reward: must not be given for distillation, which uses no reward",
        ),
        (
            {"models__reference": {"path": "x"}},
            "models.reference: must not be given when algorithm.kl_coefficient is 0, for nothing uses it",
        ),
        ({"models__actor": {}}, "models.actor: exactly one of `path` and `name` must be given"),
        ({"models__actor": {"path": "a", "name": "b"}}, "models.actor: exactly one of `path` and `name` must be given"),
        (
            {"models__reward": {"path": "config.json", "warm_start": {"steps": 1, "batch": 1, "learning_rate": 1.0}}},
            "models.reward.warm_start: must only be given for an actor with a `path`",
        ),
        ({"limits__max_devices": 2, "limits__devices": 4}, "limits: at most one of `devices` and `max_devices` may be given"),
        ({"limits__devices": []}, "limits.devices: expected `array` of length >= 1"),
        ({"limits__max_staleness": 9}, "limits.max_staleness: expected `int` <= 8"),
        ({"objective": "fun"}, "objective: invalid enum value 'fun'"),
        ({"workload__oversampling": 0.5}, "workload.oversampling: expected `float` >= 1.0"),
        ({"workload__turns": {"mean": 0.5}}, "workload.turns.mean: expected `float` >= 1.0"),
        ({"workload__speculation": {"acceptance": 1.0}}, "workload.speculation.acceptance: expected `float` < 1.0"),
        ({"workload__lengths": {"prompt": [1, 2]}}, "workload.lengths: either `file` or both of `prompt` and `response` must be given"),
        ({"workload__lengths": {"file": "a.jsonl", "prompt": [1, 2]}}, "workload.lengths: either `file` or both"),
        ({"workload__lengths": {"prompt": [2, 1], "response": [1, 2]}}, "workload.lengths: quantiles must not descend"),
        (
            {"workload__lengths": {"prompt": {"sigma": 1}, "response": [1, 2]}},
            "workload.lengths.prompt: exactly one of `mean` and `median` must be given",
        ),
        (
            {"workload__lengths": {"prompt": [1, 2], "response": [1, 2], "probabilities": [0, 0.5]}},
            "workload.lengths: `probabilities` must ascend from 0 to 1",
        ),
        (
            {"workload__lengths": {"prompt": [1, 2], "response": [1, 2], "probabilities": [0, 0.5, 1]}},
            "workload.lengths: with `probabilities`, both lists of quantiles must have their length",
        ),
        ({"workload__lengths": {"file": "a.csv"}}, "workload.lengths.file: must be a readable Parquet (.parquet) or JSONL (.jsonl) file"),
        ({"workload__lengths": {"file": "a.jsonl"}}, "workload.lengths.file: must be a readable Parquet"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_rule(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'job.toml'}: {message}")
    assert "\n" not in str(caught.value)


def test_models_by_role(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        algorithm__name="ppo",
        algorithm__kl_coefficient=0.1,
        models__critic={"path": "critic.json"},
        workload__samples_per_prompt=1,
    )
    assert {role: shape.layers for role, shape in job.models.items()} == {
        Role.ACTOR: 2,
        Role.CRITIC: 1,
        Role.REFERENCE: 2,
    }
    assert job.actor == build.SHAPE
    assert job.actor_path == tmp_path / "config.json"


def test_a_reference_may_differ_from_the_actor(tmp_path: Path) -> None:
    job = load(tmp_path, algorithm__kl_coefficient=0.1, models__reference={"path": "critic.json"})
    assert job.models[Role.REFERENCE].layers == 1
    assert Role.REFERENCE not in load(tmp_path).models


def test_an_adapter_is_the_actors_own(tmp_path: Path) -> None:
    job = load(tmp_path, algorithm__kl_coefficient=0.1, models__actor={"path": "config.json", "lora_rank": 4})
    assert job.actor.lora_rank == 4
    assert job.models[Role.REFERENCE] == build.SHAPE


def test_a_model_by_name_is_enough_to_plan(tmp_path: Path) -> None:
    job = load(tmp_path, models__actor={"name": "Qwen/Qwen3-8B"})
    assert job.actor.parameters == 8_190_735_360
    with pytest.raises(InputError) as caught:
        prepare_actor(job, tmp_path)
    assert str(caught.value) == (
        "models.actor: must have weights (a directory, or a config.json with warm_start) to be run, got 'Qwen/Qwen3-8B'"
    )


def test_a_config_without_warm_start_is_enough_to_plan(tmp_path: Path) -> None:
    job = load(tmp_path)
    with pytest.raises(InputError, match=r"models\.actor: must have weights \(a directory, or a config\.json with"):
        prepare_actor(job, tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "job: workload.tasks: must name at least one data set to be run"),
        ({"algorithm__name": "rloo"}, "job: algorithm.name: must be grpo to be run, got 'rloo'"),
        ({"models__reward": {"path": "config.json"}}, "job: models.reward: must be a verifier to be run"),
        (
            {"workload__tasks": [{"dataset": "chain_sum"}], "workload__oversampling": 1.5},
            "job: workload.oversampling: must be 1 to be run, got 1.5",
        ),
        (
            {"workload__tasks": [{"dataset": "chain_sum"}], "workload__turns": {"mean": 2}},
            "job: workload.turns: must not be given to be run",
        ),
        (
            {"workload__tasks": [{"dataset": "chain_sum"}], "objective": "pareto"},
            "job: objective: must be step_time to be run: real runs are compared by their seconds, got 'pareto'",
        ),
    ],
)
def test_what_only_can_be_planned_is_not_run(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_runnable(load(tmp_path, **changes))
    assert str(caught.value) == message


def test_no_task_gives_no_prompt(tmp_path: Path) -> None:
    check_runnable(build.job())
    with pytest.raises(InputError, match=r"workload\.tasks: must name at least one data set to be run"):
        prompts(load(tmp_path).workload, first=0, count=1)


@pytest.mark.parametrize(
    ("changes", "sequences"),
    [
        ({}, 16.0),
        ({"workload__oversampling": 1.5}, 24.0),
        ({"algorithm__name": "dapo", "workload__useful_groups": 0.4, "workload__oversampling": 1.25}, 50.0),
        ({"algorithm__name": "remax"}, 20.0),
    ],
)
def test_sequences_started_a_step(tmp_path: Path, changes: dict[str, Any], sequences: float) -> None:
    assert load(tmp_path, **changes).generated_sequences == pytest.approx(sequences)


@pytest.mark.parametrize(
    ("limits", "allowed", "most"),
    [
        ({}, [True, True, True, True, False], 4),
        ({"max_devices": 2}, [True, True, False, False, False], 2),
        ({"max_devices": 64}, [True, True, True, True, False], 4),
        ({"devices": 3}, [False, False, True, False, False], 3),
        ({"devices": (2, 4, 8)}, [False, True, False, True, False], 4),
        ({"devices": 8}, [False, False, False, False, False], 0),
    ],
)
def test_limits_on_devices(limits: dict[str, Any], allowed: list[bool], most: int) -> None:
    assert Limits(**limits).allows(np.arange(1, 6), 4).tolist() == allowed
    assert Limits(**limits).most_devices(4) == most


def test_a_document_survives_the_disk(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm__kl_coefficient": 0.1,
        "models__reference": {"path": "critic.json"},
        "workload__turns": {"mean": 3.5, "observation_tokens": 100, "latency": {"mean_s": 2.0, "cv": 1.5}},
        "workload__shared_prefix_tokens": 8,
        "workload__reward_seconds": 0.25,
        "workload__lengths": {"prompt": [1, 9], "response": {"median": 9, "sigma": 1.0}, "prompt_share": 0.3},
        "limits": {"devices": [8, 16], "max_price_per_hour": 40.0, "max_staleness": 8},
        "objective": "pareto",
    }
    document = from_data(data(**changes), JobDocument, where="test")
    write_document(tmp_path / "job.toml", document)
    assert read_document(tmp_path / "job.toml", JobDocument) == document
    assert document.workload.turns is not None and document.workload.turns.latency is not None
    assert document.workload.turns.latency.cv == 1.5


def test_identity_changes_with_what_a_measurement_depends_on(tmp_path: Path) -> None:
    base = load(tmp_path).identity
    different = [
        load(tmp_path, algorithm__name="gspo"),
        load(tmp_path, algorithm__clip=0.3),
        load(tmp_path, algorithm__kl_coefficient=0.1),
        load(tmp_path, models__actor={"path": "critic.json"}),
        load(tmp_path, models__reward={"path": "critic.json"}),
        load(tmp_path, models__reward={"path": "config.json"}),
        load(tmp_path, models__actor={"path": "config.json", "lora_rank": 4}),
        load(tmp_path, workload__oversampling=1.5),
        load(tmp_path, workload__turns={"mean": 2}),
        load(tmp_path, workload__speculation={"acceptance": 0.7}),
        load(tmp_path, workload__seed=1),
    ]
    assert len({base, *(job.identity for job in different)}) == 12


def test_identity_ignores_lengths_paths_and_directories(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    base = load(tmp_path)
    moved = load(tmp_path / "other", models__actor={"path": "../config.json"})
    seen = with_lengths(base, Lengths(prompt=(1.0, 2.0), response=(1.0, 2.0)))
    assert base.identity == moved.identity == seen.identity
    lengths = {"prompt": {"mean": 9, "sigma": 1}, "response": [1, 9], "prompt_share": 0.5}
    assert load(tmp_path, workload__lengths=lengths).identity == base.identity


def test_identity_is_not_the_models_name(tmp_path: Path) -> None:
    named = load(tmp_path, models__actor={"name": "Qwen/Qwen3-8B"})
    assert named.identity == load(tmp_path, models__actor={"name": "qwen3-8b"}).identity
    assert named.identity != load(tmp_path, models__actor={"name": "Qwen/Qwen3-4B"}).identity


# Lengths


def test_no_lengths_are_unknown_lengths(tmp_path: Path) -> None:
    assert load(tmp_path).lengths is None


def test_a_list_is_quantiles_at_even_probabilities(tmp_path: Path) -> None:
    found = load(tmp_path, workload__lengths={"prompt": [1, 3, 9], "response": [2, 40], "prompt_share": 0.25}).lengths
    assert found is not None
    assert (found.prompt.probabilities, found.prompt.values) == ((0.0, 0.5, 1.0), (1.0, 3.0, 9.0))
    assert (found.response.probabilities, found.response.values) == ((0.0, 1.0), (2.0, 24.0)), "cut off at the most"
    assert found.prompt_share == 0.25


def test_a_list_may_say_where_its_quantiles_are(tmp_path: Path) -> None:
    lengths = {"prompt": [1, 3, 9], "response": [2, 4, 20], "probabilities": [0, 0.9, 1]}
    found = length_model(load(tmp_path, workload__lengths=lengths)).response
    assert found.quantile(np.array([0.45, 0.9, 0.95])).tolist() == pytest.approx([3.0, 4.0, 12.0])
    # 0.9 x (2 + 4)/2 + 0.1 x (4 + 20)/2; 0.9 x (4 + 8 + 16)/3 + 0.1 x (16 + 80 + 400)/3
    assert found.mean == pytest.approx(3.9)
    assert found.second_moment == pytest.approx(74.8 / 3)


ROWS = [(n % 7 + 1, n % 24 + 1) for n in range(240)]


def write_jsonl(path: Path) -> None:
    rows = [json.dumps({"prompt_tokens": p, "response_tokens": r, "id": n}) for n, (p, r) in enumerate(ROWS)]
    path.write_text("\n".join(rows) + "\n\n")


def write_parquet(path: Path) -> None:
    columns = {"prompt_tokens": [p for p, _ in ROWS], "response_tokens": [r for _, r in ROWS]}
    parquet.write_table(pa.table(columns), path)


@pytest.mark.parametrize(("name", "write"), [("seen.jsonl", write_jsonl), ("seen.parquet", write_parquet)])
def test_a_file_is_read_when_a_job_is_loaded(tmp_path: Path, name: str, write: Any) -> None:
    write(tmp_path / name)
    job = load(tmp_path, workload__lengths={"file": name, "prompt_share": 0.5})
    (tmp_path / name).unlink()
    assert job.lengths is not None and job.lengths.prompt_share == 0.5
    found = length_model(job)
    assert (found.prompt.quantiles[0], found.prompt.quantiles[-1]) == (1.0, 7.0)
    assert found.response.mean == pytest.approx(12.5, rel=5e-3)
    write_document(tmp_path / "again.toml", job.document)
    again = load_job(tmp_path / "again.toml")
    assert (again.lengths, again.identity) == (job.lengths, job.identity), "the document needs the file no more"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt_tokens": 1}', "column response_tokens must hold positive integers, got None"),
        ('{"prompt_tokens": 1.5, "response_tokens": 1}', "column prompt_tokens must hold positive integers, got 1.5"),
        ('{"prompt_tokens": 1, "response_tokens": 0}', "column response_tokens must hold positive integers, got 0"),
        ('{"prompt_tokens": true, "response_tokens": 1}', "column prompt_tokens must hold positive integers, got True"),
        ("", "must hold at least one sequence, got"),
        ("[1]", "must be a readable Parquet (.parquet) or JSONL (.jsonl) file (line 1 is no object)"),
        ("{", "must be a readable Parquet (.parquet) or JSONL (.jsonl) file (Expecting"),
    ],
)
def test_a_wrong_file_of_lengths_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "seen.jsonl").write_text(text)
    with pytest.raises(InputError) as caught:
        load(tmp_path, workload__lengths={"file": "seen.jsonl"})
    assert f"job.toml: workload.lengths.file: {message}" in str(caught.value)


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "seen.parquet").write_text("no table")
    with pytest.raises(InputError, match=r"workload\.lengths\.file: must be a readable Parquet"):
        load(tmp_path, workload__lengths={"file": "seen.parquet"})


def distribution(form: Lognormal, longest: int) -> Distribution:
    tables = tabulate(Lengths(prompt=form, response=form), max_prompt_tokens=longest, max_response_tokens=longest)
    return Distribution(tables.response.values, tables.response.probabilities)


@pytest.mark.parametrize(
    ("form", "longest"),
    [
        (Lognormal(median=1000.0, sigma=0.5), 32768),
        (Lognormal(median=1000.0, sigma=0.8), 32768),
        (Lognormal(median=2000.0, sigma=1.0), 8192),
        (Lognormal(mean=4000.0, sigma=0.8), 16384),
        (Lognormal(mean=500.0, sigma=1.2), 100_000),
        (Lognormal(mean=3000.0, sigma=1.5), 4096),
    ],
)
def test_a_lognormal_has_its_moments_and_its_maximum(form: Lognormal, longest: int) -> None:
    mu, s, x = form.mu, form.sigma, float(longest)
    below, z = NormalDist().cdf, (math.log(longest) - form.mu) / form.sigma
    mean = math.exp(mu + s**2 / 2) * below(z - s) + x * (1 - below(z))
    square = math.exp(2 * mu + 2 * s**2) * below(z - 2 * s) + x**2 * (1 - below(z))
    # P(max <= l) = p^512, so the maximum is Q(u^(1/512)) for a uniform u.
    u = (np.arange(400_000) + 0.5) / 400_000
    largest = np.minimum(np.exp(mu + s * ndtri(u ** (1 / 512))), x).mean()
    found = distribution(form, longest)
    assert found.mean == pytest.approx(mean, rel=5e-3)
    assert found.second_moment == pytest.approx(square, rel=5e-3)
    assert found.expected_largest(np.array([512.0]))[0] == pytest.approx(largest, rel=5e-3)


def test_a_mean_is_the_mean_before_it_is_cut_off() -> None:
    assert Lognormal(mean=math.exp(3.0 + 0.5), sigma=1.0).mu == pytest.approx(3.0)
    assert Lognormal(median=math.exp(3.0), sigma=1.0).mu == pytest.approx(3.0)


def test_the_maximum_where_the_cut_off_binds() -> None:
    # 1.8 % of the responses are cut off, so that the longest of 512 is.
    found = distribution(Lognormal(median=2000.0, sigma=1.0), 16384)
    assert found.expected_largest(np.array([512.0]))[0] == pytest.approx(16384, rel=0.02)


def test_the_expected_maximum_by_hand() -> None:
    uniform = Distribution((0.0, 100.0))
    assert uniform.expected_largest(np.array([1.0, 9.0, 1.0])).tolist() == pytest.approx([50.0, 90.0, 50.0])
    # Half the draws are 0, the others uniform to 10: E[max of 2] = 10 - (10 / 0.5) x (1 - 1/8) / 3.
    half = Distribution((0.0, 0.0, 10.0))
    assert half.expected_largest(np.array([2.0]))[0] == pytest.approx(10 - 20 * 0.875 / 3)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_padding_of_many_plans_is_that_of_each(pairs: list[tuple[int, int]]) -> None:
    lengths = Distribution((3.0, 10.0, 12.0, 90.0), (0.0, 0.3, 0.9, 1.0))
    count, size = np.array([n for n, _ in pairs]), np.array([b for _, b in pairs])
    for power, got in ((1, lengths.padded(count, size)), (2, lengths.padded_squares(count, size))):
        for (n, b), value in zip(pairs, got, strict=True):
            longest = [float(lengths.quantile(np.array([(n - j - 0.375) / (n + 0.25)]))[0]) for j in range(0, n, b)]
            wanted = sum(min(b, n - i * b) * length**power for i, length in enumerate(longest))
            assert value == pytest.approx(wanted)


def test_a_workload_needs_no_task() -> None:
    workload = Workload(prompts_per_step=2, samples_per_prompt=3, max_prompt_tokens=5, max_response_tokens=7)
    assert (workload.tasks, workload.sequences, workload.max_tokens) == ((), 6, 12)
    assert msgspec.structs.replace(workload, oversampling=2.0).sequences == 6


def test_critics_and_reward_models_have_a_head_of_one_number():
    job = load_job(Path(__file__).parents[1] / "examples" / "ppo-70b" / "job.toml")
    critic = job.models[Role.CRITIC]
    assert (job.actor.outputs, critic.outputs) == (128256, 1)
    # Llama-3.1-8B without its head of 128,256 x 4,096, with one of 4,096.
    assert critic.parameters == 8_030_261_248 - 128256 * 4096 + 4096
    assert critic.active_parameters == critic.parameters - 128256 * 4096
    assert critic.matmul_flops_per_token == replace(critic, scores=False).matmul_flops_per_token - 2 * 128255 * 4096


def test_a_lognormal_that_is_cut_off_anyway_may_be_of_any_size() -> None:
    """Its counts once overflowed."""
    lengths = Lengths(prompt=Lognormal(mean=1e-9, sigma=1e-9), response=Lognormal(median=1e30, sigma=1e30))
    tables = tabulate(lengths, max_prompt_tokens=64, max_response_tokens=512)
    assert set(tables.prompt.values) == {1.0}
    assert set(tables.response.values) == {1.0, 512.0}
