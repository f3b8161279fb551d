"""A micro-batch's seconds in a model's layers and head, forward, backward and again, and its way through a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds, overlap_of
from analytic.distinct import at_rows, distinct
from analytic.kernels import gemm_seconds
from analytic.layers import Routing, Spread, Work, forward
from analytic.moe import expert_traffic, experts
from analytic.moe import imbalance as routed_imbalance
from analytic.setup import Machine
from analytic.training import Trainer
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]


HALF_TILE = 64.0
"""Half of the rows of a tile of large products."""


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


def parts(machine: Machine, shape: ModelShape, at: Spread, work: Work, imbalance: float | None) -> Parts:
    """Each different micro-batch is priced once: recomputation, sharding and pipelines change nothing in it.
    `imbalance` is the load of the fullest expert-parallel device over the mean; None: as measured."""
    columns: list[NDArray[Any]] = [at.tp, at.cp, at.ep, at.etp, at.fp8, *([at.dp] if shape.is_moe else [])]
    columns += [work.tokens, work.squares, work.head_tokens]
    first, inverse = distinct(columns, len(at.tp))
    one = _parts(machine, shape, at_rows(at, first), at_rows(work, first), Routing(imbalance=imbalance))
    return at_rows(one, inverse)


def _parts(machine: Machine, shape: ModelShape, at: Spread, work: Work, routing: Routing) -> Parts:
    whole = forward(machine, shape, at, work, routing)
    linear = whole.kernels - whole.attention - whole.head
    memory, collectives, exchange = np.minimum(whole.memory, linear), whole.collectives, np.zeros_like(linear)
    if shape.num_moe_layers and not machine.is_host:
        m = work.tokens / at.cp
        served, slow = experts(machine, shape, at, m, routing)
        trained = grouped_seconds(machine, shape, at, m, routing)
        linear = linear + shape.num_moe_layers * (trained - served)
        memory = np.clip(memory - shape.num_moe_layers * slow, 0.0, linear)
        sent = expert_traffic(machine, shape, at, m, routing)
        exchange = shape.num_moe_layers * dispatch_seconds(machine, shape, at, m, sent)
        collectives = collectives + exchange - shape.num_moe_layers * sent
    return Parts(
        linear=linear,
        attention=whole.attention,
        head=whole.head,
        collectives=collectives,
        tensor=whole.tensor,
        exchange=exchange,
        memory=memory,
    )


def dispatch_seconds(machine: Machine, shape: ModelShape, at: Spread, m: Float, sent: Float) -> Float:
    """Dispatch and combine in a trainer, whose recipes choose the way: that of engines (`sent` seconds), or a plain
    all-to-all with a copy of each token for each of its experts, which is faster where links inside a domain are."""
    assert shape.moe is not None
    size = m / at.tp * shape.moe.experts_per_token * shape.hidden * machine.device.bytes_per_value
    return np.minimum(sent, 2.0 * collective_seconds(machine.levels, "all_to_all", size, at.ep))


def grouped_seconds(machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing) -> Float:
    """Router and routed experts of a layer as trainers run them: tokens are sorted by expert and back, and products of
    all experts are one launch, as long as a plain one of all their rows, or as reading all their weights. An expert
    wastes half a tile of rows. (Engines fuse all of it into kernels for few tokens, which have tables of their own.)"""
    moe = shape.moe
    assert moe is not None
    met = m * at.cp * at.dp / np.maximum(at.tp * at.cp * at.dp / (at.ep * at.etp), 1.0)
    local = moe.experts / at.ep
    rows = met * moe.experts_per_token / at.ep * routed_imbalance(at.ep, met, routing)
    padded, width, hidden = rows + HALF_TILE * local, moe.ffn / at.etp, float(shape.hidden)
    seconds = _grouped(machine, at, padded, (hidden, 2.0 * width), local)
    seconds = seconds + _grouped(machine, at, padded, (width, hidden), local)
    sorting = 4.0 * rows * hidden * machine.device.bytes_per_value / machine.device.memory_bandwidth
    router = gemm_seconds(machine, m, hidden, float(moe.experts))
    return np.asarray((router + seconds + sorting) * (m > 0))


def _grouped(
    machine: Machine, at: Spread, rows: Float, matrix: tuple[Float | float, Float | float], local: Float
) -> Float:
    """Products of all local experts; in fp8 with whichever scaling pays, or in bfloat16 if none does: narrow products
    spend more on scaling than they save."""
    k, n = matrix
    plain = gemm_seconds(machine, rows, k, n)
    if at.fp8.any():
        narrow = np.minimum(gemm_seconds(machine, rows, k, n, "fp8"), gemm_seconds(machine, rows, k, n, "fp8_block"))
        plain = np.where(at.fp8, np.minimum(plain, narrow), plain)
    width = np.where(at.fp8, 1.0, machine.device.bytes_per_value)
    return np.asarray(np.maximum(plain, local * k * n * width * machine.roofline.seconds_per_byte))


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
