"""The one entry of the model: prices a batch of plans on a cluster.

A section's cost depends on its own layout and pool, so each different layout is priced
once. Plans of one structure (placement, fusions, shared models) lower to RPEGs that
differ only in numbers, so each structure is lowered once and its plans are composed
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.compose import cycles
from analytic.costs import Columns, Cost
from analytic.distinct import distinct, grouped, largest
from analytic.fit import setup
from analytic.memory import Memory, laid_out_as_trained, memory
from analytic.passes import pass_cost, update_cost
from analytic.rollout import generate_cost
from analytic.scales import scale_of, scaled, scales_at
from analytic.setup import Setup
from analytic.transfer import reward_seconds, sync_seconds
from ir.batch import FLAGS, PlanBatch
from ir.cluster import Cluster
from ir.graph import ROLE_OF, Op, Rpeg, Stage
from ir.job import Job
from ir.lower import lower
from ir.plan import SECTIONS, Generate, Update

Float = NDArray[np.float64]
Rows = NDArray[np.intp]

MODEL_VERSION = "6"
"""Changes with every change of the model's numbers."""

BLOCK = 1 << 16
"""Plans priced at a time."""

PARALLEL_FROM = 4_000_000
"""Plans from which on worker processes save more than they take to start (some seconds)."""

STREAMED = (Op.REFERENCE_LOGPROB, Op.TEACHER_LOGPROB, Op.VALUES, Op.REWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What plans cost, one row a plan."""

    job: Job
    batch: PlanBatch
    stages: tuple[str, ...]
    """Keys of the stages that a plan of the job may have, the columns of `stage_seconds`."""
    stage_seconds: Float
    """float64[n, stages], busy seconds per step of a stage's slowest device; 0 where a plan has no such stage."""
    latency_ratio: Float
    """float64[n], generation's latency over its busy seconds."""
    memory: Memory
    structures: tuple[Rpeg, ...]
    structure: NDArray[np.intp]
    """intp[n], the plan's structure."""
    call_s: float

    @property
    def step_seconds(self) -> Float:
        """float64[n]."""
        return self.compose(self.stage_seconds, np.arange(len(self.batch)))

    def compose(self, stage_seconds: Float, rows: Rows) -> Float:
        """Step seconds float64[..., m] from stage seconds float64[..., m, stages] of the plans `rows` intp[m]:
        the model's composition, open to corrected stage times."""
        longest = np.zeros(stage_seconds.shape[:-1])
        for here, found in self._found(stage_seconds, rows):
            longest[..., here] = largest(found.values())
        return longest

    def cycles(self, stage_seconds: Float, rows: Rows) -> dict[str, Float]:
        """Seconds per step of each cycle, float64[..., m]; 0 where a plan has no such cycle."""
        result: dict[str, Float] = {}
        for here, found in self._found(stage_seconds, rows):
            for name, values in found.items():
                whole = result.setdefault(name, np.zeros(stage_seconds.shape[:-1]))
                whole[..., here] = values
        return result

    def _found(self, stage_seconds: Float, rows: Rows) -> Iterator[tuple[Rows, dict[str, Float]]]:
        """(which of the rows, their cycles) of each structure."""
        staleness, in_flight = self.batch["staleness"].astype(np.int64), self.batch["in_flight"] == 1
        column_of = {key: column for column, key in enumerate(self.stages)}
        for index, here in grouped(self.structure[rows]):

            def seconds_of(stage: Stage, here: Rows = here) -> Float:
                column = column_of.get(stage.key)
                if column is None:
                    return np.zeros((*stage_seconds.shape[:-2], len(here)))
                return stage_seconds[..., column][..., here]

            at, rpeg = rows[here], self.structures[index]
            yield here, cycles(rpeg, seconds_of, self.latency_ratio[at], self.call_s, staleness[at], in_flight[at])


def stage_keys(job: Job) -> tuple[str, ...]:
    """Keys of all stages that take time in some plan of the job; advantages and selection take none that counts."""
    from ir.recipes import RECIPES

    ops = {op for stage in RECIPES[job.algorithm.name](job).stages for op in stage.ops}
    timeless = {Op.ADVANTAGE, Op.SELECT, Op.GREEDY, Op.ENVIRONMENT}
    keys = [str(op) for op in Op if op in ops - timeless]
    if {Op.REFERENCE_LOGPROB, Op.OLD_LOGPROB} <= ops:
        keys.insert(keys.index(Op.OLD_LOGPROB) + 1, f"{Op.REFERENCE_LOGPROB}+{Op.OLD_LOGPROB}")
    if Op.UPDATE_CRITIC in ops:
        keys.insert(keys.index(Op.UPDATE_ACTOR) + 1, f"{Op.UPDATE_CRITIC}+{Op.UPDATE_ACTOR}")
    return tuple(keys)


def section_cost(s: Setup, op: Op, x: Columns, *, streamed: NDArray[np.bool_] | None = None) -> Cost:
    """Price layouts of a section, arrays over layouts of one or several groups of devices.

    Args:
        s: The job and cluster.
        op: The section.
        x: Its columns, with `devices` and `group` of its pool and the plan's `staleness`.
        streamed: Where its batch comes group by group; None for nowhere.
    """
    groups = np.unique(x["group"])
    if len(groups) == 1:
        return _section_cost(s, int(groups[0]), op, x, streamed)
    parts = [np.flatnonzero(x["group"] == group) for group in groups]
    costs = [
        _section_cost(
            s, int(group), op, {n: c[rows] for n, c in x.items()}, None if streamed is None else streamed[rows]
        )
        for group, rows in zip(groups, parts, strict=True)
    ]
    order = np.argsort(np.concatenate(parts), kind="stable")
    return _joined(costs, order)


def _section_cost(s: Setup, group: int, op: Op, x: Columns, streamed: NDArray[np.bool_] | None) -> Cost:
    machine, shape = s.machines[group], s.job.models[ROLE_OF[op]]
    scale = scale_of(machine.device, op)
    if SECTIONS[op] is Generate:
        return scaled(generate_cost(s, machine, shape, x), scale)
    if SECTIONS[op] is Update:
        return scaled(update_cost(s, machine, shape, x), scale)
    trained = op in (Op.OLD_LOGPROB, Op.VALUES)
    limit = None if streamed is None else _streamed_limit(s, x, streamed)
    return scaled(pass_cost(s, machine, shape, x, trained=trained, limit=limit), scale)


def _streamed_limit(s: Setup, x: Columns, streamed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """A pool that waits for generation takes groups one at a time, so its micro-batches are a replica's share of one;
    with staleness the pool is busy and groups pile up."""
    replicas = x["devices"] // (x["tp"] * x["pp"] * x["cp"])
    share = np.maximum(s.job.workload.samples_per_prompt // np.maximum(replicas, 1), 1).astype(np.int64)
    return np.where(streamed & (x["staleness"] == 0), share, s.job.workload.sequences)


def _joined(costs: Sequence[Cost], order: NDArray[np.intp]) -> Cost:
    """Costs of consecutive parts as one, in the given order."""

    def terms(name: str) -> dict[str, Float]:
        keys = dict.fromkeys(key for cost in costs for key in getattr(cost, name))
        blank = [np.zeros(len(cost.seconds)) for cost in costs]
        return {
            key: np.concatenate([getattr(c, name).get(key, zero) for c, zero in zip(costs, blank, strict=True)])[order]
            for key in keys
        }

    return Cost(
        seconds=np.concatenate([cost.seconds for cost in costs])[order],
        latency=np.concatenate([cost.latency for cost in costs])[order],
        reshard=np.concatenate([cost.reshard for cost in costs])[order],
        kinds=terms("kinds"),
        resident=terms("resident"),
        transient=terms("transient"),
    )


def estimate(job: Job, batch: PlanBatch, cluster: Cluster) -> Estimate:
    """Price legal plans. Any number of plans goes through the same code."""
    return _estimate(setup(job, cluster), batch)


def _estimate(s: Setup, batch: PlanBatch) -> Estimate:
    structures, structure = _structures(s.job, batch)
    costs = {op: _costs(s, batch, op) for op in SECTIONS if batch.has(op).any()}
    keys = stage_keys(s.job)
    per_op = {op: cost.seconds + cost.reshard * ~laid_out_as_trained(batch, op) for op, cost in costs.items()} | {
        Op.SYNC_WEIGHTS: sync_seconds(s, batch) * scales_at(s.cluster, Op.SYNC_WEIGHTS, batch["group.actor"]),
        Op.REWARD: costs[Op.REWARD].seconds
        if Op.REWARD in costs
        else reward_seconds(s, batch) * scales_at(s.cluster, Op.REWARD, batch["group.actor"]),
    }
    # One stage after the other in memory, for so they are read.
    seconds = np.zeros((len(keys), len(batch))).T
    stages = [{stage.key: stage for stage in rpeg.stages} for rpeg in structures]
    some = {key: stage for of in stages for key, stage in of.items()}
    for column, key in enumerate(keys):
        if key in some:
            has = np.array([key in of for of in stages])[structure]
            seconds[:, column] = np.where(has, stage_seconds_of(some[key], per_op), 0.0)
    generation = costs[Op.GENERATE]
    return Estimate(
        job=s.job,
        batch=batch,
        stages=keys,
        stage_seconds=seconds,
        latency_ratio=generation.latency / generation.seconds,
        memory=memory(s, batch, costs),
        structures=structures,
        structure=structure,
        call_s=s.cluster.call_s,
    )


def stage_seconds_of(stage: Stage, per_op: dict[Op, Float]) -> Float:
    """A merged visit runs both models with the layout of the reference; interleaved updates hide the smaller's waits,
    which are not modelled, so their times add up."""
    working = [op for op in stage.ops if op not in stage.riders]
    if working == [Op.REFERENCE_LOGPROB, Op.OLD_LOGPROB]:
        return 2.0 * per_op[Op.REFERENCE_LOGPROB]
    return np.asarray(sum(per_op[op] for op in working))


def _costs(s: Setup, batch: PlanBatch, op: Op) -> Cost:
    """The section's cost in every plan but for its kinds, 0 where it is absent; different layouts are priced once."""
    present, x = batch.has(op), batch.section(op)
    x["streamed"] = batch["fusions.stream"] * np.int32(op in STREAMED)
    if op is Op.GENERATE:
        # Engines that do not take weights in flight finish every sequence first, as if nothing were stale.
        x["staleness"] = x["staleness"] * batch["in_flight"]
    rows = None if present.all() else np.flatnonzero(present)
    x = x if rows is None else {name: column[rows] for name, column in x.items()}
    first, layout = distinct(x.values(), len(batch) if rows is None else len(rows))
    unique = {name: column[first] for name, column in x.items()}
    cost = section_cost(s, op, unique, streamed=unique.pop("streamed") == 1)
    if rows is not None:
        # Plans without the section have a layout of their own, the last, which costs nothing.
        layout, there = np.full(len(batch), len(first)), layout
        layout[rows] = there

    def spread(values: Float) -> Float:
        return np.append(values, 0.0).take(layout)

    return Cost(
        seconds=spread(cost.seconds),
        latency=spread(cost.latency),
        reshard=spread(cost.reshard),
        resident={name: spread(values) for name, values in cost.resident.items()},
        transient={name: spread(values) for name, values in cost.transient.items()},
    )


def _structures(job: Job, batch: PlanBatch) -> tuple[tuple[Rpeg, ...], NDArray[np.intp]]:
    """One RPEG per structure, and each plan's."""
    names = [name for name in batch.columns if name in FLAGS or name.startswith("place.")]
    first, structure = distinct((batch[name] for name in names), len(batch))
    return tuple(lower(job, batch.plan(int(row))) for row in first), structure


def estimate_blocks(job: Job, batch: PlanBatch, cluster: Cluster, jobs: int = -1) -> Estimate:
    """As `estimate`, block by block so that temporaries stay in the cache, and on `jobs` cores (-1: all) once
    there are so many plans that starting processes pays."""
    s = setup(job, cluster)
    blocks = [batch.part(start, start + BLOCK) for start in range(0, len(batch), BLOCK)]
    if len(batch) < PARALLEL_FROM or jobs == 1:
        return concatenate([_estimate(s, block) for block in blocks])
    from joblib import Parallel, delayed

    priced = Parallel(n_jobs=jobs)(delayed(_estimate)(s, block) for block in blocks)
    return concatenate(list(priced))


def concatenate(parts: Sequence[Estimate]) -> Estimate:
    """The estimates of consecutive blocks as one."""
    if len(parts) == 1:
        return parts[0]
    structures = list(dict.fromkeys(_shape(r) for part in parts for r in part.structures))
    example = {_shape(r): r for part in parts for r in part.structures}
    index = [np.array([structures.index(_shape(r)) for r in part.structures])[part.structure] for part in parts]
    names = dict.fromkeys(name for part in parts for name in part.batch.columns)
    return Estimate(
        job=parts[0].job,
        batch=PlanBatch(
            sum(len(part.batch) for part in parts),
            {name: np.concatenate([part.batch[name] for part in parts]) for name in names},
        ),
        stages=parts[0].stages,
        stage_seconds=np.concatenate([part.stage_seconds for part in parts]),
        latency_ratio=np.concatenate([part.latency_ratio for part in parts]),
        memory=Memory.concatenate([part.memory for part in parts]),
        structures=tuple(example[key] for key in structures),
        structure=np.concatenate(index),
        call_s=parts[0].call_s,
    )


def _shape(rpeg: Rpeg) -> tuple[object, ...]:
    """What plans of one structure have in common."""
    return tuple(pool.name for pool in rpeg.pools), tuple((stage.ops, stage.pool) for stage in rpeg.stages), rpeg.data
