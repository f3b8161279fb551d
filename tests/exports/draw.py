"""Plans drawn over the space of a backend by hypothesis."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from framework_plans import setting
from hypothesis import assume
from hypothesis import strategies as st

from executor.export.production import Production
from ir.errors import InputError
from ir.followers import follow
from ir.job import Job, load_job
from ir.lower import lower
from ir.rules import legal
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


@cache
def _job(name: str) -> Job:
    return load_job(EXAMPLES / name / "job.toml")


@cache
def _space(name: str, cluster: str, framework: str | None) -> LegalSpace | None:
    """None where the framework does not run the job."""
    at = setting(_job(name), framework, cluster)
    try:
        space = legal_space(default_space(at), at)
    except InputError:
        return None
    return space if space.num_plans else None


def spaces(framework: str | None) -> list[tuple[str, str]]:
    """The cases that a framework runs."""
    return [names for names in CASES if _space(*names, framework) is not None]


@st.composite
def plans(draw: Any, framework: str | None) -> Production:
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
    job, plan = _job(names[0]), batch.plan(0)
    return Production(plan=plan, rpeg=lower(job, plan), cluster=load_cluster(names[1]))
