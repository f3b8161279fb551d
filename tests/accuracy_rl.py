"""RL steps, weight transfers and staleness against published measurements.

Nothing is fitted to staleness, and to the steps only that layers with experts keep the host busy, which other sources
tell too. Rates of weight transfer come from pages that are also rows of the file; `weight_sync` leaves those pages out,
`weight_sync_factor` gives both shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from accuracy import Evaluation, constant_rate, find
from numpy.typing import NDArray
from rl_jobs import Case, Row, cases, read
from rl_rows import nemo, verl_blog, verl_log, verl_table
from sync_rows import CALIBRATED, Transfer, transfers

from analytic.estimate import Estimate, estimate
from analytic.staleness import mean_staleness
from analytic.uncertainty import step_error
from ir.batch import batch_of

Float = NDArray[np.float64]
Figures = dict[str, float | int | str]

FILES: Mapping[str, Callable[[Row], Case]] = {
    "nemo_rl_steps.csv": nemo,
    "rl_verl_steps.csv": verl_table,
    "rl_verl_logs.csv": verl_log,
    "rl_other_steps.csv": verl_blog,
}


def priced(case: Case) -> Estimate:
    """The case's plan, priced."""
    return estimate(case.job, batch_of([case.plan]), case.cluster)


def found_cases(folder: Path) -> tuple[list[Case], list[str]]:
    """All rows that can be priced, and why the others cannot."""
    every: list[Case | str] = []
    for name, build in FILES.items():
        path = find(folder, name)
        every += [] if path is None else list(cases(read(path), build))
    return [case for case in every if isinstance(case, Case)], [why for why in every if isinstance(why, str)]


def rl_steps(folder: Path) -> Evaluation | None:
    """Seconds of RL steps."""
    good, left_out = found_cases(folder)
    if not good:
        return None
    measured = np.array([case.seconds for case in good])
    return Evaluation(
        predicted=np.array([float(priced(case).step_seconds[0]) for case in good]),
        measured=measured,
        groups=[case.group for case in good],
        baseline=constant_rate(np.array([case.tokens for case in good]), measured, [case.rate for case in good]),
        left_out=len(left_out),
        why_left_out="; ".join(sorted(set(left_out))),
    )


def rl_steps_dense(folder: Path) -> Evaluation | None:
    """As `rl_steps`, of models without experts."""
    return _part(rl_steps(folder), folder, lambda case: not case.job.actor.is_moe)


def rl_steps_experts(folder: Path) -> Evaluation | None:
    """As `rl_steps`, of mixtures of experts."""
    return _part(rl_steps(folder), folder, lambda case: case.job.actor.is_moe)


def _part(whole: Evaluation | None, folder: Path, belongs: Callable[[Case], bool]) -> Evaluation | None:
    rows = np.flatnonzero([belongs(case) for case in found_cases(folder)[0]])
    if whole is None or not len(rows):
        return None
    return Evaluation(
        predicted=whole.predicted[rows],
        measured=whole.measured[rows],
        groups=[whole.groups[row] for row in rows],
        baseline=whole.baseline[rows],
    )


PHASES = {
    "gen_s": ("generate",),
    "logprobs_s": ("reference_logprob", "old_logprob"),
    "train_s": ("update_actor",),
}
"""Stages of each printed phase; refits are left out, for a constant comes from them."""


def rl_phases(folder: Path) -> Evaluation | None:
    """Seconds of the phases of colocated steps, of a page whose steps are in no other file."""
    path = find(folder, "nemo_rl_phases.csv")
    rows = [] if path is None else read(path)
    both = [(row, case) for row, case in zip(rows, cases(rows, nemo), strict=True) if isinstance(case, Case)]
    if not both:
        return None
    predicted, measured, tokens, groups = list[float](), list[float](), list[float](), list[str]()
    for row, case in both:
        found = priced(case)
        for phase, stages in PHASES.items():
            predicted.append(sum(float(found.stage_seconds[0, found.stages.index(stage)]) for stage in stages))
            measured.append(float(row[phase]))
            tokens.append(case.tokens * case.job.actor.active_parameters)
            groups.append(phase)
    work = constant_rate(np.array(tokens), np.array(measured), groups)
    return Evaluation(predicted=np.array(predicted), measured=np.array(measured), groups=groups, baseline=work)


def rl_bars(folder: Path) -> Figures | None:
    """Share of steps inside one and two bars, before and after one scalar per framework and device."""
    good, _ = found_cases(folder)
    whole = rl_steps(folder)
    if whole is None:
        return None
    shares: Figures = {}
    for name, predicted, calibrated in (("", whole.predicted, False), ("_after_scalar", _scaled(whole), True)):
        bars = np.array([float(step_error(priced(case), case.cluster, calibrated=calibrated)[0]) for case in good])
        off = np.abs(np.log(predicted / whole.measured)) / np.log1p(bars)
        off = off[np.isfinite(off)]
        shares |= {f"median_bar{name}": round(float(np.median(bars)), 3)}
        shares |= {f"within_{n}{name}": round(float(np.mean(off <= n)), 3) for n in (1, 2)}
    return {"rows": len(good)} | shares


def _scaled(whole: Evaluation) -> Float:
    """Predictions times the median ratio of their group's other rows."""
    return constant_rate(whole.predicted, whole.measured, whole.groups)


def sync_async_sign(folder: Path) -> Figures | None:
    """Share of pairs, equal but for one step of staleness on half of the devices, of which the faster is told."""
    pairs, steps = find(folder, "nemo_rl_sync_async_pairs.csv"), find(folder, "nemo_rl_steps.csv")
    if pairs is None or steps is None:
        return None
    rows, right, sizes = read(steps), list[bool](), list[float]()
    for pair in read(pairs):
        both = [_paired(rows, pair, seconds) for seconds in ("sync_step_s", "async_1off_step_s")]
        built = [case for row in both if row is not None for case in cases([row], nemo) if isinstance(case, Case)]
        if len(built) == 2:
            first, second = (float(priced(case).step_seconds[0]) for case in built)
            right.append((first > second) == (float(pair["async_speedup_derived"]) > 1.0))
            sizes.append(abs(np.log(first / second) - np.log(float(pair["async_speedup_derived"]))))
    if not right:
        return None
    return {
        "value": round(float(np.mean(right)), 3),
        "pairs": len(right),
        "median_log_error": round(float(np.median(sizes)), 3),
    }


def _paired(rows: list[Row], pair: Row, seconds: str) -> Row | None:
    """The row of a pair's step."""
    same = ("release", "model", "gpu", "num_gpus", "max_seq_len")
    return next(
        (
            row
            for row in rows
            if all(row[name] == pair[name] for name in same) and float(row["step_time_s"]) == float(pair[seconds])
        ),
        None,
    )


def staleness(folder: Path) -> Evaluation | None:
    """Mean staleness of trained samples, in steps."""
    path = find(folder, "staleness.csv")
    rows = [] if path is None else [row for row in read(path) if row["staleness_measured"]]
    if not rows:
        return None

    def column(name: str) -> Float:
        return np.array([float(row[name]) for row in rows])

    live, measured = column("concurrency_C") / column("batch_B"), column("staleness_measured")
    groups = [row["system"] for row in rows]
    return Evaluation(
        predicted=mean_staleness(live, column("rho"), column("queue_ratio_q"), column("m_tail")),
        measured=measured,
        groups=groups,
        baseline=constant_rate(live, measured, groups),
    )


def weight_sync(folder: Path) -> Evaluation | None:
    """Seconds of weight transfers, of pages that no rate was taken from."""
    found, left_out = transfers(folder)
    return _transfers([t for t in found if t.source not in CALIBRATED], left_out)


def weight_sync_all(folder: Path) -> Evaluation | None:
    """Seconds of all weight transfers."""
    return _transfers(*transfers(folder))


def _transfers(found: list[Transfer], left_out: list[str]) -> Evaluation | None:
    if not found:
        return None
    measured = np.array([t.measured for t in found])
    kinds = [t.kind for t in found]
    return Evaluation(
        predicted=np.array([t.predicted for t in found]),
        measured=measured,
        groups=kinds,
        baseline=constant_rate(np.array([t.size for t in found]), measured, kinds),
        left_out=len(left_out),
        why_left_out="; ".join(sorted(set(left_out))),
    )


def weight_sync_factor(folder: Path) -> Figures | None:
    """Share of transfers that are predicted within a factor of 1.5."""
    whole, others = weight_sync_all(folder), weight_sync(folder)
    if whole is None:
        return None
    return {
        "value": _within(whole),
        "rows": len(whole.measured),
        "other_pages": np.nan if others is None else _within(others),
    }


def _within(found: Evaluation) -> float:
    return round(float(np.mean(np.abs(np.log(found.predicted / found.measured)) <= np.log(1.5))), 3)


SETS: dict[str, Callable[[Path], Evaluation | Figures | None]] = {
    "rl_steps": rl_steps,
    "rl_steps_dense": rl_steps_dense,
    "rl_steps_experts": rl_steps_experts,
    "rl_phases": rl_phases,
    "rl_bars": rl_bars,
    "sync_async_sign": sync_async_sign,
    "staleness": staleness,
    "weight_sync": weight_sync,
    "weight_sync_all": weight_sync_all,
    "weight_sync_factor": weight_sync_factor,
}
