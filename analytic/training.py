"""Constants of training from `data/training.toml`, and what trainers differ in."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What a trainer fuses and hides; the data file says what each figure counts."""

    score_bytes: float
    score_bytes_backward: float
    score_flops: float
    saved_scores: float
    saved_masks: float
    logit_bytes: float
    routed_hidden: float
    gradient_bytes: float
    saves_fp8: bool
    attention_limit: float
    tensor_overlap: float
    overlaps: bool
    launches: float
    expert_launches: float
    expert_overlap: float
    adapters: float
    sequence_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """See the data file for meaning and source of each."""

    attention_backward: float
    loaded: dict[str, float]
    """By generation of devices."""
    optimizer_bytes: float
    bucket_parameters: float
    bucket_parameters_per_replica: float
    step_s: float
    deviations: float
    communicator_bytes: float
    fragmentation: float
    asleep_bytes: float
    sync_bucket_bytes: float
    logit_passed: float
    trainers: dict[str, Trainer]


@cache
def training() -> Training:
    """The constants, read once."""
    data = tomllib.loads((Path(__file__).parent / "data" / "training.toml").read_text(encoding="utf-8"))
    memory = data["memory"]
    return Training(
        attention_backward=data["attention"]["backward_ratio"],
        loaded=data["kernels"]["loaded"],
        optimizer_bytes=data["optimizer"]["bytes_per_parameter"],
        bucket_parameters=data["buckets"]["parameters"],
        bucket_parameters_per_replica=data["buckets"]["parameters_per_replica"],
        step_s=data["step"]["seconds"],
        deviations=data["imbalance"]["deviations"],
        communicator_bytes=memory["communicator"],
        fragmentation=memory["fragmentation"],
        asleep_bytes=memory["asleep"],
        sync_bucket_bytes=memory["bucket"],
        logit_passed=memory["logit_passed"],
        trainers={name: Trainer(**traits) for name, traits in data["trainers"].items()},
    )
