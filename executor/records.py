"""What the controller, the runtime and the workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ir.graph import Op
from ir.job import Algorithm, Workload
from traces.schema import Span

Tokens = NDArray[np.int64]
LogProbs = NDArray[np.float32]
Weights = NDArray[np.float32]


class OutOfDeviceMemory(RuntimeError):
    """A worker occupies more than its device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to be sampled."""

    group: int
    """Index of the prompt in the run's sequence of prompts."""
    member: int
    """Which sample of the group."""
    prompt: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled response."""

    group: int
    member: int
    prompt: Tokens
    response: Tokens
    """Ends with the end-of-sequence token unless it was cut off."""
    rollout_logprob: LogProbs
    """Of every response token, under the weights that sampled it."""
    version: int
    """Oldest weights that sampled one of its tokens: number of updates they had seen."""

    @property
    def key(self) -> tuple[int, int]:
        """Identity within a run."""
        return self.group, self.member

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample with what earlier stages found out about it: the input of a visit."""

    sample: Sample
    reward: float | None = None
    reference_logprob: LogProbs | None = None
    old_logprob: LogProbs | None = None
    advantage: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a visit found out about one sample: the fields of `Row` it sets."""

    key: tuple[int, int]
    reward: float | None = None
    reference_logprob: LogProbs | None = None
    old_logprob: LogProbs | None = None
    advantage: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a worker needs to know about a run."""

    run_id: str
    pool: str
    model_path: str
    algorithm: Algorithm
    workload: Workload
    slots: int
    """KV-cache rows if this worker generates, else 0."""
    trains: bool
    refers: bool
    """Whether this worker holds the reference."""
    training_ranks: int
    """Workers of this pool that train: its first ones."""
    memory_limit: int
    """Bytes this worker may occupy."""
    started: float
    """time.time() at which the run started: spans count from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a visit is to be done on this rank."""

    ops: tuple[Op, ...]
    step: int
    micro_batch: int
    recompute: bool
    """Whether the backward pass computes activations again."""
    ranks: int
    """Ranks that take part; the update sums gradients over them."""
    minibatch_sequences: tuple[int, ...] = ()
    """Sequences of each minibatch over all ranks."""
    epochs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitReply:
    """A worker's answer to a visit."""

    findings: tuple[Finding, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReply:
    """A worker's answer to a generate call."""

    samples: tuple[Sample, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Command: let an engine decode."""

    engine: int
    """Rank in the rollout pool."""
    groups: tuple[int, ...]
    """Prompts to add to its queue."""
    version: int
    """Weights to decode with; loaded first if the engine has older ones."""
    drain: bool
    """Come back when everything is finished, or else as soon as a group is or a time slice has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Command: let a pool visit groups of a step."""

    ops: tuple[Op, ...]
    step: int
    groups: tuple[int, ...]


Command = Generate | Visit


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Event: an engine came back."""

    engine: int
    groups: tuple[int, ...]
    """Groups all of whose samples are now finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited:
    """Event: every rank finished a visit."""

    visit: Visit


Event = Generated | Visited
