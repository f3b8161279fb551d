"""verl's training engines: FSDP or Megatron-Core, by the stage of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from executor.export.entries import Entry, entry
from executor.export.production import Production
from ir.frameworks.megatron import NAMES
from ir.graph import ROLE_OF, Op
from ir.model import ModelShape
from ir.plan import Pass, Update

Entries = Iterator[Entry]


def is_fsdp(update: Update) -> bool:
    """Whether FSDP trains it, else Megatron."""
    return update.zero >= 2


def training(p: Production, op: Op, model: str, fsdp: str, hf_model: str) -> Entries:
    """The engine of a trained model."""
    update = p.plan.sections[op]
    assert isinstance(update, Update)
    if is_fsdp(update):
        yield entry(f"{model}.strategy", "fsdp2", "plan: zero above 1")
        yield entry(f"{model}.{fsdp}.fsdp_size", update.shard or -1, f"plan: {op}.shard; -1: over all replicas")
        yield entry(f"{model}.{fsdp}.reshard_after_forward", update.zero == 3, f"plan: {op}.zero")
        yield entry(f"{model}.{fsdp}.ulysses_sequence_parallel_size", update.cp, f"plan: {op}.cp")
        yield from _offload(f"{model}.{fsdp}", update, op)
        yield entry(f"{hf_model}.enable_gradient_checkpointing", update.recompute == "full", f"plan: {op}.recompute")
    else:
        yield from _megatron(p, op, update, f"{model}.megatron")
        yield from _offload(f"{model}.megatron", update, op)


def _offload(engine: str, update: Update, op: Op) -> Entries:
    yield entry(f"{engine}.param_offload", update.offload == "all", f"plan: {op}.offload")
    yield entry(f"{engine}.optimizer_offload", update.offload != "none", f"plan: {op}.offload")


def _megatron(p: Production, op: Op, update: Update, engine: str) -> Entries:
    for axis, name in NAMES.items():
        yield entry(f"{engine}.{name}", getattr(update, axis), f"plan: {op}.{axis}")
    pieces = update.vpp if update.vpp > 1 else None
    yield entry(f"{engine}.virtual_pipeline_model_parallel_size", pieces, f"plan: {op}.vpp")
    yield entry(f"{engine}.use_distributed_optimizer", update.zero == 1, f"plan: {op}.zero")
    transformer = f"{engine}.override_transformer_config"
    recompute = None if update.recompute == "none" else update.recompute
    yield entry(f"{transformer}.recompute_granularity", recompute, f"plan: {op}.recompute")
    if recompute == "full":
        yield entry(f"{transformer}.recompute_method", "uniform", "rule: full needs a method")
        yield entry(f"{transformer}.recompute_num_layers", 1, "rule: full needs a number of layers")
    layers = p.job.models[ROLE_OF[op]].layers
    if layers % update.pp:
        last = layers - (update.pp - 1) * -(-layers // update.pp)
        yield entry(f"+{transformer}.num_layers_in_last_pipeline_stage", last, f"plan: {op}.pp; layers do not divide")
    if update.precision == "fp8":
        yield entry(f"+{transformer}.fp8", "e4m3", f"plan: {op}.precision")
        yield entry(f"+{transformer}.fp8_recipe", "blockwise", f"plan: {op}.precision")
        optimizer = f"{engine.removesuffix('.megatron')}.optim.override_optimizer_config"
        yield entry(f"+{optimizer}.fp8_recipe", "blockwise", f"plan: {op}.precision")


def micro(section: Pass | Update, tokens: str, sequences: str, op: Op) -> Entries:
    """A micro-batch, in whichever unit the plan counts it."""
    if section.micro_tokens:
        yield entry(tokens, section.micro_tokens, f"plan: {op}.micro_tokens (x context parallelism)")
    else:
        yield entry(sequences, section.micro_batch, f"plan: {op}.micro_batch (of a replica)")


def lora(model: str, shape: ModelShape, update: Update, why: str) -> Entries:
    """The rank of a model's adapters, if it has any."""
    if shape.lora_rank:
        yield entry(f"{model}.lora_rank" if is_fsdp(update) else f"{model}.lora.rank", shape.lora_rank, why)
