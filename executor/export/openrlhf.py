"""A plan as flags of OpenRLHF 0.11.2 (openrlhf/cli/train_ppo_ray.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from executor.export.entries import Entry, entry, flags, shell_script
from executor.export.production import Files, Production
from ir.frameworks.openrlhf import ESTIMATORS
from ir.job import Role
from ir.plan import Pass

COMMAND = ("python3", "-m", "openrlhf.cli.train_ppo_ray")

_TO_SET = (
    "To set before it runs: data.prompt_dataset with data.input_key, data.label_key and data.apply_chat_template, and",
    "ckpt.output_dir and ckpt.path. The schedule of learning rates and the critic's are OpenRLHF's defaults.",
)


def write(production: Production) -> Files:
    """A script that starts training in a running Ray cluster."""
    entries = [*_models(production), *_pools(production), *_engines(production), *_trainers(production)]
    entries += [*_batches(production), *_algorithm(production), *_data(production)]
    header = [*production.header, *_TO_SET, *_verifier_to_set(production)]
    return {"run.sh": shell_script(header, COMMAND, flags(entries))}


def _verifier_to_set(p: Production) -> Iterator[str]:
    if Role.REWARD not in p.job.models:
        what = "train.agent_func_path" if p.job.workload.turns else "reward.remote_url"
        yield f"{what} is to be your own: a Python file{'' if p.job.workload.turns else ' or the address of a server'}."


def _models(p: Production) -> Iterator[Entry]:
    for role in (Role.ACTOR, Role.CRITIC, Role.REWARD):
        if role in p.job.models:
            yield entry(f"{role}.model_name_or_path", p.model(role), f"job: models.{role}")
    if Role.REWARD not in p.job.models:
        if p.job.workload.turns:
            yield entry("train.agent_func_path", "path/to/agent_func.py", "to be set: the job's responses have turns")
        else:
            yield entry("reward.remote_url", "path/to/reward_func.py", "to be set: the job has a verifier")
    if p.job.actor.lora_rank:
        yield entry("ds.lora.rank", p.job.actor.lora_rank, "job: models.actor.lora_rank")


def _pools(p: Production) -> Iterator[Entry]:
    plan = p.plan
    sections = {
        "actor": plan.update_actor,
        "ref": plan.reference_logprob,
        "critic": plan.update_critic,
        "reward": plan.reward,
    }
    for role, section in sections.items():
        if section is not None:
            nodes, per_node = _sized(plan.devices_of(section.pool), p.node)
            yield entry(f"{role}.num_nodes", nodes, f"plan: devices of pool {section.pool}")
            yield entry(f"{role}.num_gpus_per_node", per_node, f"plan: devices of pool {section.pool}")
    yield from _colocation(p)


def _sized(devices: int, node: int) -> tuple[int, int]:
    """(nodes, devices of each) whose product is the pool."""
    per_node = math.gcd(devices, node)
    return devices // per_node, per_node


def _colocation(p: Production) -> Iterator[Entry]:
    plan = p.plan
    actor = plan.update_actor.pool
    critic = plan.update_critic.pool if plan.update_critic is not None else None
    reward = plan.reward.pool if plan.reward is not None else None
    if plan.colocated:
        yield entry("train.colocate_all", True, "plan: every model is on one pool")
    elif actor in (critic, reward):
        yield entry("train.colocate_all", True, "plan: every model but the engines' is on one pool")
    else:
        if plan.reference_logprob is not None and plan.reference_logprob.pool == actor:
            yield entry("train.colocate_actor_ref", True, "plan: reference_logprob.pool is the actor's")
        if critic is not None and critic == reward:
            yield entry("train.colocate_critic_reward", True, "plan: reward.pool is the critic's")


def _engines(p: Production) -> Iterator[Entry]:
    plan, engine = p.plan, p.plan.generate
    engines = plan.devices_of(engine.pool) // engine.tp
    yield entry("vllm.num_engines", engines, "plan: devices of generate.pool over generate.tp")
    yield entry("vllm.tensor_parallel_size", engine.tp, "plan: generate.tp")
    yield entry("vllm.gpu_memory_utilization", engine.memory_percent / 100, "plan: generate.memory_percent")
    yield entry("vllm.enable_prefix_caching", True, "rule: a prompt is read once for its samples")
    if plan.colocated:
        yield entry("vllm.enable_sleep", True, "plan: engines share their devices with training")
    yield entry("vllm.sync_backend", "nccl", f"plan: sync {plan.sync}")
    if plan.staleness:
        yield entry("train.async_enable", True, "plan: staleness")
        yield entry("train.async_queue_size", plan.staleness, "plan: staleness, in batches of a step")
        if plan.in_flight:
            yield entry("train.partial_rollout_enable", True, "plan: in_flight")


def _trainers(p: Production) -> Iterator[Entry]:
    plan, update = p.plan, p.plan.update_actor
    yield entry("ds.zero_stage", update.zero, "plan: update_actor.zero")
    yield entry("ds.tensor_parallel_size", update.tp, "plan: update_actor.tp")
    yield entry("ds.ring_attn_size", update.cp, "plan: update_actor.cp")
    yield entry("ds.packing_samples", True, "rule: passes without padding")
    yield entry("ds.param_dtype", "bf16", "plan: update_actor.precision")
    if update.recompute == "full":
        yield entry("actor.gradient_checkpointing_enable", True, "plan: update_actor.recompute")
    if update.offload == "optimizer":
        yield entry("ds.enable_sleep", True, "plan: update_actor.offload")
    for role, section in (("ref", plan.reference_logprob), ("reward", plan.reward)):
        if section is not None and section.offload == "all":
            yield entry(f"{role}.offload", True, f"plan: {'reference_logprob' if role == 'ref' else role}.offload")


def _batches(p: Production) -> Iterator[Entry]:
    workload, update = p.job.workload, p.plan.update_actor
    old = _old_logprob(p)
    minibatch = workload.sequences // workload.minibatches
    yield entry("rollout.batch_size", workload.prompts_per_step, "job: workload.prompts_per_step")
    yield entry("rollout.n_samples_per_prompt", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    yield entry("train.batch_size", minibatch, "job: sequences of a minibatch, prompts x samples over minibatches")
    yield entry("train.max_epochs", workload.epochs, "job: workload.epochs")
    if update.micro_tokens:
        per_device = "over tp: the budget is of each device"
        yield entry("train.dynamic_batch_enable", True, "plan: micro-batches by tokens")
        yield entry(
            "train.max_tokens_per_gpu",
            update.micro_tokens // update.tp,
            f"plan: update_actor.micro_tokens {per_device}",
        )
        yield entry(
            "rollout.max_tokens_per_gpu", old.micro_tokens // old.tp, f"plan: old_logprob.micro_tokens {per_device}"
        )
    else:
        yield entry("train.micro_batch_size", update.micro_batch, "plan: update_actor.micro_batch")
        yield entry("rollout.micro_batch_size", old.micro_batch, "plan: old_logprob.micro_batch")


def _old_logprob(p: Production) -> Pass:
    old = p.plan.old_logprob
    assert old is not None, "OpenRLHF computes the old log-probs in a pass of their own"
    return old


def _algorithm(p: Production) -> Iterator[Entry]:
    algorithm = p.job.algorithm
    why = f"job: algorithm.name {algorithm.name}"
    yield entry("algo.advantage.estimator", ESTIMATORS[algorithm.name], why)
    if algorithm.name == "gspo":
        yield entry("actor.policy_loss_type", "gspo", why)
    if algorithm.dynamic_sampling:
        yield entry("algo.dynamic_filtering_enable", True, why)
    yield entry("algo.kl.init_coef", algorithm.kl_coefficient, "job: algorithm.kl_coefficient; 0: no reference")
    if algorithm.kl_coefficient and not algorithm.kl_in_reward:
        yield entry("algo.kl.use_loss", True, f"{why}, whose KL is a term of the loss")
        yield entry("algo.kl.estimator", "k3", f"{why}, whose KL is a term of the loss")
    if p.plan.staleness:
        cap = [0.0, algorithm.max_importance_weight]
        yield entry("algo.advantage.is_correction_level", "token", "plan: staleness")
        yield entry("algo.advantage.is_correction_mode", "clip", "job: algorithm.max_importance_weight is a cap")
        yield entry("algo.advantage.is_correction_threshold", cap, "job: algorithm.max_importance_weight")
    yield entry("actor.adam.lr", algorithm.learning_rate, "job: algorithm.learning_rate")
    yield entry("actor.eps_clip", algorithm.clip, "job: algorithm.clip")
    for role in ("actor", "critic") if algorithm.uses_critic else ("actor",):
        yield entry(f"{role}.max_norm", algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")


def _data(p: Production) -> Iterator[Entry]:
    workload = p.job.workload
    yield entry("data.max_len", workload.max_tokens, "job: workload.max_prompt_tokens + max_response_tokens")
    yield entry("rollout.max_new_tokens", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry("rollout.temperature", workload.temperature, "job: workload.temperature")
    yield entry("train.seed", workload.seed, "job: workload.seed")
    yield entry("data.prompt_dataset", "path/to/prompts", "to be set")
