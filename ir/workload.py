"""The sequences of a step: how many, how long, from which prompts, with how many turns."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ir.lengths import Lengths
from ir.quantities import LARGEST, Natural, NonNegative, Positive, PositiveFloat


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reasoning-gym data set that prompts are drawn from."""

    dataset: str
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the other tasks' weights."""
    params: dict[str, Any] = {}
    """Passed to reasoning-gym as they are."""


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long an environment takes to answer one turn."""

    mean_s: PositiveFloat
    """Mean, seconds."""
    cv: NonNegative = 0.0
    """Standard deviation over mean."""


class Turns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-turn responses: the environment answers between the actor's turns. `max_response_tokens` and the response
    lengths count the tokens of all turns, observations included."""

    mean: Annotated[float, Meta(ge=1, le=LARGEST)]
    """Mean number of the actor's turns in a response."""
    observation_tokens: NonNegative = 0.0
    """Mean tokens that the environment adds after a turn; they are read, not generated."""
    latency: Latency | None = None
    """None if the environment answers at once."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a way of guessing tokens ahead, by n-grams or a draft model, gets right on the job's responses. Sampling by
    rejection keeps the actor's distribution (arXiv:2211.17192)."""

    acceptance: Annotated[float, Meta(gt=0, lt=1)]
    """Chance that a guessed token is accepted, those before it being so."""
    cost: NonNegative = 0.0
    """Seconds of a guess over those of a plain decode step; 0 for n-grams."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One RL step: `prompts_per_step` x `samples_per_prompt` sequences."""

    tasks: tuple[Task, ...] = ()
    """Needed for real runs only."""
    prompts_per_step: Positive
    samples_per_prompt: Positive
    """The group that advantages are normalised over, if the algorithm does so."""
    minibatches: Positive = 1
    epochs: Positive = 1
    distinct_prompts: Positive | None = None
    """Size of the set of prompts, which a run goes through again and again; None never repeats one."""
    max_prompt_tokens: Positive
    max_response_tokens: Positive
    shared_prefix_tokens: Natural = 0
    """Tokens that all prompts begin with, part of `max_prompt_tokens`."""
    temperature: PositiveFloat = 1.0
    seed: Natural = 0
    oversampling: Annotated[float, Meta(ge=1, le=LARGEST)] = 1.0
    """Sequences started per sequence used; the slowest of a step are abandoned."""
    useful_groups: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of groups with unlike rewards, where the algorithm samples until it has enough of them."""
    speculation: Speculation | None = None
    """None if engines are not to guess tokens ahead, or it is not known how often they would be right."""
    turns: Turns | None = None
    """None for a single response to a prompt."""
    reward_seconds: PositiveFloat | None = None
    """Seconds that a verifier takes for a response on one core; None for the model's prior."""
    full_marks: bool = False
    """Whether a verifier's partial credit counts as nothing. Normalising within a group blows small differences
    up, so that a hint of credit for a wrong answer would count as much as a right one."""
    lengths: Lengths | None = None
    """Given here, or else measured on samples of the actor before a search."""

    @property
    def sequences(self) -> int:
        """Sequences that an RL step trains on."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def started(self) -> float:
        """Sequences started for them: those too that are abandoned, or dropped with their group."""
        return self.sequences * self.oversampling / (self.useful_groups or 1.0)

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens
