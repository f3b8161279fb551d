"""Moves: pure functions RPEG -> RPEG that change how a step is executed, never what it computes in the limit.

Each says what it changes in memory, traffic and semantics. Whether a move is allowed
is decided before, by `ir.rules`; a move only asserts what it needs.
"""

from __future__ import annotations

from dataclasses import replace

from ir.graph import Data, Layout, Op, PoolSpan, Rpeg, Stage


def place(rpeg: Rpeg, pools: tuple[PoolSpan, ...], pool_of: dict[Op, str]) -> Rpeg:
    """Put every stage on a pool. Stages of one pool take turns; stages of different pools run side by side,
    and weights then have to travel between pools."""
    stages = tuple(replace(stage, pool=pool_of[stage.ops[0]]) for stage in rpeg.stages)
    return replace(rpeg, pools=pools, stages=stages)


def shard(rpeg: Rpeg, layout_of: dict[Op, Layout]) -> Rpeg:
    """Give stages their layouts: ranks divide the batch, micro-batches bound the activations and KV cache held at
    once, recomputation trades a forward pass for activation memory."""
    stages = tuple(replace(stage, layout=layout_of.get(stage.ops[0], stage.layout)) for stage in rpeg.stages)
    return replace(rpeg, stages=stages)


def relax(rpeg: Rpeg, staleness: int) -> Rpeg:
    """Let generation run up to `staleness` updates behind. The rollout pool works ahead instead of waiting; samples
    become off-policy, which the importance weight pi_old / pi_rollout corrects. Weights are taken between two
    decode steps, so a sample may span versions; its age is that of its oldest token."""
    state = tuple(replace(edge, staleness=staleness) if edge.target is Op.GENERATE else edge for edge in rpeg.state)
    return replace(rpeg, state=state)


def take_rollout_logprobs(rpeg: Rpeg) -> Rpeg:
    """Use the log-probs that the engine sampled with as the old ones. Saves a forward pass over the batch. The ratio
    of the surrogate is then pi / pi_rollout, so that the clip also limits how far stale samples pull; engine and
    trainer must compute the same function (here both are float32 and agree to 1e-4)."""
    return _without(rpeg, Op.OLD_LOGPROB, provider=Op.GENERATE, data=Data.ROLLOUT_LOGPROB)


def fold_old_logprobs(rpeg: Rpeg) -> Rpeg:
    """Take the old log-probs from the update's own forward pass. Exact when there is a single optimizer step per RL
    step, since the actor has not changed yet: the ratio is 1 in value and carries the gradient. Saves a forward
    pass; memory is unchanged."""
    folded = _without(rpeg, Op.OLD_LOGPROB, provider=None, data=Data.OLD_LOGPROB)
    return replace(folded, stages=_fused(folded.stages, Op.UPDATE_ACTOR, (Op.OLD_LOGPROB, Op.UPDATE_ACTOR)))


def merge_logprobs(rpeg: Rpeg) -> Rpeg:
    """Compute reference and old log-probs in one visit to the batch: micro-batches are built and sent once. Both
    models' weights are touched in turn; results are unchanged."""
    ops = (Op.REFERENCE_LOGPROB, Op.OLD_LOGPROB)
    stages = tuple(stage for stage in rpeg.stages if stage.ops != (Op.OLD_LOGPROB,))
    return replace(rpeg, stages=_fused(stages, Op.REFERENCE_LOGPROB, ops))


def stream(rpeg: Rpeg) -> Rpeg:
    """Hand each finished group to reward and reference while the rest is still being generated. Hides these stages
    under generation where they have devices of their own; smaller micro-batches cost some efficiency."""
    targets = (Op.REWARD, Op.REFERENCE_LOGPROB)
    data = tuple(replace(edge, streamed=edge.target in targets) for edge in rpeg.data)
    return replace(rpeg, data=data)


def _fused(stages: tuple[Stage, ...], at: Op, ops: tuple[Op, ...]) -> tuple[Stage, ...]:
    return tuple(replace(stage, ops=ops) if stage.ops == (at,) else stage for stage in stages)


def _without(rpeg: Rpeg, op: Op, *, provider: Op | None, data: Data) -> Rpeg:
    """Drop the stage of `op`; its consumers get `data` from `provider`, or make it themselves if None."""
    consumers = {edge.target for edge in rpeg.data if edge.source is op}
    kept = tuple(edge for edge in rpeg.data if op not in (edge.source, edge.target))
    if provider is not None:
        have = {(edge.source, edge.target, edge.data) for edge in kept}
        assert all((provider, target, data) in have for target in consumers), "the recipe must offer the data"
    stages = tuple(stage for stage in rpeg.stages if stage.ops != (op,))
    state = tuple(edge for edge in rpeg.state if edge.target is not op)
    return replace(rpeg, stages=stages, data=kept, state=state)
