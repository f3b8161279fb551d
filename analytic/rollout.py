"""Generation: continuous batching over an engine's slots, by an identity, order statistics and the KV cache's room.

Whatever the schedule, the batch sizes of all decode steps add up to the response
lengths. So a phase costs its number of steps, times what a step costs with the mean
batch, plus the cached keys that are read; the schedule decides the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.costs import Columns, Cost
from analytic.layers import Spread, Work, forward, num_launches, spread_of
from analytic.priors import priors
from analytic.setup import Machine, Setup
from analytic.weights import weight_bytes
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A step's generation on one engine, float64[n] each."""

    count: Float
    """Sequences of a step."""
    slots: Float
    """Sequences decoded together at most, as the cache has room."""
    steps: Float
    """Decode steps that a step's sequences take."""
    keys: Float
    """Cached tokens read, summed over decode steps and sequences."""


def generate_cost(s: Setup, machine: Machine, shape: ModelShape, x: Columns) -> Cost:
    """Rollout of an RL step on engines of tp x pp devices that fill the pool.

    Busy seconds hold the drain at the end of a step if the staleness bound is 0, and none if the next step's
    sequences fill the slots. Latency is from a step's first sequence to its last.
    """
    engine = x["tp"].astype(np.int64) * x["pp"]
    at = spread_of(x, x["devices"].astype(np.int64) // engine)
    weights = weight_bytes(machine, shape, at, np.zeros(len(engine), dtype=np.int32))
    cache = _cache_bytes(s, machine, shape, at, x, weights)
    phase = _phase(s, shape, machine, at, x, cache)
    generated = phase.count * s.lengths.response.mean
    batch = generated / np.maximum(phase.steps, 1.0)
    step = _decode_step(machine, shape, at, batch)
    key = shape.kv_bytes_per_token(machine.device.bytes_per_value) * _cache_share(shape, at) / at.pp
    reading = phase.keys * key / machine.device.kv_bandwidth
    busy = phase.steps * step + reading + _prefill(s, machine, shape, at, phase.count)
    longest = s.lengths.response.expected_largest(np.maximum(phase.count, 1.0))
    pace = busy / np.maximum(phase.steps, 1.0)
    latency = np.where(x["staleness"] > 0, np.maximum(busy, longest * pace), busy)
    # A cache on a core is not freed between phases.
    keep = {"kv cache": cache}
    graphs = np.full_like(cache, 0.0 if machine.is_host else priors().graphs_bytes)
    return Cost(
        seconds=busy + _environment_seconds(s),
        latency=latency + _environment_seconds(s),
        reshard=np.zeros_like(busy),
        resident=keep if machine.is_host else {},
        transient={"rollout weights": weights} | ({} if machine.is_host else {"graphs": graphs} | keep),
    )


def _phase(s: Setup, shape: ModelShape, machine: Machine, at: Spread, x: Columns, cache: Float) -> Phase:
    response, prompt = s.lengths.response, s.lengths.prompt
    count = s.job.generated_sequences / at.dp
    stale = x["staleness"].astype(np.float64)
    # Tokens that a live sequence holds in the long run; samples of a prompt share its keys.
    shared = prompt.mean / s.job.workload.samples_per_prompt
    residual = response.second_moment / (2.0 * response.mean)
    token = shape.kv_bytes_per_token(machine.device.bytes_per_value) * _cache_share(shape, at) / at.pp
    room = np.where(x["memory_percent"] > 0, np.maximum(cache / token / (shared + residual), 1.0), np.inf)
    slots = np.minimum(np.minimum(x["concurrency"], np.ceil(count * (1.0 + stale))), room)
    fresh = np.minimum(slots, np.ceil(count))
    longest = response.expected_largest(np.maximum(count, 1.0))
    # One wave lasts as long as its longest sequence; else slots are saturated first and drain at the end.
    saturated = count * response.mean / fresh
    last = response.expected_largest(np.maximum(fresh, 1.0))
    drained = np.where(fresh >= count, longest, np.maximum(longest, saturated - residual + last))
    ahead = stale > 0
    steps = np.where(ahead, count * response.mean / slots, drained)
    keys = count * (prompt.mean * response.mean + response.second_moment / 2.0)
    if machine.is_host:
        # Sequences of all ages are live together there and see as many keys as the longest of them.
        widest = s.lengths.total.expected_largest(np.maximum(slots, 1.0))
        keys = np.where(ahead, count * response.mean * widest, keys)
    return Phase(count=count, slots=slots, steps=steps, keys=keys)


def _cache_share(shape: ModelShape, at: Spread) -> Float:
    """Part of a token's cached values on a tensor-parallel rank: KV heads repeat beyond their number, a latent is
    held whole by all."""
    if shape.mla is not None:
        return np.ones(len(at.tp))
    return 1.0 / np.minimum(at.tp, shape.kv_heads)


def _cache_bytes(s: Setup, machine: Machine, shape: ModelShape, at: Spread, x: Columns, weights: Float) -> Float:
    """Bytes of the KV cache on a device: what the share of memory leaves, or every slot at its longest."""
    device = machine.device
    token = shape.kv_bytes_per_token(device.bytes_per_value) * _cache_share(shape, at) / at.pp
    asked = x["concurrency"] * float(s.job.workload.max_tokens) * token
    share = x["memory_percent"] / 100.0 * device.memory_bytes - weights - device.base_memory_bytes
    left = np.maximum(share - priors().graphs_bytes, 0.0)
    return np.where(x["memory_percent"] > 0, np.minimum(left, asked), asked)


def _decode_step(machine: Machine, shape: ModelShape, at: Spread, batch: Float) -> Float:
    """Seconds of a decode step, cached keys apart. Pipeline stages work on their parts of the batch at the same
    time, so a round over all parts takes as long as all layers take for one part."""
    part = batch / at.pp
    work = Work(tokens=part, squares=np.zeros_like(part), head_tokens=part)
    host, device = machine.device.host, machine.device
    one = forward(machine, shape, at, work)
    # Attention to a token itself is counted with the cached keys.
    kernels = one.kernels - (0.0 if machine.is_host else shape.layers * device.attention_launch_s)
    launches = shape.layers * (device.kv_launch_s + num_launches(shape) * machine.roofline.launch_s)
    kernels = kernels + (0.0 if machine.is_host else launches)
    waits = host.decode_step_s + shape.layers * host.decode_layer_s + batch * host.decode_sequence_s
    return kernels + one.collectives + waits


def _prefill(s: Setup, machine: Machine, shape: ModelShape, at: Spread, count: Float) -> Float:
    """Prompts are read once per group."""
    host, workload = machine.device.host, s.job.workload
    prompts = count / workload.samples_per_prompt
    if machine.is_host:
        length = s.lengths.prompt.expected_largest(np.maximum(prompts, 1.0))
        work = Work(tokens=prompts * length, squares=prompts * length**2, head_tokens=prompts)
    else:
        fresh = max(s.lengths.prompt.mean - workload.shared_prefix_tokens, 1.0)
        work = Work(tokens=prompts * fresh, squares=prompts * s.lengths.prompt.second_moment, head_tokens=prompts)
    one = forward(machine, shape, at, work)
    launches = np.full_like(prompts, host.forward_s + shape.layers * host.forward_layer_s)
    return machine.with_launches(one.kernels / at.pp, launches) + one.collectives / at.pp


def _environment_seconds(s: Setup) -> float:
    """What the environment's answers add to a step: other sequences are decoded meanwhile, but the last one waits for
    all of its own."""
    turns = s.job.workload.turns
    if turns is None or turns.latency is None:
        return 0.0
    return (turns.mean - 1.0) * turns.latency.mean_s
