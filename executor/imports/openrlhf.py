"""A launch script or flags of OpenRLHF 0.11.2, or of a release before it, as a job and a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from executor.imports.imported import Imported, assumed_lengths, assumed_nodes
from executor.imports.openrlhf_flags import REMARKS, Flags, flags_of
from executor.imports.openrlhf_plan import plan_of, staleness_of
from executor.imports.shell import words
from ir.frameworks.openrlhf import ESTIMATORS
from ir.job import Algorithm, JobDocument, Limits, Models, ModelSource, Workload

USEFUL_GROUPS = 0.5
"""Share of groups that dynamic filtering keeps, which flags do not say."""

_ALGORITHMS = {estimator: name for name, estimator in reversed(ESTIMATORS.items())} | {"flash_reinforce": "reinforce++"}


def read(text: str, *, where: str) -> Imported:
    """What the flags say; those that are not given have the defaults of 0.11.2.

    Raises:
        InputError: a flag that is unknown, or that says what no plan can.
    """
    flags = flags_of(words(text, where), where)
    for remark in _remarks(flags):
        flags.note(remark)
    job = _job(flags)
    plan = plan_of(flags, job)
    nodes, per_node, note = assumed_nodes(plan.num_devices)
    flags.note(note)
    return Imported(job=job, plan=plan, nodes=nodes, per_node=per_node, assumed=tuple(flags.notes))


def _remarks(f: Flags) -> Iterator[str]:
    for key in f.given:
        if key in REMARKS:
            yield f"{key}: {REMARKS[key]}"
    if f.text("vllm.sync_backend") not in (None, "nccl"):
        yield f"vllm.sync_backend {f.text('vllm.sync_backend')}: priced as NCCL"
    if not f.on("vllm.enable_prefix_caching"):
        yield "vllm.enable_prefix_caching: taken as set, so that a prompt is read once for its samples"
    if f.on("train.colocate_all") and not f.on("train.async_enable") and not f.on("vllm.enable_sleep"):
        yield "vllm.enable_sleep: taken as set, so that engines give up their memory for training"
    if f.on("rollout.vllm_generate_batch_size"):
        yield "rollout.vllm_generate_batch_size: priced as if a step's prompts were sent at a time"


# The job


def _job(f: Flags) -> JobDocument:
    algorithm = _algorithm(f)
    staleness = staleness_of(f)
    return JobDocument(
        name="openrlhf",
        algorithm=algorithm,
        models=_models(f, algorithm),
        workload=_workload(f, algorithm),
        limits=Limits(max_staleness=max(staleness, Limits().max_staleness)),
    )


def _algorithm(f: Flags) -> Algorithm:
    name = _name(f)
    fields: dict[str, Any] = {}
    if f.on("algo.advantage.is_correction_threshold"):
        fields["max_importance_weight"] = f.number("algo.advantage.is_correction_threshold", at=-1)
    algorithm = Algorithm(
        name=name,  # type: ignore[arg-type]
        learning_rate=f.number("actor.adam.lr"),
        clip=f.number("actor.eps_clip_low_high" if f.on("actor.eps_clip_low_high") else "actor.eps_clip"),
        kl_coefficient=f.number("algo.kl.init_coef"),
        max_gradient_norm=f.number("actor.max_norm"),
        **fields,
    )
    if algorithm.kl_coefficient and algorithm.kl_in_reward == f.on("algo.kl.use_loss"):
        place = "reward" if algorithm.kl_in_reward else "loss"
        f.note(f"algo.kl.use_loss: the KL divergence is taken to be in the {place}, as usual for {name}")
    return algorithm


def _name(f: Flags) -> str:
    estimator = f.text("algo.advantage.estimator")
    if estimator not in _ALGORITHMS:
        raise f.error("algo.advantage.estimator", f"must be one of {', '.join(_ALGORITHMS)}", repr(estimator))
    if f.on("algo.dynamic_filtering_enable"):
        if estimator == "gae":
            raise f.error("algo.dynamic_filtering_enable", "must not be given with the estimator gae")
        f.note(f"algo.dynamic_filtering_enable: planned as dapo, with a share of {USEFUL_GROUPS} of useful groups")
        return "dapo"
    if estimator == "flash_reinforce":
        f.note("algo.advantage.estimator flash_reinforce: planned as reinforce++, whose step is the same")
    gspo = f.text("actor.policy_loss_type") == "gspo" and estimator == "group_norm"
    return "gspo" if gspo else _ALGORITHMS[estimator]


def _models(f: Flags, algorithm: Algorithm) -> Models:
    actor = f.text("actor.model_name_or_path")
    if actor is None:
        raise f.error("actor.model_name_or_path", "must be given")
    rank = f.count("ds.lora.rank", least=0) or None
    reward = None if _verified(f) else f.text("reward.model_name_or_path")
    if reward is None and not _verified(f):
        raise f.error("reward.model_name_or_path", "must be given, or reward.remote_url")
    if reward is not None and "," in reward:
        raise f.error("reward.model_name_or_path", "must be a single model", repr(reward))
    critic = f.text("critic.model_name_or_path") or reward or actor
    return Models(
        actor=ModelSource(name=actor, lora_rank=rank),
        critic=ModelSource(name=critic, lora_rank=rank) if algorithm.uses_critic else None,
        reward=ModelSource(name=reward) if reward is not None else None,
    )


def _verified(f: Flags) -> bool:
    return f.on("reward.remote_url") or f.on("train.agent_func_path")


def _workload(f: Flags, algorithm: Algorithm) -> Workload:
    prompts, samples = f.count("rollout.batch_size"), f.count("rollout.n_samples_per_prompt")
    minibatches, rest = divmod(prompts * samples, f.count("train.batch_size"))
    if rest or not minibatches:
        raise f.error(
            "train.batch_size",
            f"must divide the {prompts * samples} sequences of a step",
            f.count("train.batch_size"),
        )
    longest_prompt, longest = _longest(f)
    lengths, note = assumed_lengths(longest_prompt, longest)
    f.note(note)
    if f.on("train.agent_func_path"):
        f.note("train.agent_func_path: taken to answer in a single turn")
    return Workload(
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        minibatches=minibatches,
        epochs=f.count("train.max_epochs"),
        max_prompt_tokens=longest_prompt,
        max_response_tokens=longest,
        temperature=f.number("rollout.temperature"),
        seed=f.count("train.seed", least=0),
        useful_groups=USEFUL_GROUPS if algorithm.dynamic_sampling else None,
        lengths=lengths,
    )


def _longest(f: Flags) -> tuple[int, int]:
    """Most tokens of a prompt and of a response. Flags give both, or the sum and perhaps the latter."""
    if f.on("prompt_max_len"):
        response = f.count("rollout.max_new_tokens") if f.on("rollout.max_new_tokens") else 1024
        return f.count("prompt_max_len"), response
    total = f.count("data.max_len", least=2)
    if f.on("rollout.max_new_tokens") and f.count("rollout.max_new_tokens") < total:
        return total - f.count("rollout.max_new_tokens"), f.count("rollout.max_new_tokens")
    prompt = total // 4
    f.note(f"rollout.max_new_tokens: taken as {total - prompt} of data.max_len {total}, for prompts of {prompt}")
    return prompt, total - prompt
