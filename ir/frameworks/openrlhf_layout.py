"""What OpenRLHF 0.11.2 asks of the layout of a section."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.frameworks.common import (
    EVEN_MICRO_BATCHES,
    PASSES,
    REPLICAS,
    TRAINERS,
    UPDATES,
    UPDATES_FILL_THE_POOL,
    replicas,
)
from ir.frameworks.deepspeed import auto_tp
from ir.graph import Op
from ir.setting import Columns, LayoutRule, Mask, Section

ENGINE_SEQUENCES, ENGINE_TOKENS = 128, 2048
"""`max_num_seqs` and `max_num_batched_tokens`, which no flag sets: vLLM's for `AsyncLLMEngine.from_engine_args`
(SchedulerConfig.DEFAULT_MAX_NUM_SEQS and DEFAULT_MAX_NUM_BATCHED_TOKENS)."""


def _share(x: Columns, s: Section) -> NDArray[Any]:
    """Sequences an engine decodes together: its part of one step's, for a step's are all sent before the next's."""
    engines = np.maximum(x["devices"] // x["tp"], 1)
    return np.asarray(np.minimum(-(-s.sequences // engines), ENGINE_SEQUENCES))


def _as_engines_do(x: Columns, s: Section) -> Mask:
    share = _share(x, s)
    return np.asarray((x["concurrency"] <= share) & (2 * x["concurrency"] > share))


def _whole_batches(x: Columns, s: Section) -> Mask:
    batch = np.maximum(x["micro_batch"], 1) * replicas(x, s)
    return np.asarray((x["micro_batch"] == 0) | (s.sequences % batch == 0))


def _batch_each(x: Columns, s: Section) -> Mask:
    batches = -(-s.sequences // np.maximum(x["micro_batch"], 1))
    return np.asarray((x["micro_batch"] == 0) | (batches >= replicas(x, s)))


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
    auto_tp(*TRAINERS),
    EVEN_MICRO_BATCHES,
    LayoutRule(
        # _gather_params_ctx of openrlhf/trainer/ray/ppo_actor.py gathers one or the other.
        name="openrlhf-syncs-one-kind-of-shards",
        ops=TRAINERS,
        path="zero",
        reads=("tp", "zero"),
        holds=lambda x, s: (x["tp"] == 1) | (x["zero"] < 3),
        message="must be below 3 with tp above 1 for OpenRLHF, whose weight sync gathers only one of the two",
    ),
    LayoutRule(
        # get_minimum_num_micro_batch_size of openrlhf/utils/seqlen_balancing.py multiplies the budget of a device by
        # both degrees.
        name="openrlhf-budget-of-a-device",
        ops=TRAINERS,
        path="micro_tokens",
        reads=("tp", "micro_tokens"),
        holds=lambda x, s: x["micro_tokens"] % x["tp"] == 0,
        message="must be a multiple of tp for OpenRLHF, whose `max_tokens_per_gpu` counts each of its devices",
    ),
    LayoutRule(
        name="openrlhf-deals-out-evenly",
        ops=(Op.OLD_LOGPROB, Op.VALUES),
        path="micro_batch",
        reads=("micro_batch", *REPLICAS),
        holds=_whole_batches,
        message="times the replicas must divide the step's sequences for OpenRLHF: replicas train on what they get",
    ),
    LayoutRule(
        name="openrlhf-has-a-batch-for-each",
        ops=PASSES,
        path="micro_batch",
        reads=("micro_batch", *REPLICAS),
        holds=_batch_each,
        message="must leave every replica a micro-batch for OpenRLHF",
    ),
    LayoutRule(
        # offload_deepspeed_states of openrlhf/utils/deepspeed/deepspeed_utils.py calls the ZeRO optimizer's own.
        name="openrlhf-sleeps-with-zero",
        ops=UPDATES,
        path="offload",
        reads=("zero", "offload"),
        holds=lambda x, s: (x["offload"] == 0) | (x["zero"] > 0),
        message="must be none with zero 0, for only DeepSpeed's ZeRO optimizers can wait in host memory",
    ),
    LayoutRule(
        # get_eval_ds_config of the same file: `offload_param` without stage 3 does nothing.
        name="openrlhf-offloads-divided-weights",
        ops=PASSES,
        path="offload",
        reads=("zero", "offload"),
        holds=lambda x, s: (x["offload"] == 0) | (x["zero"] == 3),
        message="must be none with zero 0, for DeepSpeed keeps only weights that ZeRO divides in host memory",
    ),
)
