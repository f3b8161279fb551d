"""Generation by this project's own engine on processor cores: padded, with a cache that it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.costs import Columns, Cost
from analytic.kvcache import cache_bytes, token_bytes
from analytic.layers import forward
from analytic.setup import Machine, Setup
from analytic.spread import Spread, Work, spread_of
from analytic.weights import weight_bytes
from ir.shape import ModelShape

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """A step's generation on one engine, float64[n] each."""

    count: Float
    """Sequences of a step."""
    steps: Float
    """Decode steps that they take."""
    keys: Float
    """Cached tokens read, summed over decode steps and sequences."""


def host_generate_cost(s: Setup, machine: Machine, shape: ModelShape, x: Columns) -> Cost:
    """As `rollout.generate_cost`, on cores. The engine there guesses nothing ahead, so guesses change no price."""
    engine = x["tp"].astype(np.int64) * x["pp"]
    at = spread_of(x, x["devices"].astype(np.int64) // engine)
    token = token_bytes(machine, shape, at)
    weights = weight_bytes(machine, shape, at, np.zeros(len(engine), dtype=np.int32))
    cache = cache_bytes(s, machine, x, token, weights)
    phase = _phase(s, x, at, np.where(x["memory_percent"] > 0, cache / token, np.inf))
    batch = phase.count * s.lengths.response.mean / np.maximum(phase.steps, 1.0)
    host = machine.device.host
    waits = host.decode_step_s + shape.layers * host.decode_layer_s + batch * host.decode_sequence_s
    part = Work(tokens=batch / at.pp, squares=np.zeros_like(batch), head_tokens=batch / at.pp)
    one = forward(machine, shape, at, part)
    reading = phase.keys * token / machine.device.kv_bandwidth
    fresh = _prefill(s, machine, shape, at, phase.count)
    busy = phase.steps * (one.kernels + one.collectives + waits) + reading + fresh
    longest = s.lengths.response.expected_largest(np.maximum(phase.count, 1.0))
    pace = busy / np.maximum(phase.steps, 1.0)
    wait = environment_seconds(s)
    moved = phase.steps * one.collectives
    return Cost(
        seconds=busy + wait,
        latency=np.where(x["staleness"] > 0, np.maximum(busy, longest * pace), busy) + wait,
        reshard=np.zeros_like(busy),
        kinds={
            "compute": phase.steps * one.kernels + fresh,
            "memory": reading,
            "communication": moved,
            "host": phase.steps * waits,
            "other": np.full_like(busy, wait),
        },
        # A cache on a core is not freed between phases.
        resident={"kv cache": cache},
        transient={"rollout weights": weights},
    )


def environment_seconds(s: Setup) -> float:
    """What the environment's answers add to a step: other sequences are decoded meanwhile, but the last one waits for
    all of its own."""
    turns = s.job.workload.turns
    if turns is None or turns.latency is None:
        return 0.0
    return (turns.mean - 1.0) * turns.latency.mean_s


def _phase(s: Setup, x: Columns, at: Spread, capacity: Float) -> _Phase:
    response, prompt = s.lengths.response, s.lengths.prompt
    count = s.job.generated_sequences / at.dp
    stale = x["staleness"].astype(np.float64)
    # Tokens that a live sequence holds in the long run; samples of a prompt share its keys.
    shared = prompt.mean / s.job.workload.samples_per_prompt
    residual = response.second_moment / (2.0 * response.mean)
    room = np.maximum(capacity / (shared + residual), 1.0)
    slots = np.minimum(np.minimum(x["concurrency"], np.ceil(count * (1.0 + stale))), room)
    fresh = np.minimum(slots, np.ceil(count))
    longest = response.expected_largest(np.maximum(count, 1.0))
    # One wave lasts as long as its longest sequence; else slots are saturated first and drain at the end.
    saturated = count * response.mean / fresh
    last = response.expected_largest(np.maximum(fresh, 1.0))
    drained = np.where(fresh >= count, longest, np.maximum(longest, saturated - residual + last))
    ahead = stale > 0
    # Sequences of all ages are live together there and see as many keys as the longest of them.
    widest = s.lengths.total.expected_largest(np.maximum(slots, 1.0))
    keys = count * (prompt.mean * response.mean + response.second_moment / 2.0)
    return _Phase(
        count=count,
        steps=np.where(ahead, count * response.mean / slots, drained),
        keys=np.where(ahead, count * response.mean * widest, keys),
    )


def _prefill(s: Setup, machine: Machine, shape: ModelShape, at: Spread, count: Float) -> Float:
    """Prompts are read once per group, padded to the longest."""
    host, prompts = machine.device.host, count / s.job.workload.samples_per_prompt
    length = s.lengths.prompt.expected_largest(np.maximum(prompts, 1.0))
    work = Work(tokens=prompts * length, squares=prompts * length**2, head_tokens=prompts)
    one = forward(machine, shape, at, work)
    launches = np.full_like(prompts, host.forward_s + shape.layers * host.forward_layer_s)
    return machine.with_launches(one.kernels / at.pp, launches) + one.collectives / at.pp
