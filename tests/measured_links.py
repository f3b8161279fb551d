"""Collectives and expert exchanges of measured tables, and the axes of the tables that the model keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measured_shapes import SYSTEMS, Columns, Kernel, Shapes, floats, held, log2, machine, parts

from analytic import comm, exchange
from ir.cluster import Level

NCCL_OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


def collective_tables(
    folder: Path, source: str = "aiconfigurator", dtype: str = "half"
) -> Iterator[tuple[str, Shapes]]:
    """NCCL inside a node in 16 bits. L40S over more than two devices is left out: one host's slow outlier."""
    found = parts(
        folder, "collectives.parquet", ["gpu", "op", "gpus"],
        lib="nccl", nodes=1, dtype=dtype, source=source, op=NCCL_OPS,
    )  # fmt: skip
    for (gpu, op, ranks), part in found:
        if gpu == "L40S" and ranks > 2:
            continue
        level = machine(gpu).levels[0]
        fit = next((fit for fit in level.fits if fit.op == op and fit.ranks == ranks), None)
        if fit is None:
            continue
        (size,), members = floats(part, "bytes"), np.full(len(part["bytes"]), int(ranks))
        yield (
            f"collective/{fit.table}/{op}/{ranks}",
            Shapes(
                coordinates=(size,),
                closed=comm.closed_seconds(fit, size),
                predicted=comm.collective_seconds(machine(gpu).levels, op, size, members),
                measured=part["latency_us"] / 1e6,
                work=comm.traffic(op, int(ranks)) * size,
                # Whole sizes are held out, so that a version of the library does not tell of another.
                held_out=held(part, "collectives"),
                group=f"{gpu} {op} {ranks}",
            ),
        )


ENGINES: dict[str, comm.Own] = {
    "vLLM_custom_graph": "vllm",
    "SGLang_CustomAllReduce_graph": "sglang",
    "TRTLLM": "trtllm",
}


def custom_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """All-reduce kernels of inference engines, under CUDA graphs."""
    found = parts(folder, "collectives.parquet", ["gpu", "gpus", "lib"], lib=list(ENGINES), nodes=1)
    for (gpu, ranks, lib), part in found:
        engine = ENGINES[lib]
        level: Level = machine(gpu).levels[0]
        fits = [fit for fit in level.fits if fit.op == "all_reduce" and fit.ranks == ranks]
        if not fits or gpu == "L40S":
            continue
        (size,), members = floats(part, "bytes"), np.full(len(part["bytes"]), int(ranks))
        yield (
            f"custom/{engine}/{fits[0].table}/{ranks}",
            Shapes(
                coordinates=(size,),
                closed=comm.closed_seconds(fits[0], size),
                predicted=comm.collective_seconds(machine(gpu).levels, "all_reduce", size, members, engine=engine),
                measured=part["latency_us"] / 1e6,
                work=size,
                held_out=held(part, "collectives"),
                group=f"{gpu} {ranks} {engine}",
            ),
        )


def exchange_tables(folder: Path) -> Iterator[tuple[str, Shapes]]:
    """DeepEP as its own kernels do it: normal and low latency."""
    modes = {"deepep_normal": False, "deepep_ll": True}
    found = parts(
        folder, "ep_alltoall.parquet", ["gpu", "mode", "phase", "nodes"], mode=list(modes), framework="sglang"
    )
    for (gpu, mode, phase, nodes), part in found:
        yield exchange_shapes(part, gpu, low_latency=modes[mode], combine=phase == "combine", nodes=int(nodes))


def exchange_shapes(part: Columns, gpu: str, *, low_latency: bool, combine: bool, nodes: int) -> tuple[str, Shapes]:
    """Of one device, kind and number of nodes. Tokens are sent to at most four nodes, as by DeepSeek-V3, but with low
    latency (aiconfigurator, collector/deep_collector: `num_topk_groups` of test_internode.py, test_low_latency.py)."""
    tokens, hidden, topk, sms = floats(part, "tokens_per_gpu", "hidden", "topk", "sms")
    ep = int(part["ep"][0])
    where = machine(gpu, ep if nodes > 1 else None)
    width = hidden * (2.0 if combine else 1.0)
    closed, predicted = np.zeros(len(tokens)), np.zeros(len(tokens))
    for key in np.unique(np.stack([hidden, topk, sms], axis=-1), axis=0):
        at = (hidden == key[0]) & (topk == key[1]) & (sms == key[2])
        one = exchange.Exchange(
            tokens=tokens[at], hidden=int(key[0]), experts_per_token=int(key[1]), combine=combine, value_bytes=1.0,
            processors=max(float(key[2]), 1.0), low_latency=low_latency, groups=nodes, groups_per_token=min(nodes, 4),
        )  # fmt: skip
        closed[at] = exchange.closed_seconds(where.levels, one, tokens[at], (ep, nodes))
        predicted[at] = exchange.exchange_seconds(where, one, np.full(at.sum(), ep))
    coordinates = (tokens * topk * width, topk) if low_latency else (tokens, hidden, np.maximum(sms, 1.0), topk)
    name = exchange.table_name(SYSTEMS[gpu][2], one, nodes)
    return name, Shapes(
        coordinates=coordinates,
        closed=closed,
        predicted=predicted,
        measured=part["latency_us"] / 1e6,
        work=tokens * width * topk,
        held_out=held(part, "ep_alltoall"),
        group=f"{gpu} {name.split('/', 2)[2]}",
    )


_TOPK = np.array([0.0, 1.0, 2.0, 3.0, 4.5])

KERNELS = (
    Kernel(tables=collective_tables, axes=(np.arange(9.0, 31.0),), stiffness=0.02),
    Kernel(tables=custom_tables, axes=(np.arange(8.0, 31.0),), stiffness=0.02),
    Kernel(
        tables=lambda folder: (found for found in exchange_tables(folder) if "normal" in found[0]),
        axes=(np.arange(0, 18, 2.0), np.array([11.0, 12, 13]), log2(1, 4, 8, 12, 16, 20, 24), _TOPK),
        stiffness=0.2,
    ),
    Kernel(
        tables=lambda folder: (found for found in exchange_tables(folder) if "low_latency" in found[0]),
        axes=(np.arange(10, 34, 2.0), _TOPK),
        stiffness=0.2,
    ),
)
