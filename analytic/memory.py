"""Peak bytes of a device: what stays for the whole run, and the larger of what generation and training add."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.priors import priors
from analytic.stages import Setup
from ir.batch import PlanBatch

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per device, float64[n] each, of the pool named first."""

    rollout: Float
    """Peak on the pool that generates."""
    train: Float
    """Peak on the pool that trains; the same pool, and number, where colocated."""
    terms: dict[str, Float]
    """What the peaks are made of."""

    @property
    def peak(self) -> Float:
        """Largest over the pools."""
        return np.maximum(self.rollout, self.train)


def memory(s: Setup, b: PlanBatch) -> Memory:
    """Lifetimes: weights, optimizer and caches live for the run; activations for a micro-batch."""
    shape, width = s.job.actor, s.roofline.bytes_per_value
    weights = np.full(len(b), float(shape.parameters * width))
    reference = weights * (s.job.algorithm.kl_coefficient > 0)
    terms = {
        "base": np.full(len(b), float(s.cluster.device.base_memory_bytes)),
        # The weights a run starts from are kept beside the working ones.
        "weights": 2.0 * weights,
        "reference": reference,
        # Gradients and two moments; the all-reduce flattens the gradients once more.
        "optimizer": weights * (3.0 + (b.dp > 1)),
        "kv_cache": b.concurrency * float(s.job.workload.max_tokens * shape.kv_bytes_per_token(width)),
        "activations": np.maximum(_update_activations(s, b), _logprob_activations(s, b)),
        # A published copy of the weights, flattened and in transit.
        "sync": 2.0 * weights * (b.colocated == 0),
    }
    together = sum(terms.values(), np.zeros(len(b)))
    rollout = terms["base"] + terms["weights"] + terms["kv_cache"] + terms["sync"]
    train = together - terms["kv_cache"]
    # The cache is not freed between phases, so a colocated device holds everything.
    colocated = b.colocated == 1
    return Memory(
        rollout=np.where(colocated, together, rollout),
        train=np.where(colocated, together, train),
        terms=terms,
    )


def _update_activations(s: Setup, b: PlanBatch) -> Float:
    """Kept for the backward pass: a layer's tensors, or with recomputation one input per layer and one layer's."""
    shape, p, width = s.job.actor, priors(), s.roofline.bytes_per_value
    tokens = b.update_micro_batch.astype(float) * _longest(s)
    heads = shape.attention_width + shape.kv_width
    layer = p.saved_hidden * shape.hidden + p.saved_heads * heads + p.saved_ffn * shape.ffn
    kept = np.where(b.recompute == 1, shape.layers * shape.hidden + layer, shape.layers * layer)
    logits = 4.0 * shape.vocab * 4
    return p.fragmentation * tokens * (kept * width + logits)


def _logprob_activations(s: Setup, b: PlanBatch) -> Float:
    shape, width = s.job.actor, s.roofline.bytes_per_value
    tokens = b.logprob_micro_batch.astype(float) * _longest(s)
    layer = 6.0 * shape.hidden + 3.0 * shape.ffn
    return priors().fragmentation * tokens * (layer * width + 3.0 * shape.vocab * 4)


def _longest(s: Setup) -> float:
    """The longest sequence that may come: memory must hold it, however rare it is."""
    return float(s.job.workload.max_tokens)
