"""The space in factors: structures, and per section the layouts that are legal on a pool.

Given a plan's structure and the sizes of its pools, sections do not depend on each other,
so the legal plans are the product of their tables. A table is joined column by column,
and a rule drops rows as soon as all columns it reads are there. Columns that no rule
reads are not joined at all: every combination of them is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ir.batch import FLAGS, HOME, ROLES, fields_of
from ir.errors import InputError
from ir.graph import Op
from ir.plan import SECTIONS, Generate
from ir.rules_layout import layout_rules
from ir.rules_structure import SIZES, structure_rules
from ir.setting import Section, Setting
from space.axes import Space

Columns = dict[str, NDArray[np.int32]]
Key = tuple[int, int, int]
"""Group and devices of the pool, and the staleness; 0 for the latter where layouts do not depend on it."""

T = TypeVar("T")

KEYS = ("group", "devices", "staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A rule, or a constraint of the representation, as a join needs it."""

    reads: frozenset[str]
    holds: Callable[[Columns], Any]


def _swapped(holds: Callable[[Columns, T], Any], judged_against: T, rows: Columns) -> Any:
    return holds(rows, judged_against)


def join(values: Sequence[tuple[str, Sequence[int]]], conditions: Iterable[Condition], start: Columns) -> Columns:
    """All combinations of `start`'s rows with the values of further columns that keep the conditions, in
    lexicographic order."""
    rows, waiting = dict(start), list(conditions)
    for name, options in values:
        n = len(next(iter(rows.values())))
        rows = {other: np.repeat(column, len(options)) for other, column in rows.items()}
        rows[name] = np.tile(np.asarray(options, dtype=np.int32), n)
        ready = [c for c in waiting if c.reads <= rows.keys()]
        waiting = [c for c in waiting if not c.reads <= rows.keys()]
        if ready:
            keep = np.ones(n * len(options), dtype=bool)
            for condition in ready:
                keep &= np.asarray(condition.holds(rows))
            rows = {other: column[keep] for other, column in rows.items()}
    assert not waiting, [sorted(c.reads - rows.keys()) for c in waiting]
    return rows


# Sections


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionTable:
    """Legal layouts of a section."""

    op: Op
    fields: tuple[str, ...]
    """Columns of `rows`, without the section's prefix."""
    rows: NDArray[np.int32]
    """int32[m, fields]."""
    span: dict[Key, tuple[int, int]]
    """First and one past the last row of a pool and staleness."""
    free: tuple[tuple[str, tuple[int, ...]], ...]
    """Fields that no rule reads, with their values: each row stands for all their combinations."""
    by_staleness: bool

    @property
    def num_free(self) -> int:
        """Combinations of the free fields."""
        return prod(len(values) for _, values in self.free)

    def rows_of(self, group: int, devices: int, staleness: int) -> tuple[int, int]:
        """First and one past the last row for a pool; equal if there is no legal layout."""
        return self.span.get((group, devices, staleness if self.by_staleness else 0), (0, 0))

    def count(self, group: int, devices: int, staleness: int) -> int:
        """Legal layouts on a pool."""
        first, last = self.rows_of(group, devices, staleness)
        return (last - first) * self.num_free


_JOIN_ORDER = (
    "tp", "pp", "cp", "dp", "ep", "etp", "vpp", "schedule", "concurrency", "micro_batch", "micro_tokens", "zero",
    "shard",
)  # fmt: skip
"""Degrees first: they prune most."""


def section_table(space: Space, setting: Setting, op: Op) -> SectionTable:
    """Join the layouts of a section over all pools."""
    section, names, by_staleness = Section(op=op, setting=setting), fields_of(op), SECTIONS[op] is Generate
    values = {name: space[f"{op}.{name}"] for name in names}
    values |= {"devices": space[f"devices.{HOME[op]}"], "group": space[f"group.{HOME[op]}"]}
    values["staleness"] = space["staleness"] if by_staleness else (0,)
    varying = {name for name, options in values.items() if len(options) > 1}
    conditions = [
        Condition(reads=frozenset(rule.reads) & values.keys(), holds=partial(_swapped, rule.holds, section))
        for rule in layout_rules(op, setting.backend)
    ]
    # A rule on one varying column was asked when the axis was made.
    read = {name for c in conditions if len(c.reads & varying) > 1 for name in c.reads}
    free = {name: values[name] for name in names if name in varying - read}
    joined = sorted((n for n in names if n not in free), key=lambda n: (*_JOIN_ORDER, n).index(n))
    wanted = [c for c in conditions if not c.reads & free.keys()]
    rows = join([(n, values[n]) for n in joined], wanted, _keys(values, setting))
    return SectionTable(
        op=op,
        fields=tuple(joined),
        rows=np.stack([rows[n] for n in joined], axis=1),
        span=_spans(rows),
        free=tuple(free.items()),
        by_staleness=by_staleness,
    )


def _keys(values: dict[str, tuple[int, ...]], setting: Setting) -> Columns:
    """Every pool and staleness that a section may find itself in."""
    grid = np.meshgrid(*(np.asarray(values[key], dtype=np.int32) for key in KEYS), indexing="ij")
    rows = {key: column.reshape(-1) for key, column in zip(KEYS, grid, strict=True)}
    fits = rows["devices"] <= np.array([group.count for group in setting.groups])[rows["group"]]
    return {key: column[fits] for key, column in rows.items()}


def _spans(rows: Columns) -> dict[Key, tuple[int, int]]:
    """Rows are in the order of their keys, so each key's are consecutive."""
    stacked = np.stack([rows[key] for key in KEYS], axis=1)
    if len(stacked) == 0:
        return {}
    firsts = np.flatnonzero(np.append(True, (stacked[1:] != stacked[:-1]).any(axis=1)))
    lasts = np.append(firsts[1:], len(stacked))
    found: dict[Key, tuple[int, int]] = {}
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        group, devices, staleness = stacked[first].tolist()
        found[(group, devices, staleness)] = (first, last)
    return found


# Structures


def structure_table(space: Space, setting: Setting) -> Columns:
    """Every legal combination of placement, staleness, sync, fusions and shared models; pool sizes apart.

    Raises:
        InputError: there is none, or a rule refuses the job whatever its plan.
    """
    for rule in structure_rules(setting):
        if not rule.reads and not np.all(rule.holds({}, setting)):
            raise InputError("job", f"{rule.message} (rule {rule.name})")
    roles = setting.roles
    conditions = [
        Condition(reads=frozenset(rule.reads), holds=partial(_swapped, rule.holds, setting))
        for rule in structure_rules(setting)
        if not set(SIZES) & set(rule.reads)
    ]
    conditions += [_led(role, roles) for role in roles] + [_grouped(role, roles) for role in roles]
    # Roles that the job does not place are no column of the space, but rules may look at them.
    start = {
        f"{what}.{role}": np.zeros(1, dtype=np.int32)
        for what in ("place", "group")
        for role in ROLES
        if role not in roles
    }
    names = [f"{what}.{role}" for role in roles for what in ("place", "group")]
    names += ["staleness", "in_flight", "sync", *FLAGS]
    rows = join([(name, space[name]) for name in names], conditions, start | {"": np.zeros(1, dtype=np.int32)})
    if len(rows["staleness"]) == 0:
        raise InputError("space", "must have a legal structure with what is fixed and the backend", "none")
    return {name: rows[name] for name in names}


def _led(role: str, roles: tuple[str, ...]) -> Condition:
    """A pool is named by the first of its roles, which leads itself."""
    before = roles[: roles.index(role) + 1]

    def holds(b: Columns) -> NDArray[np.bool_]:
        leads = [(b[f"place.{role}"] == i) & (b[f"place.{ROLES[i]}"] == i) for i in map(ROLES.index, before)]
        return np.asarray(np.logical_or.reduce(leads))

    return Condition(reads=frozenset(f"place.{other}" for other in before), holds=holds)


def _grouped(role: str, roles: tuple[str, ...]) -> Condition:
    """Roles of one pool lie in one group of devices."""
    before = roles[: roles.index(role) + 1]

    def holds(b: Columns) -> NDArray[np.bool_]:
        apart = [
            (b[f"place.{role}"] == ROLES.index(other)) & (b[f"group.{role}"] != b[f"group.{other}"]) for other in before
        ]
        return np.asarray(~np.logical_or.reduce(apart))

    reads = {f"place.{role}", *(f"group.{other}" for other in before)}
    return Condition(reads=frozenset(reads), holds=holds)
