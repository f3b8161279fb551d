"""What OpenRLHF 0.11.2 asks of the layout of a section."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.frameworks.common import UPDATES, UPDATES_FILL_THE_POOL
from ir.graph import Op
from ir.plan import SECTIONS, Pass
from ir.setting import Columns, LayoutRule, Mask, Section

ENGINE_SEQUENCES, ENGINE_TOKENS = 128, 2048
"""`max_num_seqs` and `max_num_batched_tokens`, which no flag sets: vLLM's for `AsyncLLMEngine.from_engine_args`
(SchedulerConfig.DEFAULT_MAX_NUM_SEQS and DEFAULT_MAX_NUM_BATCHED_TOKENS)."""

_PASSES = tuple(op for op, kind in SECTIONS.items() if kind is Pass)
_TRAINERS = (*_PASSES, *UPDATES)


def _replicas(x: Columns, s: Section) -> NDArray[Any]:
    return np.asarray(np.maximum(x["devices"] // (x["tp"].astype(np.int64) * x["cp"]), 1))


def _share(x: Columns, s: Section) -> NDArray[Any]:
    """Sequences an engine decodes together: its part of one step's, for a step's are all sent before the next's."""
    engines = np.maximum(x["devices"] // x["tp"], 1)
    return np.asarray(np.minimum(-(-s.sequences // engines), ENGINE_SEQUENCES))


def _as_engines_do(x: Columns, s: Section) -> Mask:
    share = _share(x, s)
    return np.asarray((x["concurrency"] <= share) & (2 * x["concurrency"] > share))


def _splits(x: Columns, s: Section) -> Mask:
    """Whether AutoTP divides every layer evenly."""
    whole = s.shape.moe is None and (s.shape.mla is not None or s.shape.kv_heads % x["tp"] == 0)
    return np.asarray((x["tp"] == 1) | whole)


def _whole_batches(x: Columns, s: Section) -> Mask:
    batch = np.maximum(x["micro_batch"], 1) * _replicas(x, s)
    return np.asarray((x["micro_batch"] == 0) | (s.sequences % batch == 0))


def _batch_each(x: Columns, s: Section) -> Mask:
    batches = -(-s.sequences // np.maximum(x["micro_batch"], 1))
    return np.asarray((x["micro_batch"] == 0) | (batches >= _replicas(x, s)))


LAYOUT_RULES = (
    UPDATES_FILL_THE_POOL,
    LayoutRule(
        name="openrlhf-engines-take-their-share",
        ops=(Op.GENERATE,),
        path="concurrency",
        reads=("concurrency", "devices", "tp"),
        holds=_as_engines_do,
        message=(
            "must be an engine's part of a step's sequences or 128, vLLM's default, if that is less (at most twofold "
            "below it), for OpenRLHF sends a step's sequences at once and has no flag for it"
        ),
    ),
    LayoutRule(
        name="openrlhf-divides-tensors-evenly",
        ops=_TRAINERS,
        path="tp",
        reads=("tp",),
        holds=_splits,
        message="must be 1 for models with experts and divide the KV heads of others, for DeepSpeed's AutoTP",
    ),
    LayoutRule(
        # _gather_params_ctx of openrlhf/trainer/ray/ppo_actor.py gathers one or the other.
        name="openrlhf-syncs-one-kind-of-shards",
        ops=_TRAINERS,
        path="zero",
        reads=("tp", "zero"),
        holds=lambda x, s: (x["tp"] == 1) | (x["zero"] < 3),
        message="must be below 3 with tp above 1 for OpenRLHF, whose weight sync gathers only one of the two",
    ),
    LayoutRule(
        # get_minimum_num_micro_batch_size multiplies the budget of a device by both degrees.
        name="openrlhf-budget-of-a-device",
        ops=_TRAINERS,
        path="micro_tokens",
        reads=("tp", "micro_tokens"),
        holds=lambda x, s: x["micro_tokens"] % x["tp"] == 0,
        message="must be a multiple of tp for OpenRLHF, whose `max_tokens_per_gpu` counts each of its devices",
    ),
    LayoutRule(
        name="openrlhf-steps-in-whole-micro-batches",
        ops=UPDATES,
        path="micro_batch",
        reads=("dp", "micro_batch"),
        holds=lambda x, s: (x["micro_batch"] == 0) | (s.sequences % np.maximum(x["micro_batch"] * x["dp"], 1) == 0),
        message="times dp must divide the sequences of a minibatch, for DeepSpeed accumulates whole micro-batches",
    ),
    LayoutRule(
        name="openrlhf-deals-out-evenly",
        ops=(Op.OLD_LOGPROB, Op.VALUES),
        path="micro_batch",
        reads=("micro_batch", "devices", "tp", "cp"),
        holds=_whole_batches,
        message="times the replicas must divide the step's sequences for OpenRLHF: replicas train on what they get",
    ),
    LayoutRule(
        name="openrlhf-has-a-batch-for-each",
        ops=_PASSES,
        path="micro_batch",
        reads=("micro_batch", "devices", "tp", "cp"),
        holds=_batch_each,
        message="must leave every replica a micro-batch for OpenRLHF",
    ),
    LayoutRule(
        # offload_deepspeed_states calls the ZeRO optimizer's offload_states.
        name="openrlhf-sleeps-with-zero",
        ops=UPDATES,
        path="offload",
        reads=("zero", "offload"),
        holds=lambda x, s: (x["offload"] == 0) | (x["zero"] > 0),
        message="must be none with zero 0, for only DeepSpeed's ZeRO optimizers can wait in host memory",
    ),
    LayoutRule(
        # get_eval_ds_config: `offload_param` without stage 3 does nothing.
        name="openrlhf-offloads-divided-weights",
        ops=_PASSES,
        path="offload",
        reads=("zero", "offload"),
        holds=lambda x, s: (x["offload"] == 0) | (x["zero"] == 3),
        message="must be none with zero 0, for DeepSpeed keeps only weights that ZeRO divides in host memory",
    ),
)
