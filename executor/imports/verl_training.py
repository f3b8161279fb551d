"""Models that a verl configuration trains: the actor, and the critic with its values."""

from __future__ import annotations

from typing import Any

import msgspec

from executor.imports.verl_keys import Settings
from executor.imports.verl_micro import Layout, fitting, held, like, micro, replica
from ir.graph import Op
from ir.job import Role
from ir.plan import Update

_ACTOR = "actor_rollout_ref.actor"


def update(layout: Layout, op: Op, model: str, fsdp: str) -> Update:
    """How a model is trained; keys begin with `model`, and those of its FSDP engine with `model`.`fsdp`."""
    s, devices = layout.settings, layout.devices[layout.train]
    engine = f"{model}.megatron" if layout.megatron else f"{model}.{fsdp}"
    degrees: dict[str, Any] = _megatron(layout, op, engine) if layout.megatron else _fsdp(s, model, engine)
    size = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if devices % size:
        raise s.error(model, f"must have degrees that divide the {devices} devices", size)
    dp = devices // size
    divided = dp * degrees["cp"] > 1
    kind = _megatron_kind(s, engine, divided) if layout.megatron else _fsdp_kind(s, model, engine, dp * degrees["cp"])
    bare = Update(pool=layout.train, dp=dp, **degrees, **kind)
    dynamic, tokens = s.flag(f"{_ACTOR}.use_dynamic_bsz"), 16384
    if op is Op.UPDATE_CRITIC:
        dynamic, tokens = s.flag("critic.use_dynamic_bsz", default=dynamic), 32768
    small = micro(layout, bare, devices, f"{model}.ppo", dynamic=dynamic, tokens=tokens, minibatch=True)
    return msgspec.structs.replace(bare, **small)


def _fsdp_kind(s: Settings, model: str, engine: str, ranks: int) -> dict[str, Any]:
    reshards = s.flag(f"{engine}.reshard_after_forward", default=True)
    hf_model = "critic.model" if model == "critic" else "actor_rollout_ref.model"
    recompute = s.flag(f"{hf_model}.enable_gradient_checkpointing", default=True)
    return {
        "zero": (3 if reshards else 2) if ranks > 1 else 0,
        "shard": shard(s, engine, ranks),
        "recompute": "full" if recompute else "none",
        # The second is how releases before 0.5 spelled the critic's.
        "offload": _offload(s, engine, f"{model}.model.fsdp_config"),
    }


def shard(s: Settings, engine: str, ranks: int) -> int:
    """Ranks that divide the states among them, 0 for all: a node's, which is what plans consider."""
    size, node = s.whole(f"{engine}.fsdp_size", default=-1, least=-1), s.whole("trainer.n_gpus_per_node", default=8)
    if size < 0 or size >= ranks:
        return 0
    if size != node or ranks % size:
        s.note(f"zero: {engine}.fsdp_size {size} is read as division over all {ranks} replicas")
        return 0
    return size


def _megatron_kind(s: Settings, engine: str, divided: bool) -> dict[str, Any]:
    transformer = f"{engine}.override_transformer_config"
    distributed = s.flag(f"{engine}.use_distributed_optimizer", default=True)
    optimizer = f"{engine.removesuffix('.megatron')}.optim.override_optimizer_config"
    s.given(f"{transformer}.recompute_method", f"{transformer}.fp8_recipe", f"{optimizer}.fp8_recipe")
    host = f"{optimizer}.optimizer_cpu_offload"
    if s.flag(host):
        s.note(
            f"offload: the optimizer's steps on the host ({host}) are read as states that wait there between updates"
        )
    layers = s.whole(f"{transformer}.recompute_num_layers", default=1)
    if layers > 1:
        s.note(f"recompute: {layers} layers together are read as one")
    return {
        "zero": int(distributed and divided),
        "recompute": s.text(f"{transformer}.recompute_granularity", default="none"),
        "precision": "fp8" if s.text(f"{transformer}.fp8") else "native",
        "offload": _offload(s, engine),
    }


def _fsdp(s: Settings, model: str, engine: str) -> dict[str, int]:
    name = "ulysses_sequence_parallel_size"
    s.given(f"{model}.strategy", f"{engine}.strategy")
    # The older key counts if it is above 1.
    cp = max(s.whole(f"{model}.{name}", default=1), s.whole(f"{engine}.{name}", default=1))
    return {"tp": 1, "pp": 1, "vpp": 1, "cp": cp, "ep": 1, "etp": 1}


def _megatron(layout: Layout, op: Op, engine: str) -> dict[str, int]:
    s = layout.settings
    shape = layout.job.models[Role.ACTOR if op is Op.UPDATE_ACTOR else Role.CRITIC]
    tp = s.whole(f"{engine}.tensor_model_parallel_size", default=1)
    pp = s.whole(f"{engine}.pipeline_model_parallel_size", default=1)
    etp = s.whole(f"{engine}.expert_tensor_parallel_size", default=tp)
    if shape.is_moe and etp > 1 and s.given(f"{engine}.expert_tensor_parallel_size")[1] is None:
        s.note(
            f"{op}.etp {etp}: Megatron divides experts as it does tensors unless expert_tensor_parallel_size is given"
        )
    last = s.whole(f"{engine}.override_transformer_config.num_layers_in_last_pipeline_stage", default=0, least=0)
    first = s.whole(f"{engine}.override_transformer_config.num_layers_in_first_pipeline_stage", default=0, least=0)
    size = -(-shape.layers // pp)
    if (last and last != shape.layers - (pp - 1) * size) or (first and first != size):
        s.note(f"{op}.pp: the configuration's own division of the layers is read as {size} a stage, the last fewer")
    return {
        "tp": tp,
        "pp": pp,
        "vpp": s.whole(f"{engine}.virtual_pipeline_model_parallel_size", default=1),
        "cp": s.whole(f"{engine}.context_parallel_size", default=1),
        "ep": s.whole(f"{engine}.expert_model_parallel_size", default=1),
        "etp": etp if shape.is_moe else 1,
    }


def _offload(s: Settings, *engines: str) -> str:
    def flag(name: str) -> bool:
        return s.flag(*(f"{engine}.{name}" for engine in engines))

    parameters, optimizer = flag("param_offload"), flag("optimizer_offload")
    for engine in engines:
        s.given(f"{engine}.grad_offload")
    if flag("offload_policy"):
        s.note("offload all: FSDP2's offload_policy also keeps the optimizer step on the host")
        return "all"
    if parameters and not optimizer:
        s.note(f"offload all: {engines[0]}.param_offload without optimizer_offload")
    return "all" if parameters else "optimizer" if optimizer else "none"


def critic(layout: Layout) -> dict[str, Any]:
    """The critic's update, and the pass for its values."""
    s, devices = layout.settings, layout.devices[layout.train]
    trained = update(layout, Op.UPDATE_CRITIC, "critic", "fsdp")
    engine = "critic.megatron" if layout.megatron else "critic.fsdp"
    s.given(f"{engine}.micro_batch_size_per_gpu", "critic.ppo_infer_max_token_len_per_gpu")
    key, size = s.given(f"{engine}.infer_micro_batch_size_per_gpu", "critic.forward_micro_batch_size_per_gpu")
    _, packed = s.given(f"{engine}.use_dynamic_bsz")
    if trained.micro_tokens:
        tokens = s.whole("critic.forward_max_token_len_per_gpu", default=trained.micro_tokens)
        small = {"micro_tokens": held(layout, tokens, trained.cp, "values")}
    else:
        if packed is not False:
            s.note(
                "values and update_critic: by sequences, as the configuration says; the V1 trainer of verl 0.9.1 packs "
                f"the critic's tokens whatever critic.use_dynamic_bsz is, unless {engine}.use_dynamic_bsz is false"
            )
        asked = trained.micro_batch if size is None else s.as_whole(key, size)
        small = {"micro_batch": fitting(layout, asked, devices // replica(trained), "values")}
    return {"update_critic": trained, "values": like(layout, trained, small, offload="none")}
