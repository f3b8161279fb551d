"""Peak bytes of a device: what stays for the whole step, and the largest of what stages add while they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytic.costs import RESHARDED, Cost
from analytic.setup import Setup
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

    @property
    def peak(self) -> Float:
        """Largest over the pools."""
        largest: Float = np.maximum.reduce(list(self.pools.values()))
        return largest

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
        )


def memory(s: Setup, b: PlanBatch, costs: Mapping[Op, Cost]) -> Memory:
    """Add up what the sections of each pool hold. Weights shared with another role are held once."""
    n = len(b)
    base = np.array([float(machine.device.base_memory_bytes) for machine in s.machines])
    capacity = np.array([float(machine.device.memory_bytes) for machine in s.machines])
    terms: dict[str, Float] = {}
    resident = {role: np.zeros(n) for role in ROLES}
    transient = {role: np.zeros(n) for role in ROLES}
    for op, cost in costs.items():
        held, extra = _held(s, b, op, cost)
        for name, values in (*held.items(), *extra.items()):
            key = f"{ROLE_OF[op] if op is not Op.GENERATE else 'rollout'} {name}".replace("rollout rollout", "rollout")
            terms[key] = np.maximum(terms.get(key, np.zeros(n)), values)
        leader = b[f"place.{HOME[op]}"]
        together, adds = sum(held.values(), np.zeros(n)), sum(extra.values(), np.zeros(n))
        for index, role in enumerate(ROLES):
            here = (leader == index) & (b[f"devices.{HOME[op]}"] > 0)
            resident[role] += np.where(here, together, 0.0)
            transient[role] = np.maximum(transient[role], np.where(here, adds, 0.0))
    pools = {
        role: np.where(
            (b[f"place.{role}"] == index) & (b[f"devices.{role}"] > 0),
            base[b[f"group.{role}"]] + resident[role] + transient[role],
            0.0,
        )
        for index, role in enumerate(ROLES)
    }
    fill = np.maximum.reduce([pools[role] / capacity[b[f"group.{role}"]] for role in ROLES])
    return Memory(pools=pools, fill=fill, terms={"base": base[b["group.actor"]], **terms})


TRAINED_BY: Mapping[Op, Op] = {Op.OLD_LOGPROB: Op.UPDATE_ACTOR, Op.VALUES: Op.UPDATE_CRITIC}
"""Passes over weights that an update holds."""


def laid_out_as_trained(b: PlanBatch, op: Op) -> NDArray[np.bool_]:
    """Where a pass finds the weights of its update laid out as it needs them, bool[n]; False for other sections."""
    update = TRAINED_BY.get(op)
    if update is None:
        return np.zeros(len(b), dtype=bool)
    same = (b[f"{op}.zero"] == 3) == (b[f"{update}.zero"] == 3)
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
