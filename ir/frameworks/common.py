"""Conditions that several frameworks have in common."""

from __future__ import annotations

import numpy as np

from ir.backend import Values
from ir.batch import ROLES
from ir.job import Role
from ir.plan import SECTIONS, Update
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

UPDATES = tuple(op for op, kind in SECTIONS.items() if kind is Update)

ONE_KIND_OF_DEVICE: Values = {f"group.{role}": (0,) for role in ROLES}
"""Configurations that speak of one cluster of like nodes."""


def _whole_nodes(x: Columns, s: Section) -> Mask:
    node = s.of_group(x["group"], "node")
    inside = (x["devices"] <= node) & (node % np.maximum(x["devices"], 1) == 0)
    return np.asarray(inside | (x["devices"] % node == 0))


WHOLE_NODES = LayoutRule(
    name="pools-are-whole-nodes",
    ops=tuple(SECTIONS),
    path="pool",
    reads=("devices", "group"),
    holds=_whole_nodes,
    message="must be of whole nodes, or divide one: sizes are configured as nodes x devices per node",
)

UPDATES_FILL_THE_POOL = LayoutRule(
    name="updates-fill-the-pool",
    ops=UPDATES,
    path="dp",
    reads=("devices", "tp", "pp", "cp", "dp"),
    holds=lambda x, s: x["dp"].astype(np.int64) * x["tp"] * x["pp"] * x["cp"] == x["devices"],
    message="times tp, pp and cp must be the devices of the pool, for data parallelism takes what is left",
)


def together(one: Role, other: Role) -> Rule:
    """Two models must be on one pool."""

    def holds(b: Columns, s: Setting) -> Mask | bool:
        return not {one, other} <= set(s.job.models) or np.asarray(b[f"place.{one}"] == b[f"place.{other}"])

    return Rule(
        name=f"{one}-runs-with-the-{other}",
        path="pools",
        reads=(f"place.{one}", f"place.{other}"),
        holds=holds,
        message=f"the {one} must be on the {other}'s pool",
    )
