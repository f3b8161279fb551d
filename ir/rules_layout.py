"""Rules on the layout of one section: degrees, micro-batches, and what devices can do."""

from __future__ import annotations

import numpy as np

from ir.backend import Backend
from ir.graph import Op
from ir.layouts import ALL, ENGINES, FILLING, TRAINERS, UPDATES, Array, replica, replicas
from ir.rules_training import TRAINING_RULES
from ir.setting import Columns, LayoutRule, Mask, Section


def _heads_divide(x: Columns, s: Section) -> Mask:
    shape, tp = s.shape, x["tp"]
    keys = shape.mla is not None or (shape.kv_heads % tp == 0) | (tp % shape.kv_heads == 0)
    return np.asarray((shape.heads % tp == 0) & keys)


def _inside_a_domain(x: Columns, s: Section) -> Mask | bool:
    domain = s.of_group(x["group"], "domain")
    return s.is_fixed("tp") or np.asarray((x["tp"] <= domain) & (domain % np.minimum(x["tp"], domain) == 0))


def _layers_fill(x: Columns, s: Section) -> Mask:
    """Pieces of equal size, the last one smaller: it must not be empty."""
    pieces = x["pp"].astype(np.int64) * (x["vpp"] if s.op in UPDATES else 1)
    size = -(-s.shape.layers // pieces)
    return np.asarray((pieces - 1) * size < s.shape.layers)


def _experts_divide(x: Columns, s: Section) -> Mask:
    return np.asarray((x["ep"] == 1) | (s.shape.moe is not None and s.shape.moe.experts % x["ep"] == 0))


def _experts_inside(x: Columns, s: Section) -> Mask:
    """Devices that hold the same layers are tp x cp x replicas."""
    divided = x["ep"].astype(np.int64) * (x["etp"] if s.op in UPDATES else 1)
    same_layers = x["tp"].astype(np.int64) * (1 if s.op in ENGINES else x["cp"]) * replicas(x, s)
    return np.asarray(same_layers % divided == 0)


def _engine_experts(x: Columns, s: Section) -> Mask | bool:
    backend = s.setting.backend
    return backend is None or not backend.engine_experts or np.asarray((x["ep"] == 1) | (x["ep"] == x["tp"]))


def _a_sequence_fits(x: Columns, s: Section) -> Mask:
    budget = x["micro_tokens"].astype(np.int64) * x["cp"]
    return np.asarray((budget == 0) | (budget >= s.setting.job.workload.max_tokens))


def _in_flight(x: Columns, s: Section) -> Array:
    """Most sequences an engine can hold: those of the step being generated and of the k steps ahead of it."""
    started = int(np.ceil(s.setting.job.generated_sequences))
    return np.asarray(-(-started * (1 + x["staleness"].astype(np.int64)) // replicas(x, s)))


LAYOUT_RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        name="replicas-fill-the-pool",
        ops=FILLING,
        path="tp",
        reads=("devices", "tp", "pp", "cp"),
        holds=lambda x, s: x["devices"] % replica(x, s) == 0,
        message="times the section's other degrees must divide the devices of its pool",
    ),
    LayoutRule(
        name="replicas-fit-the-pool",
        ops=UPDATES,
        path="dp",
        reads=("devices", "tp", "pp", "cp", "dp"),
        holds=lambda x, s: replica(x, s) * x["dp"] <= x["devices"],
        message="times the section's tp, pp and cp must not exceed the devices of its pool",
    ),
    LayoutRule(
        name="half-the-pool-works",
        ops=UPDATES,
        path="dp",
        reads=("devices", "tp", "pp", "cp", "dp"),
        holds=lambda x, s: 2 * replica(x, s) * x["dp"] >= x["devices"],
        message="times the section's tp, pp and cp must be at least half of the devices of its pool",
    ),
    LayoutRule(
        name="tensor-parallel-divides-the-heads",
        ops=ALL,
        path="tp",
        reads=("tp",),
        holds=_heads_divide,
        message="must divide the model's attention heads, and divide its KV heads or be a multiple of them",
    ),
    LayoutRule(
        name="tensor-parallel-inside-a-domain",
        ops=ALL,
        path="tp",
        reads=("tp", "group"),
        holds=_inside_a_domain,
        message="must divide the devices that the fastest links join, for every layer waits for it",
    ),
    LayoutRule(
        name="layers-fill-the-pipeline",
        ops=ALL,
        path="pp",
        reads=("pp", "vpp"),
        holds=_layers_fill,
        message="every piece of the pipeline must have a layer when layers are dealt out evenly",
    ),
    LayoutRule(
        name="experts-divide",
        ops=ALL,
        path="ep",
        reads=("ep",),
        holds=_experts_divide,
        message="must divide the model's experts, and be 1 where it has none",
    ),
    LayoutRule(
        name="experts-inside-the-replicas",
        ops=ALL,
        path="ep",
        reads=("devices", "tp", "pp", "cp", "dp", "ep", "etp"),
        holds=_experts_inside,
        message="(times etp) must divide the devices that hold the same layers: tp x cp x replicas",
    ),
    LayoutRule(
        name="backend-divides-an-engines-experts",
        ops=ENGINES,
        path="ep",
        reads=("tp", "ep"),
        holds=_engine_experts,
        message="must be 1 or tp for this backend's engine",
    ),
    LayoutRule(
        name="expert-tensor-parallel-is-one-or-all",
        ops=UPDATES,
        path="etp",
        reads=("tp", "etp"),
        holds=lambda x, s: (x["etp"] == 1) | ((x["etp"] == x["tp"]) & (s.shape.moe is not None)),
        message="must be 1, or tp for a model with experts",
    ),
    LayoutRule(
        name="context-parallel-divides-the-sequence",
        ops=TRAINERS,
        path="cp",
        reads=("cp",),
        holds=lambda x, s: (x["cp"] == 1) | (s.setting.job.workload.max_tokens % (2 * x["cp"]) == 0),
        message="times 2 must divide the longest sequence, which is dealt out from both ends",
    ),
    LayoutRule(
        name="dp-divides-the-minibatch",
        ops=UPDATES,
        path="dp",
        reads=("dp",),
        holds=lambda x, s: s.sequences % x["dp"] == 0,
        message="must divide the sequences of a minibatch",
    ),
    LayoutRule(
        name="one-unit-of-micro-batch",
        ops=TRAINERS,
        path="micro_batch",
        reads=("micro_batch", "micro_tokens"),
        holds=lambda x, s: (x["micro_batch"] > 0) != (x["micro_tokens"] > 0),
        message="exactly one of micro_batch and micro_tokens must be above 0",
    ),
    LayoutRule(
        name="micro-tokens-hold-a-sequence",
        ops=TRAINERS,
        path="micro_tokens",
        reads=("micro_tokens", "cp"),
        holds=_a_sequence_fits,
        message="times cp must hold the longest sequence",
    ),
    LayoutRule(
        name="micro-batch-fits",
        ops=TRAINERS,
        path="micro_batch",
        reads=("micro_batch", "devices", "tp", "pp", "cp", "dp"),
        holds=lambda x, s: x["micro_batch"] <= -(-s.sequences // replicas(x, s)),
        message="must not exceed a replica's sequences",
    ),
    LayoutRule(
        name="concurrency-fits",
        ops=ENGINES,
        path="concurrency",
        reads=("concurrency", "devices", "tp", "pp", "staleness"),
        holds=lambda x, s: x["concurrency"] <= _in_flight(x, s),
        message="must not exceed the sequences an engine can have in flight under the staleness bound",
    ),
    LayoutRule(
        name="guesses-need-an-acceptance",
        ops=ENGINES,
        path="draft_tokens",
        reads=("draft_tokens",),
        holds=lambda x, s: (x["draft_tokens"] == 0) | (s.setting.job.workload.speculation is not None),
        message="must be 0 unless the job says how often guesses are right: workload.speculation",
    ),
    LayoutRule(
        name="backend-sizes-the-cache-by-memory",
        ops=ENGINES,
        path="memory_percent",
        reads=("memory_percent",),
        holds=lambda x, s: (
            s.setting.backend is None or not s.setting.backend.needs_memory_percent or (x["memory_percent"] > 0)
        ),
        message="must be above 0 for this backend, whose cache takes a share of memory",
    ),
    LayoutRule(
        name="fp8-needs-the-device",
        ops=(*ENGINES, *UPDATES),
        path="precision",
        reads=("precision", "group"),
        holds=lambda x, s: (x["precision"] == 0) | s.of_group(x["group"], "fp8"),
        message="must be native on devices that do not multiply in fp8",
    ),
    LayoutRule(
        name="offload-needs-host-memory",
        ops=TRAINERS,
        path="offload",
        reads=("offload", "group"),
        holds=lambda x, s: (x["offload"] == 0) | s.of_group(x["group"], "host"),
        message="must be none where devices have no host memory apart from their own",
    ),
    LayoutRule(
        name="trained-weights-wait-as-the-update-says",
        ops=(Op.OLD_LOGPROB, Op.VALUES),
        path="offload",
        reads=("offload",),
        holds=lambda x, s: x["offload"] == 0,
        message="must be none: offload of the model's update says where its weights wait",
    ),
    *TRAINING_RULES,
)


def layout_rules(op: Op, backend: Backend | None = None) -> tuple[LayoutRule, ...]:
    """The rules on the layout of a section, those of a backend included."""
    rules = LAYOUT_RULES if backend is None else (*LAYOUT_RULES, *backend.layout_rules)
    return tuple(rule for rule in rules if op in rule.ops)
