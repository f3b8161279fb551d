"""One optimizer step: micro-batches forward and backward through a pipeline, gradients, the optimizer.

An RL update and a step of plain pre-training are priced by the same code; they differ in
the `Batch` that a replica is given.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from analytic.backward import Back, both_ways
from analytic.costs import Columns
from analytic.device import overlapped
from analytic.layers import Spread, Work
from analytic.microbatch import Batch, Micro, cut, straggling
from analytic.parallel import Exchange, exchange, exposed_across, exposed_reduction, optimizer_seconds
from analytic.priors import priors
from analytic.products import Made
from analytic.serving import generation_of
from analytic.setup import Machine
from analytic.stages import (
    Parts,
    adapter_seconds,
    filled_share,
    flight_seconds,
    largest_share,
    neighbour_seconds,
    scores_seconds,
    slowest_stage,
)
from analytic.training import Trainer, training
from ir.batch import CODES
from ir.shape import ModelShape

Float = NDArray[np.float64]
Int = NDArray[np.int64]

SELECTIVE, FULL = CODES["recompute"].index("selective"), CODES["recompute"].index("full")
ZERO_BUBBLE = CODES["schedule"].index("zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Seconds of a micro-batch over all layers in one direction, float64[n] each."""

    compute: Float
    memory: Float
    communication: Float
    host: Float
    """Launches that the device waits for."""
    head: Float
    """Of the output head, arithmetic."""

    @property
    def layers(self) -> Float:
        """Everything but the head."""
        return self.compute + self.memory + self.communication + self.host

    @property
    def seconds(self) -> Float:
        """Everything."""
        return self.layers + self.head


def train_step(
    machine: Machine, shape: ModelShape, at: Spread, x: Columns, batch: Batch, trainer: Trainer
) -> tuple[dict[str, Float], Micro]:
    """Seconds of one optimizer step by kind (they add up to the step), and how it was cut.

    Args:
        machine: The group of devices.
        shape: The model; with adapters, all but them is frozen.
        at: How it is spread.
        x: Columns of an update's section: `micro_batch` or `micro_tokens`, `vpp`, `schedule`, `zero`,
            `recompute`, `offload`.
        batch: What a replica trains on.
        trainer: What fuses and hides.
    """
    micro = cut(machine, x, batch, at.cp)
    how = made(at, x["zero"], trainer)
    one, late = both_ways(machine, shape, at, micro.mean, micro.imbalance, how)
    forth = forward_pass(machine, shape, at, micro.mean, one, trainer)
    back = _backward_pass(machine, shape, at, x, micro.mean, (one, late), trainer)
    kinds = _flight(machine, shape, at, x, micro, (forth, back, weight_gradients(machine, shape, late)), trainer)
    core = _core_factor(machine, trainer) * (1.0 + training().attention_backward) * loaded(machine)
    waiting = _straggling(machine, x, batch, micro, at, (kinds, micro.batches * one.attention * core / at.pp))
    optimizer, moved = optimizer_seconds(machine, shape, at, x)
    return {
        **kinds,
        "memory": kinds["memory"] + optimizer,
        "communication": kinds["communication"] + moved,
        "bubble": kinds["bubble"] + waiting,
    }, micro


def forward_pass(
    machine: Machine, shape: ModelShape, at: Spread, work: Work, one: Parts, trainer: Trainer, scale: float = 1.0
) -> Pass:
    """A forward pass of a micro-batch; its launches are counted with the backward pass when it trains."""
    scores = scores_seconds(machine, shape, at, work, trainer.score_bytes)
    compute = one.linear - one.memory + one.attention * _core_factor(machine, trainer)
    memory = one.memory + scores + trainer.adapters * adapter_seconds(machine, shape, at, work)
    scale = scale * loaded(machine)
    return Pass(
        compute=scale * compute,
        memory=scale * memory,
        communication=_communication(at, one, trainer),
        host=np.zeros_like(compute),
        head=scale * one.head,
    )


def loaded(machine: Machine) -> float:
    """Seconds of kernels in a running job over those measured alone; a core's whole passes are measured themselves."""
    return 1.0 if machine.is_host else training().loaded[generation_of(machine.device)]


def _core_factor(machine: Machine, trainer: Trainer) -> float:
    """Seconds of the trainer's attention core over those of the device's own."""
    limit = trainer.attention_limit
    return trainer.score_flops * (max(machine.device.attention_flops / limit, 1.0) if limit else 1.0)


def _communication(at: Spread, one: Parts, trainer: Trainer) -> Float:
    """Exposed collectives of a forward pass."""
    hidden = one.tensor * _hidden(at, trainer) + one.exchange * trainer.expert_overlap
    return np.asarray(one.collectives - hidden)


def made(at: Spread, zero: NDArray[np.int32], trainer: Trainer) -> Made:
    """How the trainer makes products. Where ZeRO-3 divides gradients a product writes them once in bfloat16; else it
    reads what earlier micro-batches left and writes the sum (Megatron-Core, `gradient_accumulation_fusion`)."""
    return Made(
        pieces=np.where(_cut_up(at, trainer), at.tp, 1).astype(np.float64),
        output_bytes=np.where(zero == 3, 2.0, 2.0 * trainer.gradient_bytes),
    )


def _cut_up(at: Spread, trainer: Trainer) -> NDArray[np.bool_]:
    """Whether collectives of tensor parallelism are cut up with their products; layers with experts cut up none."""
    return np.asarray((at.tp > 1) & (at.ep == 1) & (trainer.tensor_overlap > 0))


def _hidden(at: Spread, trainer: Trainer) -> Float:
    """Of tensor-parallel collectives that are cut up, a part hides under products, and of those that gather inputs of
    fp8 products half the bytes travel."""
    left = (1.0 - trainer.tensor_overlap) * np.where(at.fp8, FP8_GATHERS, 1.0)
    return np.where(_cut_up(at, trainer), 1.0 - left, 0.0)


FP8_GATHERS = 0.75
"""Bytes of an all-gather in fp8 and a reduce-scatter in bfloat16 over those of both in bfloat16."""


def _backward_pass(
    machine: Machine, shape: ModelShape, at: Spread, x: Columns, work: Work, both: tuple[Parts, Back], trainer: Trainer
) -> Pass:
    """Gradients of inputs and of weights, and what is computed again. Frozen weights need only the former."""
    (one, late), trained = both, 0.0 if shape.lora_rank else 1.0
    core = priors().backward_ratio if machine.is_host else training().attention_backward
    again_all, again_core = x["recompute"] == FULL, x["recompute"] == SELECTIVE
    linear, attention = np.where(again_all, 1.0, 0.0), np.where(again_all | again_core, 1.0, 0.0)
    if machine.is_host:
        linear = attention = np.where(again_all, 1.0, np.where(again_core, priors().selective, 0.0))
    scale, again_scale = machine.train_scale * loaded(machine), machine.forward_scale * loaded(machine)
    scores = scores_seconds(machine, shape, at, work, loaded(machine))
    core_seconds = one.attention * _core_factor(machine, trainer)
    # What no gradient needs is not computed again where layers are torch's or JAX's: the product that ends a layer
    # (torch.utils.checkpoint, `early_stop`; dead code to XLA). Megatron-Core computes all of it.
    spared = late.ending * (x["zero"] == 3)
    compute = (late.inputs + trained * late.weights) * scale
    compute = compute + (one.linear - one.memory - spared) * linear * again_scale
    compute = compute + core_seconds * (core * scale + attention * again_scale)
    memory = late.memory * scale + one.memory * linear * again_scale
    adapters = trainer.adapters * adapter_seconds(machine, shape, at, work)
    memory = memory + adapters * (1.0 + linear) * loaded(machine)
    memory = memory + scores * (trainer.score_bytes_backward + attention * trainer.score_bytes)
    # A head whose logits are not kept goes again; recomputed layers leave it out, but for a core's.
    again_head = linear * again_scale if machine.is_host else again_scale * (trainer.logit_bytes == 0)
    return Pass(
        compute=compute,
        memory=memory,
        communication=(1.0 + linear) * _communication(at, one, trainer),
        host=np.zeros_like(compute),
        head=(late.head_inputs + trained * late.head_weights) * scale + one.head * again_head,
    )


def weight_gradients(machine: Machine, shape: ModelShape, late: Back) -> Float:
    """Seconds of weights' gradients in a backward pass: none where weights are frozen."""
    if shape.lora_rank:
        return np.zeros_like(late.weights)
    return np.asarray(machine.train_scale * loaded(machine) * (late.weights + late.head_weights))


def launched_layers(machine: Machine, shape: ModelShape, trainer: Trainer) -> float:
    """Layers, those with experts as many as the host's launches for them are worth."""
    return shape.layers + shape.num_moe_layers * (0.0 if machine.is_host else trainer.expert_launches)


def _with_launches(machine: Machine, shape: ModelShape, x: Columns, both: Pass, trainer: Trainer) -> Pass:
    """Forward and backward pass with what the device waits for the host: on an accelerator it gets through kernels
    and collectives while the host launches the next ones."""
    host = machine.device.host
    again = np.where(x["recompute"] == FULL, host.forward_layer_s, 0.0)
    launches = trainer.launches * (
        host.train_s + launched_layers(machine, shape, trainer) * (host.train_layer_s + again)
    )
    waits = launches if machine.is_host else np.maximum(launches - both.seconds, 0.0)
    return replace(both, host=waits)


def _flight(
    machine: Machine,
    shape: ModelShape,
    at: Spread,
    x: Columns,
    micro: Micro,
    passes: tuple[Pass, Pass, Float],
    trainer: Trainer,
) -> dict[str, Float]:
    """All micro-batches through the pipeline, by kind; `passes` are forward and backward, and of the latter the seconds
    of weights' gradients."""
    forth, back, weights = passes
    most, _ = largest_share(shape, at.pp)
    batches, vpp = micro.batches, x["vpp"].astype(np.int64)
    both = Pass(**{f.name: getattr(forth, f.name) + getattr(back, f.name) for f in fields(Pass)})
    both = _with_launches(machine, shape, x, both, trainer)
    slowest = slowest_stage(shape, at.pp, both.layers, both.head)
    filled = filled_share(forth.seconds, weights, both.seconds) * (x["schedule"] == ZERO_BUBBLE)
    busy, bubble = flight_seconds(slowest, both.seconds, batches, at.pp, vpp, filled)
    e = exchange(machine, shape, at, x["zero"], trainer)
    sharded = _sharded(e, shape, (most * forth.layers, most * back.layers), batches, at.pp)
    sharded = sharded + exposed_reduction(e, x["zero"], batches, most * forth.layers, most * back.layers)
    sends = neighbour_seconds(machine, shape, at, micro.mean.tokens, batches, vpp, trainer)
    # The slowest rank's time is shared out among kinds as a whole micro-batch's is.
    part = busy / both.seconds
    return {
        "compute": part * (both.compute + both.head),
        "memory": part * both.memory,
        "communication": part * both.communication + sharded + sends,
        "bubble": bubble,
        "host": part * both.host,
    }


def _sharded(e: Exchange, shape: ModelShape, stage: tuple[Float, Float], batches: Int, pp: Int) -> Float:
    """What ZeRO-3 adds: weights are gathered forward and backward under the layer before, gradients are reduced in
    the backward pass, and nothing hides the first layer's gathering. Pipeline ranks keep what they have gathered and
    reduce after the last micro-batch: once a step instead of for each."""
    forth, back = stage
    again = np.where(pp > 1, 0.0, e.gather)
    wait = overlapped(forth, e.gather, e.hidden) - forth
    wait = wait + overlapped(back, again + e.reduce, e.hidden) - back + (e.gather + again) / shape.layers
    across = exposed_across(e, back, again + e.reduce)
    return np.where(e.gather > 0, np.where(pp > 1, 1, batches) * wait + across, 0.0)


def _straggling(
    machine: Machine, x: Columns, batch: Batch, micro: Micro, at: Spread, work: tuple[dict[str, Float], Float]
) -> Float:
    """Seconds that the mean replica waits for the slowest, `work` being seconds by kind and those of attention cores.
    Cores pad, which is counted already."""
    if machine.is_host:
        return np.zeros(len(at.dp))
    kinds, attention = work
    whole, core = straggling(batch, micro, at.dp, x["micro_tokens"] > 0, x["zero"] == 3)
    return np.asarray(whole * (kinds["compute"] + kinds["memory"]) + core * attention)
