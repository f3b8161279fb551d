"""A model's weights as one block of float32, which is how they travel."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from executor.records import Weights


def flatten(model: PreTrainedModel) -> Weights:
    """All parameters in the model's order, float32[parameters]."""
    return np.concatenate([p.detach().reshape(-1).float().cpu().numpy() for p in model.parameters()])


@torch.no_grad()
def assign(model: PreTrainedModel, weights: Weights) -> None:
    """Set all parameters from what `flatten` gave of a model of the same shape."""
    offset = 0
    for parameter in model.parameters():
        block = weights[offset : offset + parameter.numel()]
        parameter.copy_(torch.from_numpy(block.copy()).view_as(parameter))
        offset += parameter.numel()
    assert offset == len(weights), "weights of another model"
