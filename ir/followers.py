"""Sections that a backend runs on the engine of another, or beside engines: what of their layout follows from that.

Tables of a space take each section by itself, so that a space under such a backend still
holds plans whose sections do not match; `follow` makes them match.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ir.backend import Backend, Follower
from ir.batch import CODES, HOME, ROLES, PlanBatch
from ir.graph import Op
from ir.setting import Breach, Mask

MICRO = ("micro_batch", "micro_tokens")
_OPTIMIZER, _ALL = CODES["offload"].index("optimizer"), CODES["offload"].index("all")


def follower_breaches(batch: PlanBatch, backend: Backend) -> Iterator[Breach]:
    """Plans in which a section is laid out otherwise than the one whose engine it runs on."""
    for follower in backend.follows:
        both = batch.has(follower.op) & batch.has(follower.leader)
        for name in follower.fields:
            field = {"unit": "micro_tokens", "stage": "zero"}.get(name, name)
            yield Breach(
                name=f"{follower.op}-follows-{follower.leader}",
                path=f"{follower.op}.{field}",
                message=_message(follower, name, backend),
                broken=both & _differs(batch, follower, name),
            )
    for op in backend.swaps:
        yield Breach(
            name=f"{op}-waits-for-engines",
            path=f"{op}.offload",
            message=f"must be all exactly if engines share the devices, for the backend {backend.name!r}",
            broken=batch.has(op) & (batch[f"{op}.offload"] != _waiting(batch, op)),
        )


def _waiting(batch: PlanBatch, op: Op) -> NDArray[np.int32]:
    """What waits in host memory where a model makes room for engines on its devices, and only there."""
    shared = batch[f"place.{HOME[op]}"] == ROLES.index("rollout")
    return np.where(shared, _ALL, np.minimum(batch[f"{op}.offload"], _OPTIMIZER)).astype(np.int32)


def _message(follower: Follower, name: str, backend: Backend) -> str:
    what = {
        "zero": f"must be 3 exactly if {follower.leader}.zero is",
        "stage": f"must be {follower.leader}.zero",
        "dp": f"must be what the degrees of {follower.leader} leave of the pool",
        "unit": f"must be above 0 exactly if {follower.leader}.micro_tokens is",
    }
    return (
        f"{what.get(name, f'must be that of {follower.leader}')} for the backend {backend.name!r}, "
        "which runs both on one engine"
    )


def _differs(batch: PlanBatch, follower: Follower, name: str) -> Mask:
    if name == "zero":
        return np.asarray((batch[f"{follower.op}.zero"] == 3) != (_stage(batch, follower) == 3))
    if name == "stage":
        return np.asarray(batch[f"{follower.op}.zero"] != _stage(batch, follower))
    if name == "dp":
        return np.asarray(batch[f"{follower.op}.dp"] != _left(batch, follower))
    if name == "unit":
        return _unlike_units(batch, follower)
    return np.asarray(batch[f"{follower.op}.{name}"] != batch[f"{follower.leader}.{name}"])


def _stage(batch: PlanBatch, follower: Follower) -> NDArray[np.int32]:
    """The leader's ZeRO stage; 0 where the follower's pool has no further devices to divide over."""
    lead, devices = batch.section(follower.leader), batch[f"devices.{HOME[follower.op]}"]
    return np.where(devices > lead["tp"].astype(np.int64) * lead["pp"], lead["zero"], 0).astype(np.int32)


def _left(batch: PlanBatch, follower: Follower) -> NDArray[np.int32]:
    """Replicas of the leader's degrees that the follower's pool has room for, at least one."""
    lead, devices = batch.section(follower.leader), batch[f"devices.{HOME[follower.op]}"]
    replica = np.maximum(lead["tp"].astype(np.int64) * lead["pp"] * lead["cp"], 1)
    return np.asarray(np.maximum(devices // replica, 1), dtype=np.int32)


def _unlike_units(batch: PlanBatch, follower: Follower) -> Mask:
    return np.asarray((batch[f"{follower.op}.micro_tokens"] > 0) != (batch[f"{follower.leader}.micro_tokens"] > 0))


def follow(batch: PlanBatch, backend: Backend | None) -> PlanBatch:
    """The plans with every following section laid out as its leader; they need not be legal."""
    for follower in backend.follows if backend is not None else ():
        both = batch.has(follower.op) & batch.has(follower.leader)
        columns = {f"{follower.op}.{name}": column for name, column in _followed(batch, follower)}
        kept = {name: np.where(both, column, batch[name]).astype(np.int32) for name, column in columns.items()}
        batch = PlanBatch(len(batch), {**batch.columns, **kept})
    for op in backend.swaps if backend is not None else ():
        waiting = np.where(batch.has(op), _waiting(batch, op), 0).astype(np.int32)
        batch = PlanBatch(len(batch), {**batch.columns, f"{op}.offload": waiting})
    return batch


def _followed(batch: PlanBatch, follower: Follower) -> Iterator[tuple[str, NDArray[np.int32]]]:
    for name in follower.fields:
        if name == "zero":
            yield name, np.where(_stage(batch, follower) == 3, 3, 0).astype(np.int32)
        elif name == "stage":
            yield "zero", _stage(batch, follower)
        elif name == "dp":
            yield name, _left(batch, follower)
        elif name == "unit":
            unlike = _unlike_units(batch, follower)
            for micro in MICRO:
                yield micro, np.where(unlike, batch[f"{follower.leader}.{micro}"], batch[f"{follower.op}.{micro}"])
        else:
            yield name, batch[f"{follower.leader}.{name}"]
