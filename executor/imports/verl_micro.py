"""What sections of a verl configuration are read from, and their micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from executor.imports.verl_keys import Settings
from executor.imports.verl_steps import Steps
from ir.job import Job
from ir.plan import Pass, Update

_A = "actor_rollout_ref"
_ACTOR = f"{_A}.actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What sections are read from."""

    settings: Settings
    job: Job
    steps: Steps
    devices: Mapping[str, int]
    """Of pools."""

    @property
    def train(self) -> str:
        """The pool that trains; the first, if it generates too."""
        return "train" if "train" in self.devices else next(iter(self.devices))

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains, else FSDP."""
        s = self.settings
        words = s.text("model_engine"), s.text(f"{_ACTOR}.strategy"), s.text("config-name")
        return any("megatron" in word for word in words)


def replica(update: Update) -> int:
    """Devices of a replica."""
    return update.tp * update.pp * update.cp


def micro(
    layout: Layout, like: Update, devices: int, prefix: str, *, dynamic: bool, tokens: int, minibatch: bool = False
) -> dict[str, int]:
    """A micro-batch: keys `prefix`_max_token_len_per_gpu, or _micro_batch_size_per_gpu or, of all replicas,
    _micro_batch_size."""
    s, name = layout.settings, prefix.rsplit(".", 1)[0]
    spelled = f"{prefix}_micro_batch_size_per_gpu", f"{prefix}_micro_batch_size"
    s.given(f"{prefix}_use_dynamic_bsz")
    if dynamic:
        s.given(*spelled)
        asked = s.whole(f"{prefix}_max_token_len_per_gpu", default=tokens)
        return {"micro_batch": 0, "micro_tokens": held(layout, asked, like.cp, name)}
    s.given(f"{prefix}_max_token_len_per_gpu")
    replicas = devices // replica(like)
    key, value = s.given(*spelled)
    if value is None:
        raise s.error(spelled[0], "must be given where micro-batches are not by tokens")
    size = s.as_whole(key, value)
    size = max(size // replicas, 1) if key == spelled[1] else size
    return {"micro_batch": fitting(layout, size, replicas, name, minibatch=minibatch), "micro_tokens": 0}


def held(layout: Layout, tokens: int, cp: int, name: str) -> int:
    """Tokens that hold the longest sequence over `cp` devices."""
    least = -(-layout.job.workload.max_tokens // cp)
    if tokens < least:
        layout.settings.note(f"{name}: micro-batches of {least} tokens for {tokens}: the longest sequence must fit")
    return max(tokens, least)


def fitting(layout: Layout, size: int, replicas: int, name: str, *, minibatch: bool = False) -> int:
    """At most what a replica has."""
    workload = layout.job.workload
    sequences = workload.sequences // (workload.minibatches if minibatch else 1)
    most = -(-sequences // replicas)
    if size > most:
        layout.settings.note(f"{name}: micro-batches of {most} sequences for {size}: a replica has no more")
    return min(size, most)


def like(
    layout: Layout,
    update: Update,
    micro: Mapping[str, int],
    *,
    offload: str,
    whole: bool = False,
    shard: int | None = None,
) -> Pass:
    """A pass of the model that `update` trains, or of its kind, whose weights groups of `shard` ranks divide; None: as
    they are trained."""
    zero: Literal[0, 3] = 3 if update.zero == 3 or (whole and update.zero == 2) else 0
    return Pass(
        pool=layout.train,
        tp=update.tp,
        pp=update.pp,
        cp=update.cp,
        ep=update.ep,
        zero=zero,
        shard=(update.shard if shard is None else shard) if zero else 0,
        offload=offload,  # type: ignore[arg-type]
        **micro,
    )
