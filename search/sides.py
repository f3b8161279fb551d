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
from search.skyline import beaten_by_few

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
    """Seconds below which the pool's options are complete."""

    def place(self, devices: Int) -> NDArray[np.intp]:
        """Number of the largest size of up to so many devices, at least that of the smallest."""
        return np.asarray(np.searchsorted(self.sizes, devices, side="right") - 1)


def side_of(fronts: tuple[SectionFronts, ...], group: int, room: float, most: float, count: int | None) -> Side:
    """Make the options of a pool's sections ready.

    Args:
        fronts: Of its sections.
        group: Where it lies.
        room: Bytes of a device.
        most: Seconds that it may not be busy for.
        count: Sizes are left out if so many smaller ones are as good; None for never.
    """
    of = [{devices for at, devices, _ in front.table.span if at == group} for front in fronts]
    sizes = np.array(sorted(set.intersection(*of)), dtype=np.int64)
    keys = [[front.key(group, devices, 0) for devices in sizes.tolist()] for front in fronts]
    least = np.array([[front.least_of[key] for key in some] for front, some in zip(fronts, keys, strict=True)]).T
    least = least.reshape(len(sizes), len(fronts))
    others = least.sum(axis=1, keepdims=True) - least
    for i, front in enumerate(fronts):
        limits = (most - others[:, i]).tolist()
        front.ask({key: limit for key, limit, floor in zip(keys[i], limits, least[:, i], strict=True) if floor < limit})
    spans = np.array(
        [[front.span.get(key, (0, 0)) for key in some] for front, some in zip(fronts, keys, strict=True)]
    ).reshape(len(fronts), len(sizes), 2)
    first, last = spans[:, :, 0].T, spans[:, :, 1].T
    parts = np.zeros((len(sizes), len(fronts), 5))
    good = np.ones(len(sizes), dtype=bool)
    # Twice, since what the others hold is known only then.
    for i in (*range(len(fronts)), *range(len(fronts) if len(fronts) > 1 else 0)):
        rest = [j for j in range(len(fronts)) if j != i]
        slack, moving = room - parts[:, rest, 2].sum(axis=1), parts[:, rest, 3].max(axis=1, initial=0.0)
        parts[:, i] = fronts[i].made.least_beside(first[:, i], last[:, i], slack, moving)
        good &= np.isfinite(parts[:, i, 0])
        parts[~good] = 0.0
    good &= parts[:, :, 0].sum(axis=1) < most
    kept = np.flatnonzero(good)
    if count is not None and len(fronts) == 1 and fronts[0].op not in TRAINED_BY:
        some = beaten_by_few(np.stack([sizes[kept], parts[kept, 0, 0]], axis=1), count=count)
        kept = kept[np.sort(some)]
    parts = parts[kept]
    return Side(
        sizes=sizes[kept],
        first=first[kept],
        last=last[kept],
        least=parts,
        upto=np.minimum.accumulate(parts[:, :, 0], axis=0),
        busy=np.minimum.accumulate(parts[:, :, 0].sum(axis=1)),
        below=most,
    )
