"""Jobs and plans for tests of exports to slime, RLinf, ROLL and what starts them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import yaml
from hypothesis import assume
from hypothesis import strategies as st

from executor.export.production import Production
from ir.backends import backend
from ir.followers import follow
from ir.job import Job, JobDocument, resolve
from ir.lower import lower
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check, legal, setting_of
from ir.setting import Setting
from ir.systems import load_cluster
from space.build import default_space
from space.enumerate import LegalSpace, legal_space

QWEN, MOE = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-30B-A3B"


def job(name: str = "grpo", model: str = QWEN, *, kl: float = 0.01, models: Any = None, **workload: Any) -> Job:
    """A job of 128 prompts x 8 samples of at most 4096 tokens in 4 minibatches."""
    others = {"critic": {"name": model}} if name == "ppo" else {}
    sizes = {"prompts_per_step": 128, "samples_per_prompt": 8, "minibatches": 4}
    lengths = {"max_prompt_tokens": 1024, "max_response_tokens": 3072}
    document = {
        "name": f"{name}-test",
        "algorithm": {"name": name, "learning_rate": 1e-6, "kl_coefficient": kl},
        "models": {"actor": {"name": model}, **others, **(models or {})},
        "workload": {**sizes, **lengths, **workload},
    }
    return resolve(msgspec.convert(document, JobDocument), Path("."), where="job")


def setting(of: Job, framework: str | None, cluster: str = "dgx-h100:16") -> Setting:
    """What plans of a framework are judged against."""
    return setting_of(of, load_cluster(cluster), backend(framework) if framework else None)


def production(of: Job, plan: Plan, framework: str | None, cluster: str = "dgx-h100:16") -> Production:
    """A plan that the framework can express, to be exported."""
    check(plan, setting(of, framework, cluster))
    notes = ("predicted: 12.0 s a step",)
    return Production(plan=plan, rpeg=lower(of, plan), cluster=load_cluster(cluster), notes=notes)


def colocated(devices: int = 16, *, update: Any, **sections: Any) -> Plan:
    """Everything on one pool; passes as the update, responses verified at once."""
    trained = Update(pool="all", **{"offload": "all", "recompute": "full", **update})
    degrees = {name: getattr(trained, name) for name in ("tp", "pp", "cp", "ep", "micro_batch", "micro_tokens")}
    visit = Pass(pool="all", **degrees)
    made = {name: visit if value is True else value for name, value in sections.items()}
    return Plan(
        pools=(Pool(name="all", devices=devices),),
        **{"generate": Generate(pool="all", tp=2, concurrency=64, memory_percent=70, prefill_tokens=2048), **made},
        update_actor=trained,
    )


def document(text: str) -> Any:
    """A YAML document whose mappings are objects."""
    return json.loads(json.dumps(yaml.safe_load(text)), object_hook=lambda fields: SimpleNamespace(**fields))


VERIFIED = Fusions(reward_with_generation=True)


@cache
def space(name: str, framework: str, cluster: str) -> LegalSpace:
    """The space of a framework for a job of `JOBS`."""
    at = setting(JOBS[name], framework, cluster)
    return legal_space(default_space(at), at)


@st.composite
def drawn(draw: Any, framework: str, names: tuple[str, ...], cluster: str = "dgx-h100:16") -> Production:
    """Any plan of a framework, to be exported."""
    name = draw(st.sampled_from(names))
    found = space(name, framework, cluster)
    batch = follow(found.sample(16, np.random.default_rng(draw(st.integers(0, 999)))), found.setting.backend)
    rows = np.flatnonzero(legal(batch, found.setting))
    assume(len(rows))
    return production(JOBS[name], batch.plan(int(rows[0])), framework, cluster)


JOBS = {
    "grpo": job(),
    "free": job(kl=0.0, minibatches=1),
    "moe": job(model=MOE, minibatches=2),
    "ppo": job("ppo", kl=0.0),
    "ppo-kl": job("ppo"),
}
