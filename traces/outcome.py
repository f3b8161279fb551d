"""What one run gave, before it is kept as a trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from traces.schema import Span, Step, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run gave."""

    state: TrialState
    failure: str = ""
    """Kind of failure, empty if there was none."""
    failure_detail: str = ""
    step_seconds: tuple[float, ...] = ()
    """Every step after the warm-up, in order."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Mean seconds of each stage per step on the busiest device; may be empty."""
    peak_bytes: int = 0
    """Largest over the devices; 0 if unknown."""
    max_staleness: int = 0
    mean_reward: float = 0.0
    response_tokens: float = 0.0
    setup_seconds: float = 0.0
    warm: bool = False
    others_share: float | None = None
    """Share of the cores' time that other processes took meanwhile; None where this was not measured."""
    started_at: datetime
    """UTC."""
    ended_at: datetime
    spans: tuple[Span, ...] = ()
    """Their run id is given by the search, as that of the steps."""
    steps: tuple[Step, ...] = ()
    """Every step, the warm-up included."""
