"""Documents: what is refused and how it is said, identities, and round trips."""

from __future__ import annotations

import json
from pathlib import Path

import build
import pytest

from ir.cluster import Cluster
from ir.documents import digest, read_document, write_document
from ir.errors import InputError
from ir.job import load_job, with_lengths
from ir.plan import Plan

JOB = """
name = "small"
[algorithm]
name = "grpo"
learning_rate = 3e-4
[models.actor]
path = "config.json"
warm_start = { steps = 10, batch = 4, learning_rate = 1e-3 }
[workload]
prompts_per_step = 4
samples_per_prompt = 4
max_prompt_tokens = 32
max_response_tokens = 24
[[workload.tasks]]
dataset = "chain_sum"
"""


def write_job(folder: Path, text: str = JOB) -> Path:
    (folder / "config.json").write_text(json.dumps(build.QWEN3_CONFIG))
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def test_a_job_is_read_with_its_actors_shape(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    assert job.actor == build.SHAPE
    assert job.workload.sequences == 16
    assert job.limits.max_staleness == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prompts_per_step = 4", "prompts_per_stp = 4", "job.toml: workload: unknown key `prompts_per_stp`"),
        ("prompts_per_step = 4", "", "job.toml: workload: missing key `prompts_per_step`"),
        ("prompts_per_step = 4", 'prompts_per_step = "4"', "job.toml: workload.prompts_per_step: expected `int`, got `str`"),
        ("samples_per_prompt = 4", "samples_per_prompt = 1", "workload.samples_per_prompt: must be at least 2 for grpo"),
        ('name = "grpo"', 'name = "ppo2"', "job.toml: algorithm.name: invalid enum value 'ppo2'"),
        ('path = "config.json"', 'path = "nowhere"', "models.actor.path: must be a directory or config.json that exists"),
        ('path = "config.json"', "", "models.actor: exactly one of `path` and `name` must be given"),
        ("[workload]", "[workload]\nminibatches = 3", "workload.minibatches: must divide `prompts_per_step` = 4, got 3"),
        ("[workload]", "[workload", "job.toml: must be valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_job_names_file_path_rule_and_value(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in JOB
    path = write_job(tmp_path, JOB.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_job(path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.toml: must be a readable file, got No such file"):
        load_job(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "config.json: model_type: must be one of deepseek_v2, "),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers: must be a positive integer, got 0"),
        ({"hidden_size": "wide"}, "config.json: hidden_size: must be a positive integer, got 'wide'"),
    ],
)
def test_a_mistake_in_a_model_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_job(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(build.QWEN3_CONFIG | change))
    with pytest.raises(InputError) as caught:
        load_job(path)
    assert message in str(caught.value)


def test_parameter_counts_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from ir.model import shape_from_config

    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        for tied in (False, True):
            config = build.QWEN3_CONFIG | {"model_type": kind, "tie_word_embeddings": tied}
            sizes = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
            shape = shape_from_config(config, where="test")
            assert shape.parameters == sum(p.numel() for p in model.parameters()), (kind, tied)


def test_known_models_have_their_published_size() -> None:
    from ir.model import shape_from_config

    qwen3_8b = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "tie_word_embeddings": False,
    }  # fmt: skip
    llama3_8b = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    assert shape_from_config(qwen3_8b, where="").parameters == 8_190_735_360
    assert shape_from_config(llama3_8b, where="").parameters == 8_030_261_248
    assert shape_from_config(llama3_8b, where="").kv_bytes_per_token(2) == 131_072


def test_identity_ignores_where_a_job_lies_and_what_lengths_were_seen(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = load_job(write_job(tmp_path / "a")), load_job(write_job(tmp_path / "b"))
    other = load_job(write_job(tmp_path / "b", JOB.replace("prompts_per_step = 4", "prompts_per_step = 8")))
    assert one.identity == two.identity
    lengths = build.job().workload.lengths
    assert lengths is not None
    assert with_lengths(one, lengths).identity == one.identity
    assert other.identity != one.identity


def test_documents_survive_the_disk(tmp_path: Path) -> None:
    plan, cluster = build.plan(staleness=2, stream=True), build.cluster()
    write_document(tmp_path / "plan.toml", plan)
    write_document(tmp_path / "cluster.toml", cluster)
    assert read_document(tmp_path / "plan.toml", Plan) == plan
    assert read_document(tmp_path / "cluster.toml", Cluster) == cluster
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_plan_in_a_few_words() -> None:
    change = {
        "generate": {"draft_tokens": 2},
        "update_actor": {"dp": 4, "zero": 3, "shard": 2},
        "update_critic": {"pp": 2, "dp": 2, "schedule": "zero-bubble"},
    }
    plan = build.full_plan(build.jobs()["ppo"], pools={"rollout": 1, "train": 4}, change=change)
    assert plan.describe() == (
        "rollout 1 + train 4 k=0 broadcast gen[x8 draft2] rew[mb4] ref[mb4] old[mb4] val[mb4] "
        "critic[dp2 pp2 zero-bubble mb4] actor[dp4 z3 shard2 mb4]"
    )


def test_identity_of_a_plan_is_that_of_its_content() -> None:
    assert build.plan().identity == build.plan().identity
    assert build.plan().identity != build.plan(concurrency=16).identity
    assert digest(build.plan()) == build.plan().identity and len(build.plan().identity) == 16
