"""Published peaks of device memory against the model's own terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from accuracy import Evaluation, constant_rate, find
from training_files import gpt_of
from training_rows import Record, Row, integer, machine, read, terms
from training_sharded import prime, titan

from analytic.activations import held
from analytic.layers import spread_of
from analytic.microbatch import cut
from analytic.training import Trainer, training
from analytic.weights import parameters_on_device, trained_on_device

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One printed figure."""

    name: str
    predicted: float
    measured: float
    size: float
    """Parameters a device: what a constant rate multiplies."""


def peak(row: Row) -> float:
    """Bytes of a device at the peak of a training step."""
    return sum(terms(row).values())


def seqpar(records: list[Record]) -> list[Peak]:
    """Of arXiv:2205.05198: activations of the fullest rank, weights and optimizer, and shares of no recomputation."""
    found: list[Peak] = []
    for r in records:
        row, trainer = _seqpar_row(r), _seqpar_trainer(r)
        size = row.shape.parameters / (row.tp * row.pp)
        kept = _kept(row, trainer)
        if r["activations_gib"]:
            found.append(
                Peak(name="activations", predicted=kept, measured=float(r["activations_gib"]) * GIB, size=size)
            )
        if r["params_and_optimizer_gib"]:
            state = {k: v for k, v in terms(row).items() if k in ("weights", "gradients", "optimizer")}
            measured = float(r["params_and_optimizer_gib"]) * GIB
            found.append(Peak(name="state", predicted=sum(state.values()), measured=measured, size=size))
        if r["activation_pct_of_no_recompute"]:
            whole = _kept(replace(row, recompute="none"), replace(trainer, sequence_parallel=False))
            share = float(r["activation_pct_of_no_recompute"]) / 100.0
            found.append(Peak(name="share", predicted=kept / whole, measured=share, size=size / 1e12))
    return found


def _seqpar_row(r: Record) -> Row:
    return Row(
        framework="seqpar",
        gpu="a100",
        num_gpus=integer(r, "num_gpus"),
        shape=gpt_of({**r, "vocab": "51200"}),
        seq_len=integer(r, "seq_len"),
        global_batch=float(r["global_batch"]),
        micro_batch=integer(r, "micro_batch"),
        seconds=1.0,
        tp=integer(r, "tp"),
        pp=integer(r, "pp"),
        vpp=integer(r, "vp"),
        zero=0,
        recompute=r["recompute"],
    )


def _seqpar_trainer(r: Record) -> Trainer:
    return replace(training().trainers["unfused"], sequence_parallel=r["sequence_parallel"] == "True")


def _kept(row: Row, trainer: Trainer) -> float:
    """What layers keep, as the paper counts: without the layer at work, allocator or loss."""
    x, m = row.columns(), machine(row.gpu, row.num_gpus)
    at = spread_of(x, x["dp"].astype(np.int64))
    micro = cut(m, x, row.batch, at.cp)
    return float(held(m, row.shape, at, x, micro, trainer, micro.mean.tokens).layers[0])


def titan_peaks(records: list[Record]) -> list[Peak]:
    """torchtitan: bytes reserved, of rows that recompute whole layers: its selective recomputation is by operator."""
    found: list[Peak] = []
    for r in records:
        row = titan(r)
        if isinstance(row, Row) and r["peak_memory_gib"] and row.recompute == "full":
            found.append(_peak("torchtitan", row, peak(row), r["peak_memory_gib"]))
    return found


def prime_peaks(records: list[Record]) -> list[Peak]:
    """prime-rl: frozen weights are kept in float32."""
    found: list[Peak] = []
    for r in records:
        row = prime(r)
        if not isinstance(row, Row) or not r["peak_mem_gib"]:
            continue
        at = spread_of(row.columns(), np.array([row.dp]))
        frozen = sum(parameters_on_device(row.shape, at)) - sum(trained_on_device(row.shape, at))
        wider = 2.0 * float(frozen[0]) / row.dp if row.shape.lora_rank else 0.0
        found.append(_peak("prime-rl", row, peak(row) + wider, r["peak_mem_gib"]))
    return found


def _peak(name: str, row: Row, predicted: float, gib: str) -> Peak:
    size = row.shape.parameters / row.num_gpus + row.global_batch * row.seq_len / row.dp / 10.0
    return Peak(name=name, predicted=predicted, measured=float(gib) * GIB, size=size)


FILES: dict[str, Callable[[list[Record]], list[Peak]]] = {
    "memory_seqpar": seqpar,
    "training_torchtitan": titan_peaks,
    "training_prime_rl": prime_peaks,
}


def compare(names: tuple[str, ...], folder: Path) -> Evaluation | None:
    """All figures of these files. The baseline is bytes in proportion to a device's parameters."""
    found = [p for name in names for p in FILES[name](read(find(folder, f"{name}.csv")))]
    if not found:
        return None
    measured = np.array([p.measured for p in found])
    groups = [p.name for p in found]
    return Evaluation(
        predicted=np.array([p.predicted for p in found]),
        measured=measured,
        groups=groups,
        baseline=constant_rate(np.array([p.size for p in found]), measured, groups),
    )
