"""The shape of a causal language model, read from a Hugging Face config.json.

Only sizes are read; no code that comes with a model is ever run. What a `model_type` means (biases, norms, where
experts and windows are) is one row of `FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ir.errors import InputError
from ir.shape import Mla, ModelShape, Moe, with_lora

__all__ = ["SUPPORTED", "Mla", "ModelShape", "Moe", "read_config", "shape_from_config", "with_lora"]

Config = Mapping[str, Any]
Windows = Callable[[Config, str, int], tuple[int, ...]]


def _full(_config: Config, _where: str, _layers: int) -> tuple[int, ...]:
    return ()


def _everywhere(config: Config, where: str, layers: int) -> tuple[int, ...]:
    return (_window(config, where),) * layers


def _when_used(config: Config, where: str, layers: int) -> tuple[int, ...]:
    return _everywhere(config, where, layers) if config.get("use_sliding_window") else ()


def _upper_when_used(config: Config, where: str, layers: int) -> tuple[int, ...]:
    if not config.get("use_sliding_window"):
        return ()
    first = _size(config, "max_window_layers", where, least=0)
    return tuple(0 if i < first else _window(config, where) for i in range(layers))


def _all_but_every(period: int) -> Windows:
    """Windows in all layers but each `period`-th, unless the configuration gives a period."""

    def windows(config: Config, where: str, layers: int) -> tuple[int, ...]:
        n = _size(config, "sliding_window_pattern", where, default=period)
        return tuple(_window(config, where) if (i + 1) % n else 0 for i in range(layers))

    return windows


def _mixture(config: Config, where: str, layers: int) -> Moe:
    """Experts as Mixtral and gpt-oss name them: every layer has them, and `intermediate_size` is an expert's."""
    key = "experts_per_token" if "num_experts_per_tok" not in config else "num_experts_per_tok"
    return Moe(
        experts=_size(config, "num_local_experts", where),
        experts_per_token=_size(config, key, where),
        ffn=_size(config, "intermediate_size", where),
        bias=config.get("model_type") == "gpt_oss",
    )


def _sparse_steps(config: Config, where: str, layers: int) -> Moe:
    """Experts as Qwen names them: in every `decoder_sparse_step`-th layer, save those listed."""
    step = _size(config, "decoder_sparse_step", where, default=1)
    listed = config.get("mlp_only_layers") or ()
    return Moe(
        experts=_size(config, "num_experts", where),
        experts_per_token=_size(config, "num_experts_per_tok", where),
        ffn=_size(config, "moe_intermediate_size", where),
        dense_at=tuple(i for i in range(layers) if i in listed or (i + 1) % step),
    )


def _after_dense(config: Config, where: str, layers: int) -> Moe:
    """Experts as DeepSeek names them: after some dense layers, with shared ones beside them."""
    first = _size(config, "first_k_dense_replace", where, least=0)
    step = _size(config, "moe_layer_freq", where, default=1)
    width, experts = _size(config, "moe_intermediate_size", where), _size(config, "n_routed_experts", where)
    groups, chosen = _size(config, "n_group", where, default=1), _size(config, "topk_group", where, default=1)
    if experts % groups:
        raise InputError(f"{where}: n_group", f"must divide n_routed_experts = {experts}", groups)
    if chosen > groups:
        raise InputError(f"{where}: topk_group", f"must not exceed n_group = {groups}", chosen)
    return Moe(
        experts=experts,
        experts_per_token=_size(config, "num_experts_per_tok", where),
        ffn=width,
        shared_ffn=width * _size(config, "n_shared_experts", where, default=0, least=0),
        dense_at=tuple(i for i in range(layers) if i < first or i % step),
        groups=groups,
        groups_per_token=chosen,
    )


def _latent(config: Config, where: str) -> Mla:
    return Mla(
        kv_lora_rank=_size(config, "kv_lora_rank", where),
        nope_head_dim=_size(config, "qk_nope_head_dim", where),
        rope_head_dim=_size(config, "qk_rope_head_dim", where),
        v_head_dim=_size(config, "v_head_dim", where),
        q_lora_rank=_size(config, "q_lora_rank", where, default=0, least=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a `model_type` means beyond the sizes in its configuration."""

    windows: Windows = _full
    """The rule for configurations that do not list `layer_types`."""
    moe: Callable[[Config, str, int], Moe] | None = None
    mla: bool = False
    qkv_bias: bool | None = False
    """None: `attention_bias` says it."""
    o_bias: bool | None = False
    """None: `attention_bias` says it."""
    qk_norm: bool | None = False
    """None: `use_qk_norm` says it."""
    sinks: bool = False
    norms_per_layer: int = 2
    unsupported: tuple[str, ...] = ()
    """Keys that must not be true: they add parameters that are not counted."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the family's configuration class fills in where a file leaves a key out."""


_DEEPSEEK = Family(moe=_after_dense, mla=True, unsupported=("attention_bias", "mlp_bias"))
_GEMMA3 = Family(
    windows=_all_but_every(6), qkv_bias=None, o_bias=None, qk_norm=True, norms_per_layer=4,
    defaults={
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 4096, "tie_word_embeddings": True,
    },
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma2": Family(
        windows=_all_but_every(2), qkv_bias=None, o_bias=None, norms_per_layer=4,
        defaults={"head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True},
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "glm4_moe": Family(moe=_after_dense, qkv_bias=None, qk_norm=None),
    "gpt_oss": Family(
        windows=_all_but_every(2), moe=_mixture, qkv_bias=None, o_bias=None, sinks=True,
        defaults={"attention_bias": True, "head_dim": 64},
    ),
    "kimi_k2": _DEEPSEEK,
    "llama": Family(qkv_bias=None, o_bias=None, unsupported=("mlp_bias",)),
    "mistral": Family(windows=_everywhere),
    "mixtral": Family(windows=_everywhere, moe=_mixture),
    "phi3": Family(windows=_everywhere),
    "qwen2": Family(windows=_upper_when_used, qkv_bias=True),
    "qwen3": Family(windows=_upper_when_used, qkv_bias=None, o_bias=None, qk_norm=True),
    "qwen3_moe": Family(windows=_when_used, moe=_sparse_steps, qkv_bias=None, o_bias=None, qk_norm=True),
}  # fmt: skip

SUPPORTED = tuple(FAMILIES)
"""`model_type` values whose parameters are counted exactly."""


def shape_from_config(config: dict[str, Any], *, where: str) -> ModelShape:
    """The shape that a Hugging Face configuration describes; of the text model, if it is nested in a larger one.

    Raises:
        InputError: an architecture this module does not count, or a missing or wrong size.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(f"{where}: model_type", f"must be one of {', '.join(SUPPORTED)}", repr(kind))
    family, inner = FAMILIES[kind], config.get("text_config")
    if isinstance(inner, dict):
        return _shape({**family.defaults, **inner}, family, f"{where}: text_config")
    return _shape({**family.defaults, **config}, family, where)


def _shape(config: Config, family: Family, where: str) -> ModelShape:
    for key in family.unsupported:
        if config.get(key):
            raise InputError(f"{where}: {key}", "must be false: biases there are not counted", config[key])
    hidden, heads = _size(config, "hidden_size", where), _size(config, "num_attention_heads", where)
    layers = _size(config, "num_hidden_layers", where)
    mla = _latent(config, where) if family.mla else None
    biased, normed = bool(config.get("attention_bias")), bool(config.get("use_qk_norm"))
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if mla else _size(config, "num_key_value_heads", where, default=heads),
        head_dim=mla.nope_head_dim + mla.rope_head_dim if mla else _head_dim(config, where, hidden, heads),
        ffn=_size(config, "intermediate_size", where),
        vocab=_size(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased if family.qkv_bias is None else family.qkv_bias,
        o_bias=biased if family.o_bias is None else family.o_bias,
        qk_norm=normed if family.qk_norm is None else family.qk_norm,
        sinks=family.sinks,
        norms_per_layer=family.norms_per_layer,
        mla=mla,
        moe=family.moe(config, where, layers) if family.moe else None,
        windows=_windows(config, family, where, layers),
    )


def _head_dim(config: Config, where: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise InputError(f"{where}: hidden_size", f"must be a multiple of num_attention_heads = {heads}", hidden)
    return _size(config, "head_dim", where, default=hidden // heads)


def _windows(config: Config, family: Family, where: str, layers: int) -> tuple[int, ...]:
    kinds = config.get("layer_types")
    if kinds is None or family.windows is _full:
        windows = family.windows(config, where, layers)
    elif len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        rule = f"must be full_attention or sliding_attention for each of {layers} layers"
        raise InputError(f"{where}: layer_types", rule, f"{len(kinds)} of {', '.join(sorted(set(map(str, kinds))))}")
    else:
        windows = tuple(_window(config, where) if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _window(config: Config, where: str) -> int:
    """The window's keys; 0, which is all of them, for null."""
    return _size(config, "sliding_window", where, default=0)


def _size(config: Config, key: str, where: str, *, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        rule = "must be a positive integer" if least else "must be an integer of at least 0"
        raise InputError(f"{where}: {key}", rule, repr(value))
    return value


def read_config(path: Path) -> dict[str, Any]:
    """The configuration at `path`, a Hugging Face directory or a config.json."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(file), "must be a Hugging Face directory or config.json", error.strerror) from error
    except ValueError as error:
        raise InputError(str(file), f"must be valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(str(file), "must hold a JSON object", type(config).__name__)
    return config
