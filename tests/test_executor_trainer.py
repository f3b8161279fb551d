"""Updates on a real, tiny model: neither micro-batches, ranks nor recomputation change what is learnt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import build
import numpy as np
import pytest
import torch
from test_executor_engine import model_of, run
from transformers import PreTrainedModel

from executor.batching import deal, micro_batches
from executor.records import Row
from executor.trainer import Trainer, score


def rows_of(model: PreTrainedModel) -> list[Row]:
    samples = run(model, slots=8, groups=4, members=4)
    (logprobs,) = score([model], samples, micro_batch=8, temperature=1.0)
    random = np.random.default_rng(2)
    return [
        Row(
            sample=s,
            advantage=float(random.normal()),
            old_logprob=logprobs[s.key],
            reference_logprob=logprobs[s.key] - np.float32(0.1),
        )
        for s in samples
    ]


def updated(
    model: PreTrainedModel,
    rows: Sequence[Row],
    *,
    micro_batch: int = 4,
    recompute: bool = False,
    sequences: int = 0,
    reduce: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Gradient of an update, flattened."""
    model = copy.deepcopy(model)
    trainer = Trainer(model, build.job(max_gradient_norm=1e9).algorithm, temperature=1.0)
    trainer.update(rows, sequences=sequences or len(rows), micro_batch=micro_batch, recompute=recompute, reduce=reduce)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("micro_batch", [1, 3, 16])
def test_micro_batches_do_not_change_the_gradient(micro_batch: int) -> None:
    model = model_of("qwen3")
    rows = rows_of(model)
    assert torch.allclose(updated(model, rows), updated(model, rows, micro_batch=micro_batch), atol=1e-6)


def test_recomputation_does_not_change_the_gradient() -> None:
    model = model_of("qwen3")
    rows = rows_of(model)
    assert torch.allclose(updated(model, rows), updated(model, rows, recompute=True), atol=1e-6)


def test_gradients_of_ranks_add_up_to_that_of_the_whole_batch() -> None:
    model = model_of("qwen3")
    rows = rows_of(model)
    hands = deal([row.sample.num_tokens for row in rows], 2)
    parts = [updated(model, [rows[i] for i in hand], sequences=len(rows)) for hand in hands]
    assert torch.allclose(updated(model, rows), parts[0] + parts[1], atol=1e-6)


def test_the_reduced_gradient_is_what_the_optimizer_takes() -> None:
    model = model_of("qwen3")
    rows = rows_of(model)
    doubled = updated(model, rows, reduce=lambda flat: flat.mul_(2))  # type: ignore[arg-type, return-value]
    assert torch.allclose(2 * updated(model, rows), doubled, atol=1e-6)


def test_an_update_makes_rewarded_samples_likelier() -> None:
    model = model_of("qwen3")
    rows = [
        Row(sample=row.sample, advantage=1.0 if row.sample.group == 0 else -0.1, old_logprob=row.old_logprob)
        for row in rows_of(model)
    ]
    samples = [row.sample for row in rows if row.sample.group == 0]
    trainer = Trainer(model, build.job(learning_rate=1e-2).algorithm, temperature=1.0)
    (before,) = score([model], samples, micro_batch=4, temperature=1.0)
    for _ in range(3):
        trainer.update(rows, sequences=len(rows), micro_batch=8, recompute=False, reduce=None)
    (after,) = score([model], samples, micro_batch=4, temperature=1.0)
    assert sum(float(after[s.key].sum() - before[s.key].sum()) for s in samples) > 0


def test_dealing_balances_counts_and_tokens() -> None:
    lengths = [100, 1, 50, 49, 2, 98, 51, 3]
    hands = deal(lengths, 2)
    assert sorted(i for hand in hands for i in hand) == list(range(8))
    assert [len(hand) for hand in hands] == [4, 4]
    assert [sum(lengths[i] for i in hand) for hand in hands] == [200, 154]


def test_micro_batches_hold_neighbours_in_length() -> None:
    assert micro_batches(["a", "b", "c", "d", "e"], [1, 5, 2, 4, 3], 2) == [["b", "d"], ["e", "c"], ["a"]]
