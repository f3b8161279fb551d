"""Recipes: the base graph of an algorithm, before any move."""

from __future__ import annotations

from ir.graph import ACTOR_WEIGHTS, Data, DataEdge, Layout, Op, Rpeg, Stage, StateEdge
from ir.job import Job


def grpo(job: Job) -> Rpeg:
    """Group-relative policy optimisation: a verifier instead of a critic, a frozen reference if there is a KL term."""
    has_reference = job.algorithm.kl_coefficient > 0
    ops = [op for op in Op if has_reference or op is not Op.REFERENCE_LOGPROB]
    edges = [
        (Op.GENERATE, Op.REWARD, Data.TOKENS),
        (Op.GENERATE, Op.REFERENCE_LOGPROB, Data.TOKENS),
        (Op.GENERATE, Op.OLD_LOGPROB, Data.TOKENS),
        (Op.GENERATE, Op.UPDATE_ACTOR, Data.TOKENS),
        (Op.GENERATE, Op.UPDATE_ACTOR, Data.ROLLOUT_LOGPROB),
        (Op.REWARD, Op.ADVANTAGE, Data.REWARD),
        (Op.ADVANTAGE, Op.UPDATE_ACTOR, Data.ADVANTAGE),
        (Op.REFERENCE_LOGPROB, Op.UPDATE_ACTOR, Data.REFERENCE_LOGPROB),
        (Op.OLD_LOGPROB, Op.UPDATE_ACTOR, Data.OLD_LOGPROB),
    ]
    return Rpeg(
        job=job,
        pools=(),
        stages=tuple(Stage(ops=(op,), pool="", layout=Layout()) for op in ops),
        data=tuple(DataEdge(source=s, target=t, data=d) for s, t, d in edges if s in ops and t in ops),
        state=(
            StateEdge(source=Op.SYNC_WEIGHTS, target=Op.GENERATE, state=ACTOR_WEIGHTS, staleness=0),
            StateEdge(source=Op.UPDATE_ACTOR, target=Op.OLD_LOGPROB, state=ACTOR_WEIGHTS, staleness=0),
            StateEdge(source=Op.UPDATE_ACTOR, target=Op.UPDATE_ACTOR, state=ACTOR_WEIGHTS, staleness=0),
        ),
    )
