"""Published weight transfers: what a row says, as bytes, devices and the way its framework takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from accuracy import find
from rl_jobs import SYSTEMS, Row, read

from analytic.fit import machine_of
from analytic.setup import Machine
from analytic.steps import steps
from analytic.transfer import (
    chain_seconds,
    changed_bytes,
    changes_seconds,
    compared_seconds,
    copy_seconds,
    in_node_rate,
    num_tensors,
    pieces_seconds,
    wire_seconds,
)
from ir.cluster import device_bandwidth
from ir.errors import InputError
from ir.job import ModelSource, Role
from ir.shape import ModelShape
from ir.sources import Models, read_shapes
from ir.systems import load_cluster

CALIBRATED = {
    "verl delta sync (H100)",
    "verl delta sync (A100/A800)",
    "verl checkpoint engine benchmark",
    "verl fully_async checkpoint-engine",
    "checkpoint-engine README",
    "nccl reshard refit (expected performance)",
}
"""Pages that a rate of transfer was taken from."""

KINDS = {
    "NCCL full broadcast": "tensors",
    "NCCL without checkpoint-engine": "tensors",
    "slime NCCL": "tensors",
    "OpenRLHF baseline": "tensors",
    "checkpoint-engine": "buckets",
    "NIXL": "reads",
    "mooncake": "reads",
    "NIXL GPU RDMA": "reads",
    "NCCL": "everyone",
    "broadcast": "everyone",
    "P2P (two nodes only)": "everyone",
    "NCCL reshard (XferDTensor)": "point to point",
    "delta_sharded": "changes",
}
"""How each framework's method sends: whole tensors one by one, in pipelined buckets down a chain, in buckets that ranks
read over the network, in buckets that all nodes send parts of, parts from shard to shard, or changed values only."""

TIMED_ALONE = {
    "verl fully_async checkpoint-engine",
    "checkpoint-engine README",
    "nccl reshard refit (expected performance)",
}
"""Pages that time a transfer without stopping engines and starting them again: the first prints 0.12 s, which is less than
any engine takes, the second's script has no engine at work, the third sums up copies."""

RECEIVED_ONLY = {"verl checkpoint engine benchmark"}
"""Pages whose receivers, as they say, throw tensors away."""

OWN_EXPERTS = {"checkpoint engine refit"}
"""Pages whose ranks read only their part of each expert (NeMo-RL, `shard_expert_weights`), 32 of them."""

SLOW_NETWORK = {"verl delta sync (A100/A800)": 1.5e9}
"""Bytes per second between nodes where a page's cluster has none of the described networks: from its transfer of 16.4 GB
in 11 s from a node to another, which is therefore not reported."""

NAMES = {"Llama-7B": "meta-llama/Llama-2-7b-hf", "Llama-70B": "meta-llama/Llama-3.1-70B", "DeepSeek-V3.1": "DeepSeek-V3.1",
         "Kimi-K2": "Kimi-K2-Instruct", "GLM-4.5-355B-A32B": "GLM-4.5"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A row."""

    source: str
    kind: str
    size: float
    """Bytes."""
    predicted: float
    """Seconds."""
    measured: float
    """Seconds, the middle of what is printed."""


def transfers(folder: Path) -> tuple[list[Transfer], list[str]]:
    """The rows that can be priced, and why the others cannot."""
    path = find(folder, "weight_sync.csv")
    every = [] if path is None else list(_read(read(path)))
    return [t for t in every if isinstance(t, Transfer)], [why for why in every if isinstance(why, str)]


def _read(rows: list[Row]) -> Iterator[Transfer | str]:
    for row in rows:
        try:
            yield _transfer(row)
        except (InputError, ValueError, KeyError) as error:
            yield str(error.args[0]) if isinstance(error, ValueError | KeyError) else str(error)


def _transfer(row: Row) -> Transfer:
    kind = KINDS.get(row["method"])
    if kind is None:
        raise ValueError("the way is not told, or none that plans have")
    if not row["model"]:
        raise ValueError("no model and layout named")
    if row["table"] in SLOW_NETWORK and row["num_gpus_total"] == "16" and kind == "tensors":
        raise ValueError("the network of its cluster was read off it")
    shape = _shape(row["model"])
    size = shape.parameters * (1.0 if row["precision"].startswith("FP8") else 2.0)
    return Transfer(
        source=row["table"],
        kind=kind,
        size=size,
        predicted=_stop(row) + _seconds(row, kind, shape, size),
        measured=(float(row["seconds_low"]) + float(row["seconds_high"])) / 2.0,
    )


def _stop(row: Row) -> float:
    return 0.0 if row["table"] in TIMED_ALONE | RECEIVED_ONLY else steps().sync.pause_s


def _seconds(row: Row, kind: str, shape: ModelShape, size: float) -> float:
    one = np.array([size])
    if kind == "changes":
        return _changes(row, shape, one)
    if kind != "point to point":
        each = 0.0 if row["table"] in RECEIVED_ONLY else steps().sync.tensor_s
        read = one * (_own_share(shape, 32) if row["table"] in OWN_EXPERTS and kind == "reads" else 1.0)
        chain = chain_seconds(read, num_tensors(shape), _rate(row, kind), each)
        return float(np.maximum(chain, _wire(row, kind, one))[0])
    trainers, engine, engines = _degrees(row)
    machine = _machine(row["gpu"])
    link = device_bandwidth(machine.levels, len(machine.levels) - 1)
    sent = pieces_seconds(shape, one, (trainers, engine, engines), np.array([link]))
    return float((sent + copy_seconds(machine, one / engine))[0])


def _changes(row: Row, shape: ModelShape, size: np.ndarray) -> float:
    """Changed values are found and sent by half of a row's devices."""
    machine = _machine(row["gpu"])
    trainers, changed = int(row["num_gpus_total"]) / 2.0, changed_bytes(machine, size)
    sent = changes_seconds(shape, changed, _rate(row, "tensors"))
    found = compared_seconds(machine, size / trainers) + np.maximum(sent, _wire(row, "tensors", changed, 1.0))
    return float(found[0])


def _rate(row: Row, kind: str) -> float:
    """Bytes per second of a kind of transfer; inside a node whole tensors travel at its links' pace."""
    if kind == "tensors" and _inside(row):
        return in_node_rate(_machine(row["gpu"]))
    sync = steps().sync
    return {"tensors": sync.tensors, "buckets": sync.buckets, "reads": sync.reads, "everyone": sync.everyone}[kind]


def _inside(row: Row) -> bool:
    return int(row["num_gpus_total"] or 16) <= 8


def _own_share(shape: ModelShape, ranks: int) -> float:
    """Of a model's bytes, what one of so many ranks reads that share every expert and nothing else."""
    return 1.0 - shape.expert_parameters / shape.parameters * (1.0 - 1.0 / ranks)


def _wire(row: Row, kind: str, size: np.ndarray, kept: float = 2.0) -> np.ndarray:
    """What network cards need for whole tensors, where the page's network is known to be slow: trainers are fully sharded
    and keep float32. Changed values are those of what is sent, and `kept` is 1."""
    slow = SLOW_NETWORK.get(row["table"])
    if slow is None or kind != "tensors" or _inside(row):
        return np.zeros(1)
    machine = _machine(row["gpu"])
    level = msgspec.structs.replace(machine.levels[-1], bandwidth=slow, links=1)
    levels, trainers = (*machine.levels[:-1], level), np.array([float(row["num_gpus_total"]) / 2.0])
    link = device_bandwidth(levels, len(levels) - 1)
    return wire_seconds(replace(machine, levels=levels), size, trainers, kept, link)


def _degrees(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trainers, devices of an engine, engines."""
    train = dict(re.findall(r"(TP|PP|EP|DP)(\d+)", row["train_layout"]))
    engine = dict(re.findall(r"(TP|PP|DP)(\d+)", row["gen_layout"]))
    if not train or not engine:
        raise ValueError("no layouts printed")
    trainers = int(train.get("PP", 1)) * max(int(train.get("EP", 1)), int(train.get("TP", 1)) * int(train.get("DP", 1)))
    numbers = trainers, int(engine.get("TP", 1)) * int(engine.get("PP", 1)), int(engine.get("DP", 1))
    return tuple(np.array([float(n)]) for n in numbers)  # type: ignore[return-value]


def _shape(model: str) -> ModelShape:
    models = Models(actor=ModelSource(name=NAMES.get(model, model)))
    return read_shapes(models, Path("."), reference=False, where=model)[Role.ACTOR]


def _machine(gpu: str) -> Machine:
    name = next(
        (system for key, system in SYSTEMS.items() if gpu.split("/")[0] == key or gpu.startswith(f"{key}-")), None
    )
    if name is None:
        raise ValueError(f"{gpu} is not described")
    return machine_of(load_cluster(f"{name}:16").groups[0])
