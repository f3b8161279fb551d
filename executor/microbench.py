"""Measurements on one worker: matrix products, memory traffic, and what launching costs.

Launch costs are measured with the engine and the passes that real runs use, on models
so small that nothing else takes time. Each figure is a median of repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from executor import attention
from executor.engine import Engine
from executor.records import Request, Row, Sample
from executor.trainer import Trainer, score
from ir.cluster import Host, MatmulPoint, MeasuredPass
from ir.job import Algorithm

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
WIDTHS = ((64, 64), (128, 128), (128, 384), (384, 128), (256, 256), (512, 1024))
"""(k, n): what the projections of small models have."""

TRAFFIC_VALUES = 1 << 20
"""Values of an elementwise operation: 4 MiB each, what the activations of a micro-batch occupy."""

_VOCABULARY = 32
_ALGORITHM = Algorithm(name="grpo", learning_rate=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """What one worker measured."""

    matmul: tuple[MatmulPoint, ...]
    memory_bytes: int
    """Of a GPU; 0 for a core, which has a share of the host's."""
    memory_bandwidth: float
    attention_flops: float
    kv_bandwidth: float
    host: Host
    passes: tuple[MeasuredPass, ...]


def measure_device(device: torch.device) -> DeviceFigures:
    """All figures of a device, in about ten seconds."""
    return DeviceFigures(
        matmul=tuple(_matmul(device, m, k, n) for m in ROWS for k, n in WIDTHS),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        memory_bandwidth=_bandwidth(device),
        attention_flops=_attention(device),
        kv_bandwidth=_kv_bandwidth(device),
        host=_host(device),
        passes=_passes(device),
    )


def measure_collective(op: str, size: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Median seconds of a collective of `size` bytes; every rank of the group must call it."""
    tensor = torch.zeros(size // 4, device=device)

    def call() -> None:
        if op == "all_reduce":
            dist.all_reduce(tensor, group=group)
        else:
            dist.broadcast(tensor, src=0, group=group)

    # A fixed count, so that all ranks agree.
    return _median(call, budget_s=0.0, at_least=12)


def _matmul(device: torch.device, m: int, k: int, n: int) -> MatmulPoint:
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    with torch.inference_mode():
        seconds = _median(lambda: torch.nn.functional.linear(a, b), budget_s=0.03)
    return MatmulPoint(m=m, k=k, n=n, seconds=seconds)


def _bandwidth(device: torch.device) -> float:
    a, b = torch.randn(TRAFFIC_VALUES, device=device), torch.randn(TRAFFIC_VALUES, device=device)
    out = torch.empty_like(a)
    seconds = _median(lambda: torch.add(a, b, out=out), budget_s=0.2)
    return 3 * 4 * TRAFFIC_VALUES / seconds


def _attention(device: torch.device) -> float:
    batch, heads, length, width = 8, 4, 128, 32
    q, k, v = (torch.randn(batch, heads, length, width, device=device) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    seconds = _median(lambda: attention(q, k, v, is_causal=True), budget_s=0.2)
    return 2.0 * batch * heads * width * length**2 / seconds


def _kv_bandwidth(device: torch.device) -> float:
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


def _host(device: torch.device) -> Host:
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


def _passes(device: torch.device) -> tuple[MeasuredPass, ...]:
    """Whole passes of a model in which kernels, not launches, take the time."""
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 384}
    model = _model(device, **sizes)
    trainer = Trainer(model, _ALGORITHM, temperature=1.0)
    points = []
    for sequences, length in ((4, 64), (16, 64), (4, 256)):
        rows = [_row(i, prompt=length // 4, response=length - length // 4) for i in range(sequences)]
        samples = [row.sample for row in rows]
        seconds = {
            "forward": _median(partial(score, [model], samples, micro_batch=sequences, temperature=1.0), budget_s=0.3),
            "train": _median(
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
    return _median(lambda: score([model], samples, micro_batch=1, temperature=1.0), budget_s=0.3)


def _train(model: PreTrainedModel) -> float:
    trainer = Trainer(model, _ALGORITHM, temperature=1.0)
    rows = [_row(i) for i in range(4)]

    def update(count: int) -> float:
        return _median(
            lambda: trainer.update(rows[:count], sequences=1, micro_batch=1, recompute=False, reduce=None),
            budget_s=0.3,
        )

    return max(update(4) - update(1), 0.0) / 3


def _adam(model: PreTrainedModel) -> float:
    trainer = Trainer(model, _ALGORITHM, temperature=1.0)
    rows = [_row(i) for i in range(2)]
    one = _median(
        lambda: trainer.update(rows[:1], sequences=1, micro_batch=1, recompute=False, reduce=None), budget_s=0.3
    )
    two = _median(lambda: trainer.update(rows, sequences=1, micro_batch=1, recompute=False, reduce=None), budget_s=0.3)
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


def _median(call: Callable[[], object], *, budget_s: float, at_least: int = 5) -> float:
    """Median seconds of a call: as many as the budget holds, one to warm up not counted."""
    call()
    seconds: list[float] = []
    until = time.perf_counter() + budget_s
    while len(seconds) < at_least or time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))


def merge_figures(figures: Sequence[DeviceFigures]) -> DeviceFigures:
    """Medians over workers that measured at the same time."""
    first = figures[0]
    host = {name: float(np.median([getattr(f.host, name) for f in figures])) for name in first.host.__struct_fields__}
    points = zip(*(f.matmul for f in figures), strict=True)
    passes = zip(*(f.passes for f in figures), strict=True)
    return DeviceFigures(
        matmul=tuple(
            MatmulPoint(m=p[0].m, k=p[0].k, n=p[0].n, seconds=float(np.median([q.seconds for q in p]))) for p in points
        ),
        memory_bytes=first.memory_bytes,
        memory_bandwidth=float(np.median([f.memory_bandwidth for f in figures])),
        kv_bandwidth=float(np.median([f.kv_bandwidth for f in figures])),
        attention_flops=float(np.median([f.attention_flops for f in figures])),
        host=Host(**host),
        passes=tuple(msgspec.structs.replace(p[0], seconds=float(np.median([q.seconds for q in p]))) for p in passes),
    )
