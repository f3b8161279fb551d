"""The setup of a job on a cluster: curves fitted to what was measured, and whole passes that scale their kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from analytic.device import roofline_of
from analytic.layers import Spread, Work, forward
from analytic.lengths import length_model
from analytic.priors import priors
from analytic.setup import Machine, Setup
from ir.cluster import Cluster, Group, MeasuredPass
from ir.job import Job
from ir.shape import ModelShape

_ALONE = Spread(
    **{name: np.ones(1, dtype=np.int64) for name in ("tp", "pp", "cp", "ep", "etp", "dp")},
    shard=np.zeros(1, dtype=np.int64),
    fp8=np.zeros(1, dtype=bool),
)


def setup(job: Job, cluster: Cluster) -> Setup:
    """Fit the devices' curves and take the job's lengths."""
    machines = tuple(machine_of(group) for group in cluster.groups)
    return Setup(job=job, cluster=cluster, machines=machines, lengths=length_model(job))


def machine_of(group: Group) -> Machine:
    """The curves of a group's devices."""
    plain = Machine(device=group.device, levels=group.levels, roofline=roofline_of(group.device))
    return replace(plain, forward_scale=_scale(plain, "forward"), train_scale=_scale(plain, "train"))


def _scale(machine: Machine, kind: Literal["forward", "train"]) -> float:
    """Geometric mean, over the measured passes of a kind, of what remains after launches over the kernels' sum."""
    ratios = [_ratio(machine, p) for p in machine.device.passes if p.kind == kind]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0


def _ratio(machine: Machine, p: MeasuredPass) -> float:
    shape = ModelShape(
        layers=p.layers, hidden=p.hidden, heads=p.heads, kv_heads=p.kv_heads, head_dim=p.head_dim, ffn=p.ffn,
        vocab=p.vocab, tied=True, qkv_bias=False, qk_norm=True,
    )  # fmt: skip
    tokens, squares, head = p.sequences * p.length, p.sequences * p.length**2, p.sequences * p.response
    work = Work(tokens=np.array([tokens * 1.0]), squares=np.array([squares * 1.0]), head_tokens=np.array([head * 1.0]))
    kernels, host = float(forward(machine, shape, _ALONE, work).kernels[0]), machine.device.host
    if p.kind == "train":
        launches = host.train_s + p.layers * (host.train_layer_s + host.optimizer_layer_s) + host.optimizer_s
        kernels *= 1.0 + priors().backward_ratio
    else:
        launches = host.forward_s + p.layers * host.forward_layer_s
    return max(p.seconds - launches, 0.1 * p.seconds) / kernels
