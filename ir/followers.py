"""Sections that a backend runs on the engine of another: what of their layout is that one's.

Tables of a space take each section by itself, so that a space under such a backend still
holds plans whose sections do not match; `follow` makes them match.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ir.backend import Backend, Follower
from ir.batch import HOME, PlanBatch
from ir.plan import SECTIONS, Pass
from ir.setting import Breach, Mask

MICRO = ("micro_batch", "micro_tokens")


def follower_breaches(batch: PlanBatch, backend: Backend) -> Iterator[Breach]:
    """Plans in which a section is laid out otherwise than the one whose engine it runs on."""
    for follower in backend.follows:
        both = batch.has(follower.op) & batch.has(follower.leader)
        for name in follower.fields:
            field = "micro_tokens" if name == "unit" else name
            yield Breach(
                name=f"{follower.op}-follows-{follower.leader}",
                path=f"{follower.op}.{field}",
                message=_message(follower, name, backend),
                broken=both & _differs(batch, follower, name),
            )


def _message(follower: Follower, name: str, backend: Backend) -> str:
    what = f"must be that of {follower.leader}"
    if name == "zero" and _is_pass(follower):
        what = f"must be 3 exactly if {follower.leader}.zero is and there are devices to divide over"
    if name == "dp":
        what = f"must be what the degrees of {follower.leader} leave of the pool"
    if name == "unit":
        what = f"must be above 0 exactly if {follower.leader}.micro_tokens is"
    return f"{what} for the backend {backend.name!r}, which runs both on one engine"


def _is_pass(follower: Follower) -> bool:
    return SECTIONS[follower.op] is Pass


def _wanted(batch: PlanBatch, follower: Follower, name: str) -> NDArray[np.int32]:
    """A column of the follower as its leader has it."""
    lead = batch.section(follower.leader)
    if name not in ("dp", "zero"):
        return lead[name]
    # Tensors and layers are divided over so many devices; the others are data or context parallel.
    divided = np.maximum(lead["tp"].astype(np.int64) * lead["pp"], 1)
    devices = batch[f"devices.{HOME[follower.op]}"]
    if name == "dp":
        return np.asarray(np.maximum(devices // (divided * np.maximum(lead["cp"], 1)), 1), dtype=np.int32)
    zero = np.where(lead["zero"] == 3, 3, 0) if _is_pass(follower) else lead["zero"]
    return np.where(devices > divided, zero, 0).astype(np.int32)


def _differs(batch: PlanBatch, follower: Follower, name: str) -> Mask:
    if name == "unit":
        return _unlike_units(batch, follower)
    return np.asarray(batch[f"{follower.op}.{name}"] != _wanted(batch, follower, name))


def _unlike_units(batch: PlanBatch, follower: Follower) -> Mask:
    return np.asarray((batch[f"{follower.op}.micro_tokens"] > 0) != (batch[f"{follower.leader}.micro_tokens"] > 0))


def follow(batch: PlanBatch, backend: Backend | None) -> PlanBatch:
    """The plans with every following section laid out as its leader; they need not be legal."""
    for follower in backend.follows if backend is not None else ():
        both = batch.has(follower.op) & batch.has(follower.leader)
        columns = {f"{follower.op}.{name}": column for name, column in _followed(batch, follower)}
        kept = {name: np.where(both, column, batch[name]).astype(np.int32) for name, column in columns.items()}
        batch = PlanBatch(len(batch), {**batch.columns, **kept})
    return batch


def _followed(batch: PlanBatch, follower: Follower) -> Iterator[tuple[str, NDArray[np.int32]]]:
    for name in follower.fields:
        if name == "unit":
            unlike = _unlike_units(batch, follower)
            for micro in MICRO:
                yield micro, np.where(unlike, batch[f"{follower.leader}.{micro}"], batch[f"{follower.op}.{micro}"])
        else:
            yield name, _wanted(batch, follower, name)
