"""Axes of the design space: each is a column of `PlanBatch` with the values it may take.

A plan's *levels* are the indices of its values on the axes. Encoding plans as levels
and back is a bijection on the space.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ir.batch import COLUMNS, PlanBatch
from ir.errors import InputError
from ir.job import Job

Levels = NDArray[np.int64]

VERSION = "1"
"""Version of the axes in traces; a change that old rows cannot be read under needs a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One degree of freedom."""

    name: str
    """A column of `PlanBatch`."""
    values: tuple[int, ...]
    """Ascending."""
    ordered: bool
    """Whether neighbouring values behave alike; otherwise they are mere labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The axes, in the order of `PlanBatch`'s columns."""

    axes: tuple[Axis, ...]

    @property
    def num_combinations(self) -> int:
        """All combinations of values, legal or not."""
        total = 1
        for axis in self.axes:
            total *= len(axis.values)
        return total

    def encode(self, batch: PlanBatch) -> Levels:
        """Levels int64[n, axes] of plans.

        Raises:
            InputError: a value that its axis does not have.
        """
        columns = []
        for axis in self.axes:
            values = np.asarray(axis.values)
            column = getattr(batch, axis.name)
            level = np.minimum(np.searchsorted(values, column), len(values) - 1)
            if not np.array_equal(values[level], column):
                got = int(column[values[level] != column][0])
                raise InputError(f"axis {axis.name}", f"must be one of {list(axis.values)}", got)
            columns.append(level)
        return np.stack(columns, axis=1)

    def decode(self, levels: Levels) -> PlanBatch:
        """Plans of levels int64[n, axes]."""
        return PlanBatch(**{axis.name: np.asarray(axis.values)[levels[:, i]] for i, axis in enumerate(self.axes)})


def default_space(job: Job, devices: int) -> Space:
    """Every axis with every value that some legal plan of the job on that many devices takes."""
    sequences = job.workload.sequences
    powers = _powers_of_two(sequences)
    ahead = _powers_of_two(sequences * (1 + job.limits.max_staleness))
    share = max(sequences // devices, 1)
    sizes = tuple(range(1, devices + 1))
    flag = (0, 1)
    values: dict[str, tuple[tuple[int, ...], bool]] = {
        "colocated": (flag, False),
        "generate_devices": (sizes, True),
        "train_devices": (sizes, True),
        "staleness": (tuple(range(job.limits.max_staleness + 1)), True),
        "concurrency": (_from(8, ahead, share), True),
        "logprob_micro_batch": (_from(4, powers, share), True),
        "dp": (_powers_of_two(devices), True),
        "update_micro_batch": (_from(4, powers, max(share // job.workload.minibatches, 1)), True),
        "recompute": (flag, False),
        "rollout_logprob": (flag, False),
        "fold_old_logprob": (flag, False),
        "merge_logprobs": (flag, False),
        "stream": (flag, False),
    }
    return Space(axes=tuple(Axis(name=name, values=values[name][0], ordered=values[name][1]) for name in COLUMNS))


def _from(least: int, values: tuple[int, ...], share: int) -> tuple[int, ...]:
    """Values from `least` on, or from a device's `share` of the sequences if that is smaller: batches of fewer are
    slower than any of these on every machine, and would only make the space larger."""
    return tuple(value for value in values if value >= min(least, _powers_of_two(share)[-1]))


def _powers_of_two(limit: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(limit.bit_length()))
