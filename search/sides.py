"""Pools that neither generate nor train the actor: what their sections take by size.

Nothing but their devices and their seconds matters to others, so their sizes stay open while
the other pools are laid out, and one table serves all structures that have such a pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.memory import TRAINED_BY
from search.fronts import SectionFronts
from search.skyline import skyline

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """A pool by its size, arrays over k sizes on which its sections fit together and are done in time."""

    sizes: Int
    """Ascending, int64[k]."""
    first: Int
    """First of each section's options, int64[k, sections]."""
    last: Int
    """One past the last of them."""
    least: Float
    """What no layout is below, float64[k, sections, 5], see `search.options.Options.parts`."""
    upto: Float
    """Seconds below which no layout is on up to so many devices, float64[k, sections]."""
    busy: Float
    """The same for all sections together, float64[k]."""
    below: float
    """Seconds below which the pool's options are complete, on"""
    largest: int
    """sizes up to this."""

    def place(self, devices: Int) -> NDArray[np.intp]:
        """Number of the largest size of up to so many devices, at least that of the smallest."""
        return np.asarray(np.searchsorted(self.sizes, devices, side="right") - 1)


def rough_side(fronts: tuple[SectionFronts, ...], group: int) -> Side:
    """What is known of a pool before its options are: no section's layout is faster than its bound."""
    of = [{devices for at, devices, _ in front.table.span if at == group} for front in fronts]
    sizes = np.array(sorted(set.intersection(*of)), dtype=np.int64)
    least = [[front.least_of[front.key(group, n, 0)][0] for n in sizes.tolist()] for front in fronts]
    parts, none = np.zeros((len(sizes), len(fronts), 5)), np.zeros((len(sizes), len(fronts)), dtype=np.int64)
    parts[:, :, :2] = np.array(least).T.reshape(len(sizes), len(fronts), 1)
    return _side(sizes, none, none, parts, below=0.0, largest=0)


def side_of(
    rough: Side, fronts: tuple[SectionFronts, ...], group: int, room: float, *, most: float, largest: int, thrifty: bool
) -> Side:
    """Make the options of a pool's sections ready.

    Args:
        rough: What is known of it.
        fronts: Of its sections.
        group: Where it lies.
        room: Bytes of a device.
        most: Seconds that it may not be busy for.
        largest: Devices that it may have.
        thrifty: Whether sizes are left out if a smaller one is as fast.
    """
    kept = np.flatnonzero((rough.sizes <= largest) & (rough.least[:, :, 0].sum(axis=1) < most))
    sizes, least = rough.sizes[kept], rough.least[kept, :, 0]
    spans = np.zeros((2, len(sizes), len(fronts)), dtype=np.int64)
    for i, front in enumerate(fronts):
        keys = [front.key(group, devices, 0) for devices in sizes.tolist()]
        limits = most - np.delete(least, i, axis=1).sum(axis=1)
        front.ask(dict(zip(keys, limits.tolist(), strict=True)))
        spans[:, :, i] = np.array([front.span[key] for key in keys], dtype=np.int64).reshape(-1, 2).T
    parts, good = _parts(fronts, spans, room)
    good &= parts[:, :, 0].sum(axis=1) < most
    if thrifty and len(fronts) == 1 and fronts[0].op not in TRAINED_BY:
        # Its seconds are all that others see of it.
        points = np.stack([sizes, parts[:, 0, 0]], axis=1)[good]
        good[np.delete(np.flatnonzero(good), skyline(points))] = False
    return _side(sizes[good], spans[0][good], spans[1][good], parts[good], below=most, largest=largest)


def _parts(fronts: tuple[SectionFronts, ...], spans: Int, room: float) -> tuple[Float, NDArray[np.bool_]]:
    """What no layout of a section is below that fits beside the others, by size, and where there is one."""
    parts, good = np.zeros((*spans.shape[1:], 5)), np.ones(spans.shape[1], dtype=bool)
    # Twice, since what the others hold is known only then.
    for i in (*range(len(fronts)), *(range(len(fronts)) if len(fronts) > 1 else ())):
        others = np.delete(parts, i, axis=1)
        slack, moving = room - others[:, :, 2].sum(axis=1), others[:, :, 3].max(axis=1, initial=0.0)
        parts[:, i] = fronts[i].made.least_beside(spans[0, :, i], spans[1, :, i], slack, moving)
        good &= np.isfinite(parts[:, i, 0])
        parts[~good] = 0.0
    return parts, good


def _side(sizes: Int, first: Int, last: Int, parts: Float, *, below: float, largest: int) -> Side:
    return Side(
        sizes=sizes,
        first=first,
        last=last,
        least=parts,
        upto=np.minimum.accumulate(parts[:, :, 0], axis=0),
        busy=np.minimum.accumulate(parts[:, :, 0].sum(axis=1)),
        below=below,
        largest=largest,
    )
