"""What makes a plan legal for a job on a cluster: one table, on arrays of plans.

A rule gives, for every plan of a batch, whether it holds. The same table refuses a
user's plan, with a sentence, and cuts a space of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.backend import Backend
from ir.batch import REMOVED_BY, PlanBatch, batch_of, owner_of, value_words
from ir.errors import InputError
from ir.followers import follower_breaches
from ir.graph import Op
from ir.plan import SECTIONS, Plan
from ir.rules_layout import layout_rules
from ir.rules_structure import structure_rules
from ir.setting import Breach, Mask, Section, Setting, setting_of

__all__ = ["Breach", "Setting", "breaches", "check", "legal", "setting_of"]


def breaches(batch: PlanBatch, setting: Setting) -> Iterator[Breach]:
    """Every rule that applies to the job, with the plans that break it."""
    for rule in structure_rules(setting):
        holds = np.broadcast_to(rule.holds(_PlanColumns(batch), setting), len(batch))
        yield Breach(name=rule.name, path=rule.path, message=rule.message, broken=~holds)
    for op in setting.sections:
        yield from _section_breaches(batch, setting, op)
    if setting.backend is not None:
        yield from _value_breaches(batch, setting.backend)
        yield from follower_breaches(batch, setting.backend)


def _section_breaches(batch: PlanBatch, setting: Setting, op: Op) -> Iterator[Breach]:
    """Rules on a section, asked of the plans that have it."""
    rows, section = np.flatnonzero(batch.has(op)), Section(op=op, setting=setting)
    columns = {name: column[rows] for name, column in batch.section(op).items()}
    for rule in layout_rules(op, setting.backend):
        broken = np.zeros(len(batch), dtype=bool)
        broken[rows] = ~np.asarray(rule.holds(columns, section))
        yield Breach(name=rule.name, path=f"{op}.{rule.path}", message=rule.message, broken=broken)


class _PlanColumns(Mapping[str, NDArray[Any]]):
    """A batch as a mapping in which missing columns are 0."""

    def __init__(self, batch: PlanBatch) -> None:
        self._batch = batch

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.columns)

    def __len__(self) -> int:
        return len(self._batch.columns)


def _value_breaches(batch: PlanBatch, backend: Backend) -> Iterator[Breach]:
    """Columns whose values a backend does not support."""
    for column, allowed in backend.by_column.items():
        op = owner_of(column)
        here = np.ones(len(batch), dtype=bool) if op is None else batch.has(op)
        yield Breach(
            name=f"backend-supports-{column}",
            path=column,
            message=f"must be {value_words(column, allowed)} for the backend {backend.name!r}",
            broken=here & ~np.isin(batch[column], allowed),
        )


def legal(batch: PlanBatch, setting: Setting) -> Mask:
    """Which plans keep every rule, bool[n]."""
    mask = np.ones(len(batch), dtype=bool)
    for breach in breaches(batch, setting):
        mask &= ~breach.broken
    return mask


def check(plan: Plan, setting: Setting, *, where: str = "plan") -> None:
    """Refuse an illegal plan.

    Raises:
        InputError: names the rule, the key of the plan and the value got.
    """
    _check_pools(plan, where)
    _check_sections(plan, setting, where)
    batch = batch_of([plan])
    for breach in breaches(batch, setting):
        if breach.broken[0]:
            message = f"{breach.message} (rule {breach.name})"
            raise InputError(f"{where}: {breach.path}", message, _got(plan, breach.path))


def _got(plan: Plan, path: str) -> object:
    if path == "pools":
        return [f"{pool.name} {pool.devices}" + f" of group {pool.group}" * (pool.group > 0) for pool in plan.pools]
    value: object = plan
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _check_pools(plan: Plan, where: str) -> None:
    names = [pool.name for pool in plan.pools]
    if len(set(names)) != len(names):
        raise InputError(f"{where}: pools", "names must be unique (rule pools-are-named-once)", names)
    for op, section in plan.sections.items():
        if section.pool not in names:
            raise InputError(f"{where}: {op}.pool", f"must be one of {names} (rule pool-exists)", repr(section.pool))
    for op, home in ((Op.OLD_LOGPROB, plan.update_actor), (Op.VALUES, plan.update_critic)):
        passing = plan.sections.get(op)
        if passing is not None and home is not None and passing.pool != home.pool:
            raise InputError(
                f"{where}: {op}.pool",
                f"must be {home.pool!r}, the pool that trains the model (rule passes-run-where-the-model-trains)",
                repr(passing.pool),
            )
    if unused := set(names) - {section.pool for section in plan.sections.values()}:
        raise InputError(f"{where}: pools", "every pool must run a stage (rule pools-are-used)", sorted(unused))


def _check_sections(plan: Plan, setting: Setting, where: str) -> None:
    """A section is there exactly if its stage is."""
    for op in SECTIONS:
        flags = [flag for flag in REMOVED_BY.get(op, ()) if _got(plan, flag)]
        wanted = op in setting.sections and not flags
        if wanted != (op in plan.sections):
            why = f"while {flags[0]} is set" if flags else f"for {setting.job.algorithm.name} with the job's models"
            rule = f"must {'' if wanted else 'not '}be given {why} (rule sections-are-the-jobs)"
            raise InputError(f"{where}: {op}", rule)
