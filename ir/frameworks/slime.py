"""slime (THUDM/slime, v0.3.1): Megatron-LM and SGLang, one set of flags.

Facts from `slime/utils/arguments.py`, `slime/backends/megatron_utils/{arguments,actor}.py`,
`slime/ray/placement_group.py`, `slime/utils/dp_schedule.py`, `train.py` and `train_async.py` (Apache-2.0).
"""

from __future__ import annotations

import numpy as np

from ir.backend import DEGREES, Backend, Follower, codes
from ir.batch import SHARING
from ir.frameworks.common import (
    EARLY_REWARD,
    EVEN_MICRO_BATCHES,
    ONE_KIND_OF_DEVICE,
    UPDATES_FILL_THE_POOL,
    together,
)
from ir.frameworks.jobs import CRITIC_LIKE_ACTOR, NO_ADAPTERS, NO_REWARD_MODEL, ONE_EPOCH, REFERENCE_LIKE_ACTOR
from ir.frameworks.megatron import DISTRIBUTED_OPTIMIZER
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

_ONE, _OFF = (1,), (0,)
_MICRO = ("micro_batch", "micro_tokens")
_UPDATE = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp", "zero", *_MICRO, "recompute", "offload", "precision")


def _nodes(x: Columns, s: Section) -> Mask:
    """GPUs are taken in order, the trainer's first: engines of a pool that begins inside a node could straddle two."""
    node, alone = s.of_group(x["group"], "node"), s.of_group(x["group"], "count")
    return np.asarray((x["devices"] % node == 0) | ((alone <= node) & (x["devices"] <= node)))


_WHOLE_NODES = LayoutRule(
    name="slime-pools-are-whole-nodes",
    ops=tuple(SECTIONS),
    path="pool",
    reads=("devices", "group"),
    holds=_nodes,
    message="must be of whole nodes, or part of the only node",
)


# sglang/srt/server_args.py asserts it.
_MIXED_CHUNKS = LayoutRule(
    name="slime-mixed-chunks-exclude-a-pipeline",
    ops=(Op.GENERATE,),
    path="prefill_tokens",
    reads=("pp", "prefill_tokens"),
    holds=lambda x, s: (x["prefill_tokens"] == 0) | (x["pp"] == 1),
    message="must be 0 with a pipeline: SGLang does not mix prompts and decoding in one",
)


def _reuses_logprobs(s: Setting) -> bool:
    """Whether the update's own forward pass gives the old log-probs (`can_reuse_log_probs_in_loss` of actor.py)."""
    algorithm = s.job.algorithm
    in_reward = algorithm.kl_in_reward and Role.REFERENCE in s.job.models
    return s.job.updates_per_step == 1 and not in_reward and algorithm.name not in ("ppo", "gspo")


_FOLDED = Rule(
    name="slime-old-logprobs-fold-when-they-can",
    path="fusions.fold_old_logprob",
    reads=("fusions.fold_old_logprob", "fusions.rollout_logprob"),
    holds=lambda b, s: np.asarray(
        b["fusions.fold_old_logprob"] == (_reuses_logprobs(s) & (b["fusions.rollout_logprob"] == 0))
    ),
    message="must be true exactly where there is one update a step without critic, KL penalty in the reward or gspo, "
    "and the engines' log-probs are not taken",
)


def _away(x: Columns, s: Section) -> Mask | bool:
    return Role.CRITIC not in s.setting.job.models or np.asarray(x["offload"] == codes("offload", "all")[0])


_TURNS = LayoutRule(
    name="slime-actor-and-critic-take-turns",
    ops=(Op.UPDATE_ACTOR, Op.UPDATE_CRITIC),
    path="offload",
    reads=("offload",),
    holds=_away,
    message="must be all beside a critic: either model waits in host memory while the other trains",
)

SLIME = Backend(
    name="slime",
    what="slime v0.3.1: Megatron-LM and SGLang",
    algorithms=("grpo", "dr-grpo", "dapo", "gspo", "cispo", "reinforce++", "reinforce++-baseline", "ppo"),
    needs_memory_percent=True,
    engine_experts=True,
    reference_with_actor=True,
    values={
        **ONE_KIND_OF_DEVICE,
        **dict.fromkeys(SHARING, _OFF),
        # train_async.py is one rollout ahead and waits for it before it sends weights; nothing bounds a fully async
        # rollout's staleness.
        "staleness": (0, 1),
        "in_flight": _OFF,
        # update_weight_from_disk_delta.py compares whole tensors and writes files, which patch every host's checkpoint.
        "sync": codes("sync", "reshard", "broadcast", "disk", "delta-disk"),
        "fusions.merge_logprobs": _OFF,
        "fusions.stream": _OFF,
        "fusions.interleave_updates": _OFF,
        "pass.zero": _OFF,
        "update.zero": (0, 1),
        # --offload-train moves all of it; --optimizer-cpu-offload updates on the host instead.
        "update.offload": codes("offload", "none", "all"),
        # The actor's buffers take the reference's weights from host memory for the pass.
        "reference_logprob.offload": codes("offload", "all"),
    },
    rules=(
        together(Role.CRITIC, Role.ACTOR),
        EARLY_REWARD,
        _FOLDED,
        ONE_EPOCH,
        NO_REWARD_MODEL,
        NO_ADAPTERS,
        REFERENCE_LIKE_ACTOR,
        CRITIC_LIKE_ACTOR,
    ),
    layout_rules=(
        _WHOLE_NODES,
        UPDATES_FILL_THE_POOL,
        DISTRIBUTED_OPTIMIZER,
        EVEN_MICRO_BATCHES,
        _TURNS,
        _MIXED_CHUNKS,
    ),
    follows=(
        Follower(op=Op.UPDATE_CRITIC, leader=Op.UPDATE_ACTOR, fields=_UPDATE),
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, *_MICRO)),
        Follower(op=Op.REFERENCE_LOGPROB, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, *_MICRO)),
        Follower(op=Op.VALUES, leader=Op.UPDATE_ACTOR, fields=(*DEGREES, *_MICRO)),
    ),
)
