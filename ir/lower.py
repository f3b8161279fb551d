"""Lowering: (job, plan) -> RPEG, by the algorithm's recipe and the plan's moves in one canonical order."""

from __future__ import annotations

from itertools import accumulate

from ir import moves
from ir.graph import Layout, Op, PoolSpan, Rpeg
from ir.job import Job
from ir.plan import Plan
from ir.recipes import grpo

RECIPES = {"grpo": grpo}


def lower(job: Job, plan: Plan) -> Rpeg:
    """Lay a step of `job` out as `plan` says. The plan must have passed `ir.rules.check`.

    Order: place, shard, fuse, relax. Equal RPEGs mean equal execution.
    """
    rpeg = RECIPES[job.algorithm.name](job)
    rpeg = moves.place(rpeg, _pools(plan), _pool_of(plan))
    rpeg = moves.shard(rpeg, _layouts(plan))
    if plan.fusions.rollout_logprob:
        rpeg = moves.take_rollout_logprobs(rpeg)
    if plan.fusions.fold_old_logprob:
        rpeg = moves.fold_old_logprobs(rpeg)
    if plan.fusions.merge_logprobs:
        rpeg = moves.merge_logprobs(rpeg)
    if plan.fusions.stream:
        rpeg = moves.stream(rpeg)
    return moves.relax(rpeg, plan.staleness)


def _pools(plan: Plan) -> tuple[PoolSpan, ...]:
    firsts = accumulate((pool.devices for pool in plan.pools), initial=0)
    return tuple(
        PoolSpan(name=pool.name, first_device=first, devices=pool.devices)
        for pool, first in zip(plan.pools, firsts, strict=False)
    )


def _pool_of(plan: Plan) -> dict[Op, str]:
    return {op: plan.generate.pool if op is Op.GENERATE else plan.update.pool for op in Op}


def _layouts(plan: Plan) -> dict[Op, Layout]:
    rollout = plan.devices_of(plan.generate.pool)
    train = plan.devices_of(plan.update.pool)
    visit = Layout(ranks=train, micro_batch=plan.logprob.micro_batch)
    return {
        Op.GENERATE: Layout(ranks=rollout, micro_batch=plan.generate.concurrency),
        Op.REWARD: Layout(ranks=train),
        Op.REFERENCE_LOGPROB: visit,
        Op.OLD_LOGPROB: visit,
        Op.UPDATE_ACTOR: Layout(
            ranks=plan.update.dp, micro_batch=plan.update.micro_batch, recompute=plan.update.recompute
        ),
        Op.SYNC_WEIGHTS: Layout(ranks=train),
    }
