"""What an engine and a trainer, or a framework that has both, can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ir.batch import CODES, DELTAS, fields_of
from ir.graph import Op
from ir.plan import SECTIONS, Generate, Pass, Update

if TYPE_CHECKING:
    from ir.setting import LayoutRule, Rule

Values = Mapping[str, tuple[int, ...]]

_KINDS = {Generate: "generate", Pass: "pass", Update: "update"}

EXTRAS: Values = {
    "sync": tuple(code for code in range(len(CODES["sync"])) if code not in DELTAS),
    "generate.draft_tokens": (0,),
    "pass.shard": (0,),
    "update.shard": (0,),
    "update.schedule": (CODES["schedule"].index("1f1b"),),
}
"""The plain values of columns that few engines and trainers have."""

DEGREES = ("tp", "pp", "cp", "ep")
"""Parallel degrees that passes and updates both have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A section that runs on the engine of another and so has that one's layout."""

    op: Op
    leader: Op
    fields: tuple[str, ...] = (*DEGREES, "zero")
    """What is the leader's: names of fields, where `zero` says whether weights are divided (stage 3), `shard` among
    which ranks they are, `stage` how far, `kind` whether replicas divide more than the optimizer (stage 2 or 3: fully
    sharded training; of a pass, weights too), `dp` is what its degrees leave of the pool, and `unit` whether
    micro-batches are counted in sequences or in tokens."""
    flag: str = ""
    """Flag of the plan without which it does not follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What an engine and a trainer support. A column that `values` does not list is free, but for those of `EXTRAS`."""

    name: str
    what: str
    """In words."""
    values: Values
    """Codes a column may take; `pass.` and `update.` stand for every section of that kind."""
    extras: tuple[str, ...] = ()
    """Which of `EXTRAS` it has, all their values."""
    rules: tuple[Rule, ...] = ()
    """Further conditions on the plan's structure."""
    layout_rules: tuple[LayoutRule, ...] = ()
    """Further conditions on a section."""
    follows: tuple[Follower, ...] = ()
    """Sections whose layout is another's."""
    swaps: tuple[Op, ...] = ()
    """Updates whose model always leaves the devices while engines on them generate, and whose weights stay where there
    are none."""
    deltas: Values = field(default_factory=dict)
    """Values that columns of sections must have where `sync` sends changed values only."""
    needs_memory_percent: bool = False
    """Whether the engine's cache is sized by a share of memory."""
    algorithms: tuple[str, ...] = ()
    """Algorithms it runs; empty for all."""
    reference_with_actor: bool = False
    """Whether the reference must run where the actor trains."""
    always_in_flight: bool = False
    """Whether stale engines always take new weights in the middle of sequences."""
    engine_experts: bool = False
    """Whether an engine's experts are either whole on every device or divided over just its own devices."""
    by_column: Values = field(init=False)
    """`values` by column of a plan."""

    def __post_init__(self) -> None:
        plain = {name: allowed for name, allowed in EXTRAS.items() if name not in self.extras}
        object.__setattr__(self, "by_column", _expand({**plain, **self.values}))

    def runs(self, algorithm: str) -> bool:
        """Whether it runs an algorithm, given by its name."""
        return not self.algorithms or algorithm in self.algorithms


def _expand(values: Values) -> dict[str, tuple[int, ...]]:
    expanded: dict[str, tuple[int, ...]] = {}
    for name, allowed in values.items():
        kind, _, column = name.partition(".")
        ops = [op for op in SECTIONS if _KINDS[SECTIONS[op]] == kind and column in fields_of(op)]
        expanded |= {f"{op}.{column}": allowed for op in ops} or {name: allowed}
    return expanded


def codes(field_name: str, *values: str) -> tuple[int, ...]:
    """Codes of the values of a field of names."""
    return tuple(CODES[field_name].index(value) for value in values)
