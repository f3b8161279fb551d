"""Records of trials and spans, and the Parquet schemas they are stored under.

Columns are only ever added: none is retyped and no name is used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

import pyarrow as pa

SCHEMA_VERSION = 1


class TrialState(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    """It ran its steps, or was stopped because it was clearly losing: either way its times are good."""
    INFEASIBLE = "infeasible"
    """It ran out of memory: says something about the plan."""
    FAILED = "failed"
    """It crashed or hung: says nothing about the plan, which may be tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One real run of a plan, as it ended."""

    run_id: str
    """Unique."""
    study: str
    """Identity of the job."""
    plan_id: str
    """Hash of the plan."""
    label: str = ""
    """A preset's name, or empty."""
    params: dict[str, str]
    """Value of every axis by name, in decimal."""
    space_version: str
    model_version: str
    hardware: str
    """Fingerprint of the cluster."""
    software: str
    """Fingerprint of the packages that ran."""
    state: TrialState
    failure: str = ""
    """Kind of failure, empty if there was none."""
    failure_detail: str = ""
    step_seconds: tuple[float, ...] = ()
    """Every step after the warm-up, in order."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Mean seconds of each stage per step: the busiest device's."""
    peak_bytes: int = 0
    """Largest over the devices."""
    max_staleness: int = 0
    """Largest staleness seen in any sample."""
    mean_reward: float = 0.0
    response_tokens: float = 0.0
    """Mean response length."""
    setup_seconds: float = 0.0
    """From the end of the previous trial to the first step of this one."""
    warm: bool = False
    """Whether every worker process was already there."""
    others_share: float | None = None
    """Share of the cores' time that other processes took while it ran; None where this was not measured."""
    started_at: datetime
    """UTC."""
    ended_at: datetime
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One visit of one device to a stage."""

    run_id: str
    step: int
    stage: str
    pool: str
    device: int
    start_s: float
    """Seconds since the run started."""
    end_s: float
    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One RL step of a run, warm-up steps included."""

    run_id: str
    step: int
    seconds: float
    """From the publication of the previous step's weights to this one's."""
    reward: float
    """Mean over the samples trained on."""
    response_tokens: float
    """Mean."""
    staleness: tuple[int, ...]
    """Of every sample trained on: updates between the oldest weights that sampled it and those it trained."""
    loss: float = 0.0
    gradient_norm: float = 0.0


_UTC = pa.timestamp("us", tz="UTC")

TRIAL_SCHEMA = pa.schema(
    [
        ("schema_version", pa.int64()),
        ("run_id", pa.string()),
        ("study", pa.string()),
        ("plan_id", pa.string()),
        ("label", pa.string()),
        ("params", pa.map_(pa.string(), pa.string())),
        ("space_version", pa.string()),
        ("model_version", pa.string()),
        ("hardware", pa.string()),
        ("software", pa.string()),
        ("state", pa.string()),
        ("failure", pa.string()),
        ("failure_detail", pa.string()),
        ("objective", pa.float64()),
        ("step_seconds", pa.list_(pa.float64())),
        ("stage_seconds", pa.map_(pa.string(), pa.float64())),
        ("peak_bytes", pa.int64()),
        ("max_staleness", pa.int64()),
        ("mean_reward", pa.float64()),
        ("response_tokens", pa.float64()),
        ("setup_seconds", pa.float64()),
        ("warm", pa.bool_()),
        ("others_share", pa.float64()),
        ("started_at", _UTC),
        ("ended_at", _UTC),
        ("host", pa.string()),
    ]
)

SPAN_SCHEMA = pa.schema(
    [
        ("schema_version", pa.int64()),
        ("run_id", pa.string()),
        ("step", pa.int64()),
        ("stage", pa.string()),
        ("pool", pa.string()),
        ("device", pa.int64()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("sequences", pa.int64()),
        ("tokens", pa.int64()),
    ]
)

STEP_SCHEMA = pa.schema(
    [
        ("schema_version", pa.int64()),
        ("run_id", pa.string()),
        ("step", pa.int64()),
        ("seconds", pa.float64()),
        ("reward", pa.float64()),
        ("response_tokens", pa.float64()),
        ("staleness", pa.list_(pa.int64())),
        ("loss", pa.float64()),
        ("gradient_norm", pa.float64()),
    ]
)
