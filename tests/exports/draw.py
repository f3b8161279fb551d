"""Plans drawn over the space of a backend by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from ir.backends import backend
from ir.cluster import Cluster
from ir.errors import InputError
from ir.followers import follow
from ir.job import Job, load_job
from ir.plan import Plan
from ir.rules import legal, setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.enumerate import LegalSpace, legal_space

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

CASES = (
    ("grpo-qwen2.5-1.5b", "dgx-h100:8"),
    ("grpo-qwen2.5-7b", "dgx-h100:16"),
    ("ppo-70b", "dgx-h100:64"),
    ("dapo-qwen2.5-32b", "dgx-h200:32"),
    ("grpo-qwen3-235b", "dgx-h200:64"),
)
"""Jobs and where they run: one node and several, dense and with experts, with and without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A plan with what it is for."""

    job: Job
    cluster: Cluster
    plan: Plan


@cache
def case(name: str, cluster: str) -> tuple[Job, Cluster]:
    """A job of the examples and a cluster."""
    return load_job(EXAMPLES / name / "job.toml"), load_cluster(cluster)


@cache
def _space(name: str, cluster: str, framework: str | None) -> LegalSpace | None:
    """None where the framework does not run the job."""
    setting = setting_of(*case(name, cluster), backend(framework) if framework else None)
    try:
        space = legal_space(default_space(setting), setting)
    except InputError:
        return None
    return space if space.num_plans else None


def spaces(framework: str | None) -> list[tuple[str, str]]:
    """The cases that a framework runs."""
    return [names for names in CASES if _space(*names, framework) is not None]


@st.composite
def plans(draw: Any, framework: str | None) -> Drawn:
    """Plans that are legal for a framework, or for none; structure, pool sizes and layouts each drawn."""
    names = draw(st.sampled_from(spaces(framework)))
    space = _space(*names, framework)
    assert space is not None
    structure = draw(st.integers(0, space.num_structures - 1))
    cases, case_of = space.cases
    chosen = cases[int(case_of[structure])]
    sizes = [
        draw(st.sampled_from(sorted(space.counts_by_size(space.pool_case(pool, chosen))) or [0]))
        for pool in chosen.pools
    ]
    assume(all(sizes) and bool(space.fit(chosen, np.array([sizes]))[0]))
    factor = space.factor(structure, tuple(sizes))
    assume(factor.num_plans)
    numbers = {op: np.array([draw(st.integers(0, factor.num_layouts(op) - 1))]) for op in factor.spans}
    batch = follow(factor.combine(numbers, 1), space.setting.backend)
    assume(bool(legal(batch, space.setting)[0]))
    job, cluster = case(*names)
    return Drawn(job=job, cluster=cluster, plan=batch.plan(0))
