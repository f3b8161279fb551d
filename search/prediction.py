"""What the model says of a few plans, in full: time by stage and kind, memory, staleness, cost, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from analytic.bounds import bounds
from analytic.costs import KINDS
from analytic.estimate import Estimate, estimate, section_cost
from analytic.fit import setup
from analytic.money import energy_per_step, price_per_million_samples, price_per_step
from analytic.staleness import staleness
from analytic.uncertainty import step_error
from ir.batch import batch_of
from ir.cluster import Cluster
from ir.documents import plain
from ir.job import Job
from ir.plan import SECTIONS, Plan
from search.report import size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one plan."""

    plan: dict[str, Any]
    """The content of its plan.toml."""
    words: str
    """The plan in a few words."""
    step_s: float
    error: float
    """Relative standard deviation of the step."""
    lower_bound_s: float
    """What no schedule of this work on these devices can beat."""
    bound_by: str
    """The cycle that sets the step."""
    cycles_s: dict[str, float]
    stages_s: dict[str, float]
    """Busy seconds by stage."""
    kinds_s: dict[str, dict[str, float]]
    """By stage that computes with a model, seconds by kind."""
    idle: dict[str, float]
    """Share of the step that each pool waits."""
    memory_bytes: float
    """On the fullest device."""
    memory_share: float
    """Largest share of a device's memory that is taken."""
    memory_terms: dict[str, float]
    """Bytes by term, over all pools."""
    mean_staleness: float
    largest_staleness: float
    price: float | None
    """US dollars a step."""
    price_per_million_samples: float | None
    energy_joule: float | None

    def as_data(self) -> dict[str, Any]:
        """Built-in types, for JSON."""
        return asdict(self)


def predictions(job: Job, plans: Sequence[Plan], cluster: Cluster) -> list[Prediction]:
    """Predict legal plans."""
    batch = batch_of(list(plans))
    found = estimate(job, batch, cluster)
    step, error = found.step_seconds, step_error(found, cluster)
    ages, least = staleness(found), bounds(job, batch, cluster).seconds
    prices = [f(batch, cluster, step) for f in (price_per_step, energy_per_step)]
    per_million = price_per_million_samples(job, batch, cluster, step)
    kinds = _kinds(found, cluster)
    cycles = found.cycles(found.stage_seconds, np.arange(len(batch)))

    def at(values: Any, row: int) -> float | None:
        return None if values is None else float(values[row])

    return [
        Prediction(
            plan=plain(plan),
            words=plan.describe(),
            step_s=float(step[row]),
            error=float(error[row]),
            lower_bound_s=float(least[row]),
            bound_by=max(cycles, key=lambda name: float(cycles[name][row])),
            cycles_s={name: float(values[row]) for name, values in cycles.items() if values[row] > 0},
            stages_s=_present(dict(zip(found.stages, found.stage_seconds[row].tolist(), strict=True))),
            kinds_s={key: _present({kind: float(v[row]) for kind, v in parts.items()}) for key, parts in kinds.items()},
            idle={
                name.removesuffix(" pool"): 1.0 - float(values[row] / step[row])
                for name, values in cycles.items()
                if name.endswith("pool") and values[row] > 0
            },
            memory_bytes=float(found.memory.peak[row]),
            memory_share=float(found.memory.fill[row]),
            memory_terms=_present({name: float(values[row]) for name, values in found.memory.terms.items()}),
            mean_staleness=float(ages.mean[row]),
            largest_staleness=float(ages.largest[row]),
            price=at(prices[0], row),
            price_per_million_samples=at(per_million, row),
            energy_joule=at(prices[1], row),
        )
        for row, plan in enumerate(plans)
    ]


def _kinds(found: Estimate, cluster: Cluster) -> dict[str, dict[str, np.ndarray[Any, np.dtype[np.float64]]]]:
    """Seconds by kind, float64[n] each, of every section that some plan has."""
    s, batch = setup(found.job, cluster), found.batch
    result = {}
    for op in SECTIONS:
        rows = np.flatnonzero(batch.has(op))
        if len(rows):
            cost = section_cost(s, op, {name: column[rows] for name, column in batch.section(op).items()})
            result[str(op)] = {
                kind: _spread(cost.kinds[kind], rows, len(batch)) for kind in KINDS if kind in cost.kinds
            }
    return result


def _spread(values: Any, rows: Any, count: int) -> Any:
    whole = np.zeros(count)
    whole[rows] = values
    return whole


def _present(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value > 0}


def prediction_text(p: Prediction) -> str:
    """One plan in full."""
    lines = [
        f"{p.words}",
        f"  step {_seconds(p.step_s)} +- {p.error:.0%}, set by the {p.bound_by}; "
        f"no schedule of this work beats {_seconds(p.lower_bound_s)}",
        "  cycles: " + ", ".join(f"{name} {_seconds(s)}" for name, s in p.cycles_s.items()),
        "  idle: " + ", ".join(f"{name} {share:.0%}" for name, share in p.idle.items()),
    ]
    for stage, seconds in p.stages_s.items():
        parts = p.kinds_s.get(stage, {})
        told = ", ".join(f"{kind} {value / sum(parts.values()):.0%}" for kind, value in parts.items())
        lines.append(f"  {stage:30} {_seconds(seconds):>9}{f'   {told}' if told else ''}")
    terms = sorted(p.memory_terms.items(), key=lambda term: -term[1])
    told = ", ".join(f"{name} {size_text(size)}" for name, size in terms if size >= 2**20)
    lines.append(
        f"  memory: {size_text(p.memory_bytes)} ({p.memory_share:.0%}) on the fullest device; all pools: {told}"
    )
    lines.append(f"  staleness: {p.mean_staleness:.2f} updates on average, at most {p.largest_staleness:.0f}")
    if p.price is not None and p.price_per_million_samples is not None:
        lines.append(f"  price: {p.price:.2f} $ a step, {p.price_per_million_samples:,.0f} $ a million samples")
    if p.energy_joule is not None:
        lines.append(f"  energy: at most {p.energy_joule / 3.6e6:.2f} kWh a step, hosts and cooling left out")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 100 else f"{value:,.0f} s"
