"""Dispatch and combine of experts' tokens between the devices that hold the experts.

A token goes once to each device, and across the network once to each node, that has any of its experts. On devices
with tables (DeepEP) a closed form of that traffic is corrected by what was measured; on others it is an all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.comm import Levels, collective_seconds, domain_of, nodes_of
from analytic.grids import Grid, grid, kernel_facts, tables_of
from analytic.setup import Machine
from ir.cluster import device_bandwidth

Float = NDArray[np.float64]
Int = NDArray[np.int64]

MEASURED_NODES = (1, 2, 4, 8)
_MULTI_NODE = "h200"
"""The only device whose exchange was measured across nodes; others have other links, which the closed form knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One of the two ways."""

    tokens: Float
    """On each device before dispatch."""
    hidden: int
    experts_per_token: int
    combine: bool
    """Back, in bfloat16; there, a value takes `value_bytes`."""
    value_bytes: float = 2.0
    processors: float = 20.0
    """Multiprocessors that it is given."""
    low_latency: bool = False
    """Whether each token is sent to each of its experts at once, as engines do with few tokens."""
    groups: int = 1
    """Groups of experts, which lie on devices in order; a token's experts are all in"""
    groups_per_token: int = 1
    """so many of them."""

    @property
    def width(self) -> float:
        """Bytes of a token."""
        return self.hidden * (2.0 if self.combine else self.value_bytes)


def exchange_seconds(machine: Machine, exchange: Exchange, ranks: Int, stride: int = 1) -> Float:
    """Seconds of a dispatch or a combine over `ranks` devices, float64[n]; 0 for one."""
    result = np.zeros(np.broadcast_shapes(np.shape(exchange.tokens), np.shape(ranks)))
    tokens, members = np.broadcast_to(exchange.tokens, result.shape), np.broadcast_to(ranks, result.shape)
    for n in np.unique(members[members > 1]).tolist():
        here = members == n
        result[here] = _seconds(machine, exchange, tokens[here], (n, nodes_of(machine.levels, n, stride)))
    return result


def _seconds(machine: Machine, exchange: Exchange, tokens: Float, group: tuple[int, int]) -> Float:
    ranks, nodes = group
    found = _table(machine, exchange, nodes)
    if found is None:
        size = tokens * distinct(ranks, exchange.experts_per_token) * exchange.width
        return collective_seconds(machine.levels, "all_to_all", size, np.full(len(tokens), ranks))
    return closed_seconds(machine.levels, exchange, tokens, group) * factor(found, exchange, tokens)


def factor(found: Grid, exchange: Exchange, tokens: Float) -> Float:
    """What a table says over the closed form."""
    topk = float(exchange.experts_per_token)
    if exchange.low_latency:
        return found.factor(tokens * topk * exchange.width, topk)
    return found.factor(tokens, float(exchange.hidden), exchange.processors, topk)


def closed_seconds(levels: Levels, exchange: Exchange, tokens: Float, group: tuple[int, int]) -> Float:
    """A launch, what a device sends inside its domain, and what it sends across the network."""
    (ranks, nodes), topk, inner = group, exchange.experts_per_token, device_bandwidth(levels, 0)
    copies = float(topk) if exchange.low_latency else distinct(ranks, topk)
    seconds = kernel_facts()["exchange"]["launch"] + tokens * exchange.width * copies / inner
    if nodes == 1:
        return np.asarray(seconds)
    network = device_bandwidth(levels, min(domain_of(levels), len(levels) - 1))
    return np.asarray(seconds + tokens * exchange.width * reached(exchange, nodes) * (nodes - 1) / nodes / network)


def reached(exchange: Exchange, nodes: int) -> float:
    """Expected different ones of so many nodes that a token goes to: those that its groups of experts lie in at most,
    where its groups are chosen first (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Copies for single experts each go
    their own way."""
    found = distinct(nodes, exchange.experts_per_token)
    if exchange.low_latency:
        return found
    return min(found, float(exchange.groups_per_token * -(-nodes // exchange.groups)))


def distinct(places: int, experts: int) -> float:
    """Expected different ones of so many places that a token's experts lie in."""
    return places * (1.0 - (1.0 - 1.0 / places) ** experts)


def table_name(device: str, exchange: Exchange, nodes: int) -> str:
    """Of the table of a device, a way and a number of nodes."""
    mode, way = "low_latency" if exchange.low_latency else "normal", "combine" if exchange.combine else "dispatch"
    return f"exchange/{device}/{mode}/{way}/{nodes}"


def _table(machine: Machine, exchange: Exchange, nodes: int) -> Grid | None:
    device = tables_of(machine.device.name)
    if device is None or grid(table_name(device, exchange, 1)) is None:
        return None
    nearest = min(MEASURED_NODES, key=lambda n: abs(np.log(n / nodes)))
    return grid(table_name(device if nearest == 1 else _MULTI_NODE, exchange, nearest))
