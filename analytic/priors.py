"""Constants that no calibration measures, from `data/priors.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Values moved and kept per token and layer, as multiples of the widths of hidden state, heads and network."""

    hidden_passes: float
    head_passes: float
    ffn_passes: float
    saved_hidden: float
    saved_heads: float
    saved_ffn: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """See the data file for meaning and source of each."""

    reward_s: float
    eager: Elementwise
    fused: Elementwise
    backward_ratio: float
    selective: float
    optimizer_values: float
    expert_efficiency: float
    expert_imbalance: float
    overlap: float
    fp8_speed: float
    broadcast_bandwidth: float
    disk_bandwidth: float
    pause_s: float
    fragmentation: float
    graphs_bytes: float


@cache
def priors() -> Priors:
    """The constants, read once."""
    data = tomllib.loads((Path(__file__).parent / "data" / "priors.toml").read_text(encoding="utf-8"))
    return Priors(
        reward_s=data["reward"]["seconds_per_sample"],
        eager=Elementwise(**data["eager"]),
        fused=Elementwise(**data["fused"]),
        backward_ratio=data["backward"]["flops_ratio"],
        selective=data["backward"]["selective"],
        optimizer_values=data["optimizer"]["values_per_parameter"],
        expert_efficiency=data["experts"]["efficiency"],
        expert_imbalance=data["experts"]["imbalance"],
        overlap=data["overlap"]["collective"],
        fp8_speed=data["fp8"]["speed"],
        broadcast_bandwidth=data["sync"]["broadcast_bandwidth"],
        disk_bandwidth=data["sync"]["disk_bandwidth"],
        pause_s=data["sync"]["pause"],
        fragmentation=data["memory"]["fragmentation"],
        graphs_bytes=data["memory"]["graphs"],
    )
