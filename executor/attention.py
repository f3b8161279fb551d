"""Attention of a decode step without copying cached keys for every query head.

Libraries repeat keys and values to as many heads as queries have; on a wide cache that copy
costs more than the attention. Here the query heads of a group meet their keys as rows of one
matrix product. Everything but a decode step is left to the library's own function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "steptune_grouped"
"""The `attn_implementation` to load a model with, after `register`."""


def register() -> None:
    """Make `NAME` known to transformers."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: query [batch, heads, tokens, width], key and value [batch, kv heads, keys, width];
    gives [batch, tokens, heads, width]. The mask is true where a key is seen."""
    batch, heads, tokens, width = query.shape
    if tokens > 1 or attention_mask is None:
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return result
    groups, keys = key.shape[1], key.shape[2]
    rows = query.reshape(batch * groups, heads // groups, width)
    scores = torch.bmm(rows, key.reshape(batch * groups, keys, width).mT) * kwargs["scaling"]
    scores = scores.view(batch, groups, heads // groups, keys).masked_fill_(~attention_mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1).view(batch * groups, heads // groups, keys)
    out = torch.bmm(weights, value.reshape(batch * groups, keys, width))
    return out.view(batch, 1, heads, width), None
