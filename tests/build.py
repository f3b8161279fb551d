"""Builders of small documents for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ir.batch import REMOVED_BY
from ir.cluster import Cluster, CollectivePoint, Device, Group, Host, Level, MatmulPoint
from ir.job import (
    Algorithm,
    Job,
    JobDocument,
    Lengths,
    Limits,
    Models,
    ModelSource,
    Role,
    Task,
    WarmStart,
    Workload,
)
from ir.model import ModelShape, with_lora
from ir.plan import SECTIONS, Fusions, Generate, Pass, Plan, Pool, Sharing, Update
from ir.setting import Devices, Setting
from ir.workload import Turns
from space.build import default_space

SHAPE = ModelShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=64,
    tied=True,
    qkv_bias=False,
    qk_norm=True,
)

QWEN3_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}


def job(*, shape: ModelShape = SHAPE, directory: Path = Path("."), warm_start: int = 3, **changes: Any) -> Job:
    """A job of 4 prompts x 4 samples; `changes` replace fields of the workload, algorithm or limits by name."""
    workload: dict[str, Any] = {
        "tasks": (
            Task(dataset="chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
        ),
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 32,
        "max_response_tokens": 24,
        "seed": 1,
        "lengths": Lengths(prompt=(10.0, 14.0, 20.0), response=(4.0, 8.0, 24.0)),
    }
    algorithm: dict[str, Any] = {"name": "grpo", "learning_rate": 1e-3, "kl_coefficient": 0.02}
    limits: dict[str, Any] = {}
    for name, value in changes.items():
        section = algorithm if name in Algorithm.__struct_fields__ else limits
        (workload if name in Workload.__struct_fields__ else section)[name] = value
    document = JobDocument(
        name="test",
        algorithm=Algorithm(**algorithm),
        models=Models(
            actor=ModelSource(path="config.json", warm_start=WarmStart(steps=warm_start, batch=32, learning_rate=5e-3))
        ),
        workload=Workload(**workload),
        limits=Limits(**limits),
    )
    others = {Role.REFERENCE: shape} if document.algorithm.kl_coefficient > 0 else {}
    return Job(document=document, directory=directory, actor=shape, others=others)


def jobs() -> dict[str, Job]:
    """A small job for every shape that a step's graph can have."""
    ppo = job(name="ppo", max_staleness=2)
    return {
        "grpo": job(max_staleness=2),
        "ppo": replace(ppo, others={**ppo.others, Role.CRITIC: SHAPE, Role.REWARD: SHAPE}),
        "dapo": job(name="dapo", kl_coefficient=0.0, useful_groups=0.5, max_staleness=2),
        "remax": job(name="remax", max_staleness=2),
        "distillation": replace(
            job(name="distillation", kl_coefficient=0.0, max_staleness=2),
            others={Role.TEACHER: replace(SHAPE, layers=4)},
        ),
        "multi-turn": job(turns=Turns(mean=3.0), max_staleness=2),
        "lora": replace(job(max_staleness=2), actor=with_lora(SHAPE, 4)),
    }


def full_plan(
    of: Job,
    *,
    pools: Mapping[str, int] | None = None,
    place: Mapping[str, str] | None = None,
    change: Mapping[str, Mapping[str, Any]] | None = None,
    flags: tuple[str, ...] = (),
    **fields: Any,
) -> Plan:
    """A plain plan for any job: generation on the first pool, all else on the last. `place` puts sections elsewhere,
    `change` replaces fields of sections, `flags` sets fusions and shared models, which remove their sections."""
    pools = pools or {"rollout": 1, "train": 1}
    plain: dict[Any, dict[str, Any]] = {
        Generate: {"concurrency": 8},
        Pass: {"micro_batch": 4},
        Update: {"micro_batch": 4},
    }
    sections = {}
    for op in Setting(job=of, groups=(Devices(count=1),)).sections:
        if not {flag.partition(".")[2] for flag in REMOVED_BY.get(op, ())} & set(flags):
            pool = (place or {}).get(op, list(pools)[0 if op == "generate" else -1])
            sections[str(op)] = SECTIONS[op](pool=pool, **plain[SECTIONS[op]] | dict((change or {}).get(op, {})))
    defaults = {"sync": "reshard" if len(pools) == 1 else "broadcast"}
    return Plan(
        pools=tuple(Pool(name=name, devices=devices) for name, devices in pools.items()),
        fusions=Fusions(**{name: True for name in flags if name in Fusions.__struct_fields__}),
        sharing=Sharing(**{name: True for name in flags if name in Sharing.__struct_fields__}),
        **sections,
        **defaults | fields,
    )


def pinned(setting: Setting, *free: str) -> dict[str, int]:
    """The plainest value of every axis whose name does not begin with one of `free`: what to fix for a small space."""
    axes = [axis for axis in default_space(setting).axes if not axis.name.startswith(free)]
    return {axis.name: axis.values[axis.name.endswith("micro_batch") and axis.values[0] == 0] for axis in axes}


def plan(
    *,
    rollout: int = 1,
    train: int = 1,
    colocated: bool = False,
    staleness: int = 0,
    concurrency: int = 8,
    logprob_micro_batch: int = 4,
    dp: int = 1,
    micro_batch: int = 4,
    recompute: bool = False,
    reference: bool = True,
    **fusions: bool,
) -> Plan:
    """A plan that this project's executor can run; colocated ones use `train` devices."""
    names = ("all", "all") if colocated else ("rollout", "train")
    pools = [Pool(name=names[1], devices=train)]
    if not colocated:
        pools.insert(0, Pool(name=names[0], devices=rollout))
    visit = Pass(pool=names[1], micro_batch=logprob_micro_batch)
    old = not {"rollout_logprob", "fold_old_logprob", "merge_logprobs"} & {n for n, on in fusions.items() if on}
    return Plan(
        pools=tuple(pools),
        generate=Generate(pool=names[0], concurrency=concurrency),
        reference_logprob=visit if reference else None,
        old_logprob=visit if old else None,
        update_actor=Update(pool=names[1], dp=dp, micro_batch=micro_batch, recompute="full" if recompute else "none"),
        fusions=Fusions(**fusions),
        staleness=staleness,
        in_flight=staleness > 0,
        sync="reshard" if colocated else "broadcast",
    )


def cluster(*, devices: int = 2, memory_bytes: int = 8 << 30) -> Cluster:
    """A cluster with round figures: 50 GFLOP/s, 10 GB/s, launches of tens of microseconds."""
    points = tuple(
        MatmulPoint(m=m, k=k, n=n, seconds=2 * m * k * n / 50e9 + 4 * (m * k + k * n + m * n) / 10e9 + 5e-6)
        for m in (1, 64, 1024)
        for k, n in ((64, 64), (128, 384), (512, 512))
    )
    sizes = (1 << 10, 1 << 20, 1 << 24)
    return Cluster(
        name="test",
        fingerprint="test",
        groups=(
            Group(
                name="test",
                device=Device(
                    kind="cpu",
                    name="core",
                    memory_bytes=memory_bytes,
                    base_memory_bytes=400 << 20,
                    memory_bandwidth=10e9,
                    attention_flops=20e9,
                    kv_bandwidth=5e9,
                    host=Host(
                        decode_step_s=4e-4,
                        decode_layer_s=4e-4,
                        decode_sequence_s=2e-6,
                        forward_s=4e-4,
                        forward_layer_s=3e-4,
                        train_s=1e-3,
                        train_layer_s=1e-3,
                        optimizer_s=2e-4,
                        optimizer_layer_s=1e-4,
                    ),
                    matmul=points,
                ),
                levels=(
                    Level(
                        name="machine",
                        size=devices,
                        latency_s=2e-4,
                        bandwidth=2e9,
                        collectives=tuple(
                            CollectivePoint(op=op, ranks=2, bytes=size, seconds=2e-4 + size / 1e9)
                            for op in ("all_reduce", "broadcast")
                            for size in sizes
                        ),
                    ),
                ),
            ),
        ),
        call_s=1e-3,
        process_start_s=5.0,
    )


def changed(plan: Plan, **sections: dict[str, Any]) -> Plan:
    """The plan with other fields in some sections."""
    return msgspec.structs.replace(
        plan, **{name: msgspec.structs.replace(getattr(plan, name), **fields) for name, fields in sections.items()}
    )
