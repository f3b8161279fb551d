"""Conditions of frameworks whose trainer is FSDP where a plan's ZeRO stage is 2 or 3, and Megatron where it is less."""

from __future__ import annotations

import numpy as np

from ir.backend import codes
from ir.frameworks.common import UPDATES
from ir.graph import Op
from ir.plan import SECTIONS, Update
from ir.setting import Columns, LayoutRule, Mask, Section

_SELECTIVE, _NATIVE = codes("recompute", "selective")[0], codes("precision", "native")[0]


def is_fsdp(x: Columns) -> Mask:
    """Whether FSDP runs a section, by the ZeRO stage."""
    return np.asarray(x["zero"] >= 2)


def only_shards(degrees: tuple[str, ...], *ops: Op) -> LayoutRule:
    """FSDP divides a model by no other degree of these."""

    def holds(x: Columns, s: Section) -> Mask:
        own = [name for name in degrees if name not in ("vpp", "etp") or SECTIONS[s.op] is Update]
        return np.asarray(~is_fsdp(x) | np.logical_and.reduce([x[name] == 1 for name in own]))

    return LayoutRule(
        name="fsdp-only-shards",
        ops=ops,
        path="zero",
        reads=("zero", *degrees),
        holds=holds,
        message=f"above 1, which is FSDP, needs {', '.join(degrees[:-1])} and {degrees[-1]} of 1",
    )


RECOMPUTES_WHOLE_LAYERS = LayoutRule(
    name="fsdp-recomputes-whole-layers",
    ops=UPDATES,
    path="recompute",
    reads=("zero", "recompute"),
    holds=lambda x, s: ~is_fsdp(x) | (x["recompute"] != _SELECTIVE),
    message="must be none or full with FSDP: zero above 1",
)

TRAINS_NATIVELY = LayoutRule(
    name="fsdp-trains-natively",
    ops=UPDATES,
    path="precision",
    reads=("zero", "precision"),
    holds=lambda x, s: ~is_fsdp(x) | (x["precision"] == _NATIVE),
    message="must be native with FSDP: zero above 1",
)


def _ulysses(x: Columns, s: Section) -> Mask:
    """Ulysses exchanges sequence parts for heads; a rank's KV heads are repeated where there are too few."""
    heads, kv = s.shape.heads // x["tp"], np.maximum(s.shape.kv_heads // x["tp"], 1)
    scattered = (heads % x["cp"] == 0) & ((kv % x["cp"] == 0) | (x["cp"] % kv == 0))
    return np.asarray(~is_fsdp(x) | scattered)


def scatters_heads(*ops: Op) -> LayoutRule:
    """FSDP's context parallelism is Ulysses."""
    return LayoutRule(
        name="fsdp-scatters-heads",
        ops=ops,
        path="cp",
        reads=("zero", "tp", "cp"),
        holds=_ulysses,
        message="must divide a rank's attention heads, and divide its KV heads or be a multiple of them, with FSDP: "
        "zero above 1",
    )
