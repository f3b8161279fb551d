"""The objective against arithmetic done by hand and against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from executor.grpo import group_advantages, token_loss
from ir.job import Algorithm


def test_advantages_are_normalised_within_the_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]).tolist() == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([0.3, 0.3, 0.3]).tolist() == [0.0, 0.0, 0.0]
    assert group_advantages([3.0, 1.0, 2.0]) == pytest.approx([1.224745, -1.224745, 0.0], abs=1e-6)


def _loss(logprob: torch.Tensor, **changes: object) -> torch.Tensor:
    arguments: dict[str, object] = {
        "old": torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64),
        "rollout": torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64),
        "reference": None,
        "advantage": torch.tensor([2.0, 2.0, -2.0], dtype=torch.float64),
        "algorithm": Algorithm(name="grpo", learning_rate=1.0),
    }
    return token_loss(logprob, **(arguments | changes))  # type: ignore[arg-type]


def test_loss_by_hand() -> None:
    # ratios 1, 2 (clipped to 1.2 for a positive advantage) and 2 (kept for a negative one)
    logprob = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 + math.log(2)], dtype=torch.float64)
    assert _loss(logprob).tolist() == pytest.approx([-2.0, -2.4, 4.0])


def test_gradient_by_hand() -> None:
    logprob = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 + math.log(2)], dtype=torch.float64, requires_grad=True)
    _loss(logprob).sum().backward()
    # d(-ratio A)/d logprob = -ratio A; none where the clip binds
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([-2.0, 0.0, 4.0])


def test_importance_weight_scales_stale_tokens_and_is_capped() -> None:
    logprob = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    rollout = torch.tensor([-1.0 - math.log(3), -1.0 + math.log(2), -1.0 - math.log(40)], dtype=torch.float64)
    assert _loss(logprob, rollout=rollout).tolist() == pytest.approx([-6.0, -1.0, 10.0])


def test_kl_term_by_hand() -> None:
    logprob = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)], dtype=torch.float64)
    none = torch.zeros(3, dtype=torch.float64)
    loss = _loss(
        logprob,
        reference=reference,
        algorithm=Algorithm(name="grpo", learning_rate=1.0, kl_coefficient=1.0),
        advantage=none,
    )
    assert loss.tolist() == pytest.approx([0.0, 2 - math.log(2) - 1, 0.5 + math.log(2) - 1])


@pytest.mark.parametrize("seed", range(5))
def test_gradient_against_finite_differences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Off the kinks of the clip, where the derivative exists.
    logprob = -1.0 + 0.1 * torch.rand(6, dtype=torch.float64, generator=generator)
    old = torch.full((6,), -1.0, dtype=torch.float64)
    rollout = old + 0.2 * torch.randn(6, dtype=torch.float64, generator=generator)
    reference = old + 0.3 * torch.randn(6, dtype=torch.float64, generator=generator)
    advantage = torch.randn(6, dtype=torch.float64, generator=generator)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return token_loss(
            x, old=old, rollout=rollout, reference=reference, advantage=advantage,
            algorithm=Algorithm(name="grpo", learning_rate=1.0, kl_coefficient=0.3),
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, logprob.requires_grad_())


def test_with_fresh_weights_all_sources_of_old_logprobs_give_the_same_gradient() -> None:
    values = np.array([-0.5, -1.5, -2.5])
    gradients = []
    for source in ("recomputed", "rollout", "folded"):
        logprob = torch.tensor(values, requires_grad=True)
        old = logprob.detach() if source == "folded" else torch.tensor(values)
        _loss(logprob, old=old, rollout=torch.tensor(values)).sum().backward()
        assert logprob.grad is not None
        gradients.append(logprob.grad.tolist())
    assert gradients[0] == gradients[1] == gradients[2] == [-2.0, -2.0, 2.0]
