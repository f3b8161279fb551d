"""What launching costs, measured with the engine and the passes that real runs use, on models so small that nothing
else takes time; and whole passes of a model in which kernels take it."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from executor import attention
from executor.engine import Engine
from executor.records import Request, Row, Sample
from executor.timing import median_seconds
from executor.trainer import Trainer, score
from ir.cluster import Host, MeasuredPass
from ir.job import Algorithm

_VOCABULARY = 32
_ALGORITHM = Algorithm(name="grpo", learning_rate=1e-6)


def kv_bandwidth(device: torch.device) -> float:
    """Bytes of cached keys and values that decode steps get through per second: from the time by which steps of
    many sequences grow with the keys they see."""
    sequences, early, late, span = 32, 8, 200, 16
    model = _model(device, layers=2, heads=4, kv_heads=2, head_dim=32)
    engine = Engine(
        model,
        slots=sequences,
        max_prompt_tokens=4,
        max_response_tokens=late + span + 2,
        temperature=1.0,
        stop_token=-1,
        seed=0,
    )
    engine.submit([Request(group=0, member=i, prompt=np.ones(4, dtype=np.int64)) for i in range(sequences)])
    seconds = []
    while not engine.idle:
        begun = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begun)
    grown = float(np.median(seconds[late : late + span]) - np.median(seconds[early : early + span]))
    kv_bytes = 2 * 2 * 2 * 32 * 4 * sequences * (late - early)
    return kv_bytes / max(grown, 1e-6)


def host_costs(device: torch.device) -> Host:
    """Seconds of decode steps, passes and optimizer steps apart from their kernels, by differences of one layer and
    four."""
    thin, thick = _model(device, layers=1), _model(device, layers=4)
    step_1, step_4 = _decode(thin, 1), _decode(thick, 1)
    step_wide = _decode(thin, 33)
    pass_1, pass_4 = _forward(thin), _forward(thick)
    train_1, train_4 = _train(thin), _train(thick)
    adam_1, adam_4 = _adam(thin), _adam(thick)
    layers = 3
    return Host(
        decode_step_s=max(step_1 - (step_4 - step_1) / layers, 0.0),
        decode_layer_s=max(step_4 - step_1, 0.0) / layers,
        decode_sequence_s=max(step_wide - step_1, 0.0) / 32,
        forward_s=max(pass_1 - (pass_4 - pass_1) / layers, 0.0),
        forward_layer_s=max(pass_4 - pass_1, 0.0) / layers,
        train_s=max(train_1 - (train_4 - train_1) / layers, 0.0),
        train_layer_s=max(train_4 - train_1, 0.0) / layers,
        optimizer_s=max(adam_1 - (adam_4 - adam_1) / layers, 0.0),
        optimizer_layer_s=max(adam_4 - adam_1, 0.0) / layers,
    )


def whole_passes(device: torch.device) -> tuple[MeasuredPass, ...]:
    """Whole passes of a model in which kernels, not launches, take the time."""
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 384}
    model = _model(device, **sizes)
    trainer = Trainer(model, _ALGORITHM, temperature=1.0)
    points = []
    for sequences, length in ((4, 64), (16, 64), (4, 256)):
        rows = [_row(i, prompt=length // 4, response=length - length // 4) for i in range(sequences)]
        samples = [row.sample for row in rows]
        seconds = {
            "forward": median_seconds(
                partial(score, [model], samples, micro_batch=sequences, temperature=1.0), budget_s=0.3
            ),
            "train": median_seconds(
                partial(trainer.update, rows, sequences=1, micro_batch=sequences, recompute=False, reduce=None),
                budget_s=0.5,
            ),
        }
        for kind in ("forward", "train"):
            points.append(
                MeasuredPass(
                    kind="forward" if kind == "forward" else "train",
                    vocab=_VOCABULARY,
                    sequences=sequences,
                    length=length,
                    response=length - length // 4,
                    seconds=seconds[kind],
                    **sizes,
                )
            )
    return tuple(points)


def _model(
    device: torch.device,
    *,
    layers: int,
    hidden: int = 16,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 8,
    ffn: int = 32,
) -> PreTrainedModel:
    attention.register()
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention.NAME
    )
    return model.to(device).eval()


def _decode(model: PreTrainedModel, sequences: int) -> float:
    """Seconds of a decode step with so many live sequences."""
    steps = 24
    # The stop token lies outside the vocabulary, so every sequence runs to the end.
    engine = Engine(
        model,
        slots=sequences,
        max_prompt_tokens=4,
        max_response_tokens=steps,
        temperature=1.0,
        stop_token=-1,
        seed=0,
    )
    prompt = np.ones(4, dtype=np.int64)
    seconds = []
    for _ in range(6):
        engine.submit([Request(group=0, member=i, prompt=prompt) for i in range(sequences)])
        engine.step()
        begun = time.perf_counter()
        while not engine.idle:
            engine.step()
        seconds.append((time.perf_counter() - begun) / (steps - 2))
    return float(np.median(seconds[1:]))


def _forward(model: PreTrainedModel) -> float:
    samples = [_row(0).sample]
    return median_seconds(lambda: score([model], samples, micro_batch=1, temperature=1.0), budget_s=0.3)


def _train(model: PreTrainedModel) -> float:
    trainer = Trainer(model, _ALGORITHM, temperature=1.0)
    rows = [_row(i) for i in range(4)]

    def update(count: int) -> float:
        return median_seconds(
            lambda: trainer.update(rows[:count], sequences=1, micro_batch=1, recompute=False, reduce=None),
            budget_s=0.3,
        )

    return max(update(4) - update(1), 0.0) / 3


def _adam(model: PreTrainedModel) -> float:
    trainer = Trainer(model, _ALGORITHM, temperature=1.0)
    rows = [_row(i) for i in range(2)]
    one = median_seconds(
        lambda: trainer.update(rows[:1], sequences=1, micro_batch=1, recompute=False, reduce=None), budget_s=0.3
    )
    two = median_seconds(
        lambda: trainer.update(rows, sequences=1, micro_batch=1, recompute=False, reduce=None), budget_s=0.3
    )
    return max(2 * one - two, 0.0)


def _row(member: int, *, prompt: int = 2, response: int = 2) -> Row:
    zeros = np.zeros(response, dtype=np.float32)
    sample = Sample(
        group=0,
        member=member,
        prompt=np.ones(prompt, dtype=np.int64),
        response=np.ones(response, dtype=np.int64),
        rollout_logprob=zeros,
        version=0,
    )
    return Row(sample=sample, advantage=1.0, old_logprob=zeros, reference_logprob=zeros)
