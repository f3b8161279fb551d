"""What rows of published RL steps are made into: jobs with lengths, clusters, and cases that can be priced."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import msgspec

from ir.cluster import Cluster
from ir.errors import InputError
from ir.job import Algorithm, Job, JobDocument, Lengths, Models, ModelSource, Workload, resolve
from ir.lengths import Lognormal
from ir.plan import Plan
from ir.systems import load_cluster

Row = Mapping[str, str]

SIGMA = 0.7
"""Standard deviation of the logarithm of response lengths: 0.6-0.8 is typical of reasoning models' answers."""

PROMPT_TOKENS, PROMPT_SIGMA = 120.0, 0.4
"""Of a mathematical problem with its instruction, where a row does not say."""

SYSTEMS = {
    "H100-SXM-80GB": "dgx-h100", "H100": "dgx-h100", "H800": "dgx-h100", "H200": "dgx-h200", "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72", "B200": "hgx-b200", "H20": "h20", "H20-96GB": "h20", "MI300X": "mi300x", "MI300": "mi300x",
    "A100": "dgx-a100", "A100-80GB": "dgx-a100", "A800": "dgx-a100",
}  # fmt: skip

MODELS = {
    "LLAMA3.1_8B": "meta-llama/Llama-3.1-8B-Instruct",
    "DeepSeek V3": "deepseek-ai/DeepSeek-V3",
    "Qwen3-235B": "Qwen/Qwen3-235B-A22B",
    "Qwen3-30B3A": "Qwen/Qwen3-30B-A3B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    # The same sizes as its successor.
    "Qwen2-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
}

GSM8K = {"512+1024": (100.0, 155.0), "1024+512": (100.0, 210.0)}
"""Mean tokens of prompts and responses of GSM8K by (prompt + response) caps, as logs of Qwen2-7B with verl print them."""

VLLM_SEQUENCES = 1024
"""Sequences an engine decodes together where a recipe is silent: vLLM's `max_num_seqs` on GPUs of 70 GB or more."""

VERL_SEQUENCES = 256
"""As verl sets it (`rollout.max_num_seqs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row that can be priced."""

    job: Job
    cluster: Cluster
    plan: Plan
    seconds: float
    """Measured, a step."""
    tokens: float
    """Per step and device, prompts and responses."""
    group: str
    """Framework and device, which one scalar may be fitted for."""
    rate: str
    """Device, precision and size of model, which the baseline has a constant rate for."""


def read(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cases(rows: list[Row], build: Callable[[Row], Case]) -> Iterator[Case | str]:
    """Each row's case, or why there is none."""
    for row in rows:
        try:
            yield build(row)
        except (InputError, ValueError, KeyError) as error:
            yield f"{type(error).__name__}: {error}"


def count(row: Row, name: str, default: int = 1) -> int:
    """An integer of a row; the default where it is blank."""
    return int(float(row.get(name) or default))


def cluster_of(gpu: str, devices: int) -> Cluster:
    """The described system; of racks that a job takes in part, equal parts."""
    name = SYSTEMS[gpu]
    rack = 64 if "nvl72" in name and devices > 72 else devices
    cluster = load_cluster(f"{name}:{rack}")
    if rack == devices:
        return cluster
    group, network = cluster.groups[0], load_cluster(f"{name}:144").levels[-1]
    levels = (*group.levels, msgspec.structs.replace(network, size=devices // rack))
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, levels=levels),))


def job_of(
    *,
    model: str,
    prompts: int,
    samples: int,
    minibatches: int,
    caps: tuple[int, int],
    means: tuple[float, float],
    staleness: int = 0,
    critic: bool = False,
    reference: bool = True,
) -> Job:
    """A job whose responses have the mean after they are cut off at the cap."""
    source = ModelSource(name=model)
    document = JobDocument(
        name="published",
        algorithm=Algorithm(
            name="ppo" if critic else "grpo", learning_rate=1e-6, kl_coefficient=0.01 if reference else 0.0
        ),
        models=Models(actor=source, critic=source if critic else None),
        workload=Workload(
            prompts_per_step=prompts,
            samples_per_prompt=samples,
            minibatches=minibatches,
            max_prompt_tokens=caps[0],
            max_response_tokens=caps[1],
            lengths=Lengths(
                prompt=Lognormal(mean=means[0], sigma=PROMPT_SIGMA),
                response=Lognormal(mean=uncapped_mean(means[1], caps[1]), sigma=SIGMA),
            ),
        ),
    )
    return resolve(document, Path("."), where=model)


def uncapped_mean(mean: float, cap: float, sigma: float = SIGMA) -> float:
    """Mean of the lognormal whose values, cut off at `cap`, have the mean `mean`; by bisection."""
    low, high = mean, 50.0 * cap
    for _ in range(60):
        middle = math.sqrt(low * high)
        mu = math.log(middle) - sigma**2 / 2
        z = (math.log(cap) - mu) / sigma
        capped = middle * NormalDist().cdf(z - sigma) + cap * (1.0 - NormalDist().cdf(z))
        low, high = (middle, high) if capped < mean else (low, middle)
    return high


def size_of(job: Job) -> str:
    """Class of a model's size, in parameters."""
    limits = {"below 15B": 15e9, "below 50B": 50e9, "below 300B": 300e9}
    return next((name for name, most in limits.items() if job.actor.parameters < most), "larger")
