"""Tokens round-trip; a warm start learns, happens once, and refuses what cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import build
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from executor.policy import _orthogonalised, build_tokenizer, encode_prompt, prepare_actor
from executor.tasks import demonstration, prompts, verify
from ir.errors import InputError
from ir.job import Job, Task


def job_in(folder: Path, *, warm_start: int = 3, **changes: object) -> Job:
    config = build.QWEN3_CONFIG | {"initializer_range": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    return build.job(directory=folder, warm_start=warm_start, **changes)


def test_demonstrations_round_trip(tmp_path: Path) -> None:
    workload = job_in(tmp_path).workload
    build_tokenizer(workload).save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for prompt in prompts(workload, first=0, count=100):
        ids = tokenizer.encode(demonstration(prompt), add_special_tokens=False)
        assert tokenizer.unk_token_id not in [*ids, *encode_prompt(tokenizer, prompt)]
        completion = tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
        assert completion == demonstration(prompt)
        assert verify(prompt, completion) == 1.0


def test_a_shared_opening_is_one_token(tmp_path: Path) -> None:
    workload = job_in(tmp_path).workload
    prompt = prompts(workload, first=0, count=1)[0]
    tokens = encode_prompt(build_tokenizer(workload), prompt)
    assert len(tokens) == len(json.loads(prompt.entry_json)["metadata"]["expression"].replace(" ", "")) + 2


def test_a_chat_template_asks_for_answer_tags(tmp_path: Path) -> None:
    workload = job_in(tmp_path).workload
    tokenizer = build_tokenizer(workload)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids = encode_prompt(tokenizer, prompts(workload, first=0, count=1)[0])
    assert tokenizer.convert_tokens_to_ids("<answer>") in ids


def test_a_warm_start_learns_and_happens_once(tmp_path: Path) -> None:
    job = job_in(tmp_path, warm_start=40)
    losses: list[float] = []
    path = prepare_actor(job, tmp_path / "cache", lambda step, steps, loss: losses.append(loss))
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert prepare_actor(job, tmp_path / "cache", lambda *_: pytest.fail("trained again")) == path
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [job.identity]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_a_killed_warm_start_leaves_nothing(tmp_path: Path) -> None:
    def kill(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_actor(job_in(tmp_path), tmp_path / "cache", kill)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("shape", [(2, 16, 48), (2, 48, 16)])
def test_orthogonalising_keeps_the_shape_and_evens_the_singular_values(shape: tuple[int, int, int]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = _orthogonalised(torch.randn(shape))
    assert result.shape == shape
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3 and values.max() < 1.4


def test_a_directory_needs_weights_and_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    job_in(tmp_path / "actor")
    source = build.job(directory=tmp_path).document.models.actor
    job = build.job(directory=tmp_path)
    models = msgspec.structs.replace(job.document.models, actor=msgspec.structs.replace(source, path="actor"))
    document = msgspec.structs.replace(job.document, models=models)
    job = Job(document=document, directory=tmp_path, actor=job.actor)
    with pytest.raises(InputError, match=r"models\.actor\.path: must hold weights"):
        prepare_actor(job, tmp_path / "cache")
    (tmp_path / "actor" / "model.safetensors").touch()
    with pytest.raises(InputError, match="must hold a tokenizer"):
        prepare_actor(job, tmp_path / "cache")
    (tmp_path / "actor" / "tokenizer.json").touch()
    assert prepare_actor(job, tmp_path / "cache") == tmp_path / "actor"


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(build.QWEN3_CONFIG | {"vocab_size": 8}))
    with pytest.raises(InputError, match="vocab_size: must be at least"):
        prepare_actor(job, tmp_path / "cache")


def test_an_unknown_data_set_is_refused(tmp_path: Path) -> None:
    job = job_in(tmp_path, tasks=(Task(dataset="no_such_data_set"),))
    with pytest.raises(InputError, match=r"workload\.tasks\[0\]\.dataset"):
        prepare_actor(job, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
