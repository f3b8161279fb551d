"""verl 0.9.1 configurations read: launch scripts, lists of overrides, and YAML, also of the older recipes one_step_off
and fully_async. Keys that are not given have the defaults of verl's YAML files."""

from __future__ import annotations

from pathlib import Path, PurePath

from executor.imports.imported import Imported, assumed_lengths
from executor.imports.verl_keys import Settings, settings
from executor.imports.verl_layout import sections
from executor.imports.verl_micro import Layout
from executor.imports.verl_steps import Steps, steps
from ir.job import Algorithm, JobDocument, Limits, Models, ModelSource, Workload, resolve
from ir.known_models import KNOWN
from ir.plan import Fusions, Plan, Pool, Sharing

_A = "actor_rollout_ref"
_ACTOR, _ROLLOUT = f"{_A}.actor", f"{_A}.rollout"

_DEFAULT_MODEL = "~/models/deepseek-llm-7b-chat"

_NAMES = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "remax": "remax",
}
"""Algorithms by `algorithm.adv_estimator`."""

_LIKE_GRPO = (
    "grpo_passk", "gdpo", "opo", "gpg", "rloo_vectorized", "grpo_vectorized", "optimal_token_baseline",
    "tir_optimal_token_baseline",
)  # fmt: skip
"""Estimators that ask the same stages of a step."""


def read(text: str, *, where: str) -> Imported:
    """The job, plan and devices of a configuration.

    Args:
        text: A script, a list of overrides, or YAML if the name says so.
        where: Its name, for errors.

    Raises:
        InputError: a key has no value that can be read, or says what no plan can.
    """
    s = settings(text, where)
    _refuse(s)
    taken = steps(s)
    document = _job(s, taken)
    job = resolve(document, Path("."), where=where)
    pools = _pools(s, taken)
    plan = _plan(s, taken, pools, Layout(settings=s, job=job, steps=taken, devices={p.name: p.devices for p in pools}))
    nodes, per_node = _nodes(s, taken)
    if s.unread:
        s.note(f"not part of a job or plan: {', '.join(sorted(s.unread))}")
    return Imported(job=document, plan=plan, nodes=nodes, per_node=per_node, assumed=tuple(s.notes))


def _refuse(s: Settings) -> None:
    """What changes a step in ways that no plan has."""
    engine = s.text("model_engine", f"{_ACTOR}.strategy", default="fsdp")
    known = ("dp", "fsdp", "fsdp2", "megatron")
    if engine not in known:
        raise s.error("model_engine", f"must be {' or '.join(known)}", repr(engine))
    for key in (f"{_ROLLOUT}.disaggregation.enabled", "distillation.enabled", f"{_ACTOR}.megatron.use_megatron_fsdp"):
        if s.flag(key):
            raise s.error(key, "must be false: no plan says so")


# Jobs


def _job(s: Settings, taken: Steps) -> JobDocument:
    name = _algorithm_name(s)
    prompt = s.whole("data.max_prompt_length", default=512)
    response = s.whole("data.max_response_length", default=512)
    lengths, note = assumed_lengths(prompt, response)
    s.note(note)
    if name == "dapo":
        s.note("workload.useful_groups 0.5: the share of groups with unlike rewards is an observation")
    if s.flag(f"{_ROLLOUT}.multi_turn.enable"):
        s.note("workload.turns: the configuration does not say how long tools take; read as single responses")
    return JobDocument(
        name=f"verl {PurePath(s.where).stem}",
        algorithm=Algorithm(
            name=name,  # type: ignore[arg-type]
            learning_rate=s.number(f"{_ACTOR}.optim.lr", default=1e-6),
            clip=s.number(f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio", default=0.2),
            kl_coefficient=_kl(s),
            max_gradient_norm=s.number(f"{_ACTOR}.optim.clip_grad", f"{_ACTOR}.grad_clip", default=1.0),
            max_importance_weight=s.number("algorithm.rollout_correction.rollout_is_threshold", default=2.0),
        ),
        models=_models(s, critic=name == "ppo"),
        workload=Workload(
            prompts_per_step=taken.prompts,
            samples_per_prompt=s.whole(f"{_ROLLOUT}.n", default=1),
            minibatches=taken.minibatches,
            epochs=s.whole(f"{_ACTOR}.ppo_epochs", default=1),
            max_prompt_tokens=prompt,
            max_response_tokens=response,
            temperature=s.number(f"{_ROLLOUT}.temperature", default=1.0),
            useful_groups=0.5 if name == "dapo" else None,
            lengths=lengths,
        ),
        limits=Limits(max_staleness=max(taken.staleness, Limits().max_staleness)),
    )


def _algorithm_name(s: Settings) -> str:
    estimator = s.text("algorithm.adv_estimator", default="gae")
    if estimator in _LIKE_GRPO:
        s.note(f"algorithm grpo: its step has the stages of {estimator}")
        estimator = "grpo"
    if estimator not in _NAMES:
        rule = f"must be one of {', '.join((*_NAMES, *_LIKE_GRPO))}"
        raise s.error("algorithm.adv_estimator", rule, repr(estimator))
    if _NAMES[estimator] != "grpo":
        return _NAMES[estimator]
    loss = s.text(f"{_ACTOR}.policy_loss.loss_mode", default="vanilla")
    if s.flag("algorithm.filter_groups.enable"):
        return "dapo"
    if loss in ("gspo", "cispo"):
        return loss
    return "grpo" if s.flag("algorithm.norm_adv_by_std_in_grpo", default=True) else "dr-grpo"


def _kl(s: Settings) -> float:
    """The weight of the KL term; a pass of the reference that is weighed by 0 is still one."""
    reward, loss = s.flag("algorithm.use_kl_in_reward"), s.flag(f"{_ACTOR}.use_kl_loss")
    in_reward = s.number("algorithm.kl_ctrl.kl_coef", default=0.001)
    in_loss = s.number(f"{_ACTOR}.kl_loss_coef", default=0.001)
    if not reward and not loss:
        return 0.0
    coefficient = in_reward if reward else in_loss
    if coefficient == 0:
        s.note("algorithm.kl_coefficient 1e-9: verl computes the reference's log-probs, and weighs them by 0")
    return coefficient or 1e-9


def _models(s: Settings, *, critic: bool) -> Models:
    rank = s.whole(f"{_A}.model.lora_rank", f"{_A}.model.lora.rank", default=0, least=0)
    actor = _name(s, f"{_A}.model.path")
    # Its own adapters are an axis of the critic's model.
    critic_rank = s.whole("critic.model.lora_rank", "critic.model.lora.rank", default=0, least=0)
    reward = s.flag("reward.reward_model.enable", "reward_model.enable")
    reward_path = ("reward.reward_model.model_path", "reward_model.model_path", "reward_model.model.path")
    return Models(
        actor=ModelSource(name=actor, lora_rank=rank or None),
        critic=ModelSource(name=_name(s, "critic.model.path"), lora_rank=critic_rank or None) if critic else None,
        reward=ModelSource(name=_name(s, *reward_path)) if reward else None,
    )


def _name(s: Settings, *keys: str) -> str:
    """A model by the end of its path, under the name it is known by."""
    path = s.text(*keys, default=_DEFAULT_MODEL).rstrip("/")
    tail = path.rsplit("/", 1)[-1].lower()
    return next((name for name in KNOWN if name.lower() == path.lower()), None) or next(
        (name for name in KNOWN if name.rsplit("/", 1)[-1].lower() == tail), path
    )


# Plans


def _pools(s: Settings, taken: Steps) -> tuple[Pool, ...]:
    """Pools by the names that plans give them."""
    train, reward = _devices(s, ("trainer",), nodes=1), ("reward.reward_model", "reward_model")
    if not taken.colocated:
        sizes = {"rollout": _devices(s, taken.rollout), "train": train}
    else:
        sizes = {"rollout" if taken.own_reward else "all": train}
    sizes |= {"reward": _devices(s, reward)} if taken.own_reward else {}
    return tuple(Pool(name=name, devices=devices) for name, devices in sizes.items())


def _devices(s: Settings, prefixes: tuple[str, ...], nodes: int | None = None) -> int:
    count, each = _grid(s, prefixes, nodes)
    return count * each


def _grid(s: Settings, prefixes: tuple[str, ...], nodes: int | None = None) -> tuple[int, int]:
    """(nodes, devices of each) of a pool."""
    count = s.whole(*(f"{prefix}.nnodes" for prefix in prefixes), default=nodes)
    default = s.whole("trainer.n_gpus_per_node", default=8)
    return count, s.whole(*(f"{prefix}.n_gpus_per_node" for prefix in prefixes), default=default)


def _nodes(s: Settings, taken: Steps) -> tuple[int, int]:
    """(nodes, devices of a node) that hold the pools: parts of a node share one as far as they fit."""
    grids = [_grid(s, ("trainer",), 1)]
    grids += [] if taken.colocated else [_grid(s, taken.rollout)]
    grids += [_grid(s, ("reward.reward_model", "reward_model"))] if taken.own_reward else []
    total, largest = sum(nodes * each for nodes, each in grids), max(each for _, each in grids)
    if total <= 8:
        return 1, total
    per_node = max(8, largest)
    return -(-total // per_node), per_node


def _plan(s: Settings, taken: Steps, pools: tuple[Pool, ...], layout: Layout) -> Plan:
    job = layout.job
    verifier = job.document.models.reward is None
    adapter = bool(job.actor.lora_rank) and job.algorithm.kl_coefficient > 0
    return Plan(
        pools=pools,
        fusions=Fusions(rollout_logprob=taken.rollout_logprob, reward_with_generation=verifier),
        sharing=Sharing(reference_adapter=adapter),
        staleness=taken.staleness,
        in_flight=taken.in_flight,
        sync=taken.sync,
        **sections(layout),
    )
