"""What differs between two plans, and what each difference costs or gains by the model."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np

from analytic.estimate import Estimate, estimate
from ir.batch import COLUMNS, HOME, PlanBatch, batch_of, concatenate, fields_of, owner_of
from ir.cluster import Cluster
from ir.plan import SECTIONS, Plan
from ir.rules import legal
from ir.setting import Mask, Setting
from search.prediction import Prediction, predictions
from search.repair import Misfit, misfit, misfit_text
from search.report import SHORT
from space.axes import blank_inactive
from space.build import default_space, value_text

DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
"""Fields that pool sizes may force to change."""

POOLS = ("place", "group", "devices")
"""Columns that say where roles run."""

WIDTH = 120

TELLING = 0.005
"""Share of the step below which changes are told together."""

Columns = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Columns that change together, because a part of them alone would break a rule."""

    words: tuple[str, ...]
    """Each as `update_actor.recompute full -> none`."""
    before_s: float
    """Modelled step before and after."""
    after_s: float
    fill_before: float
    """Largest share of a device's memory that is taken, before and after."""
    fill_after: float
    stages: tuple[tuple[str, float, float], ...]
    """Stages whose time it changes, most first: name, seconds before and after."""

    @property
    def saved_s(self) -> float:
        """What it takes off the step; negative if it costs."""
        return self.before_s - self.after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans of a job."""

    first: Prediction
    second: Prediction
    misfits: tuple[Misfit | None, Misfit | None]
    """Why each runs out of memory; None if it does not."""
    changes: tuple[Change, ...]
    """From the first to the second, at each point the change that gains most; their savings add up to the whole."""

    @property
    def gain(self) -> float:
        """Step time of the first over that of the second."""
        return self.first.step_s / self.second.step_s


def compare(setting: Setting, cluster: Cluster, first: Plan, second: Plan) -> Comparison:
    """Compare two legal plans.

    Args:
        setting: What both plans are legal for; its job must have lengths.
        cluster: Where they run.
        first: Where the changes start from.
        second: Where they lead.
    """
    job, space = setting.job, default_space(setting)
    told = predictions(job, [first, second], cluster)
    return Comparison(
        first=told[0],
        second=told[1],
        misfits=(misfit(space, setting, cluster, first), misfit(space, setting, cluster, second)),
        changes=tuple(_walk(setting, cluster, batch_of([first]), batch_of([second]))),
    )


def _walk(setting: Setting, cluster: Cluster, now: PlanBatch, end: PlanBatch) -> Iterator[Change]:
    """Changes one after the other. A plan between that does not fit would say nothing about either, so that a change
    is as large as it must be for a plan that is legal and fits."""
    while left := tuple(name for name in COLUMNS if now[name][0] != end[name][0]):
        changed, found = _next(setting, cluster, now, end, left)
        after = found.batch.take(np.array([1]))
        yield _change(found, _words(changed, now, after))
        now = after


def _next(
    setting: Setting, cluster: Cluster, now: PlanBatch, end: PlanBatch, left: Columns
) -> tuple[Columns, Estimate]:
    """The smallest set of columns whose change gains, and of those the one that gains most; or else the least loss of
    the smallest. With what the plan costs before and after."""
    least: tuple[Columns, Estimate] | None = None
    # What only one of the two has comes and goes with the flag that says so.
    lasting = tuple(name for name in left if (op := owner_of(name)) is None or (now.has(op)[0] and end.has(op)[0]))
    for sets in _sets(lasting):
        kept, plans = _legal_changes(setting, now, end, left, sets)
        if not kept:
            continue
        found = estimate(setting.job, concatenate([now, plans]), cluster)
        most = max(1.0 - setting.job.limits.memory_margin, float(found.memory.fill[0]) * 1.001)
        seconds = np.where(found.memory.fill <= most, found.step_seconds, np.inf)[1:]
        best = int(np.argmin(seconds))
        if not np.isfinite(seconds[best]):
            continue
        pair = estimate(setting.job, found.batch.take(np.array([0, best + 1])), cluster)
        if seconds[best] <= found.step_seconds[0]:
            return kept[best], pair
        least = least or (kept[best], pair)
    return least or (left, estimate(setting.job, concatenate([now, end]), cluster))


def _legal_changes(
    setting: Setting, now: PlanBatch, end: PlanBatch, left: Columns, sets: Sequence[Columns]
) -> tuple[list[Columns], PlanBatch]:
    """Those of the sets whose change keeps every rule, with the plans they lead to."""
    n = len(sets)
    columns = {name: np.repeat(now[name], n) for name in COLUMNS}
    for name in left:
        columns[name] = np.where([name in chosen for chosen in sets], end[name], now[name]).astype(np.int32)
    plans, odd = _whole_sections(PlanBatch(n, columns), now, end)
    changed = [tuple(name for name in left if plans[name][i] != now[name][0]) for i in range(n)]
    towards = [bool(names) and all(plans[name][i] == end[name][0] for name in names) for i, names in enumerate(changed)]
    rows = np.flatnonzero(np.array(towards, dtype=bool) & ~odd)
    rows = rows[legal(plans.take(rows), setting)]
    return [changed[i] for i in rows], plans.take(rows)


def _whole_sections(plans: PlanBatch, now: PlanBatch, end: PlanBatch) -> tuple[PlanBatch, Mask]:
    """Sections that a change brings or takes away, with all of their columns; and the plans in which one lacks
    its columns."""
    odd, columns = np.zeros(len(plans), dtype=bool), dict(plans.columns)
    for op in SECTIONS:
        new = plans.has(op) & ~now.has(op)
        for name in fields_of(op):
            columns[f"{op}.{name}"] = np.where(new, end[f"{op}.{name}"], columns[f"{op}.{name}"]).astype(np.int32)
        # A degree is 0 only in a section that is not there.
        odd |= plans.has(op) & (columns[f"{op}.tp"] == 0)
    return blank_inactive(PlanBatch(len(plans), columns)), odd


def _sets(left: Columns) -> Iterator[list[Columns]]:
    """Sets of columns to try, level by level: single ones, a few of a section or of the structure, all of either, the
    structure with all degrees. Where roles run is one decision, and replicas are what is left of it."""
    pools = tuple(name for name in left if _is_pool(name))
    if pools:
        pools += tuple(name for name in left if name.endswith(".dp"))
    alone = [name for name in left if name not in pools]
    structure = [pools, *((name,) for name in alone if owner_of(name) is None)]
    sections: list[list[Columns]] = [[(name,) for name in alone if owner_of(name) is op] for op in HOME]
    parts = [kept for part in (structure, *sections) if (kept := [names for names in part if names])]
    for size in (1, 2, 3):
        if several := [tuple(chain(*names)) for part in parts for names in combinations(part, size)]:
            yield several
    yield [tuple(chain(*part)) for part in parts]
    degrees = tuple(name for name in alone if owner_of(name) is not None and name.rpartition(".")[2] in DEGREES)
    if pools and degrees:
        yield [(*pools, *degrees), (*chain(*structure), *degrees)]


def _is_pool(name: str) -> bool:
    return name.partition(".")[0] in POOLS


def _change(found: Estimate, words: Sequence[str]) -> Change:
    (before, after), step = found.stage_seconds.tolist(), found.step_seconds
    stages = sorted(zip(found.stages, before, after, strict=True), key=lambda stage: -abs(stage[2] - stage[1]))
    return Change(
        words=tuple(words),
        before_s=float(step[0]),
        after_s=float(step[1]),
        fill_before=float(found.memory.fill[0]),
        fill_after=float(found.memory.fill[1]),
        stages=tuple((name, a, b) for name, a, b in stages if abs(b - a) > TELLING * step[0]),
    )


def _words(changed: Columns, now: PlanBatch, after: PlanBatch) -> list[str]:
    pools = [f"pools {_pools(now.plan(0))} -> {_pools(after.plan(0))}"] if any(map(_is_pool, changed)) else []
    gone = {op for op in SECTIONS if now.has(op)[0] and not after.has(op)[0]}
    new = {op for op in SECTIONS if after.has(op)[0] and not now.has(op)[0]}
    kept = [name for name in changed if not _is_pool(name) and owner_of(name) not in gone | new]
    words = [f"{name} {_value(name, now)} -> {_value(name, after)}" for name in kept]
    words += [f"no stage {op}" for op in SECTIONS if op in gone]
    for op in (op for op in SECTIONS if op in new):
        fields = [f"{name.partition('.')[2]} {_value(name, after)}" for name in changed if owner_of(name) is op]
        words.append(f"a stage {op} ({' '.join(fields)})")
    return pools + words


def _value(name: str, plan: PlanBatch) -> str:
    return value_text(name, int(plan[name][0]))


def _pools(plan: Plan) -> str:
    homes = {
        pool.name: dict.fromkeys(HOME[op] for op, s in plan.sections.items() if s.pool == pool.name)
        for pool in plan.pools
    }
    return " | ".join(f"{'+'.join(homes[pool.name])} {pool.devices}" for pool in plan.pools)


def comparison_text(found: Comparison, names: tuple[str, str] = ("a", "b")) -> str:
    """In words that a user can act on."""
    lines = [
        f"{name}: {told.step_s:.3g} s a step (+-{told.error:.0%}), {told.memory_share:.0%} of memory, "
        f"staleness {told.largest_staleness:.0f}: {told.words}"
        for name, told in zip(names, (found.first, found.second), strict=True)
    ]
    lines += [f"{name} {misfit_text(why)}" for name, why in zip(names, found.misfits, strict=True) if why is not None]
    if not found.changes:
        return "\n".join([*lines, "they are the same plan"])
    lines += ["", f"from {names[0]} to {names[1]}, the change that gains most first:"]
    small = [change for change in found.changes if abs(change.saved_s) < TELLING * found.first.step_s]
    for change in found.changes:
        if change not in small:
            lines += _change_lines(-change.saved_s, change.words, _why(change))
    if small:
        words = [word for change in small for word in change.words]
        lines += _change_lines(-sum(change.saved_s for change in small), words, "each hardly matters")
    return "\n".join([*lines, "", _verdict(found, names)])


def _why(change: Change) -> str:
    stages = ", ".join(f"{SHORT.get(name, name)} {a:.3g} -> {b:.3g} s" for name, a, b in change.stages[:3])
    moved = abs(change.fill_after - change.fill_before) >= 0.005
    memory = f"memory {change.fill_before:.0%} -> {change.fill_after:.0%}" if moved else ""
    return "; ".join(part for part in (stages, memory) if part)


def _change_lines(seconds: float, words: Sequence[str], why: str) -> Iterator[str]:
    head = f"  {seconds:+9.3g} s  "
    text = ", ".join(words) + (f" ({why})" if why else "")
    yield textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _verdict(found: Comparison, names: tuple[str, str]) -> str:
    gain, (first, second) = found.gain, found.misfits
    faster = f"{names[1]} is predicted {gain:.2f} x as fast as {names[0]}"
    if gain < 1 and first is None:
        return f"{faster}: keep {names[0]}"
    if second is not None:
        return f"{faster}, but it does not fit"
    return f"{faster}, and {names[0]} does not fit" if first is not None else faster
