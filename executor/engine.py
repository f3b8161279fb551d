"""Continuous batching on a Hugging Face causal LM: sequences join and leave a running batch between decode steps.

The KV cache is one block of `slots` x `max_tokens` per layer, allocated once: the
plan's concurrency is its bound. Rows in use are kept in front (the last row moves
into a freed one), so that a step costs what its live sequences cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from executor.records import Request, Sample


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, kv heads, max_tokens, head dim]."""

    def __init__(self, cache_state: _Positions, slots: int, max_tokens: int) -> None:
        super().__init__()
        self._state = cache_state
        self._slots = slots
        self._max_tokens = max_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the block on first use, when heads, width and type are known."""
        _, heads, _, width = key_states.shape
        shape = (self._slots, heads, self._max_tokens, width)
        self.keys = torch.zeros(shape, dtype=key_states.dtype, device=key_states.device)
        self.values = torch.zeros(shape, dtype=value_states.dtype, device=value_states.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, [rows, kv heads, tokens, head dim], and give those to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        state = self._state
        if state.prefill_of is not None:
            rows, source = state.prefill_of
            tokens = key_states.shape[2]
            self.keys[rows, :, :tokens] = key_states[source]
            self.values[rows, :, :tokens] = value_states[source]
            return key_states, value_states
        rows_in_use = key_states.shape[0]
        self.keys[state.rows, :, state.positions] = key_states[:, :, 0]
        self.values[state.rows, :, state.positions] = value_states[:, :, 0]
        return self.keys[:rows_in_use, :, : state.width], self.values[:rows_in_use, :, : state.width]

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy a row."""
        self.keys[target, :, :tokens] = self.keys[source, :, :tokens]
        self.values[target, :, :tokens] = self.values[source, :, :tokens]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys to be masked; unused, the engine gives its own mask."""
        return self._state.width, 0

    def get_seq_length(self) -> int:
        """Tokens before the first row's query; unused, the engine gives its own positions."""
        return 0

    def get_max_length(self) -> int:
        """Longest sequence."""
        return self._max_tokens


@dataclass(slots=True)
class _Positions:
    """Where the layers write: set by the engine before each forward pass."""

    rows: Tensor
    positions: Tensor
    width: int
    prefill_of: tuple[Tensor, Tensor] | None
    """(cache rows, row of the prefill batch each is copied from) while prompts are being read."""


@dataclass(slots=True)
class _Live:
    """A sequence in a cache row."""

    request: Request
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Engine:
    """Samples responses. `submit`, then `step` until `idle`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        temperature: float,
        stop_token: int,
        seed: int,
    ) -> None:
        self._model = model
        self._device = model.device
        self._slots = slots
        self._max_response = max_response_tokens
        self._temperature = temperature
        self._stop = stop_token
        self._generator = torch.Generator(device=self._device).manual_seed(seed)
        max_tokens = max_prompt_tokens + max_response_tokens
        empty = torch.empty(0, dtype=torch.long, device=self._device)
        self._state = _Positions(rows=empty, positions=empty, width=0, prefill_of=None)
        self._layers = [_SlotLayer(self._state, slots, max_tokens) for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=self._layers)
        self._waiting: deque[Request] = deque()
        self._live: list[_Live] = []
        self._next_token = empty
        self._next_position = empty
        self._key_index = torch.arange(max_tokens, device=self._device)
        self._row_index = torch.arange(slots, device=self._device)
        self.version = 0
        """Updates that the model's weights have seen; the owner sets it when it changes them."""

    @property
    def idle(self) -> bool:
        """Nothing live and nothing waiting."""
        return not self._live and not self._waiting

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they join as slots fall free, in order."""
        self._waiting.extend(requests)

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Admit what fits, decode one token of every live sequence, and give those that finished."""
        finished = self._admit() if self._waiting and len(self._live) < self._slots else []
        return finished + self._decode() if self._live else finished

    def _admit(self) -> list[Sample]:
        """Read the prompts of new sequences; equal prompts are read once and their cache rows copied."""
        count = min(len(self._waiting), self._slots - len(self._live))
        requests = [self._waiting.popleft() for _ in range(count)]
        distinct: dict[int, int] = {}
        for request in requests:
            distinct.setdefault(request.group, len(distinct))
        prompts = {request.group: request.prompt for request in requests}
        lengths = torch.tensor([len(prompts[group]) for group in distinct], device=self._device)
        ids = torch.zeros(len(distinct), int(lengths.max()), dtype=torch.long)
        for group, row in distinct.items():
            ids[row, : len(prompts[group])] = torch.from_numpy(prompts[group])
        source = torch.tensor([distinct[request.group] for request in requests], device=self._device)
        first = len(self._live)
        rows = self._row_index[first : first + count]
        logits = self._forward_prompts(ids.to(self._device), lengths, rows, source)
        self._live += [_Live(request=request, version=self.version) for request in requests]
        self._next_position = torch.cat([self._next_position, lengths[source]])
        return self._sample(logits, first)

    def _forward_prompts(self, ids: Tensor, lengths: Tensor, rows: Tensor, source: Tensor) -> Tensor:
        # Prompts are padded on the right and attention is causal, so padding is never looked at.
        self._state.prefill_of = (rows, source)
        self._state.width = ids.shape[1]
        positions = torch.arange(ids.shape[1], device=self._device).expand(ids.shape)
        keys = self._key_index[: ids.shape[1]]
        causal = (keys[:, None] >= keys[None, :])[None, None]
        hidden = self._hidden(ids, positions, causal.expand(ids.shape[0], 1, -1, -1))
        self._state.prefill_of = None
        last = hidden[torch.arange(len(lengths), device=self._device), lengths - 1]
        return self._head(last)[source]

    def _decode(self) -> list[Sample]:
        live = len(self._live)
        self._state.rows = self._row_index[:live]
        self._state.positions = self._next_position
        self._state.width = int(self._next_position.max()) + 1
        mask = self._key_index[None, : self._state.width] <= self._next_position[:, None]
        hidden = self._hidden(self._next_token[:, None], self._next_position[:, None], mask[:, None, None, :])
        self._next_position = self._next_position + 1
        logits = self._head(hidden[:, 0])
        self._next_token = self._next_token[:0]
        return self._sample(logits, 0)

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        output = self._model.base_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden = output.last_hidden_state
        assert isinstance(hidden, Tensor)
        return hidden

    def _head(self, hidden: Tensor) -> Tensor:
        logits = self._model.get_output_embeddings()(hidden)
        assert isinstance(logits, Tensor)
        return logits.float()

    def _sample(self, logits: Tensor, first: int) -> list[Sample]:
        """Draw a token for the rows from `first` on, float[rows, vocabulary]; finished rows leave."""
        logprobs = torch.log_softmax(logits / self._temperature, dim=-1)
        # Dividing by exponential noise and taking the largest draws from the softmax (the exponential race).
        noise = torch.empty_like(logprobs).exponential_(generator=self._generator)
        tokens = (logprobs.exp() / noise).argmax(dim=-1)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        self._next_token = torch.cat([self._next_token, tokens])
        done = []
        for row, (token, logprob) in enumerate(zip(tokens.tolist(), chosen.tolist(), strict=True), start=first):
            live = self._live[row]
            live.tokens.append(token)
            live.logprobs.append(logprob)
            if token == self._stop or len(live.tokens) == self._max_response:
                done.append(row)
        return self._release(done) if done else []

    def _release(self, done: list[int]) -> list[Sample]:
        """Take finished rows out and close the gaps from behind."""
        samples = [_finished(self._live[row]) for row in done]
        keep = len(self._live)
        index = list(range(keep))
        for row in reversed(done):
            keep -= 1
            if row != keep:
                tokens = len(self._live[keep].request.prompt) + len(self._live[keep].tokens)
                for layer in self._layers:
                    layer.move(keep, row, tokens)
                self._live[row] = self._live[keep]
                index[row] = index[keep]
        del self._live[keep:]
        chosen = torch.tensor(index[:keep], dtype=torch.long, device=self._device)
        self._next_token = self._next_token[chosen]
        self._next_position = self._next_position[chosen]
        return samples


def _finished(live: _Live) -> Sample:
    return Sample(
        group=live.request.group,
        member=live.request.member,
        prompt=live.request.prompt,
        response=np.array(live.tokens, dtype=np.int64),
        rollout_logprob=np.array(live.logprobs, dtype=np.float32),
        version=live.version,
    )
