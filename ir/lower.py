"""Lowering: (job, plan) -> RPEG, by the algorithm's recipe and the plan's moves in one canonical order."""

from __future__ import annotations

from ir import moves
from ir.graph import Layout, Op, PoolSpan, Rpeg
from ir.job import Job
from ir.plan import Generate, Pass, Plan, Update
from ir.recipes import RECIPES


def lower(job: Job, plan: Plan) -> Rpeg:
    """Lay a step of `job` out as `plan` says. The plan must have passed `ir.rules.check`.

    Order: place, shard, share, fuse, relax. Equal RPEGs mean equal execution.
    """
    rpeg = RECIPES[job.algorithm.name](job)
    rpeg = moves.place(rpeg, _pools(plan), _pool_of(plan))
    rpeg = moves.shard(rpeg, _layouts(plan))
    for wanted, move in (
        (plan.sharing.reference_adapter, moves.share_reference_adapter),
        (plan.sharing.critic_trunk, moves.share_critic_trunk),
        (plan.sharing.reward_trunk, moves.share_reward_trunk),
        (plan.fusions.rollout_logprob, moves.take_rollout_logprobs),
        (plan.fusions.fold_old_logprob, moves.fold_old_logprobs),
        (plan.fusions.merge_logprobs, moves.merge_logprobs),
        (plan.fusions.interleave_updates, moves.interleave_updates),
        (plan.fusions.reward_with_generation, moves.reward_with_generation),
        (plan.fusions.stream, moves.stream),
    ):
        if wanted:
            rpeg = move(rpeg)
    return moves.synchronise(moves.relax(rpeg, plan.staleness, in_flight=plan.in_flight), plan.sync)


def _pools(plan: Plan) -> tuple[PoolSpan, ...]:
    """Pools take the devices of their group in order."""
    taken: dict[int, int] = {}
    spans = []
    for pool in plan.pools:
        first = taken.get(pool.group, 0)
        spans.append(PoolSpan(name=pool.name, first_device=first, devices=pool.devices, group=pool.group))
        taken[pool.group] = first + pool.devices
    return tuple(spans)


def _pool_of(plan: Plan) -> dict[Op, str]:
    """Operations without a section run where the actor trains."""
    return {op: plan.update_actor.pool for op in Op} | {op: section.pool for op, section in plan.sections.items()}


def _layouts(plan: Plan) -> dict[Op, Layout]:
    whole = Layout(dp=plan.devices_of(plan.update_actor.pool))
    free = {op: whole for op in (Op.REWARD, Op.SELECT, Op.SYNC_WEIGHTS)}
    sections = {op: _layout(section, plan.devices_of(section.pool)) for op, section in plan.sections.items()}
    # Advantages are made on one device, from all rewards.
    return free | {Op.ADVANTAGE: Layout()} | sections


def _layout(section: Generate | Pass | Update, devices: int) -> Layout:
    match section:
        case Generate():
            return Layout(
                dp=devices // (section.tp * section.pp),
                tp=section.tp,
                pp=section.pp,
                ep=section.ep,
                micro_batch=section.concurrency,
                micro_tokens=section.prefill_tokens,
                memory_percent=section.memory_percent,
                draft_tokens=section.draft_tokens,
                precision=section.precision,
            )
        case Pass():
            return Layout(
                dp=devices // (section.tp * section.pp * section.cp),
                tp=section.tp,
                pp=section.pp,
                cp=section.cp,
                ep=section.ep,
                zero=section.zero,
                shard=section.shard,
                micro_batch=section.micro_batch,
                micro_tokens=section.micro_tokens,
                offload=section.offload,
            )
    return Layout(**{name: getattr(section, name) for name in section.__struct_fields__ if name != "pool"})
