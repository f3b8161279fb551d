"""vLLM 0.33 engine arguments: `engine_args.json` for `EngineArgs(**arguments)`, and a script that serves one engine."""

from __future__ import annotations

from collections.abc import Iterator

from executor.export.entries import Entry, as_json, entry, flags, reasons, shell_script
from executor.export.production import Files, Production
from ir.job import Role

_CACHE_BYTES = 2
"""Bytes of a number in the cache."""


def write(production: Production) -> Files:
    """`engine_args.json`, where its values come from, and `serve.sh`."""
    entries, header = list(_entries(production)), (*production.header, _engines(production))
    return {
        "engine_args.json": as_json(entries),
        "engine_args.reasons.txt": reasons(header, entries),
        "serve.sh": shell_script(header, ("vllm", "serve", production.model(Role.ACTOR)), flags(_options(entries))),
    }


def _engines(production: Production) -> str:
    """How many to start."""
    engine = production.plan.generate
    shared = max(engine.ep // engine.tp, 1)
    count = production.plan.devices_of(engine.pool) // (engine.tp * engine.pp * shared)
    return f"vLLM 0.33. To be started {count} times, each on {engine.tp * engine.pp * shared} devices of its own."


def _entries(production: Production) -> Iterator[Entry]:
    plan, workload = production.plan, production.job.workload
    engine = plan.generate
    yield entry("model", production.model(Role.ACTOR), "job: models.actor")
    yield entry("tensor_parallel_size", engine.tp, "plan: generate.tp")
    yield entry("pipeline_parallel_size", engine.pp, "plan: generate.pp")
    if engine.ep > 1:
        yield entry("enable_expert_parallel", True, "plan: generate.ep")
        yield entry("data_parallel_size", engine.ep // engine.tp, "plan: generate.ep over tp")
    if engine.tp * engine.pp > production.node:
        yield entry("distributed_executor_backend", "ray", "rule: an engine of several nodes")
    if engine.memory_percent:
        yield entry("gpu_memory_utilization", engine.memory_percent / 100, "plan: generate.memory_percent")
    else:
        yield entry("kv_cache_memory_bytes", _cache(production), "plan: generate.concurrency of the longest sequences")
    yield entry("max_num_seqs", engine.concurrency, "plan: generate.concurrency")
    yield entry("max_model_len", workload.max_tokens, "job: longest prompt and response")
    chunked = engine.prefill_tokens > 0
    yield entry("enable_chunked_prefill", chunked, "plan: generate.prefill_tokens")
    yield entry(
        "max_num_batched_tokens", production.step_tokens, "plan: generate.prefill_tokens and a token a sequence"
    )
    yield entry("enable_prefix_caching", True, "rule: samples of a prompt share it")
    yield entry("enable_sleep_mode", plan.colocated, "plan: whether training shares the engines' devices")
    yield entry("seed", workload.seed, "job: workload.seed")
    if engine.precision == "fp8":
        yield entry("quantization", "fp8", "plan: generate.precision")


def _cache(production: Production) -> int:
    """Bytes a device: what the slots need at their longest."""
    shape, engine = production.job.actor, production.plan.generate
    parts = engine.pp * (1 if shape.mla else min(engine.tp, shape.kv_heads))
    return int(-(-engine.concurrency * shape.kv_bytes(production.job.workload.max_tokens, _CACHE_BYTES) // parts))


def _options(entries: list[Entry]) -> Iterator[Entry]:
    """As flags: the model is no option, and what is off is said."""
    for e in entries:
        name = e.key.replace("_", "-")
        if e.value is False:
            yield entry(f"no-{name}", True, e.why)
        elif e.key != "model":
            yield entry(name, e.value, e.why)
