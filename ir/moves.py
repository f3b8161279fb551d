"""Moves: pure functions RPEG -> RPEG that change how a step is executed, never what it computes in the limit.

Each says what it changes in memory, traffic and semantics. Whether a move is allowed
is decided before, by `ir.rules`; a move only asserts what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ir.graph import Data, Layout, Op, PoolSpan, Rpeg, State
from ir.job import Role

# Place and shard


def place(rpeg: Rpeg, pools: tuple[PoolSpan, ...], pool_of: Mapping[Op, str]) -> Rpeg:
    """Put every stage on a pool. Stages of one pool take turns; stages of different pools run side by side,
    and weights and batches then have to travel between pools."""
    stages = tuple(replace(stage, pool=pool_of[stage.ops[0]]) for stage in rpeg.stages)
    return replace(rpeg, pools=pools, stages=stages)


def shard(rpeg: Rpeg, layout_of: Mapping[Op, Layout]) -> Rpeg:
    """Give stages their layouts. Replicas divide the batch; tensor, pipeline, context and expert parallelism divide
    a replica's weights, activations and caches and add collectives; micro-batches bound what is held at once;
    recomputation, ZeRO and offload trade computation or traffic for memory. Results differ by rounding only, but
    for fp8, whose products are coarser."""
    stages = tuple(replace(stage, layout=layout_of.get(stage.ops[0], stage.layout)) for stage in rpeg.stages)
    return replace(rpeg, stages=stages)


# Share


def share_reference_adapter(rpeg: Rpeg) -> Rpeg:
    """Run the reference as the actor with its low-rank adapter switched off. Saves the memory of a whole model;
    exact, for the weights below the adapter are those the run started from."""
    return replace(rpeg, shared=(*rpeg.shared, (Role.REFERENCE, Role.ACTOR)))


def share_critic_trunk(rpeg: Rpeg) -> Rpeg:
    """Give the actor a second head that is the critic. Saves a model with its optimizer state, a forward pass for
    values and a whole update; the two losses now pull on the same weights, so their ratio matters to learning."""
    critic = (State.CRITIC_WEIGHTS, State.CRITIC_OPTIMIZER)
    shared = replace(
        rpeg,
        shared=(*rpeg.shared, (Role.CRITIC, Role.ACTOR)),
        state=tuple(edge for edge in rpeg.state if edge.state not in critic),
    )
    return _ride(_ride(shared, Op.VALUES, on=Op.OLD_LOGPROB), Op.UPDATE_CRITIC, on=Op.UPDATE_ACTOR)


def share_reward_trunk(rpeg: Rpeg) -> Rpeg:
    """Give the critic a second head that is the reward model. Saves a model and a forward pass; the reward then moves
    with the trunk unless the critic's loss leaves it in place."""
    shared = replace(rpeg, shared=(*rpeg.shared, (Role.REWARD, Role.CRITIC)))
    return _ride(shared, Op.REWARD, on=Op.VALUES)


def _ride(rpeg: Rpeg, op: Op, *, on: Op) -> Rpeg:
    """Do `op` in the visit of `on`, at no pass of its own; `on` keeps its place."""
    host = rpeg.stage(on)
    stages = tuple(
        replace(stage, ops=_ordered((*stage.ops, op)), riders=(*stage.riders, op)) if stage is host else stage
        for stage in rpeg.stages
        if stage.ops != (op,)
    )
    return replace(rpeg, stages=stages)


# Fuse


def take_rollout_logprobs(rpeg: Rpeg) -> Rpeg:
    """Use the log-probs that the engine sampled with as the old ones. Saves a forward pass over the batch. The ratio
    of the surrogate is then pi / pi_rollout, so that the clip also limits how far stale samples pull; where engine
    and trainer round differently, a capped importance weight has to make up for it."""
    consumers = {edge.target for edge in rpeg.data if edge.source is Op.OLD_LOGPROB}
    offered = {edge.target for edge in rpeg.data if edge.data is Data.ROLLOUT_LOGPROB}
    assert consumers <= offered, "the recipe must offer the rollout's log-probs to whoever needs old ones"
    return _without(rpeg, Op.OLD_LOGPROB)


def fold_old_logprobs(rpeg: Rpeg) -> Rpeg:
    """Take the old log-probs from the update's own forward pass. Exact when there is a single optimizer step per RL
    step, since the actor has not changed yet: the ratio is 1 in value and carries the gradient. Saves a forward
    pass; memory is unchanged."""
    folded = _without(rpeg, Op.OLD_LOGPROB)
    host = folded.stage(Op.UPDATE_ACTOR)
    ridden = replace(host, ops=_ordered((Op.OLD_LOGPROB, *host.ops)), riders=(Op.OLD_LOGPROB, *host.riders))
    return replace(folded, stages=tuple(ridden if stage is host else stage for stage in folded.stages))


def merge_logprobs(rpeg: Rpeg) -> Rpeg:
    """Compute reference and old log-probs in one visit to the batch: micro-batches are built and sent once. Both
    models' weights are touched in turn; results are unchanged."""
    old, reference = rpeg.stage(Op.OLD_LOGPROB), rpeg.stage(Op.REFERENCE_LOGPROB)
    merged = replace(reference, ops=_ordered((*reference.ops, *old.ops)), riders=(*reference.riders, *old.riders))
    stages = tuple(merged if stage is reference else stage for stage in rpeg.stages if stage is not old)
    return replace(rpeg, stages=stages)


_STREAMED = {Op.REWARD, Op.SELECT, Op.REFERENCE_LOGPROB, Op.TEACHER_LOGPROB, Op.VALUES}


def stream(rpeg: Rpeg) -> Rpeg:
    """Hand each finished group to reward, reference, teacher and critic while the rest is still being generated.
    Hides these stages under generation where they have devices of their own; smaller micro-batches cost some
    efficiency."""
    fed = {op for op in _STREAMED if rpeg.stage_of(op) and _can_stream(rpeg, op)}
    data = tuple(replace(edge, streamed=True) if edge.target in fed else edge for edge in rpeg.data)
    return replace(rpeg, data=data)


def _can_stream(rpeg: Rpeg, op: Op) -> bool:
    """Whether an operation can work group by group: its devices do not generate, nothing in its visit needs the whole
    batch, and all that it reads comes group by group."""
    stage, rollout = rpeg.stage(op), rpeg.stage(Op.GENERATE)
    sources = [edge.source for edge in rpeg.data if edge.target is op]
    return (
        stage.pool != rollout.pool
        and _STREAMED.issuperset(stage.ops)
        and all(source in rollout.ops or _can_stream(rpeg, source) for source in sources)
    )


def interleave_updates(rpeg: Rpeg) -> Rpeg:
    """Alternate micro-batches of the critic's and the actor's updates in one visit. Each fills the other's pipeline
    bubbles and waits for collectives; both models' gradients and activations are held at once."""
    critic, actor = rpeg.stage(Op.UPDATE_CRITIC), rpeg.stage(Op.UPDATE_ACTOR)
    both = replace(actor, ops=_ordered((*critic.ops, *actor.ops)), partner=critic.layout)
    stages = tuple(both if stage is actor else stage for stage in rpeg.stages if stage is not critic)
    return replace(rpeg, stages=stages)


def reward_with_generation(rpeg: Rpeg) -> Rpeg:
    """Verify each response on the processors of the pool that generates, the moment it is finished. Hides the verifier
    under generation; the last responses' verification remains, and slow verifiers compete with the engines' host
    side."""
    return _ride(rpeg, Op.REWARD, on=Op.GENERATE)


# Relax


def relax(rpeg: Rpeg, staleness: int, *, in_flight: bool = False) -> Rpeg:
    """Let generation run up to `staleness` updates behind. The rollout pool works ahead instead of waiting, and a
    buffer holds what it is ahead; samples become off-policy, which the importance weight pi_old / pi_rollout
    corrects. In flight, weights are taken between two decode steps: a sample then spans versions, its age is that
    of its oldest token, and cached keys and values of older versions are used on. Otherwise engines finish their
    sequences with the weights they began with."""
    state = tuple(
        replace(edge, staleness=staleness, in_flight=in_flight)
        if edge.state is State.EXPERIENCE or edge.source is Op.SYNC_WEIGHTS
        else edge
        for edge in rpeg.state
    )
    return replace(rpeg, state=state)


def synchronise(rpeg: Rpeg, method: str) -> Rpeg:
    """Choose how new weights travel. `reshard` regroups shards within a pool; `broadcast` gathers whole tensors and
    sends them to every engine; `p2p` sends each engine rank just the parts it holds; `disk` writes and reads a
    checkpoint, which needs no network between the pools and takes longest; `delta` and `delta-disk` compare weights
    with those sent last and send, or write, values that differ and their places. The weights are the same."""
    state = tuple(replace(edge, method=method) if edge.source is Op.SYNC_WEIGHTS else edge for edge in rpeg.state)
    return replace(rpeg, state=state)


def _ordered(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(sorted(ops, key=list(Op).index))


def _without(rpeg: Rpeg, op: Op) -> Rpeg:
    """Drop the stage that does `op` alone, with its edges."""
    assert any(stage.ops == (op,) for stage in rpeg.stages), f"{op} must be a stage of its own"
    return replace(
        rpeg,
        stages=tuple(stage for stage in rpeg.stages if stage.ops != (op,)),
        data=tuple(edge for edge in rpeg.data if op not in (edge.source, edge.target)),
        state=tuple(edge for edge in rpeg.state if edge.target is not op),
    )
