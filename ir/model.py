"""The shape of a causal language model, read from a Hugging Face config.json, and its arithmetic.

Only sizes are read; no code that comes with a model is ever run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ir.errors import InputError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` values whose dense decoder layer this module counts exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder with grouped-query attention and a gated feed-forward network."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """Whether the output head is the embedding matrix."""
    qkv_bias: bool
    qk_norm: bool

    @property
    def attention_width(self) -> int:
        """Width of the concatenated query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the concatenated key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def matmuls_per_layer(self) -> tuple[tuple[int, int], ...]:
        """(input width, output width) of each weight matrix of a layer."""
        h = self.hidden
        return (
            (h, self.attention_width),
            (h, self.kv_width),
            (h, self.kv_width),
            (self.attention_width, h),
            (h, self.ffn),
            (h, self.ffn),
            (self.ffn, h),
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, norms and biases included."""
        linear = sum(i * o for i, o in self.matmuls_per_layer)
        bias = self.attention_width + 2 * self.kv_width if self.qkv_bias else 0
        qk_norm = 2 * self.head_dim if self.qk_norm else 0
        return linear + bias + qk_norm + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of cached keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_width * bytes_per_value


def shape_from_config(config: dict[str, Any], *, where: str) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Raises:
        InputError: an architecture this module does not count, or a missing or wrong size.
    """
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise InputError(f"{where}: model_type", f"must be one of {', '.join(SUPPORTED)}", repr(kind))
    hidden = _size(config, "hidden_size", where)
    heads = _size(config, "num_attention_heads", where)
    return ModelShape(
        layers=_size(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", where, default=heads),
        head_dim=_size(config, "head_dim", where, default=hidden // heads),
        ffn=_size(config, "intermediate_size", where),
        vocab=_size(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _size(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {key}", "must be a positive integer", repr(value))
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
