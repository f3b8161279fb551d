"""What no schedule can beat: the work of a step over all devices' peak, and the longest chain of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.device import roofline_of
from analytic.lengths import LengthModel, length_model
from analytic.speculation import tokens_per_step
from ir.batch import HOME, ROLES, PlanBatch
from ir.cluster import Cluster, Device
from ir.graph import ROLE_OF, Op
from ir.job import Job
from ir.plan import SECTIONS, Pass, Update
from ir.shape import ModelShape

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of plans, float64[n] each."""

    work: dict[Op, Float]
    """FLOP per step of each stage that computes with a model, in matrices and attention; recomputation not counted."""
    depth: dict[Op, Float]
    """Seconds of each stage's longest chain, however many devices share the rest: of generation the longest response,
    each token of which reads the active weights of an engine at the peak bandwidth; of other stages the longest
    sequence's products on the tensor and context parallel devices of a replica."""
    seconds: Float
    """Lower bound of the step: `max(work / (devices x peak), depth / (1 + staleness))`, where the depth is that of the
    longest sequence's way through generation, its slowest pass and its update."""

    def gap(self, step_seconds: Float) -> Float:
        """How many times the bound a step takes."""
        return step_seconds / self.seconds


def bounds(job: Job, batch: PlanBatch, cluster: Cluster) -> Bounds:
    """Work, depth and lower bounds of plans."""
    lengths = length_model(job)
    work = {
        op: np.where(_runs(batch, op), _flops(job, op, lengths), 0.0) for op in SECTIONS if ROLE_OF[op] in job.models
    }
    longest = _longest(job, lengths)
    depth = {Op.GENERATE: _decode_depth(job, batch, cluster, longest)}
    spent = np.zeros(len(batch))
    for op, flops in work.items():
        peak = _peaks(batch, op, cluster)
        spent = spent + flops / peak
        if op is not Op.GENERATE:
            replica = np.maximum(batch[f"{op}.tp"] * batch[f"{op}.cp"], 1)
            depth[op] = np.where(flops > 0, _pass_flops(job, op, longest) / (peak * replica), 0.0)
    chain = depth[Op.GENERATE] + depth[Op.UPDATE_ACTOR] + _slowest_pass(depth)
    least = np.maximum(spent / _devices(batch), chain / (1.0 + batch["staleness"]))
    return Bounds(work=work, depth=depth, seconds=least)


def _longest(job: Job, lengths: LengthModel) -> float:
    """Tokens of a step's longest response; of a mean one where the slowest are abandoned."""
    if job.workload.oversampling > 1.0:
        return float(lengths.response.mean)
    return float(lengths.response.expected_largest(np.array([max(job.generated_sequences, 1.0)]))[0])


def _slowest_pass(depth: dict[Op, Float]) -> Float:
    """Passes that do not need each other's results may run side by side."""
    passes = [seconds for op, seconds in depth.items() if SECTIONS[op] is Pass]
    return np.asarray(np.maximum.reduce(passes) if passes else 0.0)


def _pass_flops(job: Job, op: Op, longest: float) -> float:
    """FLOP of a sequence of the longest response through a stage, once."""
    shape = job.models[ROLE_OF[op]]
    once = longest * (shape.matmul_flops_per_token + shape.attention_flops_per_token(max(round(longest / 2.0), 1)))
    return once * (_passes(shape) if SECTIONS[op] is Update else 1.0)


def _passes(shape: ModelShape) -> float:
    """Forward passes that an update is worth: the backward pass is two, or one for the inputs of frozen weights."""
    return 2.0 if shape.lora_rank else 3.0


def _peaks(batch: PlanBatch, op: Op, cluster: Cluster) -> Float:
    """FLOP per second of a device of the stage's group."""
    return np.asarray(
        np.select(
            [batch[f"group.{HOME[op]}"] == i for i in range(len(cluster.groups))],
            [_peak(group.device, batch[f"{op}.precision"]) for group in cluster.groups],
        )
    )


def _runs(batch: PlanBatch, op: Op) -> NDArray[np.bool_]:
    """Whether a plan does an operation, in a visit of its own or in a merged one."""
    merged = (batch["fusions.merge_logprobs"] == 1) if op is Op.OLD_LOGPROB else np.zeros(len(batch), dtype=bool)
    return np.asarray(batch.has(op) | merged)


def _flops(job: Job, op: Op, lengths: LengthModel) -> float:
    """FLOP of an operation per RL step."""
    shape, workload = job.models[ROLE_OF[op]], job.workload
    if op is Op.GENERATE:
        return job.generated_sequences * _sequence(shape, lengths, samples=workload.samples_per_prompt)
    once = workload.sequences * _sequence(shape, lengths)
    return once * _passes(shape) * workload.epochs if SECTIONS[op] is Update else once


def _sequence(shape: ModelShape, lengths: LengthModel, samples: int = 1) -> float:
    """FLOP of a forward pass over a sequence, whose prompt is shared by `samples`; only responses need the head."""
    prompt, response, total = lengths.prompt, lengths.response, lengths.total
    head = 2.0 * shape.outputs * shape.hidden
    body = shape.matmul_flops_per_token - head
    tokens = prompt.mean / samples + response.mean
    keys = shape.attention_flops_per_token(max(round(total.second_moment / total.mean / 2.0), 1))
    return float(tokens * (body + keys) + response.mean * head)


def _decode_depth(job: Job, batch: PlanBatch, cluster: Cluster, longest: float) -> Float:
    """Layers follow each other, so that only tensor and expert parallel devices read at the same time; weights are
    read once for all tokens that a step gives a sequence."""
    devices = np.maximum(batch["devices.rollout"].astype(np.float64), 1.0)
    share = np.maximum(batch["generate.tp"], batch["generate.ep"]).astype(np.float64)
    size = job.actor.active_parameters * np.select(
        [batch["group.rollout"] == i for i in range(len(cluster.groups))],
        [group.device.bytes_per_value * 1.0 / _bandwidth(group.device) for group in cluster.groups],
    )
    size = size * np.where(batch["generate.precision"] == 1, 0.5, 1.0)
    tokens = tokens_per_step(job.workload.speculation, batch["generate.draft_tokens"].astype(np.float64))
    return np.asarray(longest / tokens * size / np.clip(share, 1.0, devices))


def _peak(device: Device, precision: NDArray[np.int32]) -> Float:
    """FLOP per second of the data sheet, or of the fitted curve where there is none."""
    native = device.peak_flops.get("bf16") or 1.0 / roofline_of(device).seconds_per_flop
    return np.where(precision == 1, device.peak_flops.get("fp8", native), native)


def _bandwidth(device: Device) -> float:
    return device.peak_bandwidth or max(device.memory_bandwidth, 1.0 / max(roofline_of(device).seconds_per_byte, 1e-15))


def _devices(batch: PlanBatch) -> Float:
    """Devices of all pools together."""
    return np.asarray(sum(devices_of_group(batch, group) for group in range(_groups(batch))), dtype=np.float64)


def _groups(batch: PlanBatch) -> int:
    return 1 + max(int(batch[f"group.{role}"].max(initial=0)) for role in set(HOME.values()))


def devices_of_group(batch: PlanBatch, group: int) -> Float:
    """Devices of a group of like devices that a plan's pools take, float64[n]: each pool is counted at its leader."""
    used = [
        np.where((batch[f"place.{role}"] == index) & (batch[f"group.{role}"] == group), batch[f"devices.{role}"], 0)
        for index, role in enumerate(ROLES)
    ]
    return np.asarray(sum(used), dtype=np.float64)
