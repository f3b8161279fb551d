"""Mixtures of experts in a forward pass: router and routed experts of a layer, and the way of tokens to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.exchange import Exchange, exchange_seconds
from analytic.grids import kernel_facts
from analytic.kernels import experts_seconds, gemm_seconds
from analytic.priors import priors
from analytic.setup import Machine
from analytic.spread import Routing, Spread
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]


def experts(machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing) -> tuple[Float, Float]:
    """Router and routed experts of a layer: the fullest device's tokens, and the weights of the experts they hit; and
    what of it memory traffic takes."""
    moe = shape.moe
    assert moe is not None
    # The router stays in the weights' own format.
    router = gemm_seconds(machine, m, float(shape.hidden), float(moe.experts)) * (m > 0)
    if machine.is_host:
        return router + _host_experts(machine, shape, at, m), np.zeros_like(m)
    met, mean = _expert_tokens(shape, at, m)
    load = mean * imbalance(at.ep, met, routing)
    local = moe.experts / at.ep
    share = 1.0 - np.exp(-mean / local)
    width = moe.ffn / at.etp
    arguments = (load, local, width, float(shape.hidden), share)
    seconds = experts_seconds(machine, "bf16", *arguments) * (m > 0)
    if at.fp8.any():
        seconds = np.where(at.fp8, experts_seconds(machine, "fp8", *arguments) * (m > 0), seconds)
    flops = 6.0 * load * shape.hidden * width * machine.roofline.seconds_per_flop
    weights = share * local * (3.0 * shape.hidden) * width * 2.0 * machine.roofline.seconds_per_byte
    return router + seconds, np.where(weights > flops, seconds, 0.0)


def _expert_tokens(shape: ModelShape, at: Spread, m: Float) -> tuple[Float, Float]:
    """(tokens that meet in a group's experts, tokens that each device's experts get, counted once an expert)."""
    assert shape.moe is not None
    devices = at.tp * at.cp * at.dp
    met = m * at.cp * at.dp / np.maximum(devices / (at.ep * at.etp), 1.0)
    return met, met * shape.moe.experts_per_token / at.ep


def imbalance(ep: Int, tokens: Float, routing: Routing) -> Float:
    """Load of the fullest device over the mean, of computation: few tokens are bound by the experts' weights."""
    facts = kernel_facts()["experts"]
    if routing.imbalance is not None:
        return np.where(ep > 1, routing.imbalance, 1.0)
    ranks, loads = (np.array(column) for column in zip(*facts["imbalance"], strict=True))
    most = np.interp(np.log2(ep), np.log2(ranks), loads)
    few, many = np.log2(facts["imbalance_tokens"])
    return np.asarray(1.0 + (most - 1.0) * np.clip((np.log2(np.maximum(tokens, 1.0)) - few) / (many - few), 0.0, 1.0))


def _host_experts(machine: Machine, shape: ModelShape, at: Spread, m: Float) -> Float:
    """On cores: the fullest device's products, or the traffic of the experts that are hit."""
    p, moe, own = priors(), shape.moe, machine.roofline
    assert moe is not None
    _, tokens = _expert_tokens(shape, at, m)
    tokens = tokens * np.where(at.ep > 1, p.expert_imbalance, 1.0)
    local = moe.experts / at.ep
    hit = local * (1.0 - np.exp(-tokens / local))
    total = np.zeros_like(m)
    for k, n in shape.expert_matmuls:
        width = n / at.etp
        flops = 2.0 * tokens * k * width * own.seconds_per_flop / (p.expert_efficiency * at.speed)
        values = hit * k * width / np.minimum(at.speed, 2.0) + tokens * (k + width)
        total = total + np.maximum(flops, values * machine.device.bytes_per_value * own.seconds_per_byte)
    return total


def expert_traffic(machine: Machine, shape: ModelShape, at: Spread, m: Float, routing: Routing) -> Float:
    """Dispatch and combine: each token's hidden state goes to the devices of its experts."""
    moe = shape.moe
    assert moe is not None
    if machine.is_host:
        # Of ep devices, a token's experts lie on so many different ones.
        spread = at.ep * (1.0 - (1.0 - 1.0 / at.ep) ** moe.experts_per_token)
        size = m / at.tp * spread * shape.hidden * machine.device.bytes_per_value
        return 2.0 * collective_seconds(machine.levels, "all_to_all", size, at.ep)
    tokens = m / at.tp
    few = tokens <= kernel_facts()["exchange"]["low_latency_tokens"]
    total = np.zeros_like(m)
    for combine in (False, True):
        one = Exchange(
            tokens=tokens, hidden=shape.hidden, experts_per_token=moe.experts_per_token, combine=combine,
            groups=moe.groups, groups_per_token=moe.groups_per_token,
        )  # fmt: skip
        seconds = exchange_seconds(machine, one, at.ep)
        if routing.engine and few.any():
            quick = replace(one, low_latency=True)
            seconds = np.where(few, np.minimum(seconds, exchange_seconds(machine, quick, at.ep)), seconds)
        total = total + seconds
    return total
