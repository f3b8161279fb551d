"""Plans as AReaL 1.0.4 configurations: YAML for areal/api/cli_args.py (`PPOConfig`), and the command that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from executor.export.entries import Entry, entry, shell_script, yaml
from executor.export.production import Files, Production
from ir.job import Role
from ir.plan import Pass, Update

_TO_SET = (
    "Still to set: train_dataset.path; cluster.fileroot and cluster.name_resolve, on storage that every node sees; the",
    "training script, which builds a PPOTrainer with the workflow and the reward function (examples/math/gsm8k_rl.py).",
)
_WORKER = {"task_type": "worker", "gpu": 1, "cpu": 4, "mem": 32, "cmd": "python3 -m areal.infra.rpc.rpc_server"}
_KEEPERS = ("saver", "evaluator", "recover", "stats_logger")

_Norm = dict[str, object] | None
_GROUP: _Norm = {"mean_level": "group", "std_level": "group"}
_BATCH: _Norm = {"mean_level": "batch", "std_level": "batch"}
_CENTRED: dict[str, object] = {"mean_level": "group", "std_level": None}
_NORMS: dict[str, tuple[_Norm, _Norm]] = {
    "ppo": (None, _BATCH),
    "grpo": (_GROUP, None),
    "dapo": (_GROUP, None),
    "gspo": (_GROUP, None),
    "dr-grpo": (_CENTRED, None),
    "rloo": ({**_CENTRED, "mean_leave1out": True}, None),
    "reinforce++": (None, _BATCH),
    "reinforce++-baseline": (_CENTRED, _BATCH),
}
"""`reward_norm` and `adv_norm` by algorithm."""


def write(production: Production) -> Files:
    """The configuration and a script that starts it."""
    header = (*production.header, "", *_TO_SET)
    command = shell_script(header, ["python3", "train.py"], [("--config areal.yaml", "")])
    return {"areal.yaml": yaml(header, list(_entries(production))), "run.sh": command}


def _entries(p: Production) -> Iterator[Entry]:
    yield from _experiment(p)
    yield from _rollout(p)
    yield from _servers(p)
    yield from _actor(p)
    if p.plan.reference_logprob is not None:
        yield from _reference(p, p.plan.reference_logprob)
    if p.plan.update_critic is not None:
        yield from _critic(p, p.plan.update_critic)
    for name in _KEEPERS:
        yield entry(f"{name}.experiment_name", "${experiment_name}", "")
        yield entry(f"{name}.trial_name", "${trial_name}", "")
        yield entry(f"{name}.fileroot", "${cluster.fileroot}", "")


def _experiment(p: Production) -> Iterator[Entry]:
    name = p.job.document.name.replace("_", "-").replace("/", "-")
    nodes = -(-p.plan.num_devices // p.node)
    workload = p.job.workload
    yield entry("experiment_name", name, "job: name")
    yield entry("trial_name", "trial0", "")
    yield entry("seed", workload.seed, "job: workload.seed")
    yield entry("total_train_epochs", 1, "to choose: how long to train")
    yield entry("tokenizer_path", p.model(Role.ACTOR), "job: models.actor")
    yield entry("enable_offload", _offloads(p), "rule: needed where a model waits in host memory")
    yield entry("cluster.n_nodes", nodes, f"plan: {p.plan.num_devices} devices")
    yield entry("cluster.n_gpus_per_node", p.node, "cluster: devices of a node")
    yield entry("cluster.fileroot", "/tmp/areal/experiments", "to set: shared storage")
    yield entry("scheduler.type", "local" if nodes == 1 else "ray", "rule: local starts workers on one node only")
    yield entry("train_dataset.path", "/path/to/train-dataset", "to set")
    yield entry("train_dataset.type", "rl", "")
    yield entry("train_dataset.batch_size", workload.prompts_per_step, "job: workload.prompts_per_step, prompts")
    yield entry("train_dataset.max_length", workload.max_prompt_tokens, "job: workload.max_prompt_tokens")
    yield entry("gconfig.n_samples", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    yield entry("gconfig.max_new_tokens", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry("gconfig.max_tokens", workload.max_tokens, "job: prompt and response")
    yield entry("gconfig.temperature", workload.temperature, "job: workload.temperature")


def _offloads(p: Production) -> bool:
    return any(getattr(section, "offload", "none") != "none" for section in p.plan.sections.values())


def _rollout(p: Production) -> Iterator[Entry]:
    plan, prompts = p.plan, p.job.workload.prompts_per_step
    engines = plan.devices_of(plan.generate.pool) // plan.generate.tp
    yield from _worker("rollout", "separate")
    yield entry("rollout.backend", f"sglang:d{engines}t{plan.generate.tp}", "plan: the generating pool, generate.tp")
    yield entry("rollout.scheduling_strategy.type", "separation", "plan: a pool of its own")
    yield entry("rollout.consumer_batch_size", prompts, "job: workload.prompts_per_step, prompts")
    yield entry("rollout.max_head_offpolicyness", plan.staleness, "plan: staleness, versions")
    most = prompts * (1 + plan.staleness)
    yield entry("rollout.max_concurrent_rollouts", most, "plan: prompts of 1 + staleness steps")
    yield entry("rollout.use_lora", p.job.actor.lora_rank > 0, "job: models.actor.lora_rank")


def _servers(p: Production) -> Iterator[Entry]:
    generate, rank = p.plan.generate, p.job.actor.lora_rank
    chunk = generate.prefill_tokens
    yield entry("sglang.model_path", p.model(Role.ACTOR), "job: models.actor")
    yield entry("sglang.random_seed", "${seed}", "")
    yield entry("sglang.skip_tokenizer_init", True, "rule: servers exchange tokens")
    yield entry("sglang.dtype", "bfloat16", "plan: generate.precision")
    yield entry("sglang.context_length", p.job.workload.max_tokens, "job: prompt and response")
    yield entry("sglang.max_running_requests", generate.concurrency, "plan: generate.concurrency, of a server")
    yield entry("sglang.mem_fraction_static", generate.memory_percent / 100, "plan: generate.memory_percent")
    yield entry("sglang.chunked_prefill_size", chunk or -1, "plan: generate.prefill_tokens; -1: prompts whole")
    yield entry("sglang.enable_mixed_chunk", chunk > 0, "plan: generate.prefill_tokens, taken in with a decode step")
    yield entry("sglang.ep_size", generate.ep, "plan: generate.ep")
    if rank:
        yield entry("sglang.enable_lora", True, "job: models.actor.lora_rank")
        yield entry("sglang.max_lora_rank", rank, "job: models.actor.lora_rank")


def _worker(engine: str, placement: str) -> Iterator[Entry]:
    yield entry(f"{engine}.experiment_name", "${experiment_name}", "")
    yield entry(f"{engine}.trial_name", "${trial_name}", "")
    spec = [{**_WORKER, "ray_placement_strategy": placement}]
    yield entry(f"{engine}.scheduling_spec", spec, "rule: one device a worker, times those of a server")


def _actor(p: Production) -> Iterator[Entry]:
    update, algorithm, workload = p.plan.update_actor, p.job.algorithm, p.job.workload
    yield from _trained("actor", p, Role.ACTOR, update)
    yield entry("actor.ppo_n_minibatches", workload.minibatches, "job: workload.minibatches")
    yield entry("actor.eps_clip", algorithm.clip, "job: algorithm.clip")
    yield entry("actor.kl_ctl", algorithm.kl_coefficient, "job: algorithm.kl_coefficient")
    yield entry("actor.temperature", workload.temperature, "job: workload.temperature")
    yield entry("actor.max_new_tokens", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield from _advantages(p)
    yield from _off_policy(p)
    mode = "disk" if p.plan.sync == "disk" else "xccl"
    yield entry("actor.weight_update_mode", mode, "plan: sync")
    yield from _adapters(p.job.actor.lora_rank)


def _advantages(p: Production) -> Iterator[Entry]:
    name = p.job.algorithm.name
    reward, advantage = _NORMS[name]
    size = {"group_size": p.job.workload.samples_per_prompt}
    yield entry("actor.reward_norm", {**reward, **size} if reward else None, f"job: algorithm {name}")
    yield entry("actor.adv_norm", advantage, f"job: algorithm {name}")
    level = "sequence" if name == "gspo" else "token"
    yield entry("actor.importance_sampling_level", level, f"job: algorithm {name}")


def _off_policy(p: Production) -> Iterator[Entry]:
    """Without a pass for old log-probs, those of the servers are taken; with one, stale samples are weighted."""
    recomputed = not p.plan.fusions.rollout_logprob
    stale = p.plan.staleness > 0
    yield entry("actor.recompute_logprob", recomputed, "plan: fusions.rollout_logprob")
    yield entry("actor.use_decoupled_loss", recomputed and stale, "plan: staleness")
    if recomputed and stale:
        cap = p.job.algorithm.max_importance_weight
        rejection = {"level": "token", "action": "clamp", "metric": "ratio", "upper": cap}
        yield entry("actor.rejection_sampling", rejection, "job: algorithm.max_importance_weight")


def _adapters(rank: int) -> Iterator[Entry]:
    if rank:
        yield entry("actor.use_lora", True, "job: models.actor.lora_rank")
        yield entry("actor.lora_rank", rank, "job: models.actor.lora_rank")
        yield entry("actor.target_modules", ["all-linear"], "rule: every linear layer, as planned")


def _critic(p: Production, update: Update) -> Iterator[Entry]:
    yield from _trained("critic", p, Role.CRITIC, update)
    yield entry("critic.is_critic", True, "")
    yield entry("critic.ppo_n_minibatches", p.job.workload.minibatches, "job: workload.minibatches")


def _trained(engine: str, p: Production, role: Role, update: Update) -> Iterator[Entry]:
    section = f"update_{engine}"
    yield from _engine(engine, p, role, update, section)
    yield entry(f"{engine}.optimizer.type", "adam", "")
    yield entry(f"{engine}.optimizer.lr", p.job.algorithm.learning_rate, "job: algorithm.learning_rate")
    clipping = p.job.algorithm.max_gradient_norm
    yield entry(f"{engine}.optimizer.gradient_clipping", clipping, "job: algorithm.max_gradient_norm")
    recompute = update.recompute
    yield entry(f"{engine}.gradient_checkpointing", recompute != "none", f"plan: {section}.recompute")
    if _kind(p, update) == "megatron":
        distributed = update.zero == 1
        yield entry(f"{engine}.megatron.ddp.use_distributed_optimizer", distributed, f"plan: {section}.zero")
        layers = ("full", "uniform", 1) if recompute == "full" else ("selective", None, None)
        if recompute != "none":
            for key, value in zip(("granularity", "method", "num_layers"), layers, strict=True):
                yield entry(f"{engine}.megatron.recompute_{key}", value, f"plan: {section}.recompute")


def _reference(p: Production, passing: Pass) -> Iterator[Entry]:
    yield from _engine("ref", p, Role.REFERENCE, passing, "reference_logprob")
    yield entry("ref.optimizer", None, "rule: not trained")


def _engine(engine: str, p: Production, role: Role, section: Pass | Update, name: str) -> Iterator[Entry]:
    """What every trainer's engine has."""
    yield from _worker(engine, "shared")
    yield entry(f"{engine}.path", p.model(role), f"job: models.{role.value}")
    yield entry(f"{engine}.dtype", "bfloat16", "")
    yield entry(f"{engine}.backend", _backend(p, section), f"plan: degrees of {name}, zero {section.zero}")
    yield from _placement(engine, p, section.pool)
    tokens = section.micro_tokens * section.cp
    yield entry(f"{engine}.mb_spec.max_tokens_per_mb", tokens, f"plan: {name}.micro_tokens x cp, tokens of a replica")
    yield entry(f"{engine}.offload", section.offload == "all", f"plan: {name}.offload")


def _placement(engine: str, p: Production, pool: str) -> Iterator[Entry]:
    """On the devices of the first engine of the pool."""
    homes: Sequence[tuple[str, Pass | Update | None]] = (
        ("actor", p.plan.update_actor),
        ("critic", p.plan.update_critic),
        ("ref", p.plan.reference_logprob),
    )
    leader = next(name for name, section in homes if section is not None and section.pool == pool)
    kind = "separation" if leader == engine else "colocation"
    yield entry(f"{engine}.scheduling_strategy.type", kind, "plan: pools")
    if leader != engine:
        yield entry(f"{engine}.scheduling_strategy.target", leader, "plan: pools")


def _kind(p: Production, section: Pass | Update) -> str:
    alone = isinstance(section, Update) and section.zero == 0 and p.plan.devices_of(section.pool) == 1
    return "fsdp" if section.zero == 3 or (alone and p.job.actor.lora_rank) else "megatron"


def _backend(p: Production, section: Pass | Update) -> str:
    replica = section.tp * section.pp * section.cp
    dp = section.dp if isinstance(section, Update) else p.plan.devices_of(section.pool) // replica
    kind, etp = _kind(p, section), getattr(section, "etp", 1)
    sizes = {"d": dp, "p": section.pp, "t": section.tp, "c": section.cp}
    attention = "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1 or letter == "d")
    if section.ep == etp == 1:
        return f"{kind}:{attention}"
    return f"{kind}:(attn:{attention}|ffn:e{section.ep}t{etp})"
