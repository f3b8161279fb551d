"""Layouts of a section with what they cost, as arrays, and two helpers for rows of arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analytic.distinct import distinct as distinct_rows

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Layouts of a section, arrays of one length; consecutive for a pool, fastest first."""

    seconds: Float
    """Weights laid out anew where they lie not counted."""
    latency: Float
    reshard: Float
    """Seconds that this takes, unless the layout is that of the update."""
    resident: Float
    """Bytes that stay."""
    transient: Float
    """Bytes that come and go, resharded weights not counted."""
    resharded: Float
    """Bytes of those."""
    sent: Float
    """Bytes held while weights travel to engines on the same pool."""
    degrees: Int
    """A number for what an update and the passes over its weights must have alike."""
    kind: Int
    """A number for all fields that something outside the section may depend on."""
    row: Int
    """Of the section's table."""
    free: Int
    """Number of the combination of the fields that no rule reads."""

    @property
    def points(self) -> Float:
        """What layouts are compared in, less being better, float64[n, 7]."""
        memory = (self.resident, self.transient, self.resharded, self.sent)
        return np.stack([self.seconds, self.latency, self.reshard, *memory], axis=1)

    @cached_property
    def parts(self) -> Float:
        """Seconds, latency, resident and transient bytes, and those held in a sync, float64[n, 5]."""
        return np.stack([self.seconds, self.latency, self.resident, self.transient, self.sent], axis=1)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Options:
        """The given ones."""
        return Options(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    def least_beside(self, first: Int, last: Int, slack: Float, moving: Float) -> Float:
        """What none of the options from `first` to `last` is below, as `parts`, float64[n, 5], among those that fit: in
        `slack` bytes with what comes and goes, of which others of the pool need `moving`; infinite if none does."""
        rows, back = distinct(first, last, slack, moving)
        found = np.full((len(rows), 5), np.inf)
        for i, row in enumerate(rows.tolist()):
            some = self.parts[first[row] : last[row]]
            some = some[some[:, 2] + np.maximum(some[:, 3], moving[row]) <= slack[row]]
            found[i] = some.min(axis=0, initial=np.inf)
        return found[back]

    @staticmethod
    def concatenate(parts: list[Options]) -> Options:
        """One after the other."""
        return Options(**{one.name: np.concatenate([getattr(p, one.name) for p in parts]) for one in fields(Options)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kinds:
    """Consecutive options by their kind."""

    options: Options
    begin: int
    """Number of the first option."""
    first: Int
    """Of each kind, the number of an option."""
    of: Int
    """Each option's."""

    @staticmethod
    def among(options: Options, first: int, last: int) -> Kinds:
        """Those of the options from `first` to `last`."""
        some = options.take(slice(first, last))
        _, at, of = np.unique(some.kind, return_index=True, return_inverse=True)
        return Kinds(options=some, begin=first, first=first + at, of=of.reshape(-1))


def nothing() -> Options:
    """No options."""
    none: dict[str, Any] = {
        one.name: np.zeros(0, dtype=np.float64 if one.type == "Float" else np.int64) for one in fields(Options)
    }
    return Options(**none)


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First row of every different combination of columns, and each row's combination."""
    return distinct_rows(columns, len(columns[0]))


def ranges(first: Int, count: Int) -> Int:
    """Consecutive numbers from each of `first`, one after the other."""
    before = np.cumsum(count) - count
    return np.asarray(np.arange(int(count.sum()), dtype=np.int64) + np.repeat(first - before, count))
