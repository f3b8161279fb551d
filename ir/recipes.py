"""Recipes: the base graph of an algorithm, before any move.

A recipe names the operations an algorithm has beside sampling, the update and the
weights' way back; which data they exchange follows from one table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ir.graph import Data, DataEdge, Op, Rpeg, Stage, State, StateEdge
from ir.job import Job, Role


def ppo(job: Job) -> Rpeg:
    """Proximal policy optimisation: a critic values every token (Schulman et al., arXiv:1707.06347)."""
    return _recipe(job, Op.REWARD, Op.OLD_LOGPROB, Op.VALUES, Op.UPDATE_CRITIC)


def grpo(job: Job) -> Rpeg:
    """Baselines from samples instead of a critic: GRPO and the algorithms whose graph is the same."""
    return _recipe(job, Op.REWARD, Op.OLD_LOGPROB)


def dapo(job: Job) -> Rpeg:
    """GRPO that samples on until enough groups teach something (Yu et al., arXiv:2503.14476)."""
    return _recipe(job, Op.REWARD, Op.SELECT, Op.OLD_LOGPROB)


def remax(job: Job) -> Rpeg:
    """The reward of a greedy response is the baseline (Li et al., arXiv:2310.10505)."""
    return _recipe(job, Op.GREEDY, Op.REWARD, Op.OLD_LOGPROB)


def distillation(job: Job) -> Rpeg:
    """On-policy distillation: the teacher's log-probs of the student's own samples take the reward's place
    (Agarwal et al., arXiv:2306.13649)."""
    return _recipe(job, Op.TEACHER_LOGPROB, Op.OLD_LOGPROB)


RECIPES: dict[str, Callable[[Job], Rpeg]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr-grpo": grpo,
    "dapo": dapo,
    "rloo": grpo,
    "reinforce++": grpo,
    "reinforce++-baseline": grpo,
    "remax": remax,
    "gspo": grpo,
    "cispo": grpo,
    "distillation": distillation,
}

_TOKEN_READERS = (
    Op.REWARD,
    Op.SELECT,
    Op.REFERENCE_LOGPROB,
    Op.TEACHER_LOGPROB,
    Op.OLD_LOGPROB,
    Op.VALUES,
    Op.UPDATE_CRITIC,
    Op.UPDATE_ACTOR,
)

_EDGES: tuple[tuple[Op, Op, Data], ...] = (
    *((Op.GENERATE, target, Data.TOKENS) for target in _TOKEN_READERS),
    (Op.GREEDY, Op.REWARD, Data.GREEDY_TOKENS),
    (Op.GENERATE, Op.SELECT, Data.ROLLOUT_LOGPROB),
    (Op.REWARD, Op.SELECT, Data.REWARD),
    (Op.REWARD, Op.ADVANTAGE, Data.REWARD),
    (Op.TEACHER_LOGPROB, Op.ADVANTAGE, Data.TEACHER_LOGPROB),
    (Op.VALUES, Op.ADVANTAGE, Data.VALUES),
    (Op.VALUES, Op.UPDATE_CRITIC, Data.VALUES),
    (Op.ADVANTAGE, Op.UPDATE_CRITIC, Data.RETURNS),
    (Op.ADVANTAGE, Op.UPDATE_ACTOR, Data.ADVANTAGE),
    (Op.OLD_LOGPROB, Op.UPDATE_ACTOR, Data.OLD_LOGPROB),
    (Op.GENERATE, Op.UPDATE_ACTOR, Data.ROLLOUT_LOGPROB),
)
"""Every edge that a graph has if it has both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What a graph depends on of a job."""

    extra: tuple[Op, ...]
    has_turns: bool
    has_reference: bool
    reference_in_reward: bool
    """Whether rewards, and not the loss, hold the reference against the actor."""
    advantage_reads_old: bool
    """Whether advantages are made from log-probs of the actor too."""


def _recipe(job: Job, *extra: Op) -> Rpeg:
    """The graph of generation, advantage, update and weight sync with the `extra` operations."""
    has_reference = Role.REFERENCE in job.models
    in_reward = job.algorithm.kl_in_reward and has_reference
    stages, data, state = _graph(
        _Traits(
            extra=extra,
            has_turns=bool(job.workload.turns),
            has_reference=has_reference,
            reference_in_reward=in_reward,
            advantage_reads_old=in_reward or job.algorithm.uses_teacher,
        )
    )
    return Rpeg(job=job, stages=stages, data=data, state=state)


@cache
def _graph(traits: _Traits) -> tuple[tuple[Stage, ...], tuple[DataEdge, ...], tuple[StateEdge, ...]]:
    """Stages, data and state; the same for all plans of a job, so made once."""
    rollout = [Op.GENERATE, *(op for op in traits.extra if op is Op.GREEDY)]
    rollout += [Op.ENVIRONMENT] if traits.has_turns else []
    ops = {*rollout, *traits.extra, Op.ADVANTAGE, Op.UPDATE_ACTOR, Op.SYNC_WEIGHTS}
    ops |= {Op.REFERENCE_LOGPROB} if traits.has_reference else set()
    edges = [edge for edge in (*_EDGES, *_penalty_edges(traits)) if edge[0] in ops and edge[1] in ops]
    edges = [_selected(edge) for edge in edges] if Op.SELECT in ops else edges
    later = [op for op in Op if op in ops and op not in rollout]
    return (
        (Stage(ops=tuple(rollout), riders=tuple(rollout[1:])), *(Stage(ops=(op,)) for op in later)),
        tuple(DataEdge(source=s, target=t, data=d) for s, t, d in edges),
        _state(ops),
    )


def _selected(edge: tuple[Op, Op, Data]) -> tuple[Op, Op, Data]:
    """The edge where a selection lies between sampling and training: later operations see what it kept."""
    source, target, data = edge
    passed = source in (Op.GENERATE, Op.REWARD) and target not in (Op.REWARD, Op.SELECT)
    return (Op.SELECT if passed else source), target, data


def _penalty_edges(traits: _Traits) -> list[tuple[Op, Op, Data]]:
    """Where the reference is compared with the actor: in the loss, or in the reward, which then reads both."""
    compared = Op.ADVANTAGE if traits.reference_in_reward else Op.UPDATE_ACTOR
    edges = [(Op.REFERENCE_LOGPROB, compared, Data.REFERENCE_LOGPROB)]
    if traits.advantage_reads_old:
        edges += [
            (Op.OLD_LOGPROB, Op.ADVANTAGE, Data.OLD_LOGPROB),
            (Op.GENERATE, Op.ADVANTAGE, Data.ROLLOUT_LOGPROB),
        ]
    return edges


def _state(ops: set[Op]) -> tuple[StateEdge, ...]:
    """Weights and optimizer of what is trained; responses wait between generation and the update."""
    edges = [
        (Op.SYNC_WEIGHTS, Op.GENERATE, State.ACTOR_WEIGHTS),
        (Op.UPDATE_ACTOR, Op.OLD_LOGPROB, State.ACTOR_WEIGHTS),
        (Op.UPDATE_ACTOR, Op.UPDATE_ACTOR, State.ACTOR_WEIGHTS),
        (Op.UPDATE_ACTOR, Op.UPDATE_ACTOR, State.ACTOR_OPTIMIZER),
        (Op.UPDATE_CRITIC, Op.VALUES, State.CRITIC_WEIGHTS),
        (Op.UPDATE_CRITIC, Op.UPDATE_CRITIC, State.CRITIC_WEIGHTS),
        (Op.UPDATE_CRITIC, Op.UPDATE_CRITIC, State.CRITIC_OPTIMIZER),
        (Op.GENERATE, Op.UPDATE_ACTOR, State.EXPERIENCE),
    ]
    return tuple(StateEdge(source=s, target=t, state=what) for s, t, what in edges if s in ops and t in ops)
