"""What a verl configuration makes of a step: prompts, minibatches, and how far generation runs ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass

from executor.imports.imported import MAX_STALENESS
from executor.imports.verl_keys import Settings
from ir.plan import Sync

_A, _V1 = "actor_rollout_ref", "trainer.v1"
_ROLLOUT, _MINIBATCH = f"{_A}.rollout", f"{_A}.actor.ppo_mini_batch_size"
_BYPASS = "algorithm.rollout_correction.bypass_mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """From one sync of weights to the next."""

    prompts: int
    minibatches: int
    colocated: bool
    staleness: int = 0
    in_flight: bool = False
    rollout_logprob: bool = False
    sync: Sync = "reshard"
    own_reward: bool = False
    """Whether the reward model has a pool of its own."""
    rollout: tuple[str, ...] = (_ROLLOUT,)
    """Prefixes of the keys that size the pool of engines."""


def steps(s: Settings) -> Steps:
    """How the configuration's trainer goes about it.

    Raises:
        InputError: a mode that no plan says, or batches that do not divide.
    """
    config, _ = s.text("config-name"), s.text("config-path")
    mode = s.text(f"{_V1}.trainer_mode", default="sync")
    if s.has("async_training.") or "fully_async" in config:
        return _fully_async(s)
    if mode == "separate_async":
        return _separate_async(s)
    if not s.flag(f"{_A}.hybrid_engine", default=True) or "one_step_off" in config:
        return _one_step_off(s)
    if mode != "sync":
        rule = "must be sync or separate_async: no plan carries responses over to the next step on shared devices"
        raise s.error(f"{_V1}.trainer_mode", rule, repr(mode))
    s.given("trainer.use_v1")
    prompts, minibatches = _batches(s)
    return Steps(
        prompts=prompts,
        minibatches=minibatches,
        colocated=True,
        rollout_logprob=s.flag(_BYPASS),
        own_reward=_own_reward(s),
    )


def _batches(s: Settings) -> tuple[int, int]:
    prompts, minibatch = s.whole("data.train_batch_size", default=1024), s.whole(_MINIBATCH, default=256)
    if prompts % minibatch:
        raise s.error(_MINIBATCH, f"must divide data.train_batch_size = {prompts}", minibatch)
    return prompts, prompts // minibatch


def _own_reward(s: Settings) -> bool:
    return s.flag("reward.reward_model.enable", "reward_model.enable") and s.flag(
        "reward.reward_model.enable_resource_pool", "reward_model.enable_resource_pool"
    )


def _bounded(s: Settings, staleness: int) -> int:
    if staleness > MAX_STALENESS:
        s.note(f"staleness {MAX_STALENESS}, the most that a job allows, for {staleness}")
    return min(staleness, MAX_STALENESS)


def _sync(s: Settings, default: str) -> Sync:
    backend = s.text(f"{_ROLLOUT}.checkpoint_engine.backend", default=default)
    if backend == "delta_sharded":
        return "delta"
    if backend != "nccl":
        s.note(f"sync broadcast: checkpoint_engine.backend {backend} is read as a broadcast")
    return "broadcast"


def _separate_async(s: Settings) -> Steps:
    """V1: generation is `num_warmup_batches` steps ahead; a sample of version v is used while the newest is below
    v + `max_off_policy_threshold`."""
    prompts, minibatches = _batches(s)
    period = s.whole(f"{_V1}.separate_async.parameter_sync_step", default=4)
    if period != minibatches:
        rule = f"must be data.train_batch_size / ppo_mini_batch_size = {minibatches}"
        raise s.error(f"{_V1}.separate_async.parameter_sync_step", rule, period)
    ahead = math.ceil(s.number(f"{_V1}.separate_async.num_warmup_batches", default=1))
    key = f"{_V1}.sampler.max_off_policy_threshold"
    # Null is no bound; so is not to give it the default of 8, which is beyond what warm-up reaches.
    threshold = s.values.get(key, 8)
    s.given(key, f"{_V1}.sampler.max_off_policy_strategy")
    staleness = ahead if threshold is None else min(ahead, s.whole(key, default=8) - 1)
    if threshold is None or staleness < threshold - 1:
        s.note(f"staleness {staleness}: generation runs so many steps ahead; single responses may be older")
    s.text(f"{_V1}.sampler.max_off_policy_strategy")
    s.flag(f"{_A}.hybrid_engine", default=True)
    sync, staleness = _sync(s, "naive"), _bounded(s, staleness)
    return Steps(
        prompts=prompts,
        minibatches=minibatches,
        colocated=False,
        sync=sync,
        staleness=staleness,
        in_flight=staleness > 0,
        rollout_logprob=s.flag(_BYPASS),
        own_reward=_own_reward(s),
    )


def _one_step_off(s: Settings) -> Steps:
    """verl.experimental.one_step_off_policy: the next batch is generated, whole, while this one is trained."""
    prompts, minibatches = _batches(s)
    return Steps(
        prompts=prompts,
        minibatches=minibatches,
        colocated=False,
        sync=_sync(s, "nccl"),
        staleness=1,
        rollout_logprob=s.flag(_BYPASS),
        own_reward=_own_reward(s),
        rollout=("rollout", _ROLLOUT),
    )


def _fully_async(s: Settings) -> Steps:
    """verl.experimental.fully_async_policy: weights go out every `trigger_parameter_sync_step` updates of
    `require_batches` minibatches; `staleness_threshold` is a share of such a step's samples, started beyond it."""
    minibatch = s.whole(_MINIBATCH, default=256)
    batches = s.whole("async_training.require_batches", default=1)
    minibatches = batches * s.whole("async_training.trigger_parameter_sync_step", default=4)
    share = s.number("async_training.staleness_threshold", default=0.1)
    s.given("data.train_batch_size", "data.gen_batch_size", f"{_A}.hybrid_engine")
    s.note(f"workload.prompts_per_step {minibatch * minibatches}: those trained between two syncs of weights")
    staleness = _bounded(s, math.ceil(share))
    if share != staleness:
        s.note(f"staleness {staleness}: async_training.staleness_threshold {share:g} starts only part of a step ahead")
    sync = _sync(s, "nccl")
    partial = s.flag("async_training.partial_rollout", default=True)
    return Steps(
        prompts=minibatch * minibatches,
        minibatches=minibatches,
        colocated=False,
        sync=sync,
        staleness=staleness,
        in_flight=partial and staleness > 0,
        rollout_logprob=s.flag(_BYPASS, default=True),
        own_reward=_own_reward(s),
        rollout=("rollout", _ROLLOUT),
    )
