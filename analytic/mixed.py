"""Decode steps between which prompts arrive. A step that takes some in runs outside of graphs, kernel by kernel, so
that it lasts at least as long as the host needs to launch them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analytic.engine import Engine, attention_products, gated_products
from analytic.serving import serving

Float = NDArray[np.float64]


def graphless_seconds(e: Engine) -> Float:
    """Seconds in which the host launches a step's kernels one by one, float64[n]."""
    return np.asarray(serving().launch_s * launches(e))


def launches(e: Engine) -> Float:
    """Kernels of a step, float64[n]: products, attention, what lies between them, and all-reduces."""
    c, shape, moe = serving(), e.shape, e.shape.moe
    each = len(attention_products(e)) + 1.0 + c.kernels + 2.0 * (e.at.tp > 1)
    dense = len(gated_products(e, shape.ffn))
    routed = 1.0 + c.router_kernels + c.expert_kernels
    if moe is not None and moe.shared_ffn:
        routed += len(gated_products(e, moe.shared_ffn))
    return np.asarray(shape.layers * each + shape.num_dense_layers * dense + shape.num_moe_layers * routed)


def launch_waits(e: Engine, step: Float, prompt: Float, arrivals: Float, together: Float) -> Float:
    """Seconds by which prompts hold a step up beyond what they take, on average, float64[n].

    Args:
        e: The engine.
        step: Seconds of a step without prompts, float64[n] as all that follow.
        prompt: Seconds that a prompt adds to one.
        arrivals: Prompts that come a step.
        together: Of those that come, how many one step takes in.
    """
    idle = graphless_seconds(e) - step - together * prompt
    return np.asarray(arrivals / together * np.maximum(idle, 0.0))


def met(arrivals: Float) -> Float:
    """Prompts that a step takes in if it takes any, where they come one by one, at random, float64[n]."""
    return np.asarray(np.maximum(arrivals, 1e-12) / -np.expm1(-np.maximum(arrivals, 1e-12)))
