"""AReaL 1.0.4: which plans its configuration can express (areal/api/cli_args.py, areal/api/alloc_mode.py, and the
engines and schedulers behind them).

Every model has an engine with degrees of its own, trained by FSDP2 (`zero` 3, always resharded) or by Megatron-Core
(`zero` 0 or 1); rollouts run on SGLang servers.
"""

from __future__ import annotations

import numpy as np

from ir.backend import DEGREES, Backend, Follower, Values, codes
from ir.batch import ROLES
from ir.frameworks.common import (
    NATIVE,
    ONE_KIND_OF_DEVICE,
    REPLICAS,
    TRAINERS,
    UPDATES,
    UPDATES_FILL_THE_POOL,
    flags,
    replicas,
)
from ir.frameworks.fsdp import RECOMPUTES_WHOLE_LAYERS, is_fsdp, only_shards, scatters_heads
from ir.frameworks.jobs import EVERY_RESPONSE, NO_REWARD_MODEL, ONE_EPOCH
from ir.graph import Op
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

_TRAINED = ("actor", "critic", "reference")
_DISK = codes("sync", "disk")[0]

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    **NATIVE,
    **flags("fusions.rollout_logprob"),
    "fusions.reward_with_generation": (1,),
    # Servers with a pipeline of their own take new weights only from a trainer with one of equal depth.
    "generate.pp": (1,),
    # `mb_spec.max_tokens_per_mb` packs by tokens; an interleaved pipeline is planned for batches by sequences.
    **{f"{kind}.micro_batch": (0,) for kind in ("pass", "update")},
    "update.vpp": (1,),
    "update.zero": (0, 1, 3),
    "update.offload": codes("offload", "none", "all"),
    "sync": codes("sync", "broadcast", "disk"),
}


def _apart_from_servers(b: Columns, s: Setting) -> Mask:
    """A role that shares devices must have as many workers as its target, and a server is one worker on several
    devices; what is more, servers that share take new weights from files only, which is no resharding in place."""
    apart = [b[f"place.{role}"] != ROLES.index("rollout") for role in _TRAINED if role in s.roles]
    return np.asarray(np.logical_and.reduce(apart))


def _capped(b: Columns, s: Setting) -> Mask:
    return np.asarray((b["staleness"] == 0) | (s.job.algorithm.max_importance_weight > 1))


_RULES = (
    Rule(
        name="areal-servers-run-alone",
        path="pools",
        reads=tuple(f"place.{role}" for role in _TRAINED),
        holds=_apart_from_servers,
        message="the pool that generates must have no other model on it for AReaL, whose servers share no devices",
    ),
    Rule(
        # RejectionSamplingConfig with action `clamp` on the ratio.
        name="areal-caps-weights-above-one",
        path="staleness",
        reads=("staleness",),
        holds=_capped,
        message="above 0 needs the job's algorithm.max_importance_weight above 1 for AReaL",
    ),
    Rule(
        # build_distributed_weight_update_requests of areal/engine/sglang_remote.py.
        name="areal-adapters-travel-in-files",
        path="sync",
        reads=("sync",),
        holds=lambda b, s: s.job.actor.lora_rank == 0 or np.asarray(b["sync"] == _DISK),
        message="must be 'disk' for adapters, which AReaL's SGLang servers load from files",
    ),
    NO_REWARD_MODEL,
    ONE_EPOCH,
    EVERY_RESPONSE,
)


def _runs_at_once(x: Columns, s: Section) -> Mask:
    """The staleness manager (areal/infra/staleness_manager.py) counts groups that run, so that
    none is started in place of those that will be dropped."""
    sequences = s.sequences * (1 + x["staleness"].astype(np.int64))
    return np.asarray(x["concurrency"] <= -(-sequences // np.maximum(x["devices"] // x["tp"], 1)))


def _dealt_evenly(x: Columns, s: Section) -> Mask:
    return np.asarray(s.setting.job.workload.prompts_per_step % replicas(x, s) == 0)


def _tensors_divide(x: Columns, s: Section) -> Mask:
    return np.asarray(~is_fsdp(x) | (s.shape.kv_heads % x["tp"] == 0))


def _adapters_are_sharded(x: Columns, s: Section) -> Mask | bool:
    alone = x["tp"].astype(np.int64) * x["pp"] * x["cp"] * x["dp"] == 1
    return s.shape.lora_rank == 0 or np.asarray(is_fsdp(x) | alone)


_LAYOUT_RULES = (
    UPDATES_FILL_THE_POOL,
    LayoutRule(
        name="areal-server-in-a-node",
        ops=(Op.GENERATE,),
        path="tp",
        reads=("tp", "group"),
        holds=lambda x, s: s.of_group(x["group"], "node") % x["tp"] == 0,
        message="must divide the devices of a node for AReaL, which starts a server as one worker",
    ),
    LayoutRule(
        name="areal-bounds-what-runs",
        ops=(Op.GENERATE,),
        path="concurrency",
        reads=("concurrency", "devices", "tp", "staleness"),
        holds=_runs_at_once,
        message="must not exceed a server's share of (1 + staleness) steps' sequences for AReaL",
    ),
    LayoutRule(
        # balanced_greedy_partition of areal/utils/seqpack.py deals the prompts' groups out, and raises where they do
        # not divide.
        name="areal-deals-prompts-out-evenly",
        ops=TRAINERS,
        path="tp",
        reads=REPLICAS,
        holds=_dealt_evenly,
        message="must, with the other degrees, leave replicas that divide workload.prompts_per_step, for AReaL",
    ),
    LayoutRule(
        # areal/engine/fsdp_utils/parallel.py raises.
        name="areal-fsdp-divides-the-kv-heads",
        ops=TRAINERS,
        path="tp",
        reads=("tp", "zero"),
        holds=_tensors_divide,
        message="must divide the model's KV heads with zero 3, which is FSDP for AReaL",
    ),
    # areal/models/transformers/ulyssess_patch.py.
    scatters_heads(*TRAINERS),
    only_shards(("ep", "etp"), *TRAINERS),
    RECOMPUTES_WHOLE_LAYERS,
    LayoutRule(
        # _validate_cfg of areal/trainer/rl_trainer.py refuses adapters that Megatron trains for SGLang's servers.
        name="areal-adapters-need-fsdp",
        ops=UPDATES,
        path="zero",
        reads=("tp", "pp", "cp", "dp", "zero"),
        holds=_adapters_are_sharded,
        message="must be 3 for adapters on several devices, which AReaL trains with FSDP only",
    ),
)

_ENGINE = (*DEGREES, "zero", "micro_tokens")

AREAL = Backend(
    name="areal",
    what="AReaL 1.0.4: SGLang servers apart from FSDP2 or Megatron-Core",
    algorithms=("ppo", "grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo"),
    needs_memory_percent=True,
    engine_experts=True,
    always_in_flight=True,
    values=_VALUES,
    rules=_RULES,
    layout_rules=_LAYOUT_RULES,
    follows=(
        Follower(op=Op.OLD_LOGPROB, leader=Op.UPDATE_ACTOR, fields=_ENGINE),
        Follower(op=Op.VALUES, leader=Op.UPDATE_CRITIC, fields=_ENGINE),
    ),
)
