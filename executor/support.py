"""What this executor can run: asked before any worker starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from ir.backends import backend
from ir.errors import InputError
from ir.job import RUNNABLE_ACTOR, Job
from ir.model import ModelShape
from ir.plan import Plan
from ir.rules import Setting, check
from ir.setting import Devices


def _has_weights(job: Job) -> bool:
    source = job.document.models.actor
    return source.path is not None and (source.warm_start is not None or job.actor_path.is_dir())


def _is_plain(shape: ModelShape, longest: int) -> bool:
    """Whether the engine's own decode attention is the model's: it knows no latent vectors, sinks, or windows that
    close before a sequence is over, and nothing of what comes with more than two norms a layer (soft caps)."""
    windowed = any(0 < window < longest for window in shape.windows)
    return shape.mla is None and shape.moe is None and not shape.sinks and shape.norms_per_layer == 2 and not windowed


@dataclass(frozen=True, slots=True)
class _Need:
    """What a job must be to be run here; planning asks less."""

    path: str
    """The key of job.toml that is wrong; its value is reported where it is one word."""
    holds: Callable[[Job], bool]
    rule: str


_NEEDS = (
    _Need("algorithm.name", lambda j: j.algorithm.name == "grpo", "must be grpo to be run"),
    _Need("models.actor.lora_rank", lambda j: j.actor.lora_rank == 0, "must not be given to be run"),
    _Need("models.reference", lambda j: j.document.models.reference is None, "must be the initial actor to be run"),
    _Need("models.reward", lambda j: j.document.models.reward is None, "must be a verifier to be run"),
    _Need("workload.tasks", lambda j: bool(j.workload.tasks), "must name at least one data set to be run"),
    _Need("workload.oversampling", lambda j: j.workload.oversampling == 1, "must be 1 to be run"),
    _Need("workload.turns", lambda j: j.workload.turns is None, "must not be given to be run"),
    _Need(
        "workload.shared_prefix_tokens",
        lambda j: j.workload.shared_prefix_tokens == 0,
        "must be 0 to be run: the engine here reads every prompt whole",
    ),
    _Need(
        "objective",
        lambda j: j.document.objective == "step_time",
        "must be step_time to be run: real runs are compared by their seconds",
    ),
    _Need("limits.max_price_per_hour", lambda j: j.limits.max_price_per_hour is None, "must not be given to be run"),
    _Need("models.actor.path", _has_weights, RUNNABLE_ACTOR),
    _Need(
        "models.actor",
        lambda j: _is_plain(j.actor, j.workload.max_tokens),
        "must be a dense decoder with full attention over `max_prompt_tokens` + `max_response_tokens` to be run",
    ),
)


def check_runnable(job: Job) -> None:
    """Refuse what can be planned but is not run here, before any worker meets it.

    Raises:
        InputError: names what the job asks for.
    """
    for need in _NEEDS:
        if not need.holds(job):
            got: object = reduce(getattr, need.path.split("."), job.document)
            word = repr(got) if isinstance(got, str) else got
            raise InputError(f"job: {need.path}", need.rule, word if isinstance(word, str | int | float) else None)


def check_plan(plan: Plan, job: Job, devices: int, *, where: str = "plan") -> None:
    """Refuse a plan that this executor would not run as it says on a machine of so many `devices`, before any worker
    starts.

    Raises:
        InputError: names what the plan or the job asks for.
    """
    check_runnable(job)
    for pool in plan.pools:
        if pool.group:
            raise InputError(f"{where}: pools", "must lie in group 0 to be run: a machine is one group", pool.group)
    machine = Devices(count=devices, domain=devices)
    check(plan, Setting(job=job, groups=(machine,), backend=backend("local")), where=where)
