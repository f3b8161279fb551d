"""Seconds of each stage per RL step, on arrays of plans.

A layer costs its matrix products (roofline), the attention core, elementwise traffic,
and the host's launches. A pass costs its micro-batches; generation costs its decode
steps, by the identity that whatever the schedule, the sum of the batch sizes over all
steps is the sum of the response lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.device import Roofline, fit_roofline
from analytic.lengths import LengthModel, length_model
from analytic.priors import priors
from ir.batch import PlanBatch
from ir.cluster import Cluster
from ir.job import Job
from ir.model import ModelShape

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all plans of a batch share, fitted once."""

    job: Job
    cluster: Cluster
    shape: ModelShape
    roofline: Roofline
    lengths: LengthModel
    forward_scale: float = 1.0
    """Measured whole passes over the sum of their kernels."""
    train_scale: float = 1.0


def setup(job: Job, cluster: Cluster) -> Setup:
    """Fit the device's curves and take the job's lengths."""
    kernels = Setup(
        job=job,
        cluster=cluster,
        shape=job.actor,
        roofline=fit_roofline(cluster.device),
        lengths=length_model(job),
    )
    return replace(kernels, forward_scale=_pass_scale(kernels, "forward"), train_scale=_pass_scale(kernels, "train"))


def _pass_scale(s: Setup, kind: str) -> float:
    """Geometric mean, over the measured passes of a kind, of what remains after launches over the kernels' sum."""
    host, ratios = s.cluster.device.host, []
    for p in (p for p in s.cluster.device.passes if p.kind == kind):
        shape = ModelShape(
            layers=p.layers, hidden=p.hidden, heads=p.heads, kv_heads=p.kv_heads, head_dim=p.head_dim, ffn=p.ffn,
            vocab=p.vocab, tied=True, qkv_bias=False, qk_norm=True,
        )  # fmt: skip
        sizes = (p.sequences * p.length, p.sequences * p.length**2, p.sequences * p.response)
        forward = float(forward_seconds(replace(s, shape=shape), *(np.array([float(v)]) for v in sizes))[0])
        if kind == "train":
            launches = host.train_s + p.layers * (host.train_layer_s + host.optimizer_layer_s) + host.optimizer_s
            forward *= 1.0 + priors().backward_ratio
        else:
            launches = host.forward_s + p.layers * host.forward_layer_s
        ratios.append(max(p.seconds - launches, 0.1 * p.seconds) / forward)
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0


def forward_seconds(s: Setup, tokens: Float, squares: Float, head_tokens: Float) -> Float:
    """One forward pass without launches. `tokens` go through the layers, `squares` is the sum of squared padded
    lengths, `head_tokens` go through the output head."""
    layer = _layer_seconds(s, tokens) + _attention_seconds(s, squares)
    return s.shape.layers * layer + _head_seconds(s, head_tokens)


def _layer_seconds(s: Setup, tokens: Float) -> Float:
    """Products and elementwise traffic of a layer over so many tokens."""
    shape, p = s.shape, priors()
    products = sum((s.roofline.matmul(tokens, k, n) for k, n in shape.matmuls_per_layer), np.zeros_like(tokens))
    heads = shape.attention_width + shape.kv_width
    values = p.hidden_passes * shape.hidden + p.head_passes * heads + p.ffn_passes * shape.ffn
    return products + tokens * values * s.roofline.bytes_per_value / s.cluster.device.memory_bandwidth


def _attention_seconds(s: Setup, squares: Float) -> Float:
    """Causal attention core of a layer: 4 x width x length^2 FLOP a sequence, half of it masked."""
    return 2.0 * s.shape.attention_width * squares / s.cluster.device.attention_flops


def _head_seconds(s: Setup, tokens: Float) -> Float:
    shape = s.shape
    softmax = 6.0 * tokens * shape.vocab * s.roofline.bytes_per_value / s.cluster.device.memory_bandwidth
    return s.roofline.matmul(tokens, shape.hidden, shape.vocab) + softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a step's generation costs an engine."""

    busy_s: Float
    """Seconds an engine decodes per RL step: with the drain at the end of a step if the bound is 0, without it if
    the next step's sequences fill the slots."""
    latency_s: Float
    """Seconds from a step's first sequence to its last."""


def generate(s: Setup, b: PlanBatch) -> Generation:
    """Rollout with continuous batching (decode planes, makespan by order statistics)."""
    engines = b.generate_devices.astype(float)
    count = s.job.workload.sequences / engines
    response = s.lengths.response
    slots = np.minimum(b.concurrency, np.ceil(count))
    saturated = count * response.mean / slots
    longest = response.largest_of(np.maximum(count, 1.0))
    # One wave lasts as long as its longest sequence; else slots are saturated first and drain at the end.
    residual = response.second_moment / (2.0 * response.mean)
    drained = np.where(
        b.concurrency >= count,
        longest,
        np.maximum(longest, saturated - residual + response.largest_of(slots)),
    )
    ahead = b.staleness > 0
    in_flight = np.where(ahead, np.minimum(b.concurrency, count * (1 + b.staleness)), slots)
    steps = np.where(ahead, count * response.mean / in_flight, drained)
    fixed, per_sequence, per_key = _decode_planes(s)
    prompt = s.lengths.prompt.mean
    # Sequences of all ages are live together and see as many keys as the longest of them.
    keys = np.where(
        ahead,
        count * response.mean * s.lengths.total.largest_of(in_flight),
        count * (prompt * response.mean + response.second_moment / 2.0),
    )
    prefill = _prefill_seconds(s, count / s.job.workload.samples_per_prompt)
    busy = steps * fixed + count * response.mean * per_sequence + keys * per_key + prefill
    step_s = np.divide(busy, np.maximum(steps, 1.0))
    latency = np.where(ahead, np.maximum(busy, longest * step_s), busy)
    return Generation(busy_s=busy, latency_s=latency)


def _decode_planes(s: Setup) -> tuple[float, float, float]:
    """(seconds a step, seconds a live sequence, seconds a live sequence and key) of decoding."""
    host, shape = s.cluster.device.host, s.shape
    zero, one = np.zeros(1), np.ones(1)
    weights = float(shape.layers * _layer_seconds(s, zero)[0] + _head_seconds(s, zero)[0])
    token = float(shape.layers * _layer_seconds(s, one)[0] + _head_seconds(s, one)[0]) - weights
    fixed = host.decode_step_s + shape.layers * host.decode_layer_s + weights
    key = shape.kv_bytes_per_token(s.roofline.bytes_per_value) / s.cluster.device.kv_bandwidth
    return fixed, host.decode_sequence_s + token, key


def _prefill_seconds(s: Setup, prompts: Float) -> Float:
    host, layers = s.cluster.device.host, s.shape.layers
    length = s.lengths.prompt.largest_of(np.maximum(prompts, 1.0))
    launches = host.forward_s + layers * host.forward_layer_s
    return launches + forward_seconds(s, prompts * length, prompts * length**2, prompts)


def logprob_pass(s: Setup, b: PlanBatch) -> Float:
    """Forward pass of one model over the batch, on every device of the training pool."""
    count = -(-s.job.workload.sequences // b.train_devices)
    return _passes(s, count, np.minimum(b.logprob_micro_batch, count))


def streamed_pass(s: Setup, b: PlanBatch) -> Float:
    """As `logprob_pass`, for groups as they are finished. A pool that waits for generation takes them one at a time,
    so its micro-batches are a rank's share of a group; with staleness the pool is busy and groups pile up."""
    members = s.job.workload.samples_per_prompt
    count = -(-s.job.workload.sequences // b.train_devices)
    share = np.where(b.staleness > 0, count, np.maximum(members // b.train_devices, 1))
    return _passes(s, count, np.minimum(b.logprob_micro_batch, share))


def _passes(s: Setup, count: NDArray[np.int64], size: NDArray[np.int64]) -> Float:
    host, total = s.cluster.device.host, s.lengths.total
    batches = -(-count // size)
    launches = batches * (host.forward_s + s.shape.layers * host.forward_layer_s)
    tokens, squares = total.padded(count, size), total.padded_squares(count, size)
    return launches + s.forward_scale * _many(
        s, batches, tokens, squares, count.astype(float) * s.lengths.response.mean
    )


def _many(s: Setup, batches: NDArray[np.int64], tokens: Float, squares: Float, head: Float) -> Float:
    """Forward time of several micro-batches: weights are read in each."""
    once = forward_seconds(s, np.zeros(1), np.zeros(1), np.zeros(1))[0]
    return forward_seconds(s, tokens, squares, head) + (batches - 1).astype(float) * float(once)


def update(s: Setup, b: PlanBatch) -> Float:
    """Optimizer steps of the actor: forward, backward, recomputation, gradient all-reduce, Adam."""
    workload, host, shape, p = s.job.workload, s.cluster.device.host, s.shape, priors()
    count = workload.sequences // workload.minibatches // b.dp
    size = np.minimum(b.update_micro_batch, count)
    batches = -(-count // size)
    total = s.lengths.total
    forward = _many(
        s,
        batches,
        total.padded(count, size),
        total.padded_squares(count, size),
        count.astype(float) * s.lengths.response.mean,
    )
    launches = batches * (host.train_s + shape.layers * (host.train_layer_s + b.recompute * host.forward_layer_s))
    compute = forward * (s.train_scale * (1.0 + p.backward_ratio) + s.forward_scale * b.recompute)
    gradients = shape.parameters * 4
    reduce = collective_seconds(s.cluster.levels[0], "all_reduce", gradients, b.dp)
    adam = (
        host.optimizer_s
        + shape.layers * host.optimizer_layer_s
        + p.optimizer_values * gradients / s.cluster.device.memory_bandwidth
    )
    total_s: Float = s.job.updates_per_step * (launches + compute + reduce + adam)
    return total_s


def sync(s: Setup, b: PlanBatch) -> Float:
    """Weights to where they are needed: nowhere if all ranks trained, else by broadcast or through host memory."""
    size = s.shape.parameters * 4
    inside = np.where(
        b.dp < b.train_devices,
        collective_seconds(s.cluster.levels[0], "broadcast", size, b.train_devices),
        0.0,
    )
    # Flattened, put into shared memory, read and copied into place: each a read and a write.
    across = np.where(b.colocated == 1, 0.0, s.cluster.call_s + 4 * 2.0 * size / s.cluster.device.memory_bandwidth)
    total: Float = inside + across
    return total


def reward(s: Setup, b: PlanBatch) -> Float:
    """Verifying responses, divided over the training pool."""
    return s.job.workload.sequences * priors().reward_s / b.train_devices.astype(float)
