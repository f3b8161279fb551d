"""A space as a person reads it: its axes, how many plans there are, and which rules refuse most. Pure text."""

from __future__ import annotations

from itertools import groupby

from ir.batch import REMOVED_BY
from ir.graph import Op
from ir.setting import Setting
from space.axes import Axis, Space
from space.build import value_text
from space.enumerate import LegalSpace
from space.selectivity import selectivity

SHOWN = 12
"""Rules and values that are listed."""


def axes_text(space: Space) -> str:
    """Each section's axes with their values and when they are active, and what is constant."""
    width = max((len(_short(axis)) for axis in space.axes), default=0)
    lines = [f"{len(space.axes)} axes:"]
    for owner, axes in groupby(space.axes, key=lambda axis: axis.owner):
        lines.append(f"  {owner or 'structure'}{_condition(owner)}")
        lines += [f"    {_short(axis):{width}}  {_values(axis)}" for axis in axes]
    constants = [f"{name}={value_text(name, value)}" for name, value in space.constants.items()]
    return "\n".join([*lines, f"constant: {', '.join(constants) or 'nothing'}"])


def _short(axis: Axis) -> str:
    return axis.name if axis.owner is None else axis.name.partition(".")[2]


def _values(axis: Axis) -> str:
    words = [value_text(axis.name, value) for value in axis.values]
    if len(words) > SHOWN:
        words = [*words[: SHOWN // 2], "...", *words[-SHOWN // 2 :]]
    return (", " if axis.ordered else " | ").join(words)


def _condition(owner: Op | None) -> str:
    flags = REMOVED_BY.get(owner, ()) if owner else ()
    return f", unless {' or '.join(flags)}" if flags else ""


def counts_text(legal: LegalSpace) -> str:
    """How many combinations, structures and legal plans there are."""
    lines = [
        f"{_large(legal.space.num_combinations)} combinations, {_large(legal.num_plans)} legal plans "
        f"of {legal.num_structures:,} structures",
        "legal layouts over all pools:",
    ]
    for op, table in legal.tables.items():
        lines.append(f"  {op:18} {_large(len(table.rows) * table.num_free)}")
    return "\n".join(lines)


def selectivity_text(space: Space, setting: Setting) -> str:
    """The rules that refuse most of the combinations of axis values."""
    found = [(name, share) for name, share in selectivity(space, setting) if share > 0][:SHOWN]
    lines = [f"  {share:6.1%}  {name}" for name, share in found]
    return "\n".join(["share of combinations that a rule refuses:", *lines])


def _large(number: int) -> str:
    """Exact, and readable where it is long."""
    return f"{number:,}" if number < 10**15 else f"{number:.3e} ({number})"
