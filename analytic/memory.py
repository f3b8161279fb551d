"""Peak bytes of a device: what stays for the whole step, and the largest of what phases add while they last.

A pool goes through its stages one after the other, so their working memory is not needed at the same time. Where
generation shares it, new weights are laid out for the engines in a phase of its own that holds both copies, and an
engine that sleeps keeps some of its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from analytic.costs import RESHARDED, Cost
from analytic.distinct import largest
from analytic.passes import LONGEST
from analytic.setup import Setup
from analytic.training import training
from ir.batch import HOME, ROLES, PlanBatch
from ir.graph import ROLE_OF, Op

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per device, float64[n] each."""

    pools: dict[str, Float]
    """Peak on the pool of each role; 0 where it is not placed."""
    fill: Float
    """Largest share of a device's memory that is taken, over the pools."""
    terms: dict[str, Float]
    """What the peaks are made of, over all pools."""
    expected: dict[str, Float] = field(default_factory=dict)
    """As `pools`, with micro-batches of mean size: what a short run will show, while `pools` must fit."""

    @property
    def peak(self) -> Float:
        """Largest over the pools."""
        return largest(self.pools.values())

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Memory:
        """Of some plans."""

        def taken(sizes: Mapping[str, Float]) -> dict[str, Float]:
            return {name: size[rows] for name, size in sizes.items()}

        return Memory(
            pools=taken(self.pools), fill=self.fill[rows], terms=taken(self.terms), expected=taken(self.expected)
        )

    @staticmethod
    def concatenate(parts: Sequence[Memory]) -> Memory:
        """Of consecutive blocks of plans."""
        names = dict.fromkeys(name for part in parts for name in part.terms)
        blank = [np.zeros(len(part.fill)) for part in parts]
        return Memory(
            pools={role: np.concatenate([part.pools[role] for part in parts]) for role in ROLES},
            fill=np.concatenate([part.fill for part in parts]),
            terms={
                name: np.concatenate([part.terms.get(name, zero) for part, zero in zip(parts, blank, strict=True)])
                for name in names
            },
            expected={role: np.concatenate([part.expected[role] for part in parts]) for role in ROLES},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a pool holds while a stage runs, float64[n] each and 0 where it runs elsewhere."""

    name: str
    """The section's stage, or the sync of weights."""
    leader: NDArray[np.int32]
    """Role that leads the pool of each plan."""
    terms: dict[str, Float]
    """Beyond what stays."""


def memory(s: Setup, b: PlanBatch, costs: Mapping[Op, Cost]) -> Memory:
    """Add up what the sections of each pool hold. Weights shared with another role are held once."""
    resident, phases = _lifetimes(s, b, costs)
    capacity = np.array([float(machine.device.memory_bytes) for machine in s.machines])
    pools = _pool_peaks(s, b, resident, phases, frozenset())
    fill = largest(pools[role] / capacity[b[f"group.{role}"]] for role in ROLES)
    terms: dict[str, Float] = {"base": _base(s, b, "actor")}
    for phase in (*resident, *phases):
        for name, values in phase.terms.items():
            key = _term_name(phase.name, name)
            terms[key] = np.maximum(terms[key], values) if key in terms else values
    expected = _pool_peaks(s, b, resident, phases, frozenset({LONGEST}))
    return Memory(pools=pools, fill=fill, terms=terms, expected=expected)


def _term_name(stage: str, name: str) -> str:
    """Role and term: what two sections of a role hold alike is told once."""
    role = "rollout" if stage in (Op.GENERATE, "sync") else ROLE_OF[Op(stage)]
    return f"{role} {name}".replace("rollout rollout", "rollout")


def _lifetimes(s: Setup, b: PlanBatch, costs: Mapping[Op, Cost]) -> tuple[list[Phase], list[Phase]]:
    """What stays, by section, and the phases that a pool goes through."""
    resident, phases, n = list[Phase](), list[Phase](), len(b)
    host = np.array([machine.is_host for machine in s.machines])
    for op, cost in costs.items():
        held, extra = _held(s, b, op, cost)
        here = b[f"devices.{HOME[op]}"] > 0
        leader = np.where(here, b[f"place.{HOME[op]}"], -1).astype(np.int32)
        if op is not Op.GENERATE:
            # The engine that shares the pool sleeps meanwhile.
            asleep = here & (leader == b["place.rollout"]) & ~host[b[f"group.{HOME[op]}"]]
            extra["engine asleep"] = training().asleep_bytes * asleep
        resident.append(Phase(name=op, leader=leader, terms=held))
        phases.append(Phase(name=op, leader=leader, terms=extra))
    if Op.GENERATE in costs and Op.UPDATE_ACTOR in costs:
        together = (b["place.actor"] == b["place.rollout"]) & ~host[b["group.actor"]]
        both = {
            "rollout weights": costs[Op.GENERATE].transient.get("rollout weights", np.zeros(n)) * together,
            "trained weights": costs[Op.UPDATE_ACTOR].transient.get("weights", np.zeros(n)) * together,
            "sync buckets": 2.0 * training().sync_bucket_bytes * together,
        }
        phases.append(Phase(name="sync", leader=np.where(together, b["place.actor"], -1).astype(np.int32), terms=both))
    return resident, phases


def _pool_peaks(
    s: Setup, b: PlanBatch, resident: list[Phase], phases: list[Phase], without: frozenset[str]
) -> dict[str, Float]:
    """Bytes at the peak of the pool that each role leads, without the terms of some names; 0 where it leads none."""
    stays = [(phase.leader, _sum(phase, without)) for phase in resident]
    adds = [(phase.leader, _sum(phase, without)) for phase in phases]
    peaks, zero = dict[str, Float](), np.zeros(len(b))
    for index, role in enumerate(ROLES):
        leads = (b[f"place.{role}"] == index) & (b[f"devices.{role}"] > 0)
        if not leads.any():
            peaks[role] = zero
            continue
        held = sum((np.where(leader == index, size, 0.0) for leader, size in stays), _base(s, b, role))
        most = largest([zero, *(np.where(leader == index, size, 0.0) for leader, size in adds)])
        peaks[role] = np.where(leads, held + most, 0.0)
    return peaks


def _sum(phase: Phase, without: frozenset[str] = frozenset()) -> Float:
    return sum((values for name, values in phase.terms.items() if name not in without), np.zeros(len(phase.leader)))


def _base(s: Setup, b: PlanBatch, role: str) -> Float:
    base = np.array([float(machine.device.base_memory_bytes) for machine in s.machines])
    return base[b[f"group.{role}"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why a plan does not fit."""

    pool: str
    """Role that leads the pool that is fullest."""
    phase: str
    """The stage at whose time it is, or `sync`."""
    needed: float
    """Bytes at the peak."""
    capacity: float
    """Bytes that may be taken of a device, the margin left free."""
    terms: tuple[tuple[str, float], ...]
    """(name, bytes) of what the peak is made of, largest first."""

    @property
    def missing(self) -> float:
        """Bytes too many."""
        return self.needed - self.capacity


def shortfall(s: Setup, b: PlanBatch, costs: Mapping[Op, Cost], row: int = 0, margin: float = 0.0) -> Shortfall | None:
    """Which pool of plan `row` does not fit and what it holds; None if all fit with a share `margin` of
    every device to spare."""
    costs = {op: _row_of(cost, row) for op, cost in costs.items() if b.has(op)[row]}
    b = b.take(np.array([row], dtype=np.intp))
    resident, phases = _lifetimes(s, b, costs)
    worst: Shortfall | None = None
    for index, role in enumerate(ROLES):
        if not (b[f"place.{role}"][0] == index and b[f"devices.{role}"][0] > 0):
            continue
        capacity = float(s.machines[int(b[f"group.{role}"][0])].device.memory_bytes) * (1.0 - margin)
        found = _fullest(index, _base(s, b, role), resident, phases)
        needed = sum(size for _, size in found[1])
        if needed > capacity and (worst is None or needed / capacity > worst.needed / worst.capacity):
            worst = Shortfall(pool=role, phase=found[0], needed=needed, capacity=capacity, terms=found[1])
    return worst


def _fullest(
    leader: int, base: Float, resident: list[Phase], phases: list[Phase]
) -> tuple[str, tuple[tuple[str, float], ...]]:
    """(phase, its terms largest first) at the peak of one plan's pool."""
    at = max((p for p in phases if p.leader[0] == leader), key=lambda p: float(_sum(p)[0]))
    held = [p for p in (*resident, at) if p.leader[0] == leader]
    terms = [(_term_name(p.name, name), float(values[0])) for p in held for name, values in p.terms.items()]
    terms = [("base", float(base[0])), *((name, size) for name, size in terms if size > 0)]
    return at.name, tuple(sorted(terms, key=lambda term: -term[1]))


def _row_of(cost: Cost, row: int) -> Cost:
    rows = slice(row, row + 1)
    return replace(
        cost,
        resident={name: values[rows] for name, values in cost.resident.items()},
        transient={name: values[rows] for name, values in cost.transient.items()},
    )


TRAINED_BY: Mapping[Op, Op] = {Op.OLD_LOGPROB: Op.UPDATE_ACTOR, Op.VALUES: Op.UPDATE_CRITIC}
"""Passes over weights that an update holds."""


def laid_out_as_trained(b: PlanBatch, op: Op) -> NDArray[np.bool_]:
    """Where a pass finds the weights of its update laid out as it needs them, bool[n]; False for other sections."""
    update = TRAINED_BY.get(op)
    if update is None:
        return np.zeros(len(b), dtype=bool)
    sharded, trained = b[f"{op}.zero"] == 3, b[f"{update}.zero"] == 3
    same = (sharded == trained) & (~sharded | (b[f"{op}.shard"] == b[f"{update}.shard"]))
    for degree in ("tp", "pp", "ep"):
        same = same & (b[f"{op}.{degree}"] == b[f"{update}.{degree}"])
    return np.asarray(same)


def _held(s: Setup, b: PlanBatch, op: Op, cost: Cost) -> tuple[dict[str, Float], dict[str, Float]]:
    """(resident, transient) bytes of a section, corrected by what depends on the plan's structure."""
    held, extra = dict(cost.resident), dict(cost.transient)
    if RESHARDED in extra:
        extra[RESHARDED] = extra[RESHARDED] * ~laid_out_as_trained(b, op)
    if op is Op.REFERENCE_LOGPROB:
        own = b["sharing.reference_adapter"] == 0
        held["weights"], extra["weights"] = held["weights"] * own, extra["weights"] * own
    group = b[f"group.{HOME[op]}"]
    host = np.array([machine.is_host for machine in s.machines])[group]
    if not host.any():
        return held, extra
    # On cores, engine and trainer of a pool use the same weights, and a worker keeps those that a run starts from; new
    # weights for another pool are flattened and held in transit.
    size, apart = 4.0 * s.job.actor.parameters, b["place.actor"] != 0
    if op is Op.GENERATE:
        weights = extra.pop("rollout weights")
        extra["rollout weights"] = np.where(host, 0.0, weights)
        held["weights"] = np.where(host & apart, 2.0 * size, 0.0)
    if op in (Op.GENERATE, Op.UPDATE_ACTOR):
        held["sync"] = np.where(host & apart, 2.0 * size, 0.0)
    return held, extra
