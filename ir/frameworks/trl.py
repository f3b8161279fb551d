"""TRL 1.16.0: which plans its GRPOTrainer can express, launched by accelerate with DeepSpeed.

As in trl/trainer/grpo_config.py, trl/trainer/grpo_trainer.py and trl/generation/vllm_generation.py.

All models live in the training processes. Engines do too (`vllm_mode: colocate`), or are a
vLLM server on devices of its own; either way generation and training take turns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ir.backend import Backend, Follower, Values, codes
from ir.batch import FLAGS, ROLES
from ir.frameworks.common import ONE_KIND_OF_DEVICE, UPDATES, UPDATES_FILL_THE_POOL, together
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

ENGINE_TOKENS = 4096
"""`max_num_batched_tokens` of engines in the training processes, which no key sets; servers are given the same."""

_ROLLOUT = ROLES.index("rollout")
_FREE_FLAGS = ("fusions.fold_old_logprob", "sharing.reference_adapter")

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    **{"generate.pp": (1,), "generate.ep": (1,), "generate.prefill_tokens": (ENGINE_TOKENS,)},
    **{f"{kind}.{degree}": (1,) for kind in ("pass", "update") for degree in ("tp", "pp", "cp", "ep")},
    **{"update.vpp": (1,), "update.etp": (1,)},
    **{f"{kind}.precision": codes("precision", "native") for kind in ("generate", "update")},
    **{f"{kind}.micro_tokens": (0,) for kind in ("pass", "update")},
    **{f"{kind}.offload": codes("offload", "none") for kind in ("pass", "update")},
    "update.recompute": codes("recompute", "none", "full"),
    "staleness": (0,),
    "sync": codes("sync", "reshard", "broadcast"),
    **{flag: (0,) for flag in FLAGS if flag not in _FREE_FLAGS},
}


def _of_job(name: str, holds: Callable[[Setting], bool], message: str) -> Rule:
    """A rule on the job alone."""
    return Rule(name=name, path="generate.pool", reads=(), holds=lambda _b, s: holds(s), message=message)


def _reference_is_the_actor(s: Setting) -> bool:
    models = s.job.document.models
    own, actor = models.reference, models.actor
    return own is None or (own.name, own.path) == (actor.name, actor.path)


def _switches_adapters_off(b: Columns, s: Setting) -> Mask:
    wanted = s.job.actor.lora_rank > 0 and Role.REFERENCE in s.job.models
    return np.asarray(b["sharing.reference_adapter"] == int(wanted))


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
    Rule(
        name="trl-switches-adapters-off",
        path="sharing.reference_adapter",
        reads=("sharing.reference_adapter",),
        holds=_switches_adapters_off,
        message="must be true exactly where adapters are trained with a reference, for TRL",
    ),
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
    _of_job(
        "trl-reference-is-the-actor",
        _reference_is_the_actor,
        "the job's models.reference must be that of models.actor for TRL, which loads the policy's once more",
    ),
    _of_job(
        "trl-answers-in-one-turn",
        lambda s: s.job.workload.turns is None,
        "the job's responses must have a single turn for TRL's own script, which has no tools",
    ),
    _of_job(
        "trl-abandons-nothing",
        lambda s: s.job.workload.oversampling == 1.0,
        "the job's workload.oversampling must be 1 for TRL, which waits for every response",
    ),
)


def _whole_machines(x: Columns, s: Section) -> Mask:
    node = s.of_group(x["group"], "node")
    return np.asarray((x["devices"] <= node) | (x["devices"] % node == 0))


def _accumulates(x: Columns, s: Section) -> Mask:
    return np.asarray(s.sequences % np.maximum(x["micro_batch"].astype(np.int64) * x["dp"], 1) == 0)


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
    LayoutRule(
        name="trl-accumulates-whole-micro-batches",
        ops=UPDATES,
        path="micro_batch",
        reads=("dp", "micro_batch"),
        holds=_accumulates,
        message="times dp must divide the sequences of a minibatch, for gradient_accumulation_steps is an integer",
    ),
    LayoutRule(
        # _calculate_rewards calls the model once a process.
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
