"""vLLM 0.33 by its engine arguments: which engines it can be; what trains is anything."""

from __future__ import annotations

from ir.backend import Backend
from ir.frameworks.common import whole_engines
from ir.graph import Op

VLLM_ARGS = Backend(
    name="vllm-args",
    what="vLLM 0.33 engines with any trainer",
    values={},
    extras=("sync", "pass.shard", "update.shard", "update.schedule"),
    layout_rules=(whole_engines(Op.GENERATE),),
)
