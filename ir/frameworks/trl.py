"""TRL 1.16.0: which plans its GRPOTrainer can express, launched by accelerate with DeepSpeed.

As in trl/trainer/grpo_config.py, trl/trainer/grpo_trainer.py and trl/generation/vllm_generation.py.

All models live in the training processes. Engines do too (`vllm_mode: colocate`), or are a
vLLM server on devices of its own; either way generation and training take turns.
"""

from __future__ import annotations

import numpy as np

from ir.backend import Backend, Follower, Values, codes
from ir.batch import ROLES
from ir.frameworks.common import (
    ADAPTER_TAKEN_OFF,
    EVEN_MICRO_BATCHES,
    NATIVE,
    ONE_KIND_OF_DEVICE,
    UPDATES_FILL_THE_POOL,
    flags,
    together,
)
from ir.frameworks.jobs import EVERY_RESPONSE, REFERENCE_IS_THE_ACTOR, job_rule
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

ENGINE_TOKENS = 4096
"""`max_num_batched_tokens` of engines in the training processes, which no key sets; servers are given the same."""

_ROLLOUT = ROLES.index("rollout")

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    **NATIVE,
    **flags("fusions.fold_old_logprob", "sharing.reference_adapter"),
    **{"generate.pp": (1,), "generate.ep": (1,), "generate.prefill_tokens": (ENGINE_TOKENS,)},
    **{f"{kind}.{degree}": (1,) for kind in ("pass", "update") for degree in ("tp", "pp", "cp", "ep")},
    **{"update.vpp": (1,), "update.etp": (1,)},
    **{f"{kind}.micro_tokens": (0,) for kind in ("pass", "update")},
    **{f"{kind}.offload": codes("offload", "none") for kind in ("pass", "update")},
    "update.recompute": codes("recompute", "none", "full"),
    "staleness": (0,),
    "sync": codes("sync", "reshard", "broadcast"),
}


def _as_engines_do(b: Columns, s: Setting) -> Mask:
    """Engines in the training processes hold what these generate: `max_num_seqs` is per_device_train_batch_size x
    vllm_tensor_parallel_size x steps_per_generation, a whole share of the step."""
    engines = np.maximum(b["devices.rollout"] // np.maximum(b["generate.tp"], 1), 1)
    share = -(-s.job.workload.sequences // engines)
    return np.asarray((b["place.actor"] != _ROLLOUT) | (2 * b["generate.concurrency"] > share))


def _served_on_a_node(b: Columns, s: Setting) -> Mask:
    return np.asarray((b["place.actor"] == _ROLLOUT) | (b["devices.rollout"] <= s.groups[0].node))


_RULES = (
    together(Role.REFERENCE, Role.ACTOR),
    together(Role.REWARD, Role.ACTOR),
    ADAPTER_TAKEN_OFF,
    # These read sizes, which a space's tables are not asked of.
    Rule(
        name="trl-engines-take-their-share",
        path="generate.concurrency",
        reads=("generate.concurrency", "generate.tp", "place.actor", "devices.rollout"),
        holds=_as_engines_do,
        message="must be an engine's part of the step's sequences (at most twofold below it) on TRL's training devices",
    ),
    Rule(
        name="trl-serves-on-a-node",
        path="generate.pool",
        reads=("place.actor", "devices.rollout"),
        holds=_served_on_a_node,
        message="must be within a node for a server that one command starts",
    ),
    REFERENCE_IS_THE_ACTOR,
    EVERY_RESPONSE,
    job_rule(
        "trl-answers-in-one-turn",
        lambda s: s.job.workload.turns is None,
        "the job's responses must have a single turn for TRL's own script, which has no tools",
    ),
)


def _whole_machines(x: Columns, s: Section) -> Mask:
    node = s.of_group(x["group"], "node")
    return np.asarray((x["devices"] <= node) | (x["devices"] % node == 0))


_LAYOUT_RULES = (
    UPDATES_FILL_THE_POOL,
    LayoutRule(
        name="trl-runs-on-whole-machines",
        ops=tuple(SECTIONS),
        path="pool",
        reads=("devices", "group"),
        holds=_whole_machines,
        message="must be of whole nodes or within one: accelerate starts as many processes on each machine",
    ),
    EVEN_MICRO_BATCHES,
    LayoutRule(
        # _calculate_rewards of trl/trainer/grpo_trainer.py calls the model once a process.
        name="trl-scores-all-at-once",
        ops=(Op.REWARD,),
        path="micro_batch",
        reads=("devices", "micro_batch"),
        holds=lambda x, s: np.asarray(x["micro_batch"].astype(np.int64) * x["devices"] == s.sequences),
        message="times the devices must be the step's sequences, for TRL scores all of a process's at once",
    ),
)

TRL = Backend(
    name="trl",
    what="TRL 1.16.0: vLLM and GRPOTrainer on DeepSpeed ZeRO",
    algorithms=("grpo", "dr-grpo", "gspo", "cispo"),
    needs_memory_percent=True,
    values=_VALUES,
    rules=_RULES,
    layout_rules=_LAYOUT_RULES,
    follows=(
        # Log-probs are computed in micro-batches of the update's size.
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=("zero", "micro_batch")),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR, fields=("zero", "micro_batch")),
        Follower(op=Op.REWARD, leader=Op.UPDATE_ACTOR, fields=("zero",)),
    ),
)
