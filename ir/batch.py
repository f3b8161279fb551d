"""Plans as a structure of arrays: what rules and the model compute on, one plan or a million alike.

A column is named as in plan.toml: `staleness`, `generate.tp`, `fusions.stream`. Where a
plan runs is said by role: `place.actor` is the role that leads the actor's pool,
`devices.actor` that pool's size, `group.actor` its group of devices. Names are written
as their index among the values of `CODES`, flags as 0 and 1. A column that is missing
is 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.graph import Op
from ir.plan import SECTIONS, Fusions, Plan, Pool, Sharing

Column = NDArray[np.int32]

PLACED: Mapping[str, Op] = {
    "rollout": Op.GENERATE,
    "actor": Op.UPDATE_ACTOR,
    "critic": Op.UPDATE_CRITIC,
    "reference": Op.REFERENCE_LOGPROB,
    "reward": Op.REWARD,
    "teacher": Op.TEACHER_LOGPROB,
}
"""What is put on pools, in the order that decides who leads a pool, and the section that says where."""

ROLES = tuple(PLACED)

HOME: Mapping[Op, str] = {op: role for role, op in PLACED.items()} | {Op.OLD_LOGPROB: "actor", Op.VALUES: "critic"}
"""The role on whose pool a section's stage runs."""

CODES: Mapping[str, tuple[str, ...]] = {
    "sync": ("reshard", "broadcast", "p2p", "disk", "delta", "delta-disk"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "all"),
    "precision": ("native", "fp8"),
    "schedule": ("1f1b", "zero-bubble"),
}
"""Values of the named fields, in the order of their codes."""

DELTAS = tuple(CODES["sync"].index(method) for method in ("delta", "delta-disk"))
"""Methods of weight sync that send changed values only."""


def value_words(column: str, values: tuple[int, ...]) -> str:
    """Values of a column as a rule names them."""
    names = CODES.get(column.rpartition(".")[2])
    return " or ".join(names[code] if names else str(code) for code in values)


FUSIONS = tuple(f"fusions.{name}" for name in Fusions.__struct_fields__)
SHARING = tuple(f"sharing.{name}" for name in Sharing.__struct_fields__)
FLAGS = (*FUSIONS, *SHARING)

REMOVED_BY: Mapping[Op, tuple[str, ...]] = {
    Op.OLD_LOGPROB: ("fusions.rollout_logprob", "fusions.fold_old_logprob", "fusions.merge_logprobs"),
    Op.VALUES: ("sharing.critic_trunk",),
    Op.UPDATE_CRITIC: ("sharing.critic_trunk",),
    Op.REWARD: ("sharing.reward_trunk",),
}
"""Flags that take a stage's section away: it is done on the way of another."""


def fields_of(op: Op) -> tuple[str, ...]:
    """Names of a section's columns without their prefix."""
    return tuple(name for name in SECTIONS[op].__struct_fields__ if name != "pool")


_FIELDS: Mapping[Op, tuple[tuple[str, str], ...]] = {
    op: tuple((n, f"{op}.{n}") for n in fields_of(op)) for op in SECTIONS
}
"""(field, column) of every section."""


def owner_of(column: str) -> Op | None:
    """The section that a column belongs to, None for the plan's structure."""
    prefix = column.partition(".")[0]
    return next((op for op in SECTIONS if op == prefix), None)


COLUMNS: tuple[str, ...] = (
    "staleness",
    "in_flight",
    "sync",
    *(f"{what}.{role}" for what in ("place", "group", "devices") for role in ROLES),
    *FLAGS,
    *(f"{op}.{name}" for op in SECTIONS for name in fields_of(op)),
)
"""Every column there may be, in the canonical order."""

POOL_NAMES = {"actor": "train"}
"""Pools are called by the role that leads them, but for the pool that trains the actor without generating."""


_ZERO = np.int32(0)


@dataclass(frozen=True, slots=True)
class PlanBatch:
    """Columns int32[n] of n plans."""

    num_plans: int
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_plans

    def __getitem__(self, name: str) -> Column:
        column = self.columns.get(name)
        return np.broadcast_to(_ZERO, self.num_plans) if column is None else column

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> PlanBatch:
        """The given rows."""
        count = int(rows.sum()) if rows.dtype == np.bool_ else len(rows)
        return PlanBatch(count, {name: column[rows] for name, column in self.columns.items()})

    def part(self, first: int, end: int) -> PlanBatch:
        """The rows from `first` to before `end`, or to the last, not copied."""
        count = len(range(self.num_plans)[first:end])
        return PlanBatch(count, {name: column[first:end] for name, column in self.columns.items()})

    def has(self, op: Op) -> NDArray[np.bool_]:
        """Which plans have the section of `op`, bool[n]: its role is placed and no flag takes it away."""
        present: NDArray[np.bool_] = self[f"devices.{HOME[op]}"] > 0
        for flag in REMOVED_BY.get(op, ()):
            present = present & (self[flag] == 0)
        return present

    def section(self, op: Op) -> dict[str, Column]:
        """A section's columns by field, with `devices` and `group` of its pool and the plan's `staleness`
        and `in_flight`."""
        home = HOME[op]
        columns = {name: self[column] for name, column in _FIELDS[op]}
        return columns | {
            "devices": self[f"devices.{home}"],
            "group": self[f"group.{home}"],
            "staleness": self["staleness"],
            "in_flight": self["in_flight"],
        }

    def plan(self, row: int) -> Plan:
        """One row as a plan, with the canonical pool names."""
        value = {name: int(column[row]) for name, column in self.columns.items()}
        roles = [role for role in ROLES if value.get(f"devices.{role}", 0)]
        leader = {role: ROLES[value.get(f"place.{role}", 0)] for role in roles}
        leaders = [role for role in roles if leader[role] == role]
        names = {lead: "all" if len(leaders) == 1 else POOL_NAMES.get(lead, lead) for lead in leaders}
        sections: dict[str, Any] = {
            str(op): kind(
                pool=names[leader[HOME[op]]],
                **{name: _value(name, value.get(column, 0)) for name, column in _FIELDS[op]},
            )
            for op, kind in SECTIONS.items()
            if value.get(f"devices.{HOME[op]}", 0) and not any(value.get(flag, 0) for flag in REMOVED_BY.get(op, ()))
        }
        return Plan(
            pools=tuple(
                Pool(name=names[lead], devices=value[f"devices.{lead}"], group=value.get(f"group.{lead}", 0))
                for lead in leaders
            ),
            fusions=Fusions(**_flags("fusions", value)),
            sharing=Sharing(**_flags("sharing", value)),
            staleness=value.get("staleness", 0),
            in_flight=bool(value.get("in_flight", 0)),
            sync=_value("sync", value.get("sync", 0)),
            **sections,
        )


def _value(name: str, code: int) -> Any:
    return CODES[name][code] if name in CODES else code


def _code(name: str, value: Any) -> int:
    return CODES[name].index(value) if name in CODES else int(value)


def _flags(group: str, value: Mapping[str, int]) -> dict[str, bool]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): bool(value.get(name, 0)) for name in FLAGS if name.startswith(prefix)}


def concatenate(batches: list[PlanBatch]) -> PlanBatch:
    """Batches one after the other."""
    if len(batches) == 1:
        return batches[0]
    names = [name for name in COLUMNS if any(name in batch.columns for batch in batches)]
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
    return PlanBatch(sum(map(len, batches)), columns)


def batch_of(plans: Sequence[Plan]) -> PlanBatch:
    """The given plans as arrays. A plan's pools must be named once and exist."""
    rows = [_row(plan) for plan in plans]
    names = [name for name in COLUMNS if any(row.get(name) for row in rows)]
    columns = {name: np.array([row.get(name, 0) for row in rows], dtype=np.int32) for name in names}
    return PlanBatch(len(rows), columns)


def _row(plan: Plan) -> dict[str, int]:
    row = {"staleness": plan.staleness, "in_flight": int(plan.in_flight), "sync": _code("sync", plan.sync)}
    row |= {f"fusions.{name}": int(getattr(plan.fusions, name)) for name in Fusions.__struct_fields__}
    row |= {f"sharing.{name}": int(getattr(plan.sharing, name)) for name in Sharing.__struct_fields__}
    for op, section in plan.sections.items():
        row |= {f"{op}.{name}": _code(name, getattr(section, name)) for name in fields_of(op)}
    return row | _places(plan)


def _places(plan: Plan) -> dict[str, int]:
    """Leader, size and group of every role's pool. A role whose sections are shared away goes with its host."""
    pool_of = {role: getattr(plan, op).pool for role, op in PLACED.items() if getattr(plan, op) is not None}
    if plan.sharing.critic_trunk:
        pool_of["critic"] = pool_of["actor"]
    if plan.sharing.reward_trunk and "critic" in pool_of:
        pool_of["reward"] = pool_of["critic"]
    pools = {pool.name: pool for pool in plan.pools}
    leader: dict[str, int] = {}
    row: dict[str, int] = {}
    for index, role in enumerate(ROLES):
        if role in pool_of:
            name = pool_of[role]
            row[f"place.{role}"] = leader.setdefault(name, index)
            row[f"devices.{role}"] = pools[name].devices
            row[f"group.{role}"] = pools[name].group
    return row
