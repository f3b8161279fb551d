"""What a configuration of a framework says: the job, the plan, and the devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ir.job import JobDocument
from ir.lengths import Lengths, Lognormal
from ir.plan import Plan

MAX_STALENESS = 8
"""The most that a job's limits allow."""

_NODE = 8
"""Devices of a node where a configuration does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration read."""

    job: JobDocument
    plan: Plan
    nodes: int
    per_node: int
    """Devices of a node."""
    assumed: tuple[str, ...] = ()
    """What the configuration does not say and was taken, a line each."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.per_node


def assumed_lengths(max_prompt_tokens: int, max_response_tokens: int) -> tuple[Lengths, str]:
    """Lengths for a configuration, which only says the longest: prompts of a quarter and responses of two fifths of it.
    A guess, to be replaced by observed lengths before its predictions are relied on."""
    prompt, response = max_prompt_tokens / 4, max_response_tokens * 0.4
    lengths = Lengths(prompt=Lognormal(mean=prompt, sigma=0.5), response=Lognormal(mean=response, sigma=0.7))
    note = f"lengths: lognormal, means {prompt:.0f} (prompt) and {response:.0f} (response) tokens"
    return lengths, note


def assumed_nodes(devices: int) -> tuple[int, int, str]:
    """(nodes, devices of each), of eight devices where that comes out even, for a configuration that says how many
    devices there are in all; and what to note."""
    per_node = devices if devices < _NODE else math.gcd(devices, _NODE)
    nodes = devices // per_node
    return nodes, per_node, f"nodes: {nodes} of {per_node} devices, for {devices} in all"
