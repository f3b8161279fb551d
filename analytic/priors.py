"""Constants that no calibration measures, from `data/priors.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """See the data file for meaning and source of each."""

    reward_s: float
    hidden_passes: float
    head_passes: float
    ffn_passes: float
    saved_hidden: float
    saved_heads: float
    saved_ffn: float
    backward_ratio: float
    optimizer_values: float
    fragmentation: float


@cache
def priors() -> Priors:
    """The constants, read once."""
    data = tomllib.loads((Path(__file__).parent / "data" / "priors.toml").read_text(encoding="utf-8"))
    tokens = data["tokens"]
    return Priors(
        reward_s=data["reward"]["seconds_per_sample"],
        hidden_passes=tokens["hidden_passes"],
        head_passes=tokens["head_passes"],
        ffn_passes=tokens["ffn_passes"],
        saved_hidden=tokens["saved_hidden"],
        saved_heads=tokens["saved_heads"],
        saved_ffn=tokens["saved_ffn"],
        backward_ratio=data["backward"]["flops_ratio"],
        optimizer_values=data["optimizer"]["values_per_parameter"],
        fragmentation=data["memory"]["fragmentation"],
    )
