"""Passes of actor and reference over a batch, and the optimizer steps of the actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from executor.batching import micro_batches
from executor.grpo import token_loss
from executor.records import LogProbs, Row, Sample
from ir.job import Algorithm

Reduce = Callable[[Tensor], None]
"""Sums a tensor over the data-parallel ranks in place."""


def response_logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> Tensor:
    """Log-probs of all response tokens, float[total response tokens], sample after sample.

    Sequences are padded on the right; with causal attention no mask is needed. Only positions that predict
    a response token go through the output head.
    """
    device = model.device
    width = max(sample.num_tokens for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    rows, columns = [], []
    for index, sample in enumerate(samples):
        ids[index, : sample.num_tokens] = torch.from_numpy(np.concatenate([sample.prompt, sample.response]))
        first = len(sample.prompt) - 1
        columns.append(np.arange(first, first + len(sample.response)))
        rows.append(np.full(len(sample.response), index))
    ids = ids.to(device)
    row = torch.from_numpy(np.concatenate(rows)).to(device)
    column = torch.from_numpy(np.concatenate(columns)).to(device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[row, column]).float() / temperature
    target = ids[row, column + 1]
    logprobs: Tensor = logits.gather(1, target[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
    return logprobs


@torch.inference_mode()
def score(
    models: Sequence[PreTrainedModel], samples: Sequence[Sample], *, micro_batch: int, temperature: float
) -> list[dict[tuple[int, int], LogProbs]]:
    """Log-probs of every sample under each model, in one walk over the micro-batches."""
    found: list[dict[tuple[int, int], LogProbs]] = [{} for _ in models]
    for batch in micro_batches(samples, [s.num_tokens for s in samples], micro_batch):
        bounds = np.cumsum([len(s.response) for s in batch])[:-1]
        for model, logprobs in zip(models, found, strict=True):
            values = response_logprobs(model, batch, temperature).cpu().numpy()
            logprobs.update(zip([s.key for s in batch], np.split(values, bounds), strict=True))
    return found


class Trainer:
    """The actor, its optimizer, and one optimizer step at a time."""

    def __init__(self, model: PreTrainedModel, algorithm: Algorithm, *, temperature: float) -> None:
        self._model = model
        self._algorithm = algorithm
        self._temperature = temperature
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=algorithm.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
        )

    def update(
        self, rows: Sequence[Row], *, sequences: int, micro_batch: int, recompute: bool, reduce: Reduce | None
    ) -> dict[str, float]:
        """One optimizer step on this rank's rows of a minibatch of so many `sequences` over all ranks.

        The loss is the mean over sequences of the mean over their tokens (Shao et al. 2024, equation 3), so it does
        not depend on micro-batches or ranks, and long answers do not drown short ones.
        """
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        with self._training(recompute):
            for batch in micro_batches(rows, [r.sample.num_tokens for r in rows], micro_batch):
                loss = self.loss(batch) / sequences
                loss.backward()
                total += loss.item()
        if reduce is not None:
            self._sum_gradients(reduce)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._algorithm.max_gradient_norm)
        self._optimizer.step()
        return {"loss": total, "gradient_norm": float(norm)}

    def loss(self, rows: Sequence[Row]) -> Tensor:
        """Sum over some rows of their mean token loss, a scalar with its graph."""
        logprob = response_logprobs(self._model, [row.sample for row in rows], self._temperature)
        rollout = self._column([row.sample.rollout_logprob for row in rows])
        old = [row.old_logprob for row in rows]
        reference = [row.reference_logprob for row in rows]
        advantage = [np.full(len(row.sample.response), row.advantage, dtype=np.float32) for row in rows]
        share = [np.full(len(r.sample.response), 1.0 / len(r.sample.response), dtype=np.float32) for r in rows]
        loss = token_loss(
            logprob,
            old=logprob.detach() if old[0] is None else self._column(old),
            rollout=rollout,
            reference=None if reference[0] is None else self._column(reference),
            advantage=self._column(advantage),
            algorithm=self._algorithm,
        )
        return (loss * self._column(share)).sum()

    def _column(self, values: Sequence[LogProbs | None]) -> Tensor:
        present = [value for value in values if value is not None]
        assert len(present) == len(values), "a stage before this one left samples out"
        return torch.from_numpy(np.concatenate(present)).to(self._model.device)

    def _sum_gradients(self, reduce: Reduce) -> None:
        """One collective for all gradients: at these sizes latency is what it costs."""
        flat = torch.cat([p.grad.reshape(-1) for p in self._parameters if p.grad is not None])
        reduce(flat)
        offset = 0
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
                offset += parameter.numel()

    @contextmanager
    def _training(self, recompute: bool) -> Iterator[None]:
        self._model.train()
        if recompute:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield
        finally:
            if recompute:
                self._model.gradient_checkpointing_disable()
            self._model.eval()
