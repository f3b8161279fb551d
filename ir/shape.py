"""The sizes of a decoder-only language model and the arithmetic on them: parameters, cached values, operations.

Counts are exact for grouped-query or multi-head latent attention, over all keys or a window, and gated feed-forward
networks, dense or mixtures of experts. They cover the main model: no multi-token prediction, vision tower or buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

Matmul = tuple[int, int]
"""(input width, output width) of a weight matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention: keys and values are cached as one latent vector (DeepSeek-V2, arXiv 2405.04434)."""

    kv_lora_rank: int
    """Width of the latent vector that keys and values are made from."""
    nope_head_dim: int
    """Width of a head's query and key that carries no position."""
    rope_head_dim: int
    """Width of a head's query and key that does; the key's is shared by all heads."""
    v_head_dim: int
    q_lora_rank: int = 0
    """Width that queries are compressed to; 0: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts in place of the feed-forward network."""

    experts: int
    """Routed experts of a layer."""
    experts_per_token: int
    ffn: int
    """Width of one routed expert."""
    shared_ffn: int = 0
    """Total width of the experts that every token goes through."""
    dense_at: tuple[int, ...] = ()
    """Layers, counted from 0, that have a dense network of width `ModelShape.ffn` instead."""
    bias: bool = False
    """Whether router and experts have biases."""
    groups: int = 1
    """Groups of neighbouring experts from which a token's are chosen: first some groups, then experts of those."""
    groups_per_token: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; the defaults are those of a dense one with full attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query head (with MLA: both its parts)."""
    ffn: int
    """Width of a dense layer's feed-forward network."""
    vocab: int
    tied: bool
    """Whether the output head is the embedding matrix."""
    qkv_bias: bool
    qk_norm: bool
    """Whether each query and key head is normalised, by a weight of `head_dim` shared by all heads."""
    o_bias: bool = False
    """Whether the output projection of attention has a bias."""
    sinks: bool = False
    """Whether each head learns a logit that takes part in its softmax."""
    norms_per_layer: int = 2
    """Norms over the hidden width in a layer."""
    scores: bool = False
    """Whether the head gives a number for a token, as critics' and reward models' do, and no logits."""
    mla: Mla | None = None
    moe: Moe | None = None
    windows: tuple[int, ...] = ()
    """Most keys a token of each layer sees, itself included; 0: all; empty: all in every layer."""
    lora_rank: int = 0
    """Rank of adapters on every matrix of attention and of feed-forward networks, each expert's too, but not on router,
    embedding or head; 0: all weights are trained."""

    @property
    def attention_width(self) -> int:
        """Width of the concatenated query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the concatenated key heads; of the value heads too, unless there is MLA."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of the attention core's output: a value head for each query head."""
        return self.heads * (self.mla.v_head_dim if self.mla else self.head_dim)

    @property
    def is_moe(self) -> bool:
        """Whether there are routed experts."""
        return self.moe is not None

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense feed-forward network."""
        return len(self.moe.dense_at) if self.moe else self.layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.num_dense_layers

    @property
    def attention_matmuls(self) -> tuple[Matmul, ...]:
        """Matrices of a layer's attention: query, key, value, output; with MLA the (compressed) query, the latent, keys
        and values from it, output."""
        h, mla = self.hidden, self.mla
        if mla is None:
            return (h, self.attention_width), (h, self.kv_width), (h, self.kv_width), (self.attention_width, h)
        rank = mla.q_lora_rank
        query = ((h, rank), (rank, self.attention_width)) if rank else ((h, self.attention_width),)
        latent = (h, mla.kv_lora_rank + mla.rope_head_dim)
        expand = (mla.kv_lora_rank, self.heads * (mla.nope_head_dim + mla.v_head_dim))
        return *query, latent, expand, (self.value_width, h)

    @property
    def dense_ffn_matmuls(self) -> tuple[Matmul, ...]:
        """Matrices of a dense layer's feed-forward network: gate, up, down."""
        return self._gated(self.ffn)

    @property
    def shared_ffn_matmuls(self) -> tuple[Matmul, ...]:
        """Matrices of all shared experts of a layer, taken together; empty if there are none."""
        return self._gated(self.moe.shared_ffn) if self.moe and self.moe.shared_ffn else ()

    @property
    def expert_matmuls(self) -> tuple[Matmul, ...]:
        """Matrices of one routed expert; empty if there are none."""
        return self._gated(self.moe.ffn) if self.moe else ()

    @property
    def router_matmul(self) -> Matmul | None:
        """The matrix that scores a layer's experts."""
        return (self.hidden, self.moe.experts) if self.moe else None

    @property
    def matmuls_per_layer(self) -> tuple[Matmul, ...]:
        """Matrices that a token goes through in a layer; in one with experts, if there are such."""
        if self.moe is None or self.router_matmul is None:
            return self.attention_matmuls + self.dense_ffn_matmuls
        routed = self.expert_matmuls * self.moe.experts_per_token
        return *self.attention_matmuls, self.router_matmul, *self.shared_ffn_matmuls, *routed

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention, with its biases, sinks and inner norms."""
        qkv_bias = self.attention_width + 2 * self.kv_width if self.qkv_bias else 0
        o_bias = self.hidden if self.o_bias else 0
        sinks = self.heads if self.sinks else 0
        return weights(self.attention_matmuls) + qkv_bias + o_bias + sinks + self._inner_norms

    @property
    def expert_layer_parameters(self) -> int:
        """Parameters of the routed experts of one layer."""
        if self.moe is None:
            return 0
        bias = 2 * self.moe.ffn + self.hidden if self.moe.bias else 0
        return self.moe.experts * (weights(self.expert_matmuls) + bias)

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of a layer with a dense feed-forward network."""
        return self._mixer_parameters + weights(self.dense_ffn_matmuls)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, norms and biases included; of one with all its experts, if there are such."""
        if not self.moe:
            return self.dense_layer_parameters
        return self._mixer_parameters + self._router + weights(self.shared_ffn_matmuls) + self.expert_layer_parameters

    @property
    def parameters(self) -> int:
        """All parameters, adapters aside; a tied head counts once."""
        layers = self.num_dense_layers * self.dense_layer_parameters + self.num_moe_layers * self.layer_parameters
        return self.embedding_parameters + self.head_parameters + layers + self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head; 0 if it is the embedding."""
        return 0 if self.tied and not self.scores else self.outputs * self.hidden

    @property
    def outputs(self) -> int:
        """Numbers that the head gives for a token."""
        return 1 if self.scores else self.vocab

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.num_moe_layers * self.expert_layer_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token goes through: all but the experts it is not routed to and the input embedding, which
        is looked up; the head's matrix counts, tied or not. OpenAI and DeepSeek publish this count; Qwen and others
        add the input embedding."""
        looked_up = 0 if self.tied and not self.scores else self.embedding_parameters
        if self.moe is None:
            return self.parameters - looked_up
        routed = self.expert_parameters * self.moe.experts_per_token // self.moe.experts
        return self.parameters - looked_up - self.expert_parameters + routed

    @property
    def replicated_parameters(self) -> int:
        """Parameters that every tensor-parallel rank holds whole: norms, routers, MLA's projections to its latents, and
        biases added after the sum over ranks. Key and value heads shared by ranks are not counted."""
        down = self.attention_matmuls[:1] if self.mla and self.mla.q_lora_rank else ()
        latent = self.attention_matmuls[-3:-2] if self.mla else ()
        bias = self.hidden if self.o_bias else 0
        layer = self.norms_per_layer * self.hidden + self._inner_norms + weights(down + latent) + bias
        return self.layers * layer + self.num_moe_layers * self._router + self.hidden

    @property
    def lora_parameters(self) -> int:
        """Parameters of the adapters: rank x (input + output width) for each adapted matrix; 0 without."""
        experts = self.expert_matmuls * (self.moe.experts if self.moe else 0)
        widths = (
            self.layers * _widths(self.attention_matmuls)
            + self.num_dense_layers * _widths(self.dense_ffn_matmuls)
            + self.num_moe_layers * (_widths(self.shared_ffn_matmuls) + _widths(experts))
        )
        return self.lora_rank * widths

    @property
    def trainable_parameters(self) -> int:
        """Parameters that have gradients: the adapters, or all."""
        return self.lora_parameters if self.lora_rank else self.parameters

    @property
    def kv_values_per_token(self) -> int:
        """Values that one layer caches for a token: keys and values, or MLA's latent and the shared key."""
        return self.mla.kv_lora_rank + self.mla.rope_head_dim if self.mla else 2 * self.kv_width

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes cached for one token over all layers, as long as no window is full."""
        return self.layers * self.kv_values_per_token * bytes_per_value

    def kv_bytes(self, context: int, bytes_per_value: int) -> int:
        """Bytes cached for a sequence of `context` tokens; a layer keeps no more than its window."""
        return self.keys_seen(context) * self.kv_values_per_token * bytes_per_value

    def keys_seen(self, context: int) -> int:
        """Keys that the last of `context` tokens sees, summed over layers."""
        return sum(layers * (min(context, window) if window else context) for window, layers in self.window_groups)

    @property
    def window_groups(self) -> tuple[tuple[int, int], ...]:
        """(window, layers that have it) for each window there is, ascending; 0 is full attention."""
        windows = self.windows or (0,) * self.layers
        return tuple((window, windows.count(window)) for window in sorted(set(windows)))

    @property
    def matmul_flops_per_token(self) -> int:
        """FLOP of a forward pass in weight matrices, two per weight, the head included, adapters not."""
        dense = self.num_dense_layers * weights(self.attention_matmuls + self.dense_ffn_matmuls)
        moe = self.num_moe_layers * weights(self.matmuls_per_layer) if self.moe else 0
        return 2 * (dense + moe + self.outputs * self.hidden)

    def attention_flops_per_token(self, context: int) -> int:
        """FLOP of a forward pass in the attention core for a token that sees `context` keys, or a window of them: two
        per key for each value of its queries and of its values (MLA: of the uncompressed heads)."""
        return 2 * (self.attention_width + self.value_width) * self.keys_seen(context)

    def _gated(self, width: int) -> tuple[Matmul, ...]:
        return (self.hidden, width), (self.hidden, width), (width, self.hidden)

    @property
    def _inner_norms(self) -> int:
        latents = self.mla.q_lora_rank + self.mla.kv_lora_rank if self.mla else 0
        return latents + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def _mixer_parameters(self) -> int:
        return self.attention_parameters + self.norms_per_layer * self.hidden

    @property
    def _router(self) -> int:
        return self.moe.experts * (self.hidden + self.moe.bias) if self.moe else 0


def weights(matmuls: Iterable[Matmul]) -> int:
    """Weights of all the matrices."""
    return sum(i * o for i, o in matmuls)


def _widths(matmuls: Iterable[Matmul]) -> int:
    return sum(i + o for i, o in matmuls)


def with_lora(shape: ModelShape, rank: int) -> ModelShape:
    """The same model, trained through adapters of a rank; 0: in full."""
    return replace(shape, lora_rank=rank)
