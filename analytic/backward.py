"""A micro-batch's seconds on its way back through a model's layers and head, recomputation apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.distinct import at_rows, distinct
from analytic.layers import softmax_seconds
from analytic.priors import priors
from analytic.products import Made, ending_seconds, gradients, grouped_gradients, head_gradients
from analytic.setup import Machine
from analytic.spread import Routing, Spread, Work
from analytic.stages import Parts, differing, each_part
from ir.shape import ModelShape

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """Seconds over all layers, float64[n] each, attention cores apart."""

    inputs: Float
    """Products that make gradients of inputs."""
    weights: Float
    """Products that make gradients of weights; none are made of frozen ones."""
    memory: Float
    """Traffic."""
    ending: Float
    """Of a forward pass, the products that end layers."""
    head_inputs: Float
    """Of the output head, and the loss."""
    head_weights: Float


def both_ways(
    machine: Machine, shape: ModelShape, at: Spread, work: Work, imbalance: float | None, made: Made
) -> tuple[Parts, Back]:
    """A micro-batch forward and back, each different one priced once; see `parts` for the arguments."""
    first, inverse = distinct([*differing(shape, at, work), made.pieces, made.output_bytes], len(at.tp))
    at, work, made = at_rows(at, first), at_rows(work, first), at_rows(made, first)
    one = each_part(machine, shape, at, work, made, imbalance)
    if machine.is_host:
        late = _host_back(shape, one)
    else:
        late = _back(machine, shape, at, work, made, one, Routing(imbalance=imbalance))
    return at_rows(one, inverse), at_rows(late, inverse)


def _host_back(shape: ModelShape, one: Parts) -> Back:
    """On cores gradients of inputs and of weights take a forward pass each, as calibration assumes."""
    half = priors().backward_ratio / 2.0
    products, passes = one.linear - one.memory, 1.0 if shape.lora_rank else 2.0
    return Back(
        inputs=half * products,
        weights=half * products,
        memory=passes * half * one.memory,
        ending=np.zeros_like(products),
        head_inputs=half * one.head,
        head_weights=half * one.head,
    )


def _back(
    machine: Machine, shape: ModelShape, at: Spread, work: Work, made: Made, one: Parts, routing: Routing
) -> Back:
    m, tokens, ratio = work.tokens / at.cp, work.head_tokens / at.cp, priors().backward_ratio
    made_here = gradients(machine, shape, at, m, made)
    inputs, weights = made_here.inputs, made_here.weights
    if shape.num_moe_layers:
        of_inputs, of_weights = grouped_gradients(machine, shape, at, m, routing, made)
        inputs, weights = inputs + shape.num_moe_layers * of_inputs, weights + shape.num_moe_layers * of_weights
    head_inputs, head_weights = head_gradients(machine, shape, at, tokens, made)
    return Back(
        inputs=inputs,
        weights=weights,
        memory=ratio * (one.memory - one.scaled) + made_here.scaled,
        ending=ending_seconds(machine, shape, at, m, made),
        head_inputs=head_inputs + ratio * softmax_seconds(machine, shape, at, tokens),
        head_weights=head_weights,
    )
