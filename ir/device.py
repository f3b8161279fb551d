"""One device of a cluster.toml: what it is, what was measured on it, and the constants that the model takes from it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ir.errors import InputError
from ir.quantities import LARGEST, Bytes, NonNegative, Positive, PositiveFloat

SCALED = ("generate", "passes", "update", "sync", "reward")
"""Kinds of stages that a device may have a scale for."""

PRECISIONS = ("fp32", "bf16", "fp8", "fp4")
"""Number formats that a device may have a peak for."""

MIN_PRODUCTS = 4
"""Measured products that a curve of three constants needs, with one to spare."""


class MatmulPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured product [m, k] x [k, n]."""

    m: Positive
    k: Positive
    n: Positive
    seconds: PositiveFloat


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that launching costs whatever the tensors' size: measured on models too small for anything else."""

    decode_step_s: NonNegative
    """A decode step of an engine, without its layers."""
    decode_layer_s: NonNegative
    """A layer of a decode step."""
    decode_sequence_s: NonNegative
    """A live sequence in a decode step."""
    forward_s: NonNegative
    """A forward pass without gradients, without its layers."""
    forward_layer_s: NonNegative
    train_s: NonNegative
    """A forward and backward pass, without its layers."""
    train_layer_s: NonNegative
    optimizer_s: NonNegative
    """An optimizer step, without its tensors' size."""
    optimizer_layer_s: NonNegative


class MeasuredPass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured pass of a small dense decoder over sequences of equal length, launches included."""

    kind: Literal["forward", "train"]
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    ffn: Positive
    vocab: Positive
    sequences: Positive
    length: Positive
    response: Positive
    """Tokens of each sequence that go through the output head."""
    seconds: PositiveFloat


class Gemm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closed form of a product [m, k] x [k, n]: `(tc^p + tm^p)^(1/p) + launch_s` seconds, where
    `tc = 2mnk / flops` and `tm = bytes / bandwidth`."""

    flops: PositiveFloat
    """Achievable FLOP per second of a large product."""
    bandwidth: PositiveFloat
    """Achievable bytes per second of a product that streams its weights."""
    launch_s: NonNegative
    p: Annotated[float, Meta(ge=1, le=LARGEST)]
    """Sharpness of the knee between the two: 1 adds them up, large values take the larger."""


class KernelPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured kernel of an accelerator, its launch included but not the time that the host takes to ask for it."""

    kind: Literal["product", "prefill", "decode", "experts", "launch"]
    precision: Literal["fp32", "bf16", "fp16", "fp8"]
    """Of the inputs."""
    sizes: tuple[Positive, ...]
    """`product`: m, k, n. `prefill`, causal: sequences, tokens of each, heads, head width. `decode`: sequences, cached
    tokens of each, KV heads, query heads of a KV head, head width. `experts`: experts, tokens of the fullest, tokens of
    all, k, n. `launch`: an empty kernel, here with the host's time: 1."""
    seconds: PositiveFloat


class StageScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far real runs are from the model in one kind of stage."""

    factor: PositiveFloat
    """Modelled seconds are multiplied by it."""
    plans: Positive
    """Different plans whose runs it comes from."""
    deviation: NonNegative
    """Standard deviation of the logarithm of the factor: what is not known of it."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: here what a worker process is pinned to. Its products are measured (`matmul`) or described
    (`gemm`), never both."""

    kind: Literal["cpu", "cuda", "rocm"]
    name: str
    memory_bytes: Bytes
    """What the driver reports, or what the devices of a host may share out among them."""
    bytes_per_value: Positive = 4
    """Width of weights and activations: 4 for float32, 2 for bfloat16."""
    base_memory_bytes: Annotated[int, Meta(ge=0, le=2**62)]
    """What a worker occupies before it holds any model."""
    memory_bandwidth: PositiveFloat
    """Bytes per second of an elementwise operation on a few MB, read and written bytes together."""
    attention_flops: PositiveFloat
    """FLOP per second of the attention core on a training micro-batch."""
    attention_launch_s: NonNegative = 0.0
    """Time of an attention core over whole sequences beside its FLOPs, per layer."""
    kv_bandwidth: PositiveFloat
    """Bytes per second of cached keys and values that a decode step gets through."""
    kv_launch_s: NonNegative = 0.0
    """Time of an attention core of a decode step beside its cached bytes, per layer."""
    host: Host
    matmul: tuple[MatmulPoint, ...] = ()
    """The measured curve that the roofline is fitted to."""
    gemm: Gemm | None = None
    """The curve itself, where nothing was measured."""
    passes: tuple[MeasuredPass, ...] = ()
    """What the kernels' sum is scaled to: a whole pass also waits for memory between kernels. None: not scaled."""
    peak_flops: dict[str, PositiveFloat] = {}
    """Dense FLOP per second of the data sheet by precision; one that is missing is not supported in hardware."""
    peak_bandwidth: PositiveFloat | None = None
    """Bytes per second of device memory by the data sheet."""
    processors: Positive | None = None
    """Streaming multiprocessors or compute units."""
    cache_bytes: Bytes | None = None
    """Last level of cache."""
    scale_up_link: PositiveFloat | None = None
    """Bytes per second one way to all neighbours together by the data sheet; None has none but the host link."""
    host_link: PositiveFloat | None = None
    """Bytes per second one way to host memory."""
    host_memory_bytes: Bytes | None = None
    """Share of one device in the memory of its host."""
    watts: PositiveFloat | None = None
    """Thermal design power."""
    price_per_hour: PositiveFloat | None = None
    """US dollars."""
    price_date: str | None = None
    """When the price was read: prices move by tens of percent within months."""

    kernels: tuple[KernelPoint, ...] | None = None
    """Measured kernels that `gemm`, the attention figures and `expert_efficiency` were fitted to; None: none were."""
    expert_efficiency: PositiveFloat | None = None
    """Rate of grouped products of experts with many tokens over that of `gemm`; None: not measured."""
    scales: dict[str, StageScale] | None = None
    """By kind of stage, what real runs taught; None: nothing yet."""

    def __post_init__(self) -> None:
        where = f"device {self.name}"
        if bool(self.matmul) == (self.gemm is not None):
            got = "both" if self.matmul else "neither"
            raise InputError(where, "must have exactly one of `matmul` and `gemm`", got)
        if self.matmul and len(self.matmul) < MIN_PRODUCTS:
            raise InputError(where, f"must have at least {MIN_PRODUCTS} points in `matmul`", len(self.matmul))
        for precision in self.peak_flops:
            if precision not in PRECISIONS:
                raise InputError(f"{where}: peak_flops", f"must be of {', '.join(PRECISIONS)}", precision)
        for kind in self.scales or {}:
            if kind not in SCALED:
                raise InputError(f"{where}: scales", f"must be of {', '.join(SCALED)}", kind)
        if (self.price_per_hour is None) != (self.price_date is None):
            raise InputError(where, "must have both `price_per_hour` and `price_date` or neither")
