"""The training of a plan as DeepSpeed 0.19.8's JSON, one for each model that is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

from executor.export.entries import Entry, as_json, entry, reasons, shell_script
from executor.export.production import Files, Production
from ir.plan import Update

_NOT_SAID = (
    "Only training is said here: generation, other passes and where weights go are up to your trainer, as is",
    "gradient checkpointing (recompute = full), which the model switches on.",
)


def write(production: Production) -> Files:
    """A configuration, its reasons and the command that starts it, for the actor and for a critic."""
    plan, files = production.plan, dict[str, str]()
    for role, update in (("actor", plan.update_actor), ("critic", plan.update_critic)):
        if update is not None:
            entries = list(_training(production, role, update))
            files |= {
                f"{role}.json": as_json(entries),
                f"{role}-reasons.txt": reasons([*production.header, *_NOT_SAID], entries),
                f"{role}.sh": _launch(production, role, update),
            }
    return files


def _training(p: Production, role: str, update: Update) -> Iterator[Entry]:
    workload, section = p.job.workload, f"update_{role}"
    minibatch = workload.sequences // workload.minibatches
    steps = minibatch // (update.micro_batch * update.dp)
    counted = "; counted on each tensor parallel device, as DeepSpeed does" if update.tp > 1 else ""
    yield entry("train_batch_size", minibatch * update.tp, f"job: sequences of a minibatch{counted}")
    yield entry("train_micro_batch_size_per_gpu", update.micro_batch, f"plan: {section}.micro_batch")
    yield entry("gradient_accumulation_steps", steps, "job: sequences of a minibatch over micro_batch x dp")
    yield entry("gradient_clipping", p.job.algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")
    yield entry("bf16.enabled", True, f"plan: {section}.precision")
    yield entry("zero_optimization.stage", update.zero, f"plan: {section}.zero")
    yield entry("zero_optimization.offload_optimizer.device", "none", f"plan: {section}.offload")
    if update.zero == 3:
        yield entry("zero_optimization.offload_param.device", "none", f"plan: {section}.offload")
    if update.tp > 1:
        yield entry("tensor_parallel.autotp_size", update.tp, f"plan: {section}.tp")
    if update.cp > 1:
        yield entry("sequence_parallel_size", update.cp, f"plan: {section}.cp")
        yield entry("data_parallel_size", update.dp, f"plan: {section}.dp")
    yield entry("optimizer.type", "AdamW", "rule: a step's states are Adam's")
    yield entry("optimizer.params.lr", p.job.algorithm.learning_rate, "job: algorithm.learning_rate")


def _launch(p: Production, role: str, update: Update) -> str:
    devices = update.dp * update.tp * update.cp
    per_node = math.gcd(devices, p.node)
    why = f"plan: dp x tp x cp of update_{role}"
    arguments = [
        (f"--num_nodes {devices // per_node}", why),
        (f"--num_gpus {per_node}", why),
        ("path/to/train.py", "to be set"),
        (f"--deepspeed_config {role}.json", ""),
    ]
    return shell_script(p.header, ["deepspeed"], arguments)
