"""DeepSpeed 0.19.8's JSON (deepspeed/runtime/config.py): which plans' training it can express. It speaks of one trained
model at a time, and of nothing else in a step."""

from __future__ import annotations

from ir.backend import Backend, Values, codes
from ir.frameworks.common import EVEN_MICRO_BATCHES, UPDATES
from ir.frameworks.deepspeed import auto_tp
from ir.setting import LayoutRule

_VALUES: Values = {
    **{f"update.{degree}": (1,) for degree in ("pp", "vpp", "ep", "etp")},
    # Micro-batches have a size; states that come and go are moved by calls.
    "update.micro_tokens": (0,),
    "update.offload": codes("offload", "none"),
    "update.precision": codes("precision", "native"),
    "update.recompute": codes("recompute", "none", "full"),
}


_LAYOUT_RULES = (
    auto_tp(*UPDATES),
    EVEN_MICRO_BATCHES,
    LayoutRule(
        # The mesh made of data_parallel_size and sequence_parallel_size has no third side.
        name="deepspeed-divides-tensors-or-sequences",
        ops=UPDATES,
        path="cp",
        reads=("tp", "cp"),
        holds=lambda x, s: (x["tp"] == 1) | (x["cp"] == 1),
        message="must be 1 with tp above 1, for DeepSpeed's mesh is of sequences and data",
    ),
    LayoutRule(
        name="deepspeed-sequences-divide-the-heads",
        ops=UPDATES,
        path="cp",
        reads=("cp",),
        holds=lambda x, s: s.shape.heads % x["cp"] == 0,
        message="must divide the attention heads, which DeepSpeed's Ulysses deals out",
    ),
)

DEEPSPEED_JSON = Backend(
    name="deepspeed-json",
    what="DeepSpeed 0.19.8's JSON for each trained model",
    # Engines are not its business. Hybrid sharding is: 0.19.8 refuses `mics_shard_size`, and `zero_hpz_partition_size`
    # copies weights only.
    extras=("sync", "generate.draft_tokens", "pass.shard"),
    values=_VALUES,
    layout_rules=_LAYOUT_RULES,
)
