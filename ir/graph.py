"""The RPEG: stages, the data they pass within a step, and the state that crosses steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ir.job import Job, Role
from ir.model import ModelShape


class Op(StrEnum):
    """What a stage does to the batch; a fused stage does several in one visit, in this order."""

    GENERATE = "generate"
    """Sample responses with the rollout weights; gives tokens and the log-probs they were sampled with."""
    GREEDY = "greedy"
    """One more response a prompt without randomness, a baseline."""
    ENVIRONMENT = "environment"
    """Answer each turn of a response: a tool, a sandbox or a user."""
    REWARD = "reward"
    """Score responses, with the task's verifier or with a reward model."""
    SELECT = "select"
    """Keep the groups that teach something and have more generated until there are enough."""
    REFERENCE_LOGPROB = "reference_logprob"
    """Log-probs of the responses under the frozen reference."""
    TEACHER_LOGPROB = "teacher_logprob"
    """Log-probs of the responses under a frozen teacher."""
    OLD_LOGPROB = "old_logprob"
    """Log-probs of the responses under the actor as it is before the step's first update."""
    VALUES = "values"
    """The critic's value of every response token."""
    ADVANTAGE = "advantage"
    """Turn rewards into an advantage a token, by the algorithm's baseline."""
    UPDATE_CRITIC = "update_critic"
    """Forward, backward and optimizer steps of the critic."""
    UPDATE_ACTOR = "update_actor"
    """Forward, backward and optimizer steps of the actor."""
    SYNC_WEIGHTS = "sync_weights"
    """Bring the new weights to the engines that generate."""


class Data(StrEnum):
    """What travels on a data edge."""

    TOKENS = "tokens"
    ROLLOUT_LOGPROB = "rollout_logprob"
    GREEDY_TOKENS = "greedy_tokens"
    REWARD = "reward"
    REFERENCE_LOGPROB = "reference_logprob"
    TEACHER_LOGPROB = "teacher_logprob"
    OLD_LOGPROB = "old_logprob"
    VALUES = "values"
    ADVANTAGE = "advantage"
    RETURNS = "returns"


BYTES_PER_SEQUENCE: Mapping[Data, int] = {Data.REWARD: 4}
"""Data that is one number a sequence; all other data has four bytes a token: an id or a float32."""


class State(StrEnum):
    """What crosses steps on a state edge."""

    ACTOR_WEIGHTS = "actor_weights"
    CRITIC_WEIGHTS = "critic_weights"
    ACTOR_OPTIMIZER = "actor_optimizer"
    CRITIC_OPTIMIZER = "critic_optimizer"
    EXPERIENCE = "experience"
    """Finished and unfinished responses that wait for the step they train."""


ROLE_OF: Mapping[Op, Role] = {
    Op.GENERATE: Role.ACTOR,
    Op.GREEDY: Role.ACTOR,
    Op.OLD_LOGPROB: Role.ACTOR,
    Op.UPDATE_ACTOR: Role.ACTOR,
    Op.SYNC_WEIGHTS: Role.ACTOR,
    Op.REFERENCE_LOGPROB: Role.REFERENCE,
    Op.TEACHER_LOGPROB: Role.TEACHER,
    Op.REWARD: Role.REWARD,
    Op.VALUES: Role.CRITIC,
    Op.UPDATE_CRITIC: Role.CRITIC,
}
"""The model whose weights an operation uses; REWARD uses none where a verifier scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a stage is spread over its pool. Degrees multiply: a replica is tp x pp x cp devices."""

    dp: int = 1
    """Replicas that divide the batch: engines of a rollout, data-parallel ranks of a pass."""
    tp: int = 1
    """Tensor parallel: devices that divide every matrix."""
    pp: int = 1
    """Pipeline parallel: devices that divide the layers."""
    vpp: int = 1
    """Pieces of its layers that a pipeline rank interleaves."""
    schedule: str = "1f1b"
    """Order of a pipeline's passes: 1f1b, or zero-bubble, which puts gradients of weights off."""
    cp: int = 1
    """Context parallel: devices that divide a sequence."""
    ep: int = 1
    """Expert parallel: devices, of those of tp x cp x dp, that divide the experts."""
    etp: int = 1
    """Tensor parallel within an expert."""
    micro_batch: int = 0
    """Sequences handled together by a replica: the KV slots of an engine, the micro-batch of a pass. 0: by tokens."""
    micro_tokens: int = 0
    """Tokens packed into a micro-batch of a pass instead; of an engine, prompt tokens taken in a decode step
    (chunked prefill), 0 for whole prompts."""
    zero: int = 0
    """ZeRO stage: what data-parallel ranks divide. 1 optimizer state, 2 gradients too, 3 weights too."""
    shard: int = 0
    """Ranks among which ZeRO divides it, where groups of them have a copy each; 0: among all."""
    recompute: str = "none"
    """Activations computed again in the backward pass: none, selective (the attention core), full (the layer)."""
    offload: str = "none"
    """What lies in host memory while unused: none, optimizer, all; of a frozen model, none or all."""
    precision: str = "native"
    """Number format of matrix products: native (as the weights) or fp8."""
    memory_percent: int = 0
    """Share of a device's memory that an engine takes; 0: what its slots need at their longest."""
    draft_tokens: int = 0
    """Tokens guessed for a sequence before a decode step."""

    @property
    def replica(self) -> int:
        """Devices that hold one copy of the batch's share."""
        return self.tp * self.pp * self.cp

    @property
    def ranks(self) -> int:
        """Devices that take part."""
        return self.dp * self.replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One visit of a pool to the batch."""

    ops: tuple[Op, ...]
    """More than one where stages are fused."""
    pool: str = ""
    layout: Layout = field(default_factory=Layout)
    riders: tuple[Op, ...] = ()
    """Of `ops`, those done on the way of another, without a pass of their own."""
    partner: Layout | None = None
    """Layout of the critic's update where it is interleaved with the actor's, whose `layout` is."""

    @property
    def name(self) -> str:
        """Unique within an RPEG; traces and reports use it."""
        return "+".join(self.ops)

    @property
    def key(self) -> str:
        """What the stage's time is modelled and compared under: an update costs the same with the old log-probs
        folded in."""
        return "+".join(op for op in self.ops if op not in self.riders)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEdge:
    """Data passed from a stage to a later one of the same step."""

    source: Op
    target: Op
    data: Data
    streamed: bool = False
    """Handed over group by group as it is finished, not as a whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEdge:
    """State written in one step and read in a later one."""

    source: Op
    target: Op
    state: State
    staleness: int = 0
    """Most updates that may lie between the version read and the newest."""
    in_flight: bool = False
    """Whether a new version is taken in the middle of sequences, not only between batches."""
    method: str = ""
    """How weights travel, `ir.plan.Sync`; empty for state that stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpan:
    """A pool and the devices it takes."""

    name: str
    first_device: int
    devices: int
    group: int = 0
    """Which of the cluster's groups of like devices it lies in; devices are numbered within it."""

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The devices of the pool."""
        return tuple(range(self.first_device, self.first_device + self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpeg:
    """A step laid out: stages in an order that respects every data edge."""

    job: Job
    pools: tuple[PoolSpan, ...] = ()
    stages: tuple[Stage, ...]
    data: tuple[DataEdge, ...]
    state: tuple[StateEdge, ...]
    shared: tuple[tuple[Role, Role], ...] = ()
    """(role, role whose weights it runs on), where a model has none of its own."""

    @property
    def actor(self) -> ModelShape:
        """The model that is trained."""
        return self.job.actor

    def weights_of(self, role: Role) -> Role:
        """The role whose weights a role runs on: its own unless shared."""
        return dict(self.shared).get(role, role)

    def stage_of(self, op: Op) -> Stage | None:
        """The stage that does `op`, None if no stage does."""
        return next((stage for stage in self.stages if op in stage.ops), None)

    def stage(self, op: Op) -> Stage:
        """The stage that does `op`; there must be one."""
        found = self.stage_of(op)
        assert found is not None, op
        return found

    def pool(self, name: str) -> PoolSpan:
        """The pool of that name."""
        return next(pool for pool in self.pools if pool.name == name)

    @property
    def colocated(self) -> bool:
        """Whether generation and training take turns on the same devices."""
        return self.stage(Op.GENERATE).pool == self.stage(Op.UPDATE_ACTOR).pool

    @property
    def rollout_weights(self) -> StateEdge:
        """The edge that brings weights to generation."""
        return next(edge for edge in self.state if edge.source is Op.SYNC_WEIGHTS)

    @property
    def staleness(self) -> int:
        """Bound on the age of the weights that generate."""
        return self.rollout_weights.staleness

    @property
    def streamed(self) -> frozenset[Op]:
        """Operations fed by a streamed edge."""
        return frozenset(edge.target for edge in self.data if edge.streamed)
