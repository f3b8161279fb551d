"""Legal plans of a framework's backend, drawn over its space, for tests of exports and imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from executor.export.production import Production
from ir.algorithm import Algorithm
from ir.backends import backend
from ir.followers import follow
from ir.job import Job, JobDocument, Limits, Models, ModelSource, Workload, resolve
from ir.lower import lower
from ir.plan import Plan
from ir.rules import legal
from ir.setting import setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.enumerate import legal_space


def known_job(
    model: str,
    *,
    algorithm: str = "grpo",
    kl: float = 0.0,
    lora_rank: int | None = None,
    staleness: int = 4,
    **workload: int,
) -> Job:
    """A job on a known model; PPO's critic is of the same one. `workload` replaces fields."""
    fields = {
        "prompts_per_step": 64,
        "samples_per_prompt": 8,
        "minibatches": 2,
        "max_prompt_tokens": 1024,
        "max_response_tokens": 3072,
    }
    document = JobDocument(
        name="drawn",
        algorithm=Algorithm(name=algorithm, learning_rate=1e-6, kl_coefficient=kl),
        models=Models(
            actor=ModelSource(name=model, lora_rank=lora_rank),
            critic=ModelSource(name=model) if algorithm == "ppo" else None,
        ),
        workload=Workload(**fields | workload, useful_groups=0.5 if algorithm == "dapo" else None),
        limits=Limits(max_staleness=staleness),
    )
    return resolve(document, Path(), where="job")


def drawn(job: Job, cluster: str, framework: str, n: int, seed: int = 0) -> list[Plan]:
    """`n` plans that the framework can express."""
    setting = setting_of(job, load_cluster(cluster), backend(framework))
    batch = legal_space(default_space(setting), setting).sample(4 * n + 4, np.random.default_rng(seed))
    followed = follow(batch, setting.backend)
    kept = np.flatnonzero(legal(followed, setting))[:n]
    assert len(kept) == n
    return [followed.plan(row) for row in kept.tolist()]


def production(plan: Plan, job: Job, cluster: str) -> Production:
    """What an exporter is given."""
    return Production(plan=plan, rpeg=lower(job, plan), cluster=load_cluster(cluster), notes=("step 1.0 s",))


JOBS: Mapping[str, tuple[Job, str]] = {
    "dense": (known_job("Qwen/Qwen2.5-7B-Instruct", kl=0.001), "dgx-h100:8"),
    "ppo": (known_job("meta-llama/Llama-3.1-8B-Instruct", algorithm="ppo", kl=0.05), "dgx-h100:16"),
    "experts": (known_job("Qwen/Qwen3-30B-A3B"), "dgx-h100:32"),
    "synchronous": (known_job("Qwen/Qwen3-14B", staleness=0, minibatches=1), "dgx-a100:64"),
}
"""Jobs with a cluster each: dense and with experts, with a critic and without, synchronous or not."""
