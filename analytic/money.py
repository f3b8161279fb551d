"""What a step costs in money and energy, by the devices that a plan holds for as long as the step takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analytic.bounds import devices_of_group
from ir.batch import PlanBatch
from ir.cluster import Cluster
from ir.job import Job

Float = NDArray[np.float64]

HOUR_S = 3600.0


def price_per_step(batch: PlanBatch, cluster: Cluster, step_seconds: Float) -> Float | None:
    """US dollars a step, float64[n]; None where the price of a kind of device is not known."""
    rate = _sum(batch, [group.device.price_per_hour for group in cluster.groups])
    return None if rate is None else rate / HOUR_S * step_seconds


def price_per_million_samples(job: Job, batch: PlanBatch, cluster: Cluster, step_seconds: Float) -> Float | None:
    """US dollars a million trained samples, float64[n]; None where a price is not known."""
    price = price_per_step(batch, cluster, step_seconds)
    return None if price is None else price / job.workload.sequences * 1e6


def energy_per_step(batch: PlanBatch, cluster: Cluster, step_seconds: Float) -> Float | None:
    """Joule a step, float64[n], all devices at their thermal design power: an upper bound without hosts and cooling.
    None where a device's power is not known."""
    watts = _sum(batch, [group.device.watts for group in cluster.groups])
    return None if watts is None else watts * step_seconds


def _sum(batch: PlanBatch, each: list[float | None]) -> Float | None:
    """What all devices of plans come to."""
    total = np.zeros(len(batch))
    for group, value in enumerate(each):
        devices = devices_of_group(batch, group)
        if value is None:
            if devices.any():
                return None
            continue
        total = total + devices * value
    return total
