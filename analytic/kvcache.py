"""Bytes of an engine's cache of keys and values, and how many tokens it holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analytic.costs import Columns
from analytic.serving import serving
from analytic.setup import Machine, Setup
from analytic.spread import Spread
from ir.shape import ModelShape

Float = NDArray[np.float64]


def token_bytes(machine: Machine, shape: ModelShape, at: Spread) -> Float:
    """Bytes that a cached token takes on a device, float64[n]: KV heads repeat on tensor-parallel ranks beyond their
    number, and a latent is held whole by all."""
    share = np.ones(len(at.tp)) if shape.mla is not None else 1.0 / np.minimum(at.tp, shape.kv_heads)
    return shape.kv_bytes_per_token(machine.device.bytes_per_value) * share / at.pp


def cache_bytes(s: Setup, machine: Machine, x: Columns, token: Float, others: Float) -> Float:
    """Bytes of the cache on a device, float64[n]: what the engine's share of memory leaves beside `others`, but no more
    than every slot at its longest takes; that much where the plan gives no share."""
    asked = x["concurrency"] * float(s.job.workload.max_tokens) * token
    share = x["memory_percent"] / 100.0 * machine.device.memory_bytes - machine.device.base_memory_bytes
    return np.where(x["memory_percent"] > 0, np.minimum(np.maximum(share - others, 0.0), asked), asked)


def cache_tokens(x: Columns, cache: Float, token: Float) -> Float:
    """Tokens that a cache holds, less what an engine keeps free; without limit where the plan gives no share."""
    return np.where(x["memory_percent"] > 0, cache / token * (1.0 - serving().watermark), np.inf)


def activation_bytes(machine: Machine, shape: ModelShape, at: Spread, chunk: Float) -> Float:
    """Bytes of an engine's buffers for the tokens of a chunk."""
    ranks, widths = (np.array(column) for column in zip(*serving().activation_widths, strict=True))
    width = np.interp(np.log2(at.tp), np.log2(ranks), widths)
    return np.asarray(width * chunk * shape.hidden * machine.device.bytes_per_value)
