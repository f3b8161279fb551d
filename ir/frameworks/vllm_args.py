"""vLLM 0.33 by its engine arguments: which engines it can be; what trains is anything."""

from __future__ import annotations

from ir.backend import Backend
from ir.graph import Op
from ir.setting import LayoutRule

# With enable_expert_parallel, experts are divided over tensor_parallel_size x data_parallel_size devices.
_EXPERTS = LayoutRule(
    name="experts-over-whole-engines",
    ops=(Op.GENERATE,),
    path="ep",
    reads=("tp", "ep"),
    holds=lambda x, s: (x["ep"] == 1) | (x["ep"] % x["tp"] == 0),
    message="must be 1 or a multiple of tp: experts are divided over all devices of one or several engines",
)

VLLM_ARGS = Backend(
    name="vllm-args",
    what="vLLM 0.33 engines with any trainer",
    values={},
    extras=("update.shard", "update.schedule"),
    layout_rules=(_EXPERTS,),
)
