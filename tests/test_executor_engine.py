"""Continuous batching on a real, tiny model: what it samples is what the trainer would have said."""

from __future__ import annotations

from collections.abc import Iterator

import build
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedModel, Qwen2Config, Qwen3Config

from executor import attention
from executor.engine import Engine
from executor.records import Request, Sample
from executor.trainer import score

STOP = 1


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    attention.register()
    sizes = {k: v for k, v in build.QWEN3_CONFIG.items() if k not in ("model_type", "architectures")}
    kinds = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "phi3": Phi3Config}
    config = kinds[kind](**sizes, initializer_range=0.2, **({"pad_token_id": 0} if kind == "phi3" else {}))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention.NAME
    )
    return model.eval()


def run(model: PreTrainedModel, *, slots: int, groups: int = 5, members: int = 3, limit: int = 20) -> list[Sample]:
    engine = Engine(
        model,
        slots=slots,
        max_prompt_tokens=12,
        max_response_tokens=limit,
        temperature=1.0,
        stop_token=STOP,
        seed=5,
    )
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 60, random.integers(3, 12)) for _ in range(groups)]
    requests = [Request(group=g, member=m, prompt=prompts[g]) for g in range(groups) for m in range(members)]
    engine.submit(requests)
    samples = []
    most_live = 0
    while not engine.idle:
        samples += engine.step()
        most_live = max(most_live, len(engine._live))
    assert most_live <= slots
    return samples


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "phi3"])
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_recorded_logprobs_are_the_models_own(kind: str, slots: int) -> None:
    model = model_of(kind)
    samples = run(model, slots=slots)
    assert sorted(s.key for s in samples) == [(g, m) for g in range(5) for m in range(3)]
    (again,) = score([model], samples, micro_batch=4, temperature=1.0)
    worst = max(float(np.abs(again[s.key] - s.rollout_logprob).max()) for s in samples)
    assert worst < 1e-4


def test_responses_end_with_the_stop_token_or_at_the_limit() -> None:
    samples = run(model_of("qwen3"), slots=4, groups=12)
    lengths = {len(s.response) for s in samples}
    assert max(lengths) == 20 and min(lengths) < 20
    for sample in samples:
        assert STOP not in sample.response[:-1]
        assert sample.response[-1] == STOP or len(sample.response) == 20
        assert len(sample.rollout_logprob) == len(sample.response)


def test_sampling_follows_the_models_distribution() -> None:
    model = model_of("qwen3")
    prompt = np.array([5, 9, 13])
    engine = Engine(
        model,
        slots=4000,
        max_prompt_tokens=4,
        max_response_tokens=1,
        temperature=0.7,
        stop_token=STOP,
        seed=1,
    )
    engine.submit([Request(group=0, member=m, prompt=prompt) for m in range(4000)])
    drawn = np.array([s.response[0] for s in engine.step()])
    with torch.inference_mode():
        wanted = torch.softmax(model(torch.from_numpy(prompt)[None]).logits[0, -1] / 0.7, dim=-1).numpy()
    share = np.bincount(drawn, minlength=64) / 4000
    # Four standard deviations of a binomial share.
    assert (np.abs(share - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / 4000) + 1e-3).all()


def test_samples_carry_the_oldest_version_that_made_them() -> None:
    engine = Engine(
        model_of("qwen3"),
        slots=1,
        max_prompt_tokens=4,
        max_response_tokens=6,
        temperature=1.0,
        stop_token=-1,
        seed=0,
    )
    engine.submit([Request(group=g, member=0, prompt=np.array([3, 4])) for g in range(2)])
    engine.version = 7
    engine.step()
    engine.version = 8
    samples = []
    while not engine.idle:
        samples += engine.step()
    assert [s.version for s in samples] == [7, 8]
