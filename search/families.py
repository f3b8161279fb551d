"""Plans of one graph: structures that differ in staleness, sync and in-flight updates only, and their pool sizes.

A family's plans have the same stages on the same pools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from analytic.estimate import STREAMED
from ir.batch import HOME
from ir.graph import Op
from search.layouts import SENT
from search.sides import Side
from space.enumerate import Case

Float = NDArray[np.float64]
Int = NDArray[np.int64]


Age = tuple[int, int]
"""Staleness, and whether updates are in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """What plans may use."""

    devices: int
    staleness: int
    memory: float = 1.0
    """Share of a device's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Structures of one graph, all of them stale or none."""

    case: Case
    """Its pools and sections; the staleness is one of several."""
    flags: dict[str, int]
    variants: Int
    """Staleness, whether updates are in flight, the sync method and the number of each structure, int64[v, 4]."""

    @cached_property
    def ages(self) -> tuple[Age, ...]:
        """The different ones of its variants."""
        return tuple(dict.fromkeys((staleness, flies) for staleness, flies, *_ in self.variants.tolist()))

    @cached_property
    def age_of(self) -> Int:
        """Number of each variant's age."""
        return np.array([self.ages.index((staleness, flies)) for staleness, flies, *_ in self.variants.tolist()])

    @cached_property
    def pool_of(self) -> dict[Op, int]:
        """Number of each section's pool."""
        at = {role: i for i, (roles, _) in enumerate(self.case.pools) for role in roles}
        return {op: at[HOME[op]] for op in self.case.sections}

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """Numbers of the pools that neither generate nor train the actor."""
        ends = {self.pool_of[op] for op in SENT}
        return tuple(pool for pool in range(len(self.case.pools)) if pool not in ends)

    @cached_property
    def members(self) -> tuple[tuple[Op, ...], ...]:
        """Sections of each pool."""
        return tuple(tuple(op for op, at in self.pool_of.items() if at == pool) for pool in range(len(self.case.pools)))

    @property
    def is_adapter(self) -> bool:
        """Whether the reference runs on the actor's weights."""
        return bool(self.flags["sharing.reference_adapter"])

    def times(self, op: Op) -> float:
        """How often a section's pass is made: the reference's for two models where both are merged."""
        return 2.0 if op is Op.REFERENCE_LOGPROB and self.flags["fusions.merge_logprobs"] else 1.0

    def is_streamed(self, op: Op) -> bool:
        """Whether a pass waits for generation, so that its batch comes in small pieces."""
        return bool(self.flags["fusions.stream"]) and op in STREAMED and not self.variants[0, 0]

    @cached_property
    def loads(self) -> tuple[tuple[object, ...], ...]:
        """All that the seconds of each pool depend on, beside its size: families of equal loads are as fast at best."""
        return tuple(self._load(pool) for pool in range(len(self.case.pools)))

    def _load(self, pool: int) -> tuple[object, ...]:
        sections = tuple((op, self.times(op), self.is_streamed(op)) for op in self.members[pool])
        adapter = self.is_adapter and Op.REFERENCE_LOGPROB in self.members[pool]
        return self.case.pools[pool][1], adapter, self.ages, sections


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roots:
    """Choices of variant and of sizes of the pools that generate and that train the actor, arrays of one length, with
    bounds on all their plans."""

    family: Family
    sides: dict[int, Side]
    """The other pools, whose sizes are open."""
    variant: Int
    """Number of the variant."""
    sizes: Int
    """int64[n, pools], 0 where open."""
    least: Float
    """float64[n, sections, 5], what no layout is below: see `search.fronts.Options.parts`."""
    busy: Float
    """Seconds of the pool that has most to do, at least."""

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Roots:
        """The given ones."""
        return replace(
            self,
            variant=self.variant[rows],
            sizes=self.sizes[rows],
            least=self.least[rows],
            busy=self.busy[rows],
        )

    @property
    def staleness(self) -> Int:
        """int64[n]."""
        return np.asarray(self.family.variants[self.variant, 0])

    @property
    def devices(self) -> Int:
        """Of the pools whose sizes are chosen, int64[n]."""
        return np.asarray(self.sizes.sum(axis=1))
