"""What the devices of plans cost an hour, for objectives and limits of money."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analytic.money import HOUR_S, price_per_step
from ir.batch import PlanBatch
from ir.cluster import Cluster
from ir.errors import InputError

Float = NDArray[np.float64]


def price_per_hour(batch: PlanBatch, cluster: Cluster) -> Float:
    """Of all devices of each plan, float64[n].

    Raises:
        InputError: the price of a kind of device that a plan has is not known.
    """
    price = price_per_step(batch, cluster, np.full(len(batch), HOUR_S))
    if price is None:
        raise _unknown(cluster)
    return price


def price_of_groups(cluster: Cluster) -> Float:
    """Of a device of each group, float64[groups].

    Raises:
        InputError: one is not known.
    """
    each = [group.device.price_per_hour for group in cluster.groups]
    if any(price is None for price in each):
        raise _unknown(cluster)
    return np.array(each, dtype=np.float64)


def _unknown(cluster: Cluster) -> InputError:
    rule = "must be given for the job's objective or limits.max_price_per_hour"
    return InputError(f"cluster {cluster.name}: device.price_per_hour", rule)
