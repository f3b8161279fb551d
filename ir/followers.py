"""Sections that a backend runs on the engine of another: what of their layout is that one's.

Tables of a space take each section by itself, so that a space under such a backend still
holds plans whose sections do not match; `follow` makes them match.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ir.backend import Backend, Follower
from ir.batch import PlanBatch
from ir.plan import SECTIONS, Update
from ir.setting import Breach, Mask

MICRO = ("micro_batch", "micro_tokens")


def follower_breaches(batch: PlanBatch, backend: Backend) -> Iterator[Breach]:
    """Plans in which a section is laid out otherwise than the one whose engine it runs on."""
    for follower in backend.follows:
        both = _both(batch, follower)
        for name in follower.fields:
            field = {"unit": "micro_tokens", "kind": "zero"}.get(name, name)
            yield Breach(
                name=f"{follower.op}-follows-{follower.leader}",
                path=f"{follower.op}.{field}",
                message=_message(follower, name, backend),
                broken=both & _differs(batch, follower, name),
            )


def _both(batch: PlanBatch, follower: Follower) -> Mask:
    """Plans in which it follows."""
    flagged = batch[follower.flag] > 0 if follower.flag else True
    return np.asarray(batch.has(follower.op) & batch.has(follower.leader) & flagged)


def _message(follower: Follower, name: str, backend: Backend) -> str:
    what = {
        "zero": f"must be 3 exactly if {follower.leader}.zero is",
        "kind": f"must be 2 or 3 (of a pass, 3) exactly if {follower.leader}.zero is 2 or 3",
        "unit": f"must be above 0 exactly if {follower.leader}.micro_tokens is",
    }
    return (
        f"{what.get(name, f'must be that of {follower.leader}')} for the backend {backend.name!r}, "
        "which runs both on one engine"
    )


def _differs(batch: PlanBatch, follower: Follower, name: str) -> Mask:
    if name == "zero":
        return np.asarray((batch[f"{follower.op}.zero"] == 3) != (batch[f"{follower.leader}.zero"] == 3))
    if name == "kind":
        return np.asarray((batch[f"{follower.op}.zero"] >= 2) != (batch[f"{follower.leader}.zero"] >= 2))
    if name == "unit":
        return _unlike_units(batch, follower)
    return np.asarray(batch[f"{follower.op}.{name}"] != batch[f"{follower.leader}.{name}"])


def _unlike_units(batch: PlanBatch, follower: Follower) -> Mask:
    return np.asarray((batch[f"{follower.op}.micro_tokens"] > 0) != (batch[f"{follower.leader}.micro_tokens"] > 0))


def follow(batch: PlanBatch, backend: Backend | None) -> PlanBatch:
    """The plans with every following section laid out as its leader; they need not be legal."""
    for follower in backend.follows if backend is not None else ():
        both = _both(batch, follower)
        columns = {f"{follower.op}.{name}": column for name, column in _followed(batch, follower)}
        kept = {name: np.where(both, column, batch[name]).astype(np.int32) for name, column in columns.items()}
        batch = PlanBatch(len(batch), {**batch.columns, **kept})
    return batch


def _followed(batch: PlanBatch, follower: Follower) -> Iterator[tuple[str, NDArray[np.int32]]]:
    for name in follower.fields:
        if name == "zero":
            yield name, np.where(batch[f"{follower.leader}.zero"] == 3, 3, 0).astype(np.int32)
        elif name == "kind":
            leader = batch[f"{follower.leader}.zero"]
            divided = leader if SECTIONS[follower.op] is Update else np.full_like(leader, 3)
            sharded = np.where(leader >= 2, divided, 0).astype(np.int32)
            yield "zero", np.where(_differs(batch, follower, name), sharded, batch[f"{follower.op}.zero"])
        elif name == "unit":
            unlike = _unlike_units(batch, follower)
            for micro in MICRO:
                yield micro, np.where(unlike, batch[f"{follower.leader}.{micro}"], batch[f"{follower.op}.{micro}"])
        else:
            yield name, batch[f"{follower.leader}.{name}"]
