"""A micro-batch's seconds in a model's layers and head, forward, backward and again, and its way through a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds, overlap_of
from analytic.distinct import at_rows, distinct
from analytic.layers import Routing, Spread, Work, around, forward
from analytic.moe import expert_traffic
from analytic.products import Made, grouped_products, products, sorting_seconds
from analytic.setup import Machine
from analytic.training import Trainer
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of one forward pass of a micro-batch over all layers, float64[n] each."""

    linear: Float
    """Kernels of layers, attention cores apart."""
    attention: Float
    head: Float
    collectives: Float
    """Of tensor, context and expert parallelism."""
    tensor: Float
    """Of `collectives`, those of tensor parallelism."""
    exchange: Float
    """Of `collectives`, dispatch and combine of experts' tokens."""
    memory: Float
    """Of `linear`, what memory traffic and not arithmetic takes."""
    scaled: Float
    """Of `memory`, quantising inputs."""


def parts(machine: Machine, shape: ModelShape, at: Spread, work: Work, imbalance: float | None, made: Made) -> Parts:
    """Each different micro-batch is priced once: recomputation, sharding and pipelines change nothing in it.
    `imbalance` is the load of the fullest expert-parallel device over the mean; None: as measured."""
    first, inverse = distinct([*differing(shape, at, work), made.pieces], len(at.tp))
    one = each_part(machine, shape, at_rows(at, first), at_rows(work, first), at_rows(made, first), imbalance)
    return at_rows(one, inverse)


def differing(shape: ModelShape, at: Spread, work: Work) -> list[NDArray[Any]]:
    """What one micro-batch differs in from another."""
    replicas = [at.dp] if shape.is_moe else []
    return [at.tp, at.cp, at.ep, at.etp, at.fp8, *replicas, work.tokens, work.squares, work.head_tokens]


def each_part(
    machine: Machine, shape: ModelShape, at: Spread, work: Work, made: Made, imbalance: float | None
) -> Parts:
    """As `parts`, every row priced."""
    return (_host_parts if machine.is_host else _parts)(machine, shape, at, work, made, Routing(imbalance=imbalance))


def _host_parts(machine: Machine, shape: ModelShape, at: Spread, work: Work, _: Made, routing: Routing) -> Parts:
    whole = forward(machine, shape, at, work, routing)
    linear, none = whole.kernels - whole.attention - whole.head, np.zeros_like(work.tokens)
    return Parts(
        linear=linear,
        attention=whole.attention,
        head=whole.head,
        collectives=whole.collectives,
        tensor=whole.tensor,
        exchange=none,
        memory=np.minimum(whole.memory, linear),
        scaled=none,
    )


def _parts(machine: Machine, shape: ModelShape, at: Spread, work: Work, made: Made, routing: Routing) -> Parts:
    m, rest = work.tokens / at.cp, around(machine, shape, at, work, routing)
    multiplied, scaled = products(machine, shape, at, m, made)
    moving, exchange = rest.kernels - rest.attention - rest.head, np.zeros_like(m)
    if shape.num_moe_layers:
        count, sent = shape.num_moe_layers, expert_traffic(machine, shape, at, m, routing)
        multiplied = multiplied + count * grouped_products(machine, shape, at, m, routing)
        moving = moving + count * sorting_seconds(machine, shape, at, m, routing)
        exchange = count * dispatch_seconds(machine, shape, at, m, sent)
    return Parts(
        linear=multiplied + moving + scaled,
        attention=rest.attention,
        head=rest.head,
        collectives=rest.collectives + exchange,
        tensor=rest.tensor,
        exchange=exchange,
        memory=moving + scaled,
        scaled=scaled,
    )


def dispatch_seconds(machine: Machine, shape: ModelShape, at: Spread, m: Float, sent: Float) -> Float:
    """Dispatch and combine in a trainer, whose recipes choose the way: that of engines (`sent` seconds), or a plain
    all-to-all with a copy of each token for each of its experts, which is faster where links inside a domain are, and
    the only way between experts that are divided, whose other parts lie between them."""
    assert shape.moe is not None
    size = m / at.tp * shape.moe.experts_per_token * shape.hidden * machine.device.bytes_per_value
    plain = 2.0 * collective_seconds(machine.levels, "all_to_all", size, at.ep, at.etp)
    return np.where(at.etp > 1, plain, np.minimum(sent, plain))


def scores_seconds(machine: Machine, shape: ModelShape, at: Spread, work: Work, bytes_per_score: float) -> Float:
    """Memory traffic of attention scores that are written out, over all layers."""
    scores = shape.layers * shape.heads * work.squares / (at.tp * at.cp)
    return np.asarray(bytes_per_score * scores / machine.device.memory_bandwidth)


def adapter_seconds(machine: Machine, shape: ModelShape, at: Spread, work: Work) -> Float:
    """A pass through low-rank adapters, which are too narrow to take time for arithmetic. Forward, their input is read,
    their output written, read and added; backward, the gradient of the output is read twice, the input once, and the
    gradient of the input is written, read and added: much the same."""
    if not shape.lora_rank:
        return np.zeros_like(work.tokens)
    values = sum(k + 4.0 * n for k, n in shape.matmuls_per_layer) * shape.layers
    tokens = work.tokens / (at.cp * at.tp)
    return np.asarray(tokens * values * machine.device.bytes_per_value / machine.device.memory_bandwidth)


def largest_share(shape: ModelShape, pp: Int) -> tuple[Float, Float]:
    """(share of the layers on the fullest pipeline rank, on the last one): ranks differ by a layer where the layers do
    not divide, and the last, which has the head too, is then among the smaller."""
    layers = float(shape.layers)
    return np.ceil(layers / pp) / layers, np.floor(layers / pp) / layers


def slowest_stage(shape: ModelShape, pp: Int, layers: Float, head: Float) -> Float:
    """Seconds of the slowest pipeline rank for one micro-batch, given those of all layers and of the head."""
    most, last = largest_share(shape, pp)
    return np.maximum(most * layers, last * layers + head)


def flight_seconds(
    slowest: Float, whole: Float, batches: Int, pp: Int, vpp: Int, filled: Float | float = 0.0
) -> tuple[Float, Float]:
    """(busy, bubble) seconds of 1F1B, interleaved by vpp: the slowest rank works without a pause once the pipeline
    is full; filling and draining take the other ranks once, in pieces if interleaved. Weight gradients that are put
    off fill a share of that."""
    return batches * slowest, np.where(pp > 1, np.maximum(whole - slowest, 0.0) / vpp * (1.0 - filled), 0.0)


def filled_share(forward: Float, weights: Float, whole: Float) -> Float:
    """Share of 1F1B's bubble that ZB-H1 fills: of its `(p - 1)(F + B + W)` it leaves `(p - 1)(F + B - W)`
    (arXiv:2401.10241, section 2.3), but not less than `(p - 1) B`, for inputs' gradients go from rank to rank.

    Args:
        forward: Seconds of a micro-batch's forward pass F, float64[n].
        weights: Of its weights' gradients W.
        whole: Of both passes, F + B + W.
    """
    return np.asarray((weights + np.minimum(weights, forward)) / whole)


def neighbour_seconds(
    machine: Machine, shape: ModelShape, at: Spread, tokens: Float, batches: Int, vpp: Int, trainer: Trainer
) -> Float:
    """Exposed sends between pipeline ranks, forward and backward: in plain 1F1B a rank waits for each, interleaved
    ones hide under the next piece but for filling."""
    size = tokens / (at.cp * at.tp) * shape.hidden * machine.device.bytes_per_value
    stride = at.tp * at.cp * at.dp
    once = collective_seconds(machine.levels, "send", size, np.minimum(at.pp, 2), stride)
    hidden = overlap_of(machine.levels, at.pp, stride) if trainer.overlaps else np.zeros(len(once))
    steady = np.where(vpp > 1, (1.0 - hidden) * batches * vpp, batches)
    return np.asarray(2.0 * once * (steady + at.pp - 1.0) * (at.pp > 1))
