"""Loads exported plans with AReaL's own code, in an environment of tests/exports/areal_requirements.txt.

    python areal_check.py FOLDER

Every sub-folder holds areal.yaml and world.json. Hydra composes the YAML and AReaL's dataclasses and grammar of engines
check it; what AReaL asserts only when a trainer, a scheduler or a worker starts is asserted here again. Prints a JSON
line a plan: {"plan", "ok", "error"}.
"""

from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import GRPOConfig, PPOConfig, parse_cli_args, to_structured_cfg
from omegaconf import OmegaConf
from verdicts import report


def load(path):
    """As `load_expr_config` does, which also writes to the file root."""
    raw, _ = parse_cli_args(["--config", str(path)])
    kind = PPOConfig if raw.get("critic") is not None else GRPOConfig
    return OmegaConf.to_object(to_structured_cfg(raw, kind))


def engines(cfg):
    """The engines that PPOTrainer starts, in its order, with their allocations."""
    found = {"actor": cfg.actor}
    if cfg.critic is not None:
        found["critic"] = cfg.critic
    if cfg.actor.kl_ctl > 0 and cfg.ref is not None:
        found["ref"] = cfg.ref
    found["rollout"] = cfg.rollout
    return {name: (engine, ModelAllocation.from_str(engine.backend, name=name)) for name, engine in found.items()}


def workers(name, allocation):
    """One a device, but one a server."""
    parallel = allocation.parallel
    return parallel.dp_size if name == "rollout" else parallel.world_size


def check_trainer(cfg, found):
    """`PPOTrainer._validate_cfg`."""
    offloaded = any(getattr(engine, "offload", False) for engine, _ in found.values())
    assert cfg.enable_offload or not offloaded, "offload needs enable_offload"
    assert cfg.actor._version == cfg.rollout._version, "actor._version must be rollout._version"
    strategies = {name: engine.scheduling_strategy for name, (engine, _) in found.items()}
    shared = {name: s.target for name, s in strategies.items() if s.type == "colocation"}
    assert shared.get("rollout") != "actor" and shared.get("actor") != "rollout", "no plan shares the servers' devices"
    if cfg.actor.use_lora:
        assert cfg.actor.weight_update_mode == "disk", "SGLang takes adapters from files"
        assert found["actor"][1].backend == "fsdp", "Megatron's adapters are not for SGLang"


def check_workers(cfg, found, world):
    """`create_workers` of the schedulers: devices in all, workers of roles that share, servers inside a node."""
    started, devices = {}, 0
    for name, (engine, allocation) in found.items():
        strategy, count = engine.scheduling_strategy, workers(name, allocation)
        if strategy.type == "colocation":
            assert started[strategy.target] == count, f"{name} must have as many workers as {strategy.target}"
        else:
            devices += allocation.parallel.world_size
        started[name] = count
    nodes, per_node = cfg.cluster.n_nodes, cfg.cluster.n_gpus_per_node
    assert nodes <= world["nodes"] and per_node == world["per_node"], "the cluster must be part of the world"
    assert devices <= nodes * per_node, f"engines take {devices} devices of {nodes} x {per_node}"
    assert per_node % found["rollout"][1].parallel.tp_size == 0, "a server must lie in a node"
    assert cfg.scheduler.type == ("local" if nodes == 1 else "ray")
    assert all(spec.gpu == 1 for engine, _ in found.values() for spec in engine.scheduling_spec)


def check_engines(cfg, found):
    """What engines assert when they are built or given a batch."""
    longest = cfg.train_dataset.max_length + cfg.gconfig.max_new_tokens
    for name, (engine, allocation) in found.items():
        if name == "rollout":
            continue
        parallel = allocation.parallel
        assert cfg.train_dataset.batch_size % parallel.dp_size == 0, f"{name}: prompts must divide over its replicas"
        assert engine.mb_spec.max_tokens_per_mb >= longest, f"{name}: a micro-batch must hold the longest sequence"
        assert engine.scheduling_spec[0].gpu == 1, f"{name}: a worker has one device"
        if allocation.backend == "megatron" and engine.gradient_checkpointing:
            selective = engine.megatron.recompute_granularity == "selective"
            assert (engine.megatron.recompute_method is None) == selective, f"{name}: a method is for full recompute"
        assert engine.optimizer is None or engine.optimizer.lr > 0
    sglang = cfg.sglang
    assert sglang.context_length >= longest and 0 < sglang.mem_fraction_static < 1
    assert sglang.ep_size in (1, found["rollout"][1].parallel.tp_size), "SGLang's experts are whole or over its devices"
    stale = cfg.rollout.max_head_offpolicyness > 0
    assert not cfg.actor.use_decoupled_loss or stale
    assert cfg.rollout.consumer_batch_size == cfg.train_dataset.batch_size


def check(folder, world):
    cfg = load(folder / "areal.yaml")
    found = engines(cfg)
    check_trainer(cfg, found)
    check_workers(cfg, found, world)
    check_engines(cfg, found)


if __name__ == "__main__":
    report(check)
