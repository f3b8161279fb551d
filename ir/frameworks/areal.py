"""AReaL 1.0.4: which plans its configuration can express (areal/api/cli_args.py, areal/api/alloc_mode.py, and the
engines and schedulers behind them).

Every model has an engine with degrees of its own, trained by FSDP2 (`zero` 3, always resharded) or by Megatron-Core
(`zero` 0 or 1); rollouts run on SGLang servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.backend import DEGREES, Backend, Follower, Values, codes
from ir.batch import FLAGS, ROLES
from ir.frameworks.common import ONE_KIND_OF_DEVICE, UPDATES, UPDATES_FILL_THE_POOL
from ir.graph import Op
from ir.job import Role
from ir.plan import SECTIONS, Generate
from ir.setting import Columns, LayoutRule, Mask, Rule, Section, Setting

_TRAINERS = tuple(op for op, kind in SECTIONS.items() if kind is not Generate)
_TRAINED = ("actor", "critic", "reference")
_FULLY_SHARDED, _SELECTIVE, _DISK = 3, codes("recompute", "selective")[0], codes("sync", "disk")[0]

_VALUES: Values = {
    **ONE_KIND_OF_DEVICE,
    # Servers with a pipeline of their own take new weights only from a trainer with one of equal depth.
    "generate.pp": (1,),
    **{f"{kind}.precision": codes("precision", "native") for kind in ("generate", "update")},
    # `mb_spec.max_tokens_per_mb` packs by tokens; an interleaved pipeline is planned for batches by sequences.
    **{f"{kind}.micro_batch": (0,) for kind in ("pass", "update")},
    "update.vpp": (1,),
    "update.zero": (0, 1, _FULLY_SHARDED),
    "update.offload": codes("offload", "none", "all"),
    "sync": codes("sync", "broadcast", "disk"),
    "fusions.reward_with_generation": (1,),
    **{flag: (0,) for flag in FLAGS if flag not in ("fusions.reward_with_generation", "fusions.rollout_logprob")},
}


def _apart_from_servers(b: Columns, s: Setting) -> Mask:
    """A role that shares devices must have as many workers as its target, and a server is one worker on several
    devices; what is more, servers that share take new weights from files only, which is no resharding in place."""
    apart = [b[f"place.{role}"] != ROLES.index("rollout") for role in _TRAINED if role in s.roles]
    return np.asarray(np.logical_and.reduce(apart))


def _capped(b: Columns, s: Setting) -> Mask:
    return np.asarray((b["staleness"] == 0) | (s.job.algorithm.max_importance_weight > 1))


def _of_job(name: str, holds: Callable[[Setting], bool], message: str) -> Rule:
    """A rule on the job alone."""
    return Rule(name=name, path="generate.pool", reads=(), holds=lambda _b, s: holds(s), message=message)


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
    _of_job(
        "areal-scores-by-a-function",
        lambda s: Role.REWARD not in s.job.models,
        "the job must have a verifier for AReaL, which has no role for a reward model",
    ),
    _of_job(
        "areal-goes-over-a-batch-once",
        lambda s: s.job.workload.epochs == 1,
        "the job's workload.epochs must be 1 for AReaL, which has minibatches only",
    ),
    _of_job(
        "areal-abandons-nothing",
        lambda s: s.job.workload.oversampling == 1.0,
        "the job's workload.oversampling must be 1 for AReaL, which keeps every response it started",
    ),
)


def _runs_at_once(x: Columns, s: Section) -> Mask:
    """The staleness manager counts groups that run, so that none is started in place of those that will be dropped."""
    sequences = s.sequences * (1 + x["staleness"].astype(np.int64))
    return np.asarray(x["concurrency"] <= -(-sequences // np.maximum(x["devices"] // x["tp"], 1)))


def _sharded(x: Columns) -> Mask:
    return np.asarray(x["zero"] == _FULLY_SHARDED)


def _replicas(x: Columns, s: Section) -> NDArray[Any]:
    replica = x["tp"].astype(np.int64) * x["pp"] * x["cp"]
    return np.asarray(x["dp"]) if s.op in UPDATES else np.maximum(x["devices"] // replica, 1)


def _dealt_evenly(x: Columns, s: Section) -> Mask:
    return np.asarray(s.setting.job.workload.prompts_per_step % _replicas(x, s) == 0)


def _tensors_divide(x: Columns, s: Section) -> Mask:
    return np.asarray(~_sharded(x) | (s.shape.kv_heads % x["tp"] == 0))


def _heads_are_scattered(x: Columns, s: Section) -> Mask:
    """Ulysses exchanges sequence parts for heads; a rank's KV heads are repeated where there are too few."""
    heads, kv = s.shape.heads // x["tp"], np.maximum(s.shape.kv_heads // x["tp"], 1)
    scattered = (heads % x["cp"] == 0) & ((kv % x["cp"] == 0) | (x["cp"] % kv == 0))
    return np.asarray(~_sharded(x) | scattered)


def _adapters_are_sharded(x: Columns, s: Section) -> Mask | bool:
    alone = x["tp"].astype(np.int64) * x["pp"] * x["cp"] * x["dp"] == 1
    return s.shape.lora_rank == 0 or np.asarray(_sharded(x) | alone)


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
        # balanced_greedy_partition deals the prompts' groups out; it raises where they do not divide.
        name="areal-deals-prompts-out-evenly",
        ops=_TRAINERS,
        path="tp",
        reads=("devices", "tp", "pp", "cp", "dp"),
        holds=_dealt_evenly,
        message="must, with the other degrees, leave replicas that divide workload.prompts_per_step, for AReaL",
    ),
    LayoutRule(
        name="areal-fsdp-divides-the-kv-heads",
        ops=_TRAINERS,
        path="tp",
        reads=("tp", "zero"),
        holds=_tensors_divide,
        message="must divide the model's KV heads with zero 3, which is FSDP for AReaL",
    ),
    LayoutRule(
        name="areal-fsdp-scatters-heads",
        ops=_TRAINERS,
        path="cp",
        reads=("tp", "cp", "zero"),
        holds=_heads_are_scattered,
        message="must divide a rank's heads, and divide its KV heads or be a multiple of them, with zero 3 for AReaL",
    ),
    LayoutRule(
        name="areal-fsdp-divides-no-experts",
        ops=_TRAINERS,
        path="ep",
        reads=("ep", "zero"),
        holds=lambda x, s: ~_sharded(x) | (x["ep"] == 1),
        message="must be 1 with zero 3, for AReaL's FSDP has no expert parallelism",
    ),
    LayoutRule(
        name="areal-fsdp-divides-no-expert",
        ops=UPDATES,
        path="etp",
        reads=("etp", "zero"),
        holds=lambda x, s: ~_sharded(x) | (x["etp"] == 1),
        message="must be 1 with zero 3, for AReaL's FSDP divides no expert's tensors",
    ),
    LayoutRule(
        name="areal-fsdp-recomputes-all",
        ops=UPDATES,
        path="recompute",
        reads=("zero", "recompute"),
        holds=lambda x, s: ~_sharded(x) | (x["recompute"] != _SELECTIVE),
        message="must be none or full with zero 3 for AReaL, whose FSDP recomputes whole layers",
    ),
    LayoutRule(
        # _validate_cfg refuses adapters that Megatron trains for SGLang's servers.
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
