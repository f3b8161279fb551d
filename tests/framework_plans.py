"""Jobs, and plans of them that a framework runs, for tests of exports and imports."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from executor.export.exporters import exporter
from executor.export.production import Production
from ir.backends import backend
from ir.followers import follow
from ir.job import Algorithm, Job, JobDocument, Limits, Models, ModelSource, Workload, resolve
from ir.lower import lower
from ir.plan import Plan
from ir.rules import check, legal
from ir.setting import Setting, setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.enumerate import LegalSpace, legal_space

QWEN = "Qwen/Qwen2.5-7B-Instruct"


def job(
    name: str = "grpo", *, model: str = QWEN, kl: float = 0.01, critic: bool = False, lora: int = 0, **workload: Any
) -> Job:
    """128 prompts x 8 samples in two minibatches; with a critic, a reward model too."""
    source = ModelSource(name=QWEN)
    fields = {"prompts_per_step": 128, "samples_per_prompt": 8, "minibatches": 2}
    fields |= {"max_prompt_tokens": 1024, "max_response_tokens": 3072}
    document = JobDocument(
        name="test",
        algorithm=Algorithm(name=name, learning_rate=1e-6, kl_coefficient=kl),
        models=Models(
            actor=ModelSource(name=model, lora_rank=lora or None),
            critic=source if critic else None,
            reward=source if critic else None,
        ),
        workload=Workload(**fields | workload),
        limits=Limits(max_staleness=4),
    )
    return resolve(document, Path("."), where="job")


def setting(of: Job, framework: str, cluster: str = "dgx-h100:16") -> Setting:
    return setting_of(of, load_cluster(cluster), backend(framework))


def exported(of: Job, plan: Plan, framework: str, cluster: str = "dgx-h100:16") -> dict[str, str]:
    """Texts of a plan that is legal for the framework."""
    check(plan, setting(of, framework, cluster))
    found = Production(plan=plan, rpeg=lower(of, plan), cluster=load_cluster(cluster), notes=("predicted: 9 s",))
    return dict(exporter(framework).write(found))


def changed(plan: Plan, section: str, **fields: Any) -> Plan:
    """A plan with other fields of a section."""
    replaced = msgspec.structs.replace(getattr(plan, section), **fields)
    return msgspec.structs.replace(plan, **{section: replaced})


@cache
def space(name: str, framework: str, cluster: str) -> LegalSpace:
    of = setting(JOBS[name], framework, cluster)
    return legal_space(default_space(of), of)


def drawn(name: str, framework: str, cluster: str, seed: int) -> list[Plan]:
    """Plans that the framework runs, of 64 drawn from its space."""
    found = space(name, framework, cluster)
    batch = follow(found.sample(64, np.random.default_rng(seed)), found.setting.backend)
    batch = batch.take(legal(batch, found.setting))
    return [batch.plan(row) for row in range(len(batch))]


JOBS = {
    "grpo": job(),
    "ppo": job("ppo", critic=True),
    "dapo": job("dapo", kl=0.0, useful_groups=0.5),
    "experts": job("gspo", model="Qwen/Qwen3-30B-A3B", minibatches=1),
    "rloo": job("rloo", prompts_per_step=96, samples_per_prompt=4),
    "adapters": job("cispo", lora=16),
}
