"""Matrix products in training: forward, and those that make the gradients of inputs and of weights.

A weight's gradient is a product of its own shape, `[n, m] x [m, k]`, whose output is added to what earlier
micro-batches left there. In fp8 a trainer quantises each input and each gradient once, by rows and by columns; the head
stays in bfloat16 (Transformer Engine).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.kernels import gemm_seconds, narrow_seconds
from analytic.layers import divided, matrices, softmax_seconds
from analytic.moe import imbalance
from analytic.setup import Machine
from analytic.spread import Routing, Spread
from ir.shape import ModelShape

Float = NDArray[np.float64]
Number = Float | float

SCALED_BYTES = 4.0
"""Of a value that is quantised: read in bfloat16, written by rows and by columns."""

HALF_TILE = 64.0
"""Half of the rows of a tile of large products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How a trainer makes products, float64[n] each."""

    pieces: Float
    """Into which a product is cut so that a collective hides under it."""
    output_bytes: Float
    """Read and written for a weight's gradient by the product that makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Seconds of a micro-batch, float64[n] each."""

    forward: Float
    inputs: Float
    """Gradients of inputs."""
    weights: Float
    """Gradients of weights."""
    scaled: Float | float = 0.0
    """Quantising inputs, forward."""
    scaled_back: Float | float = 0.0
    """Quantising gradients, backward."""
    sorting: Float | float = 0.0
    """Tokens by expert and back, forward."""


def products(machine: Machine, shape: ModelShape, at: Spread, m: Float, made: Made) -> Products:
    """Of all layers' dense matrices, for m rows.

    Where a trainer cuts products up, it cuts those whose input is gathered or whose output is scattered: all of the
    forward pass, and the gradients of inputs of those that scattered. The others run whole beside the collectives.
    """
    total = dict.fromkeys(("forward", "inputs", "weights", "scaled", "scaled_back"), np.zeros_like(m))
    each = SCALED_BYTES * at.fp8 * ("fp8" in machine.device.peak_flops) / machine.device.memory_bandwidth
    for count, cuts in matrices(machine, shape):
        for matrix, cut in cuts:
            k, n = divided(at, matrix, cut)
            back: Number = made.pieces if cut == "rows" else 1.0
            one = {
                "forward": made.pieces * _product(machine, at, m / made.pieces, k, n),
                "inputs": back * _product(machine, at, m / back, n, k),
                "weights": _product(machine, at, n + np.zeros_like(m), m, k, made.output_bytes),
                "scaled": each * m * k,
                "scaled_back": each * m * n,
            }
            total = {name: total[name] + count * seconds for name, seconds in one.items()}
    return Products(**{name: seconds * (m > 0) for name, seconds in total.items()})


def head(machine: Machine, shape: ModelShape, at: Spread, tokens: Float, made: Made) -> Products:
    """Of the output head and the loss, for so many tokens; the loss goes over its logits twice as long backward."""
    k, n = float(shape.hidden), np.maximum(shape.outputs / at.tp.astype(np.float64), 1.0)
    loss = softmax_seconds(machine, shape, at, tokens)
    some = tokens > 0
    return Products(
        forward=gemm_seconds(machine, tokens, k, n) * some + loss,
        inputs=gemm_seconds(machine, tokens, n, k) * some + 2.0 * loss,
        weights=gemm_seconds(machine, n, tokens, k, output_bytes=made.output_bytes) * some,
    )


def grouped_products(
    machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing, made: Made
) -> Products:
    """Router and routed experts of a layer as trainers run them: tokens are sorted by expert and back, and products of
    all experts are one launch, as long as a plain one of all their rows, or as reading all their weights. An expert
    wastes half a tile of rows. (Engines fuse all of it into kernels for few tokens, which have tables of their own.)"""
    moe = shape.moe
    assert moe is not None
    met = m * at.cp * at.dp / np.maximum(at.tp * at.cp * at.dp / (at.ep * at.etp), 1.0)
    local = moe.experts / at.ep
    rows = met * moe.experts_per_token / at.ep * imbalance(at.ep, met, routing)
    padded, width, hidden = rows + HALF_TILE * local, moe.ffn / at.etp, float(shape.hidden)
    total = dict.fromkeys(("forward", "inputs", "weights"), np.zeros_like(m))
    for k, n in ((hidden, 2.0 * width), (width, hidden)):
        one = {
            "forward": _grouped(machine, at, padded, (k, n), local),
            "inputs": _grouped(machine, at, padded, (n, k), local),
            "weights": _grouped(machine, at, padded, (k, n), local, made.output_bytes),
        }
        total = {name: total[name] + seconds for name, seconds in one.items()}
    router = gemm_seconds(machine, m, hidden, float(moe.experts))
    sorting = 4.0 * rows * hidden * machine.device.bytes_per_value / machine.device.memory_bandwidth
    some = m > 0
    return Products(**{name: (router + seconds) * some for name, seconds in total.items()}, sorting=sorting * some)


def _product(machine: Machine, at: Spread, m: Float, k: Number, n: Number, output_bytes: Number = 2.0) -> Float:
    if not at.fp8.any():
        return gemm_seconds(machine, m, k, n, output_bytes=output_bytes)
    narrow = narrow_seconds(machine, m, k, n, output_bytes)
    wide = narrow if at.fp8.all() else gemm_seconds(machine, m, k, n, output_bytes=output_bytes)
    return np.where(at.fp8, narrow, wide)


def _grouped(
    machine: Machine, at: Spread, rows: Float, matrix: tuple[Number, Number], local: Number, output_bytes: Number = 0.0
) -> Float:
    """Products of all local experts; in fp8 with whichever scaling pays, or in bfloat16 if none does: narrow products
    spend more on scaling than they save. Gradients of weights are written as wide as `output_bytes`."""
    k, n = matrix
    plain = gemm_seconds(machine, rows, k, n)
    if at.fp8.any():
        narrow = np.minimum(gemm_seconds(machine, rows, k, n, "fp8"), gemm_seconds(machine, rows, k, n, "fp8_block"))
        plain = np.where(at.fp8, np.minimum(plain, narrow), plain)
    width = np.where(at.fp8, 1.0, machine.device.bytes_per_value)
    each = np.where(np.asarray(output_bytes) > 0.0, output_bytes, width)
    return np.asarray(np.maximum(plain, local * k * n * each * machine.roofline.seconds_per_byte))
