"""Constants of inference engines, from `data/serving.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ir.cluster import Device

Steps = tuple[tuple[float, float], ...]
"""(ranks, value) in ascending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How products go with weights of a number format. Rates are over the device's own curve in bf16."""

    weight_bytes: float
    """Bytes of a weight, its scales included."""
    flops: float
    """Rate of products with few rows."""
    prefill_flops: float
    """Rate of products with many rows."""
    bandwidth: float
    """Rate at which weights are streamed."""
    launch_s: float | None = None
    """Seconds of a product beside both; None: as in bf16."""
    p: float | None = None
    """Sharpness of the knee; None: as in bf16."""
    expert_flops: float
    """Rate of grouped products of experts with few tokens, over the bf16 peak; uneven routing is in it."""
    expert_prefill_flops: float
    """With many tokens."""
    expert_bandwidth: float
    """Of the data sheet's bandwidth, what streaming experts reach."""
    expert_launch_s: float
    """Seconds of a layer's experts beside both: sorting, two grouped products, gathering."""
    expert_p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention over a latent cache."""

    flops: float
    """Of the bf16 peak."""
    bandwidth: float
    """Of the data sheet's bandwidth."""
    launch_s: float
    p: float
    prefill_flops: float
    """Of the bf16 peak, over whole prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """See the data file for meaning and source of each."""

    block_tokens: int
    watermark: float
    chunk_tokens: int
    activation_widths: Steps
    recompute: float
    recompute_waves: float
    kernels: float
    router_kernels: float
    kernel_s: float
    expert_kernels: float
    launch_s: float
    sequence_head_s: dict[str, float]
    """By generation: what a sequence adds to a layer's attention per query head."""
    latent: Latent
    formats: dict[str, dict[str, Format]]
    """By generation of the hardware, and name."""

    def format(self, device: Device, name: str) -> Format:
        """The device's format of this name; bf16 where its generation has none of that name."""
        known = self.formats[generation_of(device)]
        return known.get(name, known["bf16"])


@cache
def serving() -> Serving:
    """The constants, read once."""
    data = tomllib.loads((Path(__file__).parent / "data" / "serving.toml").read_text(encoding="utf-8"))
    kept, small = data["cache"], data["small"]
    return Serving(
        block_tokens=kept["block_tokens"],
        watermark=kept["watermark"],
        chunk_tokens=kept["chunk_tokens"],
        activation_widths=tuple((n, w) for n, w in kept["activation_widths"]),
        recompute=kept["recompute"],
        recompute_waves=kept["recompute_waves"],
        kernels=small["kernels"],
        router_kernels=small["router_kernels"],
        kernel_s=small["seconds"],
        expert_kernels=small["expert_kernels"],
        launch_s=small["launch_us"] / 1e6,
        sequence_head_s={name: ns / 1e9 for name, ns in data["attention"]["sequence_ns"].items()},
        latent=Latent(**_seconds(data["latent"])),
        formats={
            generation: {name: Format(**_seconds(facts)) for name, facts in formats.items()}
            for generation, formats in data["formats"].items()
        },
    )


def generation_of(device: Device) -> str:
    """By the narrowest numbers that a device multiplies in hardware: four bits, eight, or sixteen."""
    if "fp4" in device.peak_flops:
        return "blackwell"
    return "hopper" if "fp8" in device.peak_flops else "ampere"


def _seconds(facts: dict[str, Any]) -> dict[str, Any]:
    """`launch_us` of the file as `launch_s`."""
    return {
        (key[:-2] + "s" if key.endswith("_us") else key): (value / 1e6 if key.endswith("_us") else value)
        for key, value in facts.items()
    }
