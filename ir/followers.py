"""Sections that a backend runs on the engine of another, or beside engines: what of their layout follows from that; and
how weights are sent between sections that allow it.

Tables of a space take each section by itself, so that a space under such a backend still
holds plans whose sections do not match; `follow` makes them match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ir.backend import Backend, Follower
from ir.batch import CODES, DELTAS, HOME, ROLES, PlanBatch, value_words
from ir.graph import Op
from ir.plan import SECTIONS, Update
from ir.setting import Breach, Mask

Column = NDArray[np.int32]

_BROADCAST = CODES["sync"].index("broadcast")
_OPTIMIZER, _ALL = CODES["offload"].index("optimizer"), CODES["offload"].index("all")


def follower_breaches(batch: PlanBatch, backend: Backend) -> Iterator[Breach]:
    """Plans in which a section is laid out otherwise than the one whose engine it runs on."""
    for follower in backend.follows:
        both = _both(batch, follower)
        for name in follower.fields:
            wanted = _wanted(batch, follower, name)
            differs = [batch[f"{follower.op}.{field}"] != column for field, column in wanted.items()]
            yield Breach(
                name=f"{follower.op}-follows-{follower.leader}",
                path=f"{follower.op}.{next(reversed(wanted))}",
                message=_message(follower, name, backend),
                broken=both & np.logical_or.reduce(differs),
            )
    for op in backend.swaps:
        yield Breach(
            name=f"{op}-waits-for-engines",
            path=f"{op}.offload",
            message=f"must be all exactly if engines share the devices, for the backend {backend.name!r}",
            broken=batch.has(op) & (batch[f"{op}.offload"] != _waiting(batch, op)),
        )
    for name, allowed in backend.deltas.items():
        yield Breach(
            name=f"deltas-need-{name}",
            path="sync",
            message=f"must send whole weights unless {name} is {value_words(name, allowed)}, for the backend "
            f"{backend.name!r}",
            broken=np.isin(batch["sync"], DELTAS) & ~np.isin(batch[name], allowed),
        )


def follow(batch: PlanBatch, backend: Backend | None) -> PlanBatch:
    """The plans with every following section laid out as its leader, and weights broadcast where changes cannot be;
    they need not be legal."""
    for follower in backend.follows if backend is not None else ():
        both, columns = _both(batch, follower), dict(batch.columns)
        for name in follower.fields:
            for field, column in _wanted(PlanBatch(len(batch), columns), follower, name).items():
                path = f"{follower.op}.{field}"
                columns[path] = np.where(both, column, batch[path]).astype(np.int32)
        batch = PlanBatch(len(batch), columns)
    for op in backend.swaps if backend is not None else ():
        waiting = np.where(batch.has(op), _waiting(batch, op), 0).astype(np.int32)
        batch = PlanBatch(len(batch), {**batch.columns, f"{op}.offload": waiting})
    for name, allowed in backend.deltas.items() if backend is not None else ():
        whole = np.isin(batch["sync"], DELTAS) & ~np.isin(batch[name], allowed)
        sync = np.where(whole, _BROADCAST, batch["sync"]).astype(np.int32)
        batch = PlanBatch(len(batch), {**batch.columns, "sync": sync})
    return batch


def _both(batch: PlanBatch, follower: Follower) -> Mask:
    """Plans in which it follows."""
    flagged = batch[follower.flag] > 0 if follower.flag else True
    return np.asarray(batch.has(follower.op) & batch.has(follower.leader) & flagged)


def _message(follower: Follower, name: str, backend: Backend) -> str:
    what = {
        "zero": f"must be 3 exactly if {follower.leader}.zero is",
        "stage": f"must be {follower.leader}.zero",
        "kind": f"must be 2 or 3 (of a pass, 3) exactly if {follower.leader}.zero is 2 or 3",
        "dp": f"must be what the degrees of {follower.leader} leave of the pool",
        "shard": f"must be that of {follower.leader} where weights are divided, and 0 elsewhere,",
        "unit": f"must be above 0 exactly if {follower.leader}.micro_tokens is",
    }
    return (
        f"{what.get(name, f'must be that of {follower.leader}')} for the backend {backend.name!r}, "
        "which runs both on one engine"
    )


# What follows, by the name in `Follower.fields`: columns of the follower


def _wanted(batch: PlanBatch, follower: Follower, name: str) -> dict[str, Column]:
    """Fields of the follower as the leader has them."""
    derived = _DERIVED.get(name)
    return derived(batch, follower) if derived else {name: batch[f"{follower.leader}.{name}"]}


def _stage(batch: PlanBatch, follower: Follower) -> Column:
    """The leader's ZeRO stage; 0 where the follower's pool has no further devices to divide over."""
    lead, devices = batch.section(follower.leader), batch[f"devices.{HOME[follower.op]}"]
    return np.where(devices > lead["tp"].astype(np.int64) * lead["pp"], lead["zero"], 0).astype(np.int32)


def _divided(batch: PlanBatch, follower: Follower) -> dict[str, Column]:
    return {"zero": np.where(_stage(batch, follower) == 3, 3, 0).astype(np.int32)}


def _kind(batch: PlanBatch, follower: Follower) -> dict[str, Column]:
    """Its own stage where both are of one kind of trainer."""
    own, leader = batch[f"{follower.op}.zero"], batch[f"{follower.leader}.zero"]
    sharded = leader if SECTIONS[follower.op] is Update else np.full_like(leader, 3)
    wanted = np.where(leader >= 2, sharded, 0).astype(np.int32)
    return {"zero": np.where((own >= 2) != (leader >= 2), wanted, own)}


def _group(batch: PlanBatch, follower: Follower) -> dict[str, Column]:
    """The leader's groups of ranks where the follower's weights are divided."""
    return {"shard": np.where(batch[f"{follower.op}.zero"] == 3, batch[f"{follower.leader}.shard"], 0).astype(np.int32)}


def _left(batch: PlanBatch, follower: Follower) -> dict[str, Column]:
    """Replicas of the leader's degrees that the follower's pool has room for, at least one."""
    lead, devices = batch.section(follower.leader), batch[f"devices.{HOME[follower.op]}"]
    replica = np.maximum(lead["tp"].astype(np.int64) * lead["pp"] * lead["cp"], 1)
    return {"dp": np.maximum(devices // replica, 1).astype(np.int32)}


def _unit(batch: PlanBatch, follower: Follower) -> dict[str, Column]:
    """Its own micro-batches where both are counted in one unit."""
    own, lead = batch.section(follower.op), batch.section(follower.leader)
    unlike = (own["micro_tokens"] > 0) != (lead["micro_tokens"] > 0)
    return {field: np.where(unlike, lead[field], own[field]) for field in ("micro_batch", "micro_tokens")}


_DERIVED: Mapping[str, Callable[[PlanBatch, Follower], dict[str, Column]]] = {
    "zero": _divided,
    "stage": lambda batch, follower: {"zero": _stage(batch, follower)},
    "kind": _kind,
    "shard": _group,
    "dp": _left,
    "unit": _unit,
}


def _waiting(batch: PlanBatch, op: Op) -> Column:
    """What waits in host memory where a model makes room for engines on its devices, and only there."""
    shared = batch[f"place.{HOME[op]}"] == ROLES.index("rollout")
    return np.where(shared, _ALL, np.minimum(batch[f"{op}.offload"], _OPTIMIZER)).astype(np.int32)
