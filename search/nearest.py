"""The plan nearest to one that a backend cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ir.batch import COLUMNS, HOME, PlanBatch, batch_of, fields_of
from ir.followers import follow
from ir.graph import Op
from ir.plan import Plan
from ir.rules import legal
from ir.setting import Setting
from space.build import default_space
from space.enumerate import Case, Factor, LegalSpace, Sizes, legal_space
from space.presets import presets
from space.tables import SectionTable

STRUCTURES = 64
"""Structures that are looked at, those with fewest changes."""

SIZES = 4
"""Sizes of a pool, and choices of sizes of all, that are looked at."""

LAYOUTS = 24
"""Layouts of a section that are looked at."""

ADAPTED = 2
"""Presets that are adapted to a backend."""

ONE = 1000.0
"""What a changed column counts; how far it is changed only decides between equals."""


def nearest(plan: Plan, setting: Setting) -> Plan | None:
    """The legal plan with fewest changed columns, and of those the one whose numbers change least; None if there is no
    legal plan at all. Changes are looked for near the plan, so that an even nearer one may be missed."""
    target = batch_of([plan])
    if legal(target, setting)[0]:
        return plan
    space = legal_space(default_space(setting), setting)
    best, least = None, np.inf
    for bound, factor in _factors(space, target):
        if bound > least:
            break
        near = _in_factor(factor, target, setting)
        if len(near):
            distance = _distance(near.columns, target, COLUMNS)
            if distance.min() < least:
                best, least = near.plan(int(np.argmin(distance))), float(distance.min())
    return best


def adapted(setting: Setting) -> dict[str, Plan]:
    """The plans that a backend can run nearest to its framework's presets, or to the first ones, by name."""
    if setting.backend is None:
        return {}
    free, name = presets(replace(setting, backend=None)), setting.backend.name
    own = [preset for preset in free if preset.startswith(name)] or list(free)
    near = {f"near {preset}": nearest(free[preset], setting) for preset in own[:ADAPTED]}
    return {preset: plan for preset, plan in near.items() if plan is not None}


def _distance(
    columns: Mapping[str, NDArray[np.int32]], target: PlanBatch, names: tuple[str, ...]
) -> NDArray[np.float64]:
    """How far rows are from the target, over the columns named: those changed, then by what factors."""
    total = np.zeros(len(next(iter(columns.values()))))
    for name in names:
        total = total + _apart(columns.get(name, np.zeros(1, dtype=np.int32)), int(target[name][0]))
    return total


def _factors(space: LegalSpace, target: PlanBatch) -> Iterator[tuple[float, Factor]]:
    """Structures and pool sizes, nearest first, with what the structure alone changes."""
    distance = _distance(space.structures, target, tuple(space.structures))
    cases, case_of = space.cases
    for structure in np.argsort(distance, kind="stable")[:STRUCTURES].tolist():
        for sizes in _sizes(space, cases[int(case_of[structure])], target):
            yield float(distance[structure]), space.factor(structure, sizes)


def _sizes(space: LegalSpace, case: Case, target: PlanBatch) -> list[Sizes]:
    """Pool sizes that fit, nearest first."""
    near = []
    for pool in case.pools:
        options = np.array(sorted(space.counts_by_size(space.pool_case(pool, case))), dtype=np.int32)
        wanted = int(target[f"devices.{pool[0][0]}"][0]) or space.setting.num_devices
        apart = _apart(options, wanted)
        order = np.argsort(apart, kind="stable")[:SIZES]
        near.append(list(zip(apart[order].tolist(), options[order].tolist(), strict=True)))
    choices = sorted(product(*near), key=lambda choice: sum(apart for apart, _ in choice))
    sizes = np.array([[size for _, size in choice] for choice in choices], dtype=np.int64).reshape(-1, len(case.pools))
    return [tuple(row) for row in sizes[space.fit(case, sizes)][:SIZES].tolist()] if len(sizes) else []


def _in_factor(factor: Factor, target: PlanBatch, setting: Setting) -> PlanBatch:
    """Plans of one structure: each section's nearest layout, and each other near layout of one of them."""
    near = {op: _layouts(factor, op, target) for op in factor.spans}
    if not all(len(layouts) for layouts in near.values()):
        return PlanBatch(0, {})
    picks = [
        {op: layouts[i if op is changed else 0] for op, layouts in near.items()}
        for changed, options in near.items()
        for i in range(len(options))
    ]
    stacked = {op: np.array([pick[op] for pick in picks]) for op in near}
    batch = follow(factor.combine(stacked, len(picks)), setting.backend)
    return batch.take(np.flatnonzero(legal(batch, setting)))


def _layouts(factor: Factor, op: Op, target: PlanBatch) -> NDArray[np.int64]:
    """Numbers of a section's layouts, nearest first; of a section that the target lacks, those like its model's other
    one."""
    table, (first, last) = factor.tables[op], factor.spans[op]
    model = op if target.has(op)[0] else next((o for o in _sections(target) if HOME[o] == HOME[op]), op)
    wanted = {name: int(target[f"{model}.{name}"][0]) for name in fields_of(op) if name in fields_of(model)}
    rows = {name: table.rows[first:last, i] for i, name in enumerate(table.fields)}
    apart = np.zeros(last - first)
    for name, column in rows.items():
        apart = apart + _apart(column, wanted.get(name, 0))
    best = np.argsort(apart, kind="stable")[:LAYOUTS]
    return best * table.num_free + _free(table, wanted)


def _sections(target: PlanBatch) -> tuple[Op, ...]:
    """Sections that a plan has."""
    return tuple(op for op in HOME if target.has(op)[0])


def _apart(column: NDArray[np.int32], wanted: int) -> NDArray[np.float64]:
    factor = np.abs(np.log2((1.0 + column) / (1.0 + wanted)))
    return np.asarray(ONE * (column != wanted) + factor)


def _free(table: SectionTable, wanted: dict[str, int]) -> int:
    """Number of the nearest combination of the fields that no rule reads."""
    number = 0
    for name, values in table.free:
        number = number * len(values) + int(np.argmin(_apart(np.asarray(values, dtype=np.int32), wanted.get(name, 0))))
    return number
