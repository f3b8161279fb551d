"""What engines and trainers can run, so that a space can be kept to it.

Facts of third-party software are those of vLLM 0.24, torch 2.13 (FSDP2 with tensor and
context parallelism), DeepSpeed 0.19 and Megatron-Core; frameworks that have both an engine
and a trainer are in `ir.frameworks`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.backend import Backend, Values, codes
from ir.batch import SHARING
from ir.errors import chosen
from ir.frameworks import FRAMEWORKS

_ONE, _ZERO = (1,), (0,)
_NATIVE = codes("precision", "native")
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
        **{f"{kind}.offload": codes("offload", "none") for kind in ("pass", "update")},
        "update.recompute": codes("recompute", "none", "full"),
        "sync": codes("sync", "reshard", "broadcast"),
        **{name: _ZERO for name in (*SHARING, "fusions.interleave_updates", "fusions.reward_with_generation")},
    },
)

_TORCH = Backend(
    name="torch",
    what="vLLM and FSDP2",
    needs_memory_percent=True,
    engine_experts=True,
    extras=("generate.draft_tokens", "pass.shard", "update.shard"),
    values={**_NO_EXPERTS, **_NO_PIPELINE, "update.zero": (0, 2, 3), "update.precision": _NATIVE},
)

_DEEPSPEED = Backend(
    name="deepspeed",
    what="vLLM and DeepSpeed ZeRO with automatic tensor parallelism",
    needs_memory_percent=True,
    extras=("generate.draft_tokens",),
    engine_experts=True,
    values={
        **_NO_EXPERTS,
        **_NO_PIPELINE,
        "update.precision": _NATIVE,
        "update.recompute": codes("recompute", "none", "full"),
    },
)

_MEGATRON = Backend(
    name="megatron",
    what="vLLM and Megatron-Core",
    needs_memory_percent=True,
    engine_experts=True,
    extras=("generate.draft_tokens",),
    values={"pass.zero": _ZERO, "update.zero": (0, 1)},
)

BACKENDS: Mapping[str, Backend] = {
    backend.name: backend for backend in (_LOCAL, _TORCH, _DEEPSPEED, _MEGATRON, *FRAMEWORKS)
}


def backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        InputError: there is none.
    """
    return chosen(name, BACKENDS, "backend")
