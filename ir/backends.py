"""What engines and trainers can run, so that a space can be kept to it.

A backend is a rollout engine and a trainer. It lists the values that columns may take;
a column it does not list is free. Facts of third-party software are those of vLLM 0.24,
torch 2.13 (FSDP2 with tensor and context parallelism), DeepSpeed 0.19 and Megatron-Core.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ir.batch import CODES, SHARING, fields_of
from ir.errors import InputError
from ir.plan import SECTIONS, Generate, Pass, Update

Values = Mapping[str, tuple[int, ...]]

_KINDS = {Generate: "generate", Pass: "pass", Update: "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What a pair of engine and trainer supports."""

    name: str
    what: str
    """In words."""
    values: Values
    """Codes a column may take; `pass.` and `update.` stand for every section of that kind."""
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
        object.__setattr__(self, "by_column", _expand(self.values))

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


def _codes(field_name: str, *values: str) -> tuple[int, ...]:
    return tuple(CODES[field_name].index(value) for value in values)


_ONE, _ZERO = (1,), (0,)
_NATIVE = _codes("precision", "native")
_NO_EXPERTS: Values = {"pass.ep": _ONE, "update.ep": _ONE, "update.etp": _ONE}
_NO_PIPELINE: Values = {"pass.pp": _ONE, "update.pp": _ONE, "update.vpp": _ONE}

_LOCAL = Backend(
    name="local",
    what="this project's executor: its torch engine and data-parallel trainer",
    algorithms=("grpo",),
    reference_with_actor=True,
    always_in_flight=True,
    values={
        **{f"{kind}.{name}": _ONE for kind in ("generate", "pass", "update") for name in ("tp", "pp", "ep")},
        **{"pass.cp": _ONE, "update.cp": _ONE, "update.vpp": _ONE, "update.etp": _ONE},
        **{"pass.zero": _ZERO, "update.zero": _ZERO, "pass.micro_tokens": _ZERO, "update.micro_tokens": _ZERO},
        **{"generate.memory_percent": _ZERO, "generate.prefill_tokens": _ZERO},
        **{f"{kind}.precision": _NATIVE for kind in ("generate", "update")},
        **{f"{kind}.offload": _codes("offload", "none") for kind in ("pass", "update")},
        "update.recompute": _codes("recompute", "none", "full"),
        "sync": _codes("sync", "reshard", "broadcast"),
        **{name: _ZERO for name in (*SHARING, "fusions.interleave_updates", "fusions.reward_with_generation")},
    },
)

_TORCH = Backend(
    name="torch",
    what="vLLM and FSDP2",
    needs_memory_percent=True,
    engine_experts=True,
    values={**_NO_EXPERTS, **_NO_PIPELINE, "update.zero": (0, 2, 3), "update.precision": _NATIVE},
)

_DEEPSPEED = Backend(
    name="deepspeed",
    what="vLLM and DeepSpeed ZeRO with automatic tensor parallelism",
    needs_memory_percent=True,
    engine_experts=True,
    values={
        **_NO_EXPERTS,
        **_NO_PIPELINE,
        "update.precision": _NATIVE,
        "update.recompute": _codes("recompute", "none", "full"),
    },
)

_MEGATRON = Backend(
    name="megatron",
    what="vLLM and Megatron-Core",
    needs_memory_percent=True,
    engine_experts=True,
    values={"pass.zero": _ZERO, "update.zero": (0, 1)},
)

BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (_LOCAL, _TORCH, _DEEPSPEED, _MEGATRON)}


def backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        InputError: there is none.
    """
    if name not in BACKENDS:
        close = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError("backend", f"must be one of {', '.join(BACKENDS)}{hint}", repr(name))
    return BACKENDS[name]
