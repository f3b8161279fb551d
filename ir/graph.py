"""The RPEG: stages, the data they pass within a step, and the state that crosses steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ir.job import Job
from ir.model import ModelShape


class Op(StrEnum):
    """What a stage does to the batch; a fused stage does several in one visit, in this order."""

    GENERATE = "generate"
    """Sample responses with the rollout weights; gives tokens and the log-probs they were sampled with."""
    REWARD = "reward"
    """Score responses with the task's verifier."""
    REFERENCE_LOGPROB = "reference_logprob"
    """Log-probs of the responses under the frozen reference."""
    OLD_LOGPROB = "old_logprob"
    """Log-probs of the responses under the actor as it is before the step's first update."""
    ADVANTAGE = "advantage"
    """Normalise rewards within each prompt's group."""
    UPDATE_ACTOR = "update_actor"
    """Forward, backward and optimizer steps of the actor."""
    SYNC_WEIGHTS = "sync_weights"
    """Bring the new weights to the engines that generate."""


class Data(StrEnum):
    """What travels on a data edge, per sequence."""

    TOKENS = "tokens"
    ROLLOUT_LOGPROB = "rollout_logprob"
    REWARD = "reward"
    REFERENCE_LOGPROB = "reference_logprob"
    OLD_LOGPROB = "old_logprob"
    ADVANTAGE = "advantage"


ACTOR_WEIGHTS = "actor_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a stage is spread over its pool."""

    ranks: int = 1
    """Devices that take part: engines of a rollout, data-parallel ranks of a pass."""
    micro_batch: int = 1
    """Sequences handled together by a rank: the KV slots of an engine, the micro-batch of a pass."""
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One visit of a pool to the batch."""

    ops: tuple[Op, ...]
    """More than one where stages are fused."""
    pool: str
    layout: Layout

    @property
    def name(self) -> str:
        """Unique within an RPEG; traces and reports use it."""
        return "+".join(self.ops)

    @property
    def key(self) -> str:
        """What the stage's time is modelled and compared under: an update costs the same with the old log-probs
        folded in."""
        return Op.UPDATE_ACTOR if Op.UPDATE_ACTOR in self.ops else self.name


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
    state: str
    staleness: int
    """Most updates that may lie between the version read and the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpan:
    """A pool and the devices it takes."""

    name: str
    first_device: int
    devices: int

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The devices of the pool."""
        return tuple(range(self.first_device, self.first_device + self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpeg:
    """A step laid out: stages in an order that respects every data edge."""

    job: Job
    pools: tuple[PoolSpan, ...]
    stages: tuple[Stage, ...]
    data: tuple[DataEdge, ...]
    state: tuple[StateEdge, ...]

    @property
    def actor(self) -> ModelShape:
        """The model that is trained."""
        return self.job.actor

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
    def staleness(self) -> int:
        """Bound on the age of the weights that generate."""
        return next(edge.staleness for edge in self.state if edge.target is Op.GENERATE)

    @property
    def streamed(self) -> frozenset[Op]:
        """Operations fed by a streamed edge."""
        return frozenset(edge.target for edge in self.data if edge.streamed)
