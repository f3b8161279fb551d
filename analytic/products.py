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
from analytic.layers import divided, matrices
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
class Gradients:
    """Seconds of a micro-batch, float64[n] each."""

    inputs: Float
    """Products that make gradients of inputs."""
    weights: Float
    """Products that make gradients of weights."""
    scaled: Float
    """Quantising gradients."""


def products(machine: Machine, shape: ModelShape, at: Spread, m: Float, made: Made) -> tuple[Float, Float]:
    """(seconds of all layers' dense products for m rows, seconds of quantising their inputs). Where a trainer cuts
    products up it cuts all of a forward pass: their inputs are gathered or their outputs scattered."""
    total, scaled = np.zeros_like(m), np.zeros_like(m)
    for count, cuts in matrices(machine, shape):
        for matrix, cut in cuts:
            k, n = divided(at, matrix, cut)
            total = total + count * made.pieces * _product(machine, at, m / made.pieces, k, n)
            scaled = scaled + count * m * k
    return total * (m > 0), scaled * _scaled_seconds(machine, at)


def gradients(machine: Machine, shape: ModelShape, at: Spread, m: Float, made: Made) -> Gradients:
    """Of all layers' dense matrices, for m rows. Of what a trainer cuts up, gradients whose products scattered forward
    are gathered piece by piece; the other products run whole beside their collectives."""
    inputs, weights, scaled = np.zeros_like(m), np.zeros_like(m), np.zeros_like(m)
    for count, cuts in matrices(machine, shape):
        for matrix, cut in cuts:
            k, n = divided(at, matrix, cut)
            pieces: Number = made.pieces if cut == "rows" else 1.0
            inputs = inputs + count * pieces * _product(machine, at, m / pieces, n, k)
            weights = weights + count * _product(machine, at, n + np.zeros_like(m), m, k, made.output_bytes)
            scaled = scaled + count * m * n
    return Gradients(inputs=inputs * (m > 0), weights=weights * (m > 0), scaled=scaled * _scaled_seconds(machine, at))


def ending_seconds(machine: Machine, shape: ModelShape, at: Spread, m: Float, made: Made) -> Float:
    """Seconds, of all layers' dense products for m rows, of those that end a layer: down projections."""
    matrix = float(shape.ffn), float(shape.hidden)
    once = made.pieces * _product(machine, at, m / made.pieces, matrix[0] / at.tp, matrix[1])
    return shape.num_dense_layers * once * (m > 0) if shape.num_dense_layers else np.zeros_like(m)


def head_gradients(machine: Machine, shape: ModelShape, at: Spread, tokens: Float, made: Made) -> tuple[Float, Float]:
    """(seconds of gradients of the output head's inputs, of its weights) for so many tokens."""
    k, n = float(shape.hidden), np.maximum(shape.outputs / at.tp.astype(np.float64), 1.0)
    inputs = gemm_seconds(machine, tokens, n, k)
    weights = gemm_seconds(machine, n, tokens, k, output_bytes=made.output_bytes)
    return inputs * (tokens > 0), weights * (tokens > 0)


def grouped_products(machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing) -> Float:
    """Seconds of the router and the routed experts of a layer as trainers run them: products of all experts are one
    launch, as long as a plain one of all their rows, or as reading all their weights. An expert wastes half a tile of
    rows. (Engines fuse all of it into kernels for few tokens, which have tables of their own.)"""
    total = _router(machine, shape, m)
    rows, local = _padded(shape, at, m, routing)
    for k, n in _expert_matrices(shape, at):
        total = total + _grouped(machine, at, rows, (k, n), local)
    return total * (m > 0)


def grouped_gradients(
    machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing, made: Made
) -> tuple[Float, Float]:
    """(seconds of gradients of a layer's inputs to router and experts, of their weights)."""
    inputs = weights = _router(machine, shape, m)
    rows, local = _padded(shape, at, m, routing)
    for k, n in _expert_matrices(shape, at):
        inputs = inputs + _grouped(machine, at, rows, (n, k), local)
        weights = weights + _grouped(machine, at, rows, (k, n), local, made.output_bytes)
    return inputs * (m > 0), weights * (m > 0)


def sorting_seconds(machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing) -> Float:
    """Sorting a layer's tokens by expert, and back."""
    moved = 4.0 * _expert_rows(shape, at, m, routing) * shape.hidden * machine.device.bytes_per_value
    return np.asarray(moved / machine.device.memory_bandwidth)


def _router(machine: Machine, shape: ModelShape, m: Float) -> Float:
    assert shape.moe is not None
    return gemm_seconds(machine, m, float(shape.hidden), float(shape.moe.experts))


def _expert_matrices(shape: ModelShape, at: Spread) -> tuple[tuple[Number, Number], ...]:
    """(values of an input's row, of an output's) of an expert's gate and up, and of its down projection."""
    assert shape.moe is not None
    width, hidden = shape.moe.ffn / at.etp, float(shape.hidden)
    return (hidden, 2.0 * width), (width, hidden)


def _expert_rows(shape: ModelShape, at: Spread, m: Float, routing: Routing) -> Float:
    """Rows of the fullest device's experts."""
    assert shape.moe is not None
    met = m * at.cp * at.dp / np.maximum(at.tp * at.cp * at.dp / (at.ep * at.etp), 1.0)
    return np.asarray(met * shape.moe.experts_per_token / at.ep * imbalance(at.ep, met, routing))


def _padded(shape: ModelShape, at: Spread, m: Float, routing: Routing) -> tuple[Float, Float]:
    """(those rows with what tiles waste, experts of a device)."""
    assert shape.moe is not None
    local = np.asarray(shape.moe.experts / at.ep)
    return _expert_rows(shape, at, m, routing) + HALF_TILE * local, local


def _scaled_seconds(machine: Machine, at: Spread) -> Float:
    """To quantise a value, where products are in fp8."""
    narrow = at.fp8 & ("fp8" in machine.device.peak_flops)
    return np.where(narrow, SCALED_BYTES / machine.device.memory_bandwidth, 0.0)


def _product(machine: Machine, at: Spread, m: Float, k: Number, n: Number, output_bytes: Number = 2.0) -> Float:
    if not at.fp8.any():
        return gemm_seconds(machine, m, k, n, output_bytes=output_bytes)
    narrow = narrow_seconds(machine, m, k, n, output_bytes)
    wide = narrow if at.fp8.all() else gemm_seconds(machine, m, k, n, output_bytes=output_bytes)
    return np.where(at.fp8, narrow, wide)


def _grouped(
    machine: Machine, at: Spread, rows: Float, matrix: tuple[Number, Number], local: Float, written: Number = 0.0
) -> Float:
    """Products of all local experts; in fp8 with whichever scaling pays, or in bfloat16 if none does: narrow products
    spend more on scaling than they save. `written` bytes of a weight's gradient go through memory, or else a weight."""
    k, n = matrix
    plain = gemm_seconds(machine, rows, k, n)
    if at.fp8.any():
        narrow = np.minimum(gemm_seconds(machine, rows, k, n, "fp8"), gemm_seconds(machine, rows, k, n, "fp8_block"))
        plain = np.where(at.fp8, np.minimum(plain, narrow), plain)
    width = np.maximum(np.where(at.fp8, 1.0, machine.device.bytes_per_value), written)
    return np.asarray(np.maximum(plain, local * k * n * width * machine.roofline.seconds_per_byte))
