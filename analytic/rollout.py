"""Generation: continuous batching over an engine's slots, by an identity, order statistics and the KV cache's room.

Whatever the schedule, the batch sizes of all decode steps add up to the generated tokens. So a phase costs its steps
with full slots and those of its drain, each at its mean batch, plus the cached keys that are read and the prompts that
are taken in; the schedule decides the number of steps (`analytic.makespan`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analytic.costs import Columns, Cost
from analytic.decode import prefill_seconds
from analytic.engine import Engine, Seconds, engine_of
from analytic.kvcache import activation_bytes, cache_bytes, cache_tokens, token_bytes
from analytic.makespan import Load, Phase, continuous, drained, largest_normal, latency_steps
from analytic.mixed import launch_waits, met
from analytic.priors import priors
from analytic.rollout_host import host_generate_cost
from analytic.serving import serving
from analytic.setup import Machine, Setup
from analytic.speculation import Decoder, draft_bytes, tokens_per_step
from analytic.spread import Spread, spread_of
from analytic.weights import weight_bytes
from ir.shape import ModelShape

Float = NDArray[np.float64]

_ROUNDS = 3
"""Of the fixed point between a step's seconds and the sequences that wait for their environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A step's generation on one engine."""

    phase: Phase
    full: Seconds
    """Of a decode step with full slots, or its share of a token where it gives several."""
    drain: Seconds
    """Of a mean one from then on."""
    prefill: Seconds
    """Of everything that is read."""
    latency: Float
    """Decode steps from the first sequence to the last, float64[n]."""
    alone: Float
    """Seconds that a step's sequences take when there are no others, float64[n]."""

    @property
    def busy(self) -> Float:
        """Seconds, float64[n]."""
        return self.phase.full * self.full.total + self.phase.drain * self.drain.total + self.prefill.total


def generate_cost(s: Setup, machine: Machine, shape: ModelShape, x: Columns) -> Cost:
    """Rollout of an RL step on engines of tp x pp devices that fill the pool.

    Busy seconds hold the drain at the end of a step if all its sequences must be done before the weights change, and
    none if the next step's sequences fill the slots. Latency is from a step's first sequence to its last.
    """
    if machine.is_host:
        return host_generate_cost(s, machine, shape, x)
    at = _spread(shape, x)
    token, chunk = token_bytes(machine, shape, at), _chunk(x)
    weights = weight_bytes(machine, shape, at, np.zeros(len(chunk), dtype=np.int32))
    graphs = np.full_like(weights, priors().graphs_bytes)
    buffers = activation_bytes(machine, shape, at, chunk)
    speculation = s.job.workload.speculation
    draft = draft_bytes(speculation, _guesses(x), weights)
    cache = cache_bytes(s, machine, x, token, weights + draft + graphs + buffers)
    run = _run(s, engine_of(machine, shape, at), x, cache_tokens(x, cache, token))
    busy = run.busy
    pace = busy / np.maximum(run.phase.steps, 1.0)
    return Cost(
        seconds=busy,
        # Engines that the circuit of a step holds up have little more to do than that step's sequences.
        latency=np.maximum(busy, np.minimum(run.latency * pace, run.alone)),
        reshard=np.zeros_like(busy),
        kinds=_kinds(run),
        transient={
            "rollout weights": weights,
            "graphs": graphs,
            "kv cache": cache,
            "prefill activations": buffers,
            **({"draft model": draft} if speculation else {}),
        },
    )


def _spread(shape: ModelShape, x: Columns) -> Spread:
    """An engine divides experts among its devices, whole or each of them."""
    at = spread_of(x, x["devices"].astype(np.int64) // (x["tp"].astype(np.int64) * x["pp"]))
    return replace(at, etp=np.maximum(at.tp // at.ep, 1)) if shape.moe is not None else at


def _chunk(x: Columns) -> Float:
    return np.where(x["prefill_tokens"] > 0, x["prefill_tokens"], serving().chunk_tokens).astype(np.float64)


def _guesses(x: Columns) -> Float:
    """Tokens guessed for a sequence in a step."""
    return np.asarray(x["draft_tokens"], dtype=np.float64)


def _run(s: Setup, e: Engine, x: Columns, capacity: Float) -> _Run:
    """The phase and its steps; where sequences wait for an environment, the two depend on each other."""
    load = _load(s, e, x, capacity)
    stale = x["staleness"].astype(np.float64)
    # Without in-flight updates a sequence is finished by the weights that began it, so that slots run empty.
    flows = (stale > 0) & (x["in_flight"] > 0 if "in_flight" in x else np.ones(len(stale), dtype=bool))
    decoder = Decoder(engine=e, keys=_keys(s, e), guesses=_guesses(x), speculation=s.job.workload.speculation)
    wait, longest_wait = _waits(s, load)
    for _ in range(_ROUNDS if wait else 1):
        phase = _phase(s, load, stale, flows)
        full, drain = decoder.seconds(phase.batch), decoder.seconds(phase.last)
        load = replace(load, idle=wait / full.total, idle_longest=longest_wait / drain.total)
    latency = np.where(flows, latency_steps(s.lengths, load, phase.slots), phase.steps)
    prefill = _prefill(s, e, x, load, phase)
    alone = _alone(s, decoder, load) + prefill.total if flows.any() else np.full(len(stale), np.inf)
    visits = load.count * _visits(s)
    later = visits - np.where(flows, 0.0, np.minimum(phase.slots, load.count))
    prefill = prefill + _launch_waits(decoder, phase, full.total, prefill.total / visits, later)
    return _Run(phase=phase, full=full, drain=drain, prefill=prefill, latency=latency, alone=alone)


def _launch_waits(decoder: Decoder, phase: Phase, pace: Float, read: Float, later: Float) -> Seconds:
    """What the host's launches add to full steps that take sequences in.

    Args:
        decoder: The engine as it decodes.
        phase: Its steps, a token each.
        pace: Seconds of one with full slots, float64[n] as all that follow.
        read: Seconds of what is read when a sequence is taken in.
        later: Sequences that begin, or go on after their environment, while others decode.
    """
    gained = tokens_per_step(decoder.speculation, decoder.guesses)
    steps = np.maximum(phase.full / gained, 1.0)
    arrivals = np.maximum(later, 0.0) / steps
    waits = launch_waits(decoder.engine, pace * gained, read, arrivals, met(arrivals))
    zero = np.zeros_like(waits)
    return Seconds(compute=zero, memory=zero, communication=zero, host=steps * waits)


def _visits(s: Setup) -> float:
    """Times that a sequence is taken in."""
    return s.job.workload.turns.mean if s.job.workload.turns else 1.0


def _alone(s: Setup, decoder: Decoder, load: Load) -> Float:
    """Seconds of decoding a step's sequences alone, drain included."""
    phase = drained(s.lengths, load)
    full, drain = decoder.seconds(phase.batch), decoder.seconds(phase.last)
    return np.asarray(phase.full * full.total + phase.drain * drain.total)


def _phase(s: Setup, load: Load, stale: Float, flows: NDArray[np.bool_]) -> Phase:
    if flows.all():
        return continuous(s.lengths, load, stale)
    ended = drained(s.lengths, load)
    if not flows.any():
        return ended
    flowing = continuous(s.lengths, load, stale)
    names = Phase.__dataclass_fields__
    return Phase(**{name: np.where(flows, getattr(flowing, name), getattr(ended, name)) for name in names})


def _load(s: Setup, e: Engine, x: Columns, capacity: Float) -> Load:
    """The share of one engine in a step's sequences."""
    workload = s.job.workload
    own = s.lengths.prompt.mean - workload.shared_prefix_tokens
    return Load(
        count=s.job.generated_sequences / e.at.dp,
        members=workload.samples_per_prompt,
        engines=e.at.dp.astype(np.float64),
        wanted=x["concurrency"].astype(np.float64),
        capacity=np.maximum(capacity - workload.shared_prefix_tokens, 0.0),
        held=max(own, 0.0) / workload.samples_per_prompt,
        used=1.0 / workload.oversampling,
        decoded=1.0 - _observed(s) / s.lengths.response.mean,
    )


def _observed(s: Setup) -> float:
    """Tokens of a response that the environment adds, of which nearly all may be."""
    turns = s.job.workload.turns
    tokens = (turns.mean - 1.0) * turns.observation_tokens if turns else 0.0
    return min(tokens, 0.95 * s.lengths.response.mean)


def _waits(s: Setup, load: Load) -> tuple[float, Float | float]:
    """Seconds that a sequence waits for its environment, and that the one does which waits longest."""
    turns = s.job.workload.turns
    if turns is None or turns.latency is None:
        return 0.0, 0.0
    times, each = turns.mean - 1.0, turns.latency.mean_s
    spread = each * turns.latency.cv * np.sqrt(times)
    return times * each, times * each + spread * largest_normal(np.maximum(load.count * load.engines, 1.0))


def _keys(s: Setup, e: Engine) -> float:
    """Cached keys that a sequence reads in a decode step, over all layers and on average over its steps."""
    response, prompt = s.lengths.response, s.lengths.prompt.mean
    keys = sum(layers * response.keys_seen(prompt, window) for window, layers in e.shape.window_groups)
    return float(keys / response.mean)


def _prefill(s: Setup, e: Engine, x: Columns, load: Load, phase: Phase) -> Seconds:
    """Prompts once per group but for what all begin with, what an environment adds, and what had to be dropped."""
    workload, prompt, response = s.job.workload, s.lengths.prompt, s.lengths.response
    prompts = load.count / workload.samples_per_prompt
    fresh = prompts * max(prompt.mean - workload.shared_prefix_tokens, 1.0)
    observed = load.count * _observed(s)
    tokens = fresh + observed + phase.recomputed
    # What is read in the middle of a sequence sees all before it, twice the half that a prompt's tokens see.
    before = prompt.mean + response.residual.mean
    squares = prompts * prompt.second_moment + (2.0 * observed + phase.recomputed) * before
    return prefill_seconds(e, tokens, squares, np.minimum(_chunk(x), tokens))


def _kinds(run: _Run) -> dict[str, Float]:
    """What all tokens would take with full slots, and what the drain adds to it."""
    phase = run.phase
    tokens = phase.full * phase.batch + phase.drain * phase.last
    whole = run.full.times(tokens / np.maximum(phase.batch, 1e-9)) + run.prefill
    tail = run.busy - whole.total
    # A drain that is cheaper than full slots has no tail: its parts are then scaled down.
    scale = np.where(tail < 0, run.busy / whole.total, 1.0)
    whole = whole.times(scale)
    return {
        "compute": whole.compute,
        "memory": whole.memory,
        "communication": whole.communication,
        "host": whole.host,
        "tail": np.maximum(tail, 0.0),
    }
