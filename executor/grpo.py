"""The loss of group-relative policy optimisation, per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ir.job import Algorithm


def group_advantages(rewards: Sequence[float]) -> NDArray[np.float64]:
    """(reward - mean) / standard deviation within a group, float64[n]; zeros if all rewards are equal
    (Shao et al. 2024, DeepSeekMath, section 4.1)."""
    values = np.asarray(rewards, dtype=np.float64)
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 1e-8 else np.zeros_like(values)


def token_loss(
    logprob: Tensor,
    *,
    old: Tensor,
    rollout: Tensor,
    reference: Tensor | None,
    advantage: Tensor,
    algorithm: Algorithm,
) -> Tensor:
    """Loss of each response token, all arguments float[tokens].

    The clipped surrogate in pi / pi_old (Schulman et al. 2017), weighted by the capped importance weight
    pi_old / pi_rollout of the weights that generated the token (decoupled objective, Hilton et al. 2022), plus
    the non-negative KL estimator exp(d) - d - 1 with d = log pi_ref - log pi (Schulman 2020).
    """
    ratio = torch.exp(logprob - old)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - algorithm.clip, 1 + algorithm.clip) * advantage)
    weight = torch.exp(old - rollout).clamp(max=algorithm.max_importance_weight).detach()
    loss = -weight * surrogate
    if reference is not None:
        difference = reference - logprob
        loss = loss + algorithm.kl_coefficient * (torch.exp(difference) - difference - 1)
    return loss
