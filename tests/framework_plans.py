"""Jobs, and plans of them that a framework runs, for tests of exports and imports."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from executor.export.exporters import exporter
from executor.export.production import Production
from ir.backends import backend
from ir.followers import follow
from ir.job import Algorithm, Job, JobDocument, Limits, Models, ModelSource, Workload, resolve
from ir.lower import lower
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update
from ir.rules import check, legal
from ir.setting import Setting, setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.enumerate import LegalSpace, legal_space

QWEN, MOE = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-30B-A3B"
NOTE = "predicted: 9 s a step"
VERIFIED = Fusions(reward_with_generation=True)


# Jobs


def job(
    name: str = "grpo",
    *,
    model: str = QWEN,
    kl: float = 0.01,
    lora: int | None = None,
    reward: str | None = None,
    staleness: int = 4,
    **workload: Any,
) -> Job:
    """128 prompts x 8 samples of at most 4096 tokens in two minibatches, unless `workload` says otherwise; the critic
    of PPO is the actor's model."""
    sizes = {"prompts_per_step": 128, "samples_per_prompt": 8, "minibatches": 2}
    lengths = {"max_prompt_tokens": 1024, "max_response_tokens": 3072}
    document = JobDocument(
        name=f"{name}-test",
        algorithm=Algorithm(name=name, learning_rate=1e-6, kl_coefficient=kl),  # type: ignore[arg-type]
        models=Models(
            actor=ModelSource(name=model, lora_rank=lora),
            critic=ModelSource(name=model) if name == "ppo" else None,
            reward=ModelSource(name=reward) if reward else None,
        ),
        workload=Workload(**sizes | lengths | workload),
        limits=Limits(max_staleness=staleness),
    )
    return resolve(document, Path("."), where="job")


JOBS = {
    "grpo": job(),
    "free": job(kl=0.0, minibatches=1),
    "moe": job(model=MOE),
    "gspo": job("gspo", model=MOE, minibatches=1),
    "ppo": job("ppo", kl=0.0),
    "ppo-kl": job("ppo"),
    "ppo-reward": job("ppo", reward=QWEN),
    "dapo": job("dapo", kl=0.0, useful_groups=0.5),
    "rloo": job("rloo", prompts_per_step=96, samples_per_prompt=4),
    "adapters": job("cispo", lora=16),
    "synchronous": job(model="Qwen/Qwen3-14B", kl=0.0, staleness=0, minibatches=1),
}


def setting(of: Job, framework: str | None, cluster: str = "dgx-h100:16") -> Setting:
    """What plans of a framework are judged against."""
    return setting_of(of, load_cluster(cluster), backend(framework) if framework else None)


# Plans


def changed(plan: Plan, **sections: dict[str, Any]) -> Plan:
    """A plan with other fields of some sections."""
    replaced = {name: msgspec.structs.replace(getattr(plan, name), **fields) for name, fields in sections.items()}
    return msgspec.structs.replace(plan, **replaced)


def colocated(devices: int = 16, *, update: dict[str, Any], **sections: Any) -> Plan:
    """Everything on one pool; passes that are True as the update."""
    trained = Update(pool="all", **{"offload": "all", "recompute": "full", **update})
    degrees = {name: getattr(trained, name) for name in ("tp", "pp", "cp", "ep", "micro_batch", "micro_tokens")}
    visit = Pass(pool="all", **degrees)
    made = {name: visit if value is True else value for name, value in sections.items()}
    return Plan(
        pools=(Pool(name="all", devices=devices),),
        **{"generate": Generate(pool="all", tp=2, concurrency=64, memory_percent=70, prefill_tokens=2048), **made},
        update_actor=trained,
    )


@cache
def _space(document: JobDocument, framework: str, cluster: str, fixed: tuple[tuple[str, Any], ...]) -> LegalSpace:
    at = setting(resolve(document, Path("."), where="job"), framework, cluster)
    return legal_space(default_space(at, dict(fixed)), at)


def space(of: Job, framework: str, cluster: str = "dgx-h100:16", fixed: dict[str, Any] | None = None) -> LegalSpace:
    """A framework's plans for a job, or those of them with some fields fixed; made once."""
    return _space(of.document, framework, cluster, tuple((fixed or {}).items()))


def sampled(found: LegalSpace, seed: int, *, tries: int, count: int) -> list[Plan]:
    """At most `count` plans, those among some tries that are legal once their followers follow."""
    batch = follow(found.sample(tries, np.random.default_rng(seed)), found.setting.backend)
    return [batch.plan(int(row)) for row in np.flatnonzero(legal(batch, found.setting))[:count]]


def drawn(of: Job, framework: str, cluster: str = "dgx-h100:16", *, seed: int = 0, count: int = 8) -> list[Plan]:
    """At most so many plans that a framework runs, at least one."""
    plans = sampled(space(of, framework, cluster), seed, tries=8 * count, count=count)
    assert plans
    return plans


# Exports


def document(text: str) -> Any:
    """A YAML document whose mappings are objects."""
    found = json.dumps(msgspec.yaml.decode(text))
    return json.loads(found, object_hook=lambda fields: SimpleNamespace(**fields))


def production(of: Job, plan: Plan, framework: str | None, cluster: str = "dgx-h100:16") -> Production:
    """A plan that the framework can express, to be exported."""
    check(plan, setting(of, framework, cluster))
    return Production(plan=plan, rpeg=lower(of, plan), cluster=load_cluster(cluster), notes=(NOTE,))


def exported(of: Job, plan: Plan, framework: str, cluster: str = "dgx-h100:16") -> dict[str, str]:
    """Texts by file name."""
    return dict(exporter(framework).write(production(of, plan, framework, cluster)))


@st.composite
def productions(draw: Any, framework: str, names: tuple[str, ...], cluster: str = "dgx-h100:16") -> Production:
    """Any plan of a framework for some of `JOBS`, to be exported."""
    of = JOBS[draw(st.sampled_from(names))]
    plans = sampled(space(of, framework, cluster), draw(st.integers(0, 999)), tries=16, count=1)
    assume(plans)
    return production(of, plans[0], framework, cluster)
