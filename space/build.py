"""The space of a job: which columns are free, and the values worth considering on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
import numpy as np

from ir.backend import Values
from ir.batch import CODES, COLUMNS, DELTAS, FLAGS, HOME, ROLES, Column, PlanBatch, fields_of, owner_of
from ir.errors import InputError
from ir.graph import Op
from ir.plan import SECTIONS, Update
from ir.quantities import Natural, Positive
from ir.rules_layout import layout_rules
from ir.rules_structure import structure_rules
from ir.setting import Section, Setting
from space.axes import Axis, Space

LABELS = ("place", "group", "fusions", "sharing", "sync", "in_flight", "precision", "offload", "recompute", "schedule")
"""Columns, by what they end or begin with, whose values have no order."""

MIN_TOKENS, MIN_SEQUENCES = 1024, 4
"""Tokens of the longest sequences, or sequences, that the smallest micro-batch holds: less only wastes launches."""

SMALL_GROUP = 8
"""Devices up to which a pool may have any size; beyond, sizes are 2^i and 3 x 2^i and what they leave over."""

MAX_PIPELINE, MAX_CONTEXT, MAX_PIECES = 16, 16, 8
MAX_CONCURRENCY = 2048


def default_space(setting: Setting, fix: Mapping[str, int] | None = None, *, also: PlanBatch | None = None) -> Space:
    """Every free column with the values worth considering, kept to the setting's backend.

    Args:
        setting: Job, devices and backend.
        fix: Columns that have just this value.
        also: Plans whose values are worth considering too.

    Raises:
        InputError: a pinned column that the job's plans do not have, or one that is left without a value.
    """
    values = _columns(setting)
    if also is not None:
        values = {name: tuple(sorted({*options, *_taken(also, name)})) for name, options in values.items()}
    for name, value in (fix or {}).items():
        if name not in values:
            raise InputError(f"fix {name}", "must be an axis of this job's plans", name)
        values[name] = (value,)
    # What one column loses may leave a rule with a single column that varies: repeat until nothing is lost.
    while (left := {name: _possible(setting, name, values) for name in values}) != values:
        values = left
    free = [name for name in COLUMNS if len(values.get(name, ())) > 1]
    return Space(
        axes=tuple(Axis(name=name, values=values[name], ordered=not _is_label(name)) for name in free),
        constants={name: values[name][0] for name in COLUMNS if len(values.get(name, ())) == 1},
    )


def _taken(plans: PlanBatch, name: str) -> list[int]:
    """Values that a column has in plans."""
    active = Axis(name=name, values=(0,), ordered=False).active(plans)
    return [int(value) for value in np.unique(plans[name][active])]


def parse_fix(text: str) -> tuple[str, int]:
    """`generate.tp=2` or `update_actor.recompute=full` as a column and its code.

    Raises:
        InputError: not of that form, no column, or no value of it.
    """
    name, equals, value = text.partition("=")
    if not equals or name not in COLUMNS:
        raise InputError(f"fix {text}", "must be AXIS=VALUE with an axis that `space` prints")
    words = _words(name)
    if value in words:
        return name, words.index(value)
    if words or not value.isdecimal():
        raise InputError(f"fix {name}", f"must be {' or '.join(words) if words else 'a whole number'}", repr(value))
    try:
        msgspec.convert(int(value), _type_of(name))
    except msgspec.ValidationError as error:
        raise InputError(f"fix {name}", f"must be a value that a plan may have ({error})", value) from error
    return name, int(value)


def _type_of(name: str) -> Any:
    """What a number in a column may be."""
    op = owner_of(name)
    if op is not None:
        return get_type_hints(SECTIONS[op], include_extras=True)[name.partition(".")[2]]
    return Positive if name.startswith("devices.") else Natural


def value_text(name: str, value: int) -> str:
    """A value of a column as a person writes it."""
    words = _words(name)
    return words[value] if words else str(value)


def _words(name: str) -> tuple[str, ...]:
    if name in FLAGS or name == "in_flight":
        return ("false", "true")
    if name.startswith("place."):
        return ROLES
    return CODES.get(name.rpartition(".")[2], ())


def _is_label(name: str) -> bool:
    return name.partition(".")[0] in LABELS or name.rpartition(".")[2] in LABELS


def _columns(setting: Setting) -> dict[str, tuple[int, ...]]:
    """Values of every column that the job's plans have, before rules are asked."""
    roles = setting.roles
    values: dict[str, tuple[int, ...]] = {
        "staleness": tuple(range(setting.job.limits.max_staleness + 1)),
        "in_flight": (0, 1),
        "sync": _ways(setting),
    }
    for role in roles:
        index = ROLES.index(role)
        values[f"place.{role}"] = tuple(i for i in range(index + 1) if ROLES[i] in roles)
        values[f"group.{role}"] = tuple(range(len(setting.groups)))
        values[f"devices.{role}"] = pool_sizes(setting)
    values |= dict.fromkeys(FLAGS, (0, 1))
    for op in setting.sections:
        options = _section_values(op, setting)
        values |= {f"{op}.{name}": options[name] for name in fields_of(op)}
    return values | _own_values(setting, values)


def _ways(setting: Setting) -> tuple[int, ...]:
    """Methods of weight sync: of plans for no framework, changed values through files are no rival to those sent over
    the network, and engines load all weights again."""
    every = range(len(CODES["sync"]))
    return tuple(code for code in every if setting.backend is not None or CODES["sync"][code] != "delta-disk")


def _own_values(setting: Setting, values: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Columns of which the backend has only values that are not usually considered."""
    supported = setting.backend.by_column if setting.backend is not None else {}
    return {name: own for name, own in supported.items() if name in values and not set(own) & set(values[name])}


def _possible(setting: Setting, name: str, values: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Values of a column that the backend supports and no rule refuses which depends on it alone, all else it reads
    having a single value."""
    supported = _supported(setting, values)
    keep = np.isin(values[name], supported.get(name, values[name]))
    for rule in structure_rules(setting):
        if name in rule.reads and (column := _alone(name, rule.reads, values)) is not None:
            keep &= np.asarray(rule.holds(column, setting))
    op = owner_of(name)
    if op is not None:
        section, field_name = _section_columns(op, values), name.partition(".")[2]
        for layout_rule in layout_rules(op, setting.backend):
            reads = tuple(other for other in layout_rule.reads if other in section)
            if field_name in reads and (column := _alone(field_name, reads, section)) is not None:
                keep &= np.asarray(layout_rule.holds(column, Section(op=op, setting=setting)))
    left = tuple(value for value, kept in zip(values[name], keep, strict=True) if kept)
    if not left:
        got = [value_text(name, value) for value in values[name]]
        raise InputError(f"axis {name}", "must have a value that the job and the backend allow", got)
    return left


def _supported(setting: Setting, values: Mapping[str, tuple[int, ...]]) -> Values:
    """What the backend supports, and asks of sections where all plans send changed values only."""
    if setting.backend is None:
        return {}
    changes = set(values["sync"]) <= set(DELTAS)
    return {**setting.backend.by_column, **(setting.backend.deltas if changes else {})}


def _section_columns(op: Op, values: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Values of all that a layout rule may read."""
    home = HOME[op]
    pool = {"devices": values[f"devices.{home}"], "group": values[f"group.{home}"]}
    return {name: values[f"{op}.{name}"] for name in fields_of(op)} | pool | {"staleness": values["staleness"]}


def _alone(name: str, reads: tuple[str, ...], values: Mapping[str, tuple[int, ...]]) -> dict[str, Column] | None:
    """Columns for a rule in which just `name` varies; None if another column that it reads has several values."""
    if any(len(values.get(other, (0,))) > 1 for other in reads if other != name):
        return None
    n = len(values[name])
    others = {other: np.full(n, values.get(other, (0,))[0], dtype=np.int32) for other in reads}
    return others | {name: np.asarray(values[name], dtype=np.int32)}


def pool_sizes(setting: Setting) -> tuple[int, ...]:
    """Sizes that pools may have: all of a small group's; of a large one those that divide well, what they leave of
    it, and the totals that the job asks for."""
    sizes: set[int] = set()
    for group in setting.groups:
        if group.count <= SMALL_GROUP:
            sizes |= set(range(1, group.count + 1))
        else:
            good = {base << i for base in (1, 3) for i in range(group.count.bit_length())}
            good = {size for size in good if size < group.count}
            sizes |= good | {group.count} | {group.count - size for size in good if 2 * size >= group.domain}
    asked = setting.job.limits.devices
    sizes |= set(asked) if isinstance(asked, tuple) else {asked} if asked is not None else set()
    return tuple(sorted(size for size in sizes if size <= setting.num_devices))


def _section_values(op: Op, setting: Setting) -> dict[str, tuple[int, ...]]:
    shape, workload = setting.shape(op), setting.job.workload
    largest = max(group.count for group in setting.groups)
    domain = max(group.domain for group in setting.groups)
    updates = SECTIONS[op] is Update
    sequences = Section(op=op, setting=setting).sequences
    experts = shape.moe.experts if shape.moe is not None else 1
    ahead = int(np.ceil(setting.job.generated_sequences)) * (1 + setting.job.limits.max_staleness)
    share = max(sequences // setting.num_devices, 1)
    return {
        "tp": _powers(domain),
        "pp": _powers(min(largest, shape.layers, MAX_PIPELINE)),
        "vpp": _powers(min(shape.layers, MAX_PIECES)),
        "schedule": tuple(range(len(CODES["schedule"]))),
        "cp": _powers(min(largest, MAX_CONTEXT)),
        "ep": tuple(n for n in _powers(min(experts, largest)) if experts % n == 0),
        "etp": _powers(domain) if experts > 1 else (1,),
        "dp": tuple(n for n in range(1, largest + 1) if sequences % n == 0),
        "zero": (0, 1, 2, 3) if updates else (0, 3),
        "shard": _shards(setting),
        "micro_batch": (
            0,
            *_from(min(-(-MIN_TOKENS // workload.max_tokens), MIN_SEQUENCES), _powers(sequences), share),
        ),
        "micro_tokens": (0, *_budgets(workload.max_tokens)),
        "recompute": (0, 1, 2),
        "offload": (0, 1, 2) if updates else (0, 2),
        "precision": (0, 1),
        "concurrency": _from(8, _powers(min(ahead, MAX_CONCURRENCY)), share),
        "memory_percent": (0, 50, 60, 70, 80, 90),
        "prefill_tokens": (0, 2048, 8192),
        "draft_tokens": (0, 1, 2, 4),
    }


def _shards(setting: Setting) -> tuple[int, ...]:
    """Ranks that fill a domain, for every degree of tensor parallelism inside it, where there are several domains."""
    several = [group.domain for group in setting.groups if group.domain < group.count]
    return tuple(sorted({0} | {n // tp for n in several for tp in _powers(n) if n % tp == 0 and tp < n}))


def _budgets(longest: int) -> list[int]:
    """Token budgets of a device: parts of the longest sequence, for context parallelism, and several of them."""
    return sorted({-(-longest * eighths // 8) for eighths in (1, 2, 4, 8, 16, 32)})


def _from(least: int, values: tuple[int, ...], share: int) -> tuple[int, ...]:
    """Values from `least` on, or from a device's `share` of the sequences if that is smaller: batches of fewer are
    slower than any of these on every machine, and would only make the space larger."""
    return tuple(value for value in values if value >= min(least, _powers(share)[-1]))


def _powers(limit: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(limit.bit_length()))
