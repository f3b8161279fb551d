"""Plans by name: the shapes that frameworks run by default. They are measured like any plan."""

from __future__ import annotations

from collections.abc import Callable

from ir.batch import COLOCATED_POOL, GENERATE_POOL, TRAIN_POOL
from ir.job import Job
from ir.plan import Fusions, Generate, LogProb, Plan, Pool, Update


def colocated_sync(job: Job, devices: int) -> Plan:
    """All stages on all devices, synchronous, log-probs recomputed: the default shape of verl's hybrid engine."""
    return _plan(job, rollout=devices, train=devices, colocated=True, staleness=0)


def disaggregated_sync(job: Job, devices: int) -> Plan:
    """Rollout and training on pools of their own, one waiting for the other."""
    rollout, train = _split(devices)
    return _plan(job, rollout=rollout, train=train, colocated=False, staleness=0)


def one_step_off(job: Job, devices: int) -> Plan:
    """Disaggregated, generation one update behind: verl's one-step-off and NeMo-RL's asynchronous default."""
    rollout, train = _split(devices)
    return _plan(job, rollout=rollout, train=train, colocated=False, staleness=1)


def fully_async(job: Job, devices: int) -> Plan:
    """Disaggregated, generation up to four updates behind with three quarters of the devices: AReaL's shape."""
    rollout, train = _split(devices, rollout_share=0.75)
    return _plan(job, rollout=rollout, train=train, colocated=False, staleness=4)


PRESETS: dict[str, Callable[[Job, int], Plan]] = {
    "colocated-sync": colocated_sync,
    "disaggregated-sync": disaggregated_sync,
    "one-step-off": one_step_off,
    "async": fully_async,
}


def presets(job: Job, devices: int) -> dict[str, Plan]:
    """The presets that exist here: disaggregation needs two devices, staleness the job's leave."""
    plans = {name: make(job, devices) for name, make in PRESETS.items() if devices > 1 or name == "colocated-sync"}
    return {name: plan for name, plan in plans.items() if plan.staleness <= job.limits.max_staleness}


def _split(devices: int, rollout_share: float = 0.5) -> tuple[int, int]:
    rollout = min(max(round(devices * rollout_share), 1), devices - 1)
    return rollout, devices - rollout


def _plan(job: Job, *, rollout: int, train: int, colocated: bool, staleness: int) -> Plan:
    sequences = job.workload.sequences
    minibatch = sequences // job.workload.minibatches
    dp = _largest_power_of_two(train, dividing=minibatch)
    pools = {COLOCATED_POOL: rollout} if colocated else {GENERATE_POOL: rollout, TRAIN_POOL: train}
    names = list(pools)
    return Plan(
        pools=tuple(Pool(name=name, devices=count) for name, count in pools.items()),
        generate=Generate(pool=names[0], concurrency=_power_of_two_at_most(-(-sequences // rollout))),
        logprob=LogProb(pool=names[-1], micro_batch=min(8, _power_of_two_at_most(-(-sequences // train)))),
        update=Update(pool=names[-1], dp=dp, micro_batch=min(4, _power_of_two_at_most(minibatch // dp))),
        fusions=Fusions(),
        staleness=staleness,
    )


def _power_of_two_at_most(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _largest_power_of_two(limit: int, *, dividing: int) -> int:
    power = _power_of_two_at_most(limit)
    while dividing % power:
        power //= 2
    return power
