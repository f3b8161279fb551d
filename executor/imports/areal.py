"""AReaL configurations as (job, plan, devices): the YAML of release 1.0.4, or its values as `key=value` lines, with the
`allocation_mode` of earlier releases too."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from executor.imports.areal_backends import Allocation, Engine, parse_allocation, parse_backend
from executor.imports.areal_job import read_job
from executor.imports.areal_trainer import Trainer
from executor.imports.imported import Imported
from executor.imports.settings import Settings, read_settings
from ir.job import JobDocument
from ir.plan import Fusions, Generate, Plan, Pool, Sync
from ir.workload import Workload

_NODES, _DEVICES, _VLLM_SEQUENCES, _SHARE = 32, 8, 256, 0.9
"""`cluster.n_nodes`, `cluster.n_gpus_per_node`, `vllm.max_num_seqs` and either engine's share of memory in AReaL 1.0.4
(areal/api/cli_args.py) where they are not set."""
_STEP_TOKENS = 8192
"""Prompt tokens that a step of a server takes by its own default on large GPUs: vLLM's OpenAI server and SGLang."""

_SYNC: Mapping[str, Sync] = {"xccl": "broadcast", "disk": "disk", "awex": "p2p"}
_POOLS = {"rollout": "rollout", "actor": "train", "critic": "critic", "ref": "reference"}
_OLD_NAMES = {"actor": "actor", "critic": "critic", "ref": "reference"}
_UNREAD = {
    "dynamic_bs": "batches that fall short are read as whole",
    "actor.enable_tree_training": "training on prefix trees is read as on packed sequences",
    "actor.pad_to_maximum": "padded micro-batches are read as packed",
    "sglang.enable_dp_attention": "servers' data-parallel attention is read as tensor parallel",
    "actor.use_sapo_loss": "SAPO's loss is read as the algorithm's own",
}
"""Switches that a plan has no place for, and what is read in their stead."""


def read(text: str, *, where: str) -> Imported:
    """A configuration; `where` is its name, for errors.

    Raises:
        InputError: it lacks what a plan needs, or asks for what none can express.
    """
    s = read_settings(text, where=where)
    if s.get("defaults") is not None:
        raise s.error("defaults", "must be resolved, for the files that it inherits from are not read")
    if s.has("teacher"):
        raise s.error("teacher", "must be null, for distillation is not read")
    job = read_job(s)
    plan = _plan(s, job)
    for key, meaning in _UNREAD.items():
        if s.flag(key):
            s.took(key, meaning)
    nodes, per_node = s.whole("cluster.n_nodes", _NODES), s.whole("cluster.n_gpus_per_node", _DEVICES)
    return Imported(job=job, plan=plan, nodes=nodes, per_node=per_node, assumed=tuple(s.notes))


def _plan(s: Settings, job: JobDocument) -> Plan:
    engines = _engines(s, reference=job.algorithm.kl_coefficient > 0)
    homes = _homes(s, engines)
    leaders = tuple(dict.fromkeys(homes.values()))
    names = {home: "all" if len(leaders) == 1 else _POOLS[home] for home in leaders}
    colocated, recomputed = homes["actor"] == "rollout", _recomputes(s)
    staleness = 0 if colocated else job.limits.max_staleness
    trainers = {
        key: Trainer(settings=s, engine=engine, key=key, pool=names[homes[key]], workload=job.workload)
        for key, engine in engines.items()
        if key != "rollout"
    }
    actor, critic, reference = trainers["actor"], trainers.get("critic"), trainers.get("ref")
    return Plan(
        pools=tuple(Pool(name=names[home], devices=engines[home].devices) for home in leaders),
        generate=_generate(s, engines["rollout"], names["rollout"], job.workload, staleness),
        reference_logprob=reference.passing(offload=True) if reference else None,
        old_logprob=actor.passing() if recomputed else None,
        values=critic.passing() if critic else None,
        update_critic=critic.update() if critic else None,
        update_actor=actor.update(away=colocated),
        fusions=Fusions(rollout_logprob=not recomputed, reward_with_generation=True),
        staleness=staleness,
        in_flight=staleness > 0,
        sync=_sync(s, colocated=colocated),
    )


def _recomputes(s: Settings) -> bool:
    """Whether the actor's log-probs get a pass of their own (`should_compute_prox_logp`)."""
    if not s.flag("actor.use_decoupled_loss"):
        return s.flag("actor.recompute_logprob")
    method = s.get("actor.prox_logp_method", "recompute")
    recomputed = method in ("recompute", "metrics")
    if not recomputed:
        s.took("actor.prox_logp_method", f"{method} takes no pass, as if old log-probs were the servers'")
    return recomputed


def _sync(s: Settings, *, colocated: bool) -> Sync:
    mode = str(s.get("actor.weight_update_mode") or "xccl")
    if mode not in _SYNC:
        raise s.error("actor.weight_update_mode", f"must be one of {', '.join(_SYNC)}", repr(mode))
    if colocated:
        s.took("actor.weight_update_mode", f"{mode} is read as resharding within the shared devices")
    return "reshard" if colocated else _SYNC[mode]


# Engines and their devices


def _engines(s: Settings, *, reference: bool) -> Mapping[str, Engine]:
    roles = ("actor", *(["critic"] if s.has("critic") else []), *(["ref"] if reference else []))
    if (mode := _allocation(s)) is not None:
        return {"rollout": mode.rollout, **{role: mode.trainer(role, _OLD_NAMES[role]) for role in roles}}
    texts = {"rollout": s.required("rollout.backend"), "actor": s.required("actor.backend")}
    texts |= {role: s.get(f"{role}.backend") or texts["actor"] for role in roles}
    return {role: parse_backend(str(text), where=f"{s.where}: {role}.backend") for role, text in texts.items()}


def _allocation(s: Settings) -> Allocation | None:
    """The `allocation_mode`, where engines do not say their own."""
    text = s.get("allocation_mode")
    if not text or s.get("rollout.backend"):
        return None
    return parse_allocation(str(text), where=f"{s.where}: allocation_mode")


def _homes(s: Settings, engines: Mapping[str, Engine]) -> Mapping[str, str]:
    """The engine that leads the devices of each."""
    homes, mode = {"rollout": "rollout"}, _allocation(s)
    for role in (role for role in _POOLS if role in engines and role != "rollout"):
        target = _shares(s, role) if mode is None else _shared_of_old(s, role, mode)
        homes[role] = homes.get(target, role)
        if engines[homes[role]].devices != engines[role].devices:
            rule = f"must take as many devices as {homes[role]}, with which it shares them"
            raise s.error(f"{role}.backend", rule, engines[role].devices)
    return homes


def _shares(s: Settings, role: str) -> str:
    """Whose devices an engine shares; its own for none."""
    if role == "actor" and _target(s, "rollout") == "actor":
        return "rollout"
    return _target(s, role) or role


def _target(s: Settings, role: str) -> str | None:
    if s.get(f"{role}.scheduling_strategy.type", "separation") != "colocation":
        return None
    return str(s.required(f"{role}.scheduling_strategy.target"))


def _shared_of_old(s: Settings, role: str, mode: Allocation) -> str:
    """Under an `allocation_mode` all that train share their devices, but those that it names apart."""
    if role == "actor":
        return "rollout" if mode.colocated else _shares(s, role)
    apart = mode.trainer(role, _OLD_NAMES[role]) is not mode.trainers[0]
    return role if apart and _target(s, role) is None else "actor"


# Servers


def _generate(s: Settings, engine: Engine, pool: str, workload: Workload, staleness: int) -> Generate:
    sglang = engine.kind == "sglang"
    key = "sglang.mem_fraction_static" if sglang else "vllm.gpu_memory_utilization"
    ep = s.whole("sglang.ep_size", 1) if sglang else 1
    return Generate(
        pool=pool,
        tp=engine.tp,
        pp=engine.pp,
        ep=engine.tp if ep == 1 and s.flag("sglang.enable_ep_moe") else ep,
        concurrency=_concurrency(s, engine, workload, staleness),
        memory_percent=s.percent(key, s.number(key, _SHARE)),
        prefill_tokens=_prefill(s, sglang=sglang),
    )


def _concurrency(s: Settings, engine: Engine, workload: Workload, staleness: int) -> int:
    """Sequences of a server: what it takes, or its share of the groups that may run if that is less."""
    groups = s.whole("rollout.max_concurrent_rollouts", s.whole("rollout.consumer_batch_size", 1))
    bound = ceil(workload.sequences * (1 + staleness) / engine.dp)
    running = min(ceil(groups * workload.samples_per_prompt / engine.dp), bound)
    sglang = engine.kind == "sglang"
    key = "sglang.max_running_requests" if sglang else "vllm.max_num_seqs"
    asked = s.whole(key, running if sglang else _VLLM_SEQUENCES)
    if asked > running or s.get(key) is None:
        s.took(key, f"{min(asked, running)} sequences of a server, of {running} that may run there")
    return min(asked, running)


def _prefill(s: Settings, *, sglang: bool) -> int:
    """Prompt tokens of a step; AReaL has SGLang prefill prompts whole unless it is told otherwise."""
    key = "sglang.chunked_prefill_size"
    if sglang and (key not in s.values or s.get(key) is not None):
        return max(s.whole(key, 0, least=-1), 0)
    if not sglang and s.flag("vllm.no_enable_chunked_prefill"):
        return 0
    s.took(key if sglang else "vllm", f"{_STEP_TOKENS} prompt tokens a step, its server's own default")
    return _STEP_TOKENS
