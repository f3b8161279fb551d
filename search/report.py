"""What a person reads: the space, the ranking, trials as they end, and the conclusion. Pure text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analytic.device import fit_error, roofline_of
from analytic.kernelfit import kernel_errors
from ir.cluster import Cluster
from ir.plan import Plan
from search import pareto
from search.confidence import Confidence, leave_one_out
from search.runs import locate
from search.survey import DESIGNS, Survey
from traces.schema import Trial, TrialState
from traces.store import objective

SHORT = {
    "generate": "gen",
    "reward": "rew",
    "reference_logprob": "ref",
    "teacher_logprob": "teach",
    "old_logprob": "old",
    "reference_logprob+old_logprob": "ref+old",
    "values": "val",
    "update_critic": "critic",
    "update_actor": "update",
    "update_critic+update_actor": "both",
    "sync_weights": "sync",
}
"""Stage names in tables."""

PROVED = {
    "step_time": "none of the others is faster",
    "cost_per_step": "none of the others is cheaper",
    "cost_per_sample": "none of the others is cheaper",
    "pareto": f"none is {pareto.MATTERS:.0%} faster with as few devices and as little staleness and memory",
}
"""What is proved of the best, by the job's objective."""


BUSY = 0.1
"""Share of the cores' time from which on other processes are told of: steps beside them are longer by about as much,
which is more than plans near the best differ by."""


def busy_text(share: float | None) -> str:
    """What other processes took, empty if it is next to nothing."""
    return f"other processes took {share:.0%} of the cores" if share is not None and share >= BUSY else ""


def cluster_text(cluster: Cluster) -> str:
    """A measured machine in a line."""
    device = cluster.device
    roofline = roofline_of(device)
    fit = f" (fit within {fit_error(roofline, device.matmul):.0%})" if device.matmul else ""
    errors = [f"{kind} {error:.0%}" for kind, error in kernel_errors(cluster.groups[0]).items()]
    kernels = f"\n  the model is off its kernels by, in the median: {', '.join(errors)}" if errors else ""
    scales = [f"{kind} x {s.factor:.2f} by {s.plans} plans" for kind, s in (device.scales or {}).items()]
    learnt = f"\n  learnt from real runs: {', '.join(scales)}" if scales else ""
    return (
        f"{cluster.name}: {cluster.num_devices} x {device.name}, {1e-9 / roofline.seconds_per_flop:.0f} GFLOP/s{fit}, "
        f"{device.memory_bandwidth / 1e9:.0f} GB/s, {device.memory_bytes / 2**30:.1f} GiB each, "
        f"process start {cluster.process_start_s:.1f} s{kernels}{learnt}"
    )


def space_text(survey: Survey) -> str:
    """How large the space is and what it will be compared with."""
    priced, fit = len(survey.legal.batch), int(survey.fits.sum())
    proof = f" (proved: {PROVED[survey.job.document.objective]})" if survey.is_proved else ""
    which = "all priced" if survey.is_whole else f"{priced:,} of them priced{proof}"
    most = "at most " if survey.setting.is_coupled and not survey.is_whole else ""
    lines = [
        f"{_large(survey.space.num_combinations)} combinations of {len(survey.space.axes)} axes, "
        f"{most}{_large(survey.num_legal)} legal plans, {which}, "
        f"{fit:,} fit in {size_text(survey.capacity_bytes)} a device",
        "presets:" if survey.presets else "presets: none is legal here",
    ]
    return "\n".join([*lines, *_preset_lines(survey)])


def _preset_lines(survey: Survey) -> Iterator[str]:
    if not survey.presets:
        return
    estimate = survey.preset_estimate
    margin = 1.0 - survey.job.limits.memory_margin
    rows = zip(survey.presets.items(), estimate.step_seconds, estimate.memory.fill, strict=True)
    for (name, plan), seconds, fill in rows:
        note = "" if fill <= margin else f" (needs {fill:.0%} of memory)"
        yield f"  {name:22} predicted {seconds:.3f} s{note}   {plan.describe()}"


def _large(number: int) -> str:
    return f"{number:,}" if number < 10**12 else f"{number:.3e}"


def size_text(num_bytes: float) -> str:
    """Bytes as a person reads them."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def best_text(survey: Survey, count: int = DESIGNS) -> str:
    """The best plans by the model, how they differ and how many are proved, and what their steps are made of."""
    if survey.job.document.objective == "pareto":
        head = "the model's front of step time, devices, staleness and memory:"
    else:
        proved = f"; {survey.num_proved} proved" if survey.num_proved and not survey.is_whole else ""
        head = f"the model's best of each design (what shares devices, and staleness{proved}), and others:"
    return f"{head}\n{_ranking_text(survey, count)}"


def _ranking_text(survey: Survey, count: int) -> str:
    rows, used = survey.ranking(count), pareto.devices_of(survey.estimate.batch)
    stages = [i for i in range(len(survey.estimate.stages)) if survey.estimate.stage_seconds[rows, i].any()]
    header = [
        "#",
        "step s",
        *(SHORT[survey.estimate.stages[i]] for i in stages),
        "devices",
        "memory",
        "bound by",
        "plan",
    ]
    table = [header]
    for place, row in enumerate(rows, start=1):
        seconds = survey.estimate.stage_seconds[row]
        table.append(
            [
                str(place),
                f"{survey.step_seconds[row]:.3f}",
                *(f"{seconds[i]:.3f}" if seconds[i] else "-" for i in stages),
                str(used[row]),
                f"{survey.estimate.memory.fill[row]:.0%}",
                survey.bound_by(row),
                survey.legal.batch.plan(row).describe(),
            ]
        )
    return align(table)


def speedup_text(survey: Survey) -> str:
    """How much faster the model's best plan is than each preset that fits."""
    rows = survey.ranking(1)
    if not rows or not survey.presets:
        return ""
    best, estimate = float(survey.step_seconds[rows[0]]), survey.preset_estimate
    good = estimate.memory.fill <= 1.0 - survey.job.limits.memory_margin
    ratios = [
        f"{seconds / best:.2f} x {name}"
        for name, seconds, fits in zip(survey.presets, estimate.step_seconds, good, strict=True)
        if fits
    ]
    return "#1 is predicted " + ", ".join(ratios) if ratios else ""


def trial_text(survey: Survey, trial: Trial, number: int, best: float | None) -> str:
    """One finished trial."""
    row = survey.candidates.row_of(plan_of(survey, trial))
    predicted = f"{survey.step_seconds[row]:.3f}" if row is not None else "-"
    head = f"#{number:<3}{trial.label or 'search':20} {plan_of(survey, trial).describe()}"
    seconds = objective(trial.step_seconds)
    if trial.state is not TrialState.COMPLETE or seconds is None:
        return f"{head}\n     {trial.state}: {trial.failure} ({trial.failure_detail})"
    stages = " ".join(f"{SHORT.get(name, name)} {s:.3f}" for name, s in trial.stage_seconds.items() if s >= 5e-4)
    best_text = "-" if best is None else f"{best:.3f}"
    busy = busy_text(trial.others_share)
    return "\n     ".join(
        [
            head,
            f"predicted {predicted} s, measured {seconds:.3f} s over {len(trial.step_seconds)} steps: {stages}",
            f"{trial.peak_bytes / 2**20:.0f} MiB, staleness {trial.max_staleness}, reward {trial.mean_reward:.2f}; "
            f"best so far {best_text} s{'; ' + busy if busy else ''}",
        ]
    )


def plan_of(survey: Survey, trial: Trial) -> Plan:
    """The plan that a trial ran."""
    return survey.candidates.plan(locate(survey.candidates, trial.params))


def best_seconds(trials: Sequence[Trial]) -> float | None:
    """Least mean step of the completed trials."""
    done = [objective(t.step_seconds) for t in trials if t.state is TrialState.COMPLETE]
    return min((s for s in done if s is not None), default=None)


def conclusion_text(
    survey: Survey, trials: Sequence[Trial], best: Trial, confidence: Confidence, why_stopped: str
) -> str:
    """The best plan, what bounds it, its speed-up over the presets, and how sure the search is."""
    plan = plan_of(survey, best)
    seconds = objective(best.step_seconds)
    assert seconds is not None
    bottleneck = max(best.stage_seconds, key=lambda name: best.stage_seconds[name])
    lines = [
        f"best plan: {plan.describe()}",
        f"  {seconds:.3f} s a step; its longest stage is {bottleneck} ({best.stage_seconds[bottleneck]:.3f} s), "
        f"its step is set by the {survey.bound_by(confidence.leader, best.stage_seconds)}",
    ]
    for name, other in _preset_seconds(trials).items():
        lines.append(f"  {other / seconds:.2f} x as fast as {name} ({other:.3f} s)")
    lines.append(
        f"  within 3% of the best of {len(survey.candidates):,} plans with probability {confidence.p3:.2f}; "
        f"expected gap {confidence.expected_gap:.1%}; {len(trials)} trials, stopped: {why_stopped}"
    )
    disturbed = [share for trial in trials if (share := trial.others_share) is not None and share >= BUSY]
    if disturbed:
        lines.append(
            f"  beside {len(disturbed)} of {len(trials)} runs other processes took up to {max(disturbed):.0%} of the "
            "cores: search anew where nothing else runs"
        )
    return "\n".join(lines)


def _preset_seconds(trials: Sequence[Trial]) -> dict[str, float]:
    measured: dict[str, float] = {}
    for trial in trials:
        seconds = objective(trial.step_seconds)
        if trial.label and trial.state is TrialState.COMPLETE and seconds is not None:
            measured[trial.label] = seconds
    return measured


def accuracy_text(survey: Survey, trials: Sequence[Trial]) -> str:
    """How well the model met the measurements, before and after learning from the other trials."""
    figures = accuracy(survey, trials)
    return (
        f"predicted against measured step over {figures.num_plans} plans: median error {figures.median_before:.1%} "
        f"by the model, {figures.median_after:.1%} once the other trials are learnt; Kendall tau {figures.tau:.2f}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Predicted against measured step seconds over the completed trials of a study."""

    num_plans: int
    median_before: float
    """Median relative error of the model."""
    median_after: float
    """The same with residuals learnt from all other plans' trials (leave one out)."""
    tau: float
    """Kendall's rank correlation of the model's step and the measured one; NaN for fewer than two plans."""


def accuracy(survey: Survey, trials: Sequence[Trial]) -> Accuracy:
    """Compare predictions with measurements."""
    from scipy.stats import kendalltau

    measured = np.array([objective(t.step_seconds) or np.nan for t in trials])
    before = np.array([survey.step_seconds[locate(survey.candidates, t.params)] for t in trials])
    after = leave_one_out(survey.candidates, trials)
    good = np.isfinite(measured) & np.isfinite(after)
    return Accuracy(
        num_plans=int(good.sum()),
        median_before=float(np.median(np.abs(before[good] / measured[good] - 1.0))),
        median_after=float(np.median(np.abs(after[good] / measured[good] - 1.0))),
        tau=float(kendalltau(before[good], measured[good]).statistic),
    )


def trials_text(survey: Survey, trials: Sequence[Trial]) -> str:
    """All trials, in order."""
    lines = [trial_text(survey, trial, number, best_seconds(trials[:number])) for number, trial in enumerate(trials, 1)]
    return "\n".join(lines) if lines else "no trials yet"


def reward_text(rewards: Sequence[float]) -> str:
    """How the mean reward moved, in six parts of equal length."""
    parts = [part.mean() for part in np.array_split(np.asarray(rewards), min(6, len(rewards)))]
    return "mean reward " + " -> ".join(f"{part:.3f}" for part in parts)


def align(table: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the last is left as it is."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in table
    )
