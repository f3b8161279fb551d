"""Where the weights' way to the engines begins and ends: its seconds between kinds of options, and which options of
the two sections are worth trying together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from search.options import Kinds, Options
from search.skyline import skyline

Float = NDArray[np.float64]
Int = NDArray[np.int64]

MOST_PARTNERS = 6
"""Different partners in weight synchronisation up to which layouts of different degrees are compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """Options of the update and of generation, on two pools and by one method."""

    actor: Kinds
    rollout: Kinds
    seconds: Float
    """Of synchronisation between two kinds, float64[actor's, rollout's]."""

    @cached_property
    def floor(self) -> float:
        """Least of all; infinite where there are no options."""
        return float(self.seconds.min(initial=np.inf))

    def ends(self, *, by_degrees: bool) -> Ends:
        """Options that no other beats with every partner; of the update among those of equal degrees if other sections
        depend on them."""
        a, b = self.actor.of, self.rollout.of
        ours = _worth(self.actor.options, self.seconds[a], self.actor.options.degrees if by_degrees else a * 0)
        theirs = _worth(self.rollout.options, self.seconds.T[b], b * 0)
        return Ends(
            actor=self.actor.begin + ours,
            rollout=self.rollout.begin + theirs,
            floors=self.seconds.min(axis=1, initial=np.inf)[a[ours]],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ends:
    """Options of the two sections between which weights travel that are worth trying together."""

    actor: Int
    """Options of the update."""
    rollout: Int
    """Options of generation."""
    floors: Float
    """Least seconds of synchronisation for each option of the update."""


def _worth(options: Options, sync: Float, kind: Int) -> NDArray[np.intp]:
    """Rows of options that no other beats, the seconds of synchronisation with every partner float64[n, partners]
    included; fastest first."""
    columns = {column.tobytes(): column for column in np.ascontiguousarray(sync.T)}
    different = np.stack(list(columns.values()), axis=1)
    if different.shape[1] > MOST_PARTNERS:
        # Those of a kind were compared when they were made.
        return np.arange(len(different))
    return np.sort(skyline(np.column_stack([options.points, different]), kind))
