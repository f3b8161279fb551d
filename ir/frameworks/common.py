"""What several frameworks can express alike: values of fields, and conditions on places, pools and micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.backend import Values, codes
from ir.batch import FLAGS, ROLES
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS, Pass, Update
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

PASSES = tuple(op for op, kind in SECTIONS.items() if kind is Pass)
UPDATES = tuple(op for op, kind in SECTIONS.items() if kind is Update)
TRAINERS = (*PASSES, *UPDATES)
"""Sections that compute with a model over whole batches."""

ONE_KIND_OF_DEVICE: Values = {f"group.{role}": (0,) for role in ROLES}
"""Configurations that speak of one cluster of like nodes."""

NATIVE: Values = {f"{kind}.precision": codes("precision", "native") for kind in ("generate", "update")}
"""Frameworks whose products are all in the model's precision."""


def flags(*free: str) -> Values:
    """Fusions and shared models that a framework has none of, but for those named."""
    return {flag: (0,) for flag in FLAGS if flag not in free}


def replicas(x: Columns, s: Section) -> NDArray[Any]:
    """Copies of a model that batches are dealt out to."""
    if s.op in UPDATES:
        return np.asarray(x["dp"].astype(np.int64))
    return np.asarray(np.maximum(x["devices"] // (x["tp"].astype(np.int64) * x["pp"] * x["cp"]), 1))


REPLICAS = ("devices", "tp", "pp", "cp", "dp")
"""Columns that `replicas` reads."""


# Pools and places


def _whole_nodes(x: Columns, s: Section) -> Mask:
    node = s.of_group(x["group"], "node")
    inside = (x["devices"] <= node) & (node % np.maximum(x["devices"], 1) == 0)
    return np.asarray(inside | (x["devices"] % node == 0))


WHOLE_NODES = LayoutRule(
    name="pools-are-whole-nodes",
    ops=tuple(SECTIONS),
    path="pool",
    reads=("devices", "group"),
    holds=_whole_nodes,
    message="must be of whole nodes, or divide one: sizes are configured as nodes x devices per node",
)

UPDATES_FILL_THE_POOL = LayoutRule(
    name="updates-fill-the-pool",
    ops=UPDATES,
    path="dp",
    reads=REPLICAS,
    holds=lambda x, s: x["dp"].astype(np.int64) * x["tp"] * x["pp"] * x["cp"] == x["devices"],
    message="times tp, pp and cp must be the devices of the pool, for data parallelism takes what is left",
)


def together(one: Role, other: Role) -> Rule:
    """Two models must be on one pool."""

    def holds(b: Columns, s: Setting) -> Mask | bool:
        return not {one, other} <= set(s.job.models) or np.asarray(b[f"place.{one}"] == b[f"place.{other}"])

    return Rule(
        name=f"{one}-runs-with-the-{other}",
        path="pools",
        reads=(f"place.{one}", f"place.{other}"),
        holds=holds,
        message=f"the {one} must be on the {other}'s pool",
    )


# Fusions and shared models


def is_verified(s: Setting) -> bool:
    """Whether responses are scored by a verifier."""
    return Op.REWARD in s.ops and Role.REWARD not in s.job.models


EARLY_REWARD = Rule(
    name="verified-when-finished",
    path="fusions.reward_with_generation",
    reads=("fusions.reward_with_generation",),
    holds=lambda b, s: not is_verified(s) or np.asarray(b["fusions.reward_with_generation"] == 1),
    message="must be true, for each response is verified as soon as it is finished",
)


def _adapter_taken_off(b: Columns, s: Setting) -> Mask:
    wanted = s.job.actor.lora_rank > 0 and Role.REFERENCE in s.job.models
    return np.asarray(b["sharing.reference_adapter"] == int(wanted))


ADAPTER_TAKEN_OFF = Rule(
    name="reference-is-the-actor-without-adapters",
    path="sharing.reference_adapter",
    reads=("sharing.reference_adapter",),
    holds=_adapter_taken_off,
    message="must be true exactly where adapters are trained with a reference, which is the actor without them",
)


# Micro-batches


def _divides_evenly(x: Columns, s: Section) -> Mask:
    return np.asarray(s.sequences % np.maximum(x["micro_batch"].astype(np.int64) * x["dp"], 1) == 0)


# Megatron-LM asserts global_batch_size % (micro_batch_size x data_parallel_size) == 0, and the
# gradient_accumulation_steps of DeepSpeed and accelerate are an integer.
EVEN_MICRO_BATCHES = LayoutRule(
    name="micro-batches-are-even",
    ops=UPDATES,
    path="micro_batch",
    reads=("dp", "micro_batch"),
    holds=_divides_evenly,
    message="times dp must divide the sequences of a minibatch",
)


def _batches_are_even(x: Columns, s: Section) -> Mask:
    return np.asarray(s.sequences % (replicas(x, s) * np.maximum(x["micro_batch"], 1)) == 0)


def even_batches(*ops: Op) -> LayoutRule:
    """Every replica gets as many sequences as the others, in whole micro-batches."""
    return LayoutRule(
        name="batches-are-even",
        ops=ops,
        path="micro_batch",
        reads=(*REPLICAS, "micro_batch"),
        holds=_batches_are_even,
        message="(1 where it packs tokens) times the replicas must divide the sequences of a step, or of a minibatch "
        "for an update",
    )


# Engines


def whole_engines(*ops: Op) -> LayoutRule:
    """vLLM's enable_expert_parallel divides experts over tensor_parallel_size x data_parallel_size devices."""
    return LayoutRule(
        name="experts-over-whole-engines",
        ops=ops,
        path="ep",
        reads=("tp", "ep"),
        holds=lambda x, s: (x["ep"] == 1) | (x["ep"] % x["tp"] == 0),
        message="must be 1 or a multiple of tp: experts are divided over all devices of one or several engines",
    )
