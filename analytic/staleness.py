"""How stale the trained samples are, by how fast engines and trainer are: closed forms.

A sample ages while it is generated, if new weights are taken in flight, and while it waits
for its batch. By Little's law it is generated for as many steps as there are sequences live
over sequences trained per step; long responses, which have most tokens, longer in proportion.
Finished samples wait in a queue that the trainer empties a batch at a time: if engines are
slower, each batch is taken when it is whole; if they are faster, the queue is filled up to
its bound and refilled after each batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import Estimate
from analytic.lengths import length_model
from ir.graph import Op

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Updates between the oldest weights that sampled a token and those that the sample trains, float64[n] each."""

    mean: Float
    """Over tokens."""
    largest: Float


def queue_wait(speed: Float, batches: Float) -> Float:
    """Mean steps that a finished sample waits, float64[n].

    Args:
        speed: Samples that engines finish over samples trained in the same time, float64[n].
        batches: Most batches that the queue holds, float64[n].

    The queue falls by a batch at each step and rises evenly: from 0 to 1 batch if engines are slower, else within
    1 / speed of a step up to its bound.
    """
    full = np.maximum(batches, 1.0) - 0.5 / np.maximum(speed, 1e-9)
    return np.where(speed > 1.0, full, 0.5)


def mean_staleness(live: Float, speed: Float, batches: Float, tail: Float | float) -> Float:
    """Mean staleness of samples whose engines take weights in flight, float64[n].

    Args:
        live: Sequences that are generated at a time, over sequences trained per step, float64[n].
        speed: As in `queue_wait`.
        batches: As in `queue_wait`.
        tail: Mean of the squared response lengths over their squared mean.
    """
    return live * tail + queue_wait(speed, batches)


def staleness(estimate: Estimate) -> Staleness:
    """Expected staleness of plans. Those that drain engines at each new version train whole batches that are one step
    old if engines are slower, and as old as the bound allows if they are faster."""
    batch, job = estimate.batch, estimate.job
    bound = batch["staleness"].astype(np.float64)
    response = length_model(job).response
    tail = response.second_moment / response.mean**2
    engines = batch["devices.rollout"] / np.maximum(batch["generate.tp"] * batch["generate.pp"], 1)
    live = np.minimum(engines * batch["generate.concurrency"] / job.workload.sequences, 1.0 + bound)
    speed = _speed(estimate)
    flight = mean_staleness(live, speed, np.maximum(1.0 + bound - live, 1.0), tail)
    drained = np.where(speed > 1.0, bound, 1.0)
    mean = np.minimum(np.where(batch["in_flight"] == 1, flight, drained), bound)
    longest = response.expected_largest(np.full(len(bound), float(job.workload.sequences))) / response.mean
    oldest = np.ceil(live * longest + queue_wait(speed, np.maximum(1.0 + bound - live, 1.0)))
    return Staleness(mean=mean, largest=np.minimum(np.where(batch["in_flight"] == 1, oldest, drained), bound))


def _speed(estimate: Estimate) -> Float:
    """What training takes per step over what generation takes."""
    generate = estimate.stage_seconds[:, estimate.stages.index(str(Op.GENERATE))]
    others = [i for i, key in enumerate(estimate.stages) if key != Op.GENERATE]
    return np.asarray(estimate.stage_seconds[:, others].sum(axis=1) / np.maximum(generate, 1e-12))
