"""Bytes that a forward pass leaves behind for the backward pass, by what is recomputed and how many are in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.costs import Columns
from analytic.layers import Spread
from analytic.microbatch import Micro
from analytic.priors import priors
from analytic.setup import Machine
from analytic.training import Trainer, training
from ir.batch import CODES
from ir.shape import ModelShape

Float = NDArray[np.float64]

SELECTIVE, FULL = CODES["recompute"].index("selective"), CODES["recompute"].index("full")
ZERO_BUBBLE = CODES["schedule"].index("zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes per device, float64[n] each; none of them with allocator overhead."""

    layers: Float
    """What layers keep on the fullest pipeline rank."""
    working: Float
    """Of the layer whose backward pass runs: gradients of its tensors, and the tensors where they were dropped."""
    logits: Float
    """What the loss keeps on the last rank."""
    peak: Float
    """The larger of the first rank with all micro-batches in flight, and the last with one and the logits, and what
    weight gradients that are put off need."""


def held(
    machine: Machine, shape: ModelShape, at: Spread, x: Columns, micro: Micro, trainer: Trainer, tokens: Float
) -> Held:
    """Of an update whose micro-batches have `tokens` tokens.

    Args:
        machine: The group of devices; a core keeps what eager kernels keep.
        shape: The model.
        at: How it is spread.
        x: Columns of the section.
        micro: How sequences are cut; of its sizes only the mean ratio of squares to tokens is used.
        trainer: What is fused.
        tokens: Of the micro-batch that is asked about, float64[n].
    """
    squares = tokens * micro.mean.squares / np.maximum(micro.mean.tokens, 1.0)
    layer = layer_bytes(machine, shape, at, tokens, squares, trainer, micro.imbalance)
    kept = _kept(machine, shape, at, x, trainer, layer, (tokens, squares))
    full = x["recompute"] == FULL
    logits = logit_bytes(machine, shape, at, tokens, 16.0 if machine.is_host else trainer.logit_bytes)
    stage = np.ceil(shape.layers / at.pp)
    first = in_flight(at, x, micro) * stage * kept
    if machine.is_host:
        working = np.where(full, layer, 0.0)
        return Held(layers=first, working=working, logits=logits, peak=first + working + logits)
    working = np.where(full, 2.0 * layer, layer)
    last = (np.minimum(in_flight(at, x, micro), 1.0) * kept + put_off(at, x, micro) * layer) * stage
    # The loss is over when layers begin to go back.
    peak = np.maximum(first + working, last + np.maximum(logits, working))
    return Held(layers=first, working=working, logits=logits, peak=peak)


def in_flight(at: Spread, x: Columns, micro: Micro) -> Float:
    """Micro-batches that the first pipeline rank keeps: as many as there are ranks before the first comes back, and
    more if its layers are interleaved (arXiv:2104.04473, section 2.2)."""
    interleaved = 1.0 + (at.pp - 1) / (at.pp * x["vpp"]) * (x["vpp"] > 1)
    return np.minimum(micro.batches, at.pp * interleaved)


def put_off(at: Spread, x: Columns, micro: Micro) -> Float:
    """Micro-batches whose weight gradients the last pipeline rank of a zero-bubble schedule has put off: as many as the
    first rank has in flight, but one. They need inputs and gradients of all products, which take about what a layer
    keeps, recomputed or not (32 of 34 bytes, arXiv:2401.10241, table 1)."""
    return np.where(x["schedule"] == ZERO_BUBBLE, in_flight(at, x, micro) - 1.0, 0.0)


def layer_bytes(
    machine: Machine,
    shape: ModelShape,
    at: Spread,
    tokens: Float,
    squares: Float,
    trainer: Trainer,
    imbalance: float | None = None,
) -> Float:
    """What a layer keeps for `tokens` tokens, all tensors counted, on one device (arXiv:2205.05198 for gated networks
    and flash attention: 8 h + 2 (q + 2k) d + 2 q d + 4 q + 6 f bytes; an expert layer has (4 h + 6 f_e) r + 2 E in
    place of 6 f, its rows times the imbalance of the fullest device)."""
    p, width, share = machine.elementwise, machine.device.bytes_per_value, at.cp * at.tp
    heads = p.saved_heads * (shape.attention_width + shape.kv_width)
    native = heads + p.saved_ffn * shape.ffn * shape.num_dense_layers / shape.layers
    narrow = at.fp8 & trainer.saves_fp8
    # Inputs of products in fp8 are kept in it: of those of the two halves of a layer, the output projection, and the
    # last matrix of the network, a byte a value less.
    inputs = shape.attention_width + shape.ffn * shape.num_dense_layers / shape.layers
    values = native - np.where(narrow, inputs, 0.0) / width
    each = (
        values * width
        + inner_bytes(machine, shape, trainer)
        + _expert_bytes(shape, at, trainer, imbalance) * _expert_share(shape)
    )
    # Without sequence parallelism ranks keep what is not divided into heads or columns whole.
    whole = (p.saved_hidden * width + trainer.saved_masks - 2.0 * narrow) * shape.hidden
    hidden = whole / (share if trainer.sequence_parallel else at.cp)
    scores = trainer.saved_scores * shape.heads * squares / share
    return np.asarray(tokens * (each / share + hidden) + scores)


def inner_bytes(machine: Machine, shape: ModelShape, trainer: Trainer) -> float:
    """Bytes per token inside the attention core, scores apart: the softmax's statistics where scores are not kept."""
    return 0.0 if machine.is_host or trainer.saved_scores else 4.0 * shape.heads


def _expert_share(shape: ModelShape) -> float:
    return shape.num_moe_layers / shape.layers


def _expert_bytes(shape: ModelShape, at: Spread, trainer: Trainer, imbalance: float | None) -> Float:
    """Bytes per token of an expert layer's network, in bfloat16."""
    moe = shape.moe
    if moe is None:
        return np.zeros(len(at.ep))
    routed = (trainer.routed_hidden * shape.hidden + 6.0 * moe.ffn) * moe.experts_per_token
    fullest = np.where(at.ep > 1, priors().expert_imbalance if imbalance is None else imbalance, 1.0)
    return np.asarray(routed * fullest + 6.0 * moe.shared_ffn + 2.0 * moe.experts)


def _kept(
    machine: Machine,
    shape: ModelShape,
    at: Spread,
    x: Columns,
    trainer: Trainer,
    layer: Float,
    work: tuple[Float, Float],
) -> Float:
    """What of a `layer` stays until the backward pass, `work` being tokens and their squares: with full recomputation
    its input, with selective all but the attention core's inner tensors."""
    (tokens, squares), width = work, machine.device.bytes_per_value
    share = tokens / (at.cp * at.tp)
    inner = inner_bytes(machine, shape, trainer) * share
    inner = inner + trainer.saved_scores * shape.heads * squares / (at.cp * at.tp)
    if machine.is_host:
        inner = machine.elementwise.saved_heads * (shape.attention_width + shape.kv_width) / 2.0 * width * share
    kept = np.where(x["recompute"] == SELECTIVE, layer - inner, layer)
    entry = float(width) * shape.hidden * (share if trainer.sequence_parallel else tokens / at.cp)
    return np.where(x["recompute"] == FULL, entry, kept)


def logit_bytes(machine: Machine, shape: ModelShape, at: Spread, tokens: Float, each: float) -> Float:
    """Logits of a micro-batch and what the loss makes of them, float32 on a core."""
    return np.asarray(each * tokens * shape.outputs / (at.cp * at.tp))


def pass_bytes(machine: Machine, shape: ModelShape, at: Spread, tokens: Float) -> Float:
    """A forward pass without gradients: a layer's working tensors and the logits."""
    width, moe = machine.device.bytes_per_value, shape.moe
    # Where every layer has experts a token still goes through several networks, one after the other.
    ffn = shape.ffn if moe is None else moe.ffn * moe.experts_per_token + moe.shared_ffn
    layer = (6.0 * shape.hidden + 3.0 * ffn) * width * tokens / (at.cp * at.tp)
    return np.asarray(
        layer + logit_bytes(machine, shape, at, tokens, 12.0 if machine.is_host else training().logit_passed)
    )


def fragmentation(machine: Machine) -> float:
    """Reserved over allocated bytes."""
    return priors().fragmentation if machine.is_host else training().fragmentation
