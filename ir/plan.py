"""plan.toml: how one RL step is laid out. A plan is a small declarative record; its hash is its identity.

A section per stage that computes with a model says where and how it runs. Sections of
stages that the job does not have, or that a fusion or a shared model removes, are absent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ir.documents import digest
from ir.graph import Op
from ir.quantities import Natural, Positive


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named group of devices. Pools take devices in the order in which the plan lists them."""

    name: str
    devices: Positive
    group: Natural = 0
    """Which of the cluster's groups of like devices it lies in."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollout: engines of tp x pp devices fill the pool."""

    pool: str
    tp: Positive = 1
    pp: Positive = 1
    ep: Positive = 1
    """Devices that divide the experts; beyond an engine's own, engines share theirs."""
    concurrency: Positive
    """Sequences decoded together by an engine."""
    memory_percent: Annotated[int, Meta(ge=0, le=98)] = 0
    """Share of device memory that an engine takes, in percent; 0: a KV cache that holds `concurrency` sequences of
    the longest length."""
    prefill_tokens: Natural = 0
    """Prompt tokens that a decode step takes in with it (chunked prefill); 0: prompts are prefilled whole."""
    draft_tokens: Natural = 0
    """Tokens that are guessed for a sequence before a decode step, which checks them all (speculative decoding)."""
    precision: Literal["native", "fp8"] = "native"


class Pass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forward passes of a model over the batch; replicas of tp x pp x cp devices fill the pool."""

    pool: str
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    zero: Literal[0, 3] = 0
    """3: replicas divide the weights among them and gather a layer when it is needed."""
    shard: Natural = 0
    """Ranks, of those that hold the same, among which weights are divided (hybrid sharding): each group of so many has
    a copy; 0: among all."""
    micro_batch: Natural = 0
    """Sequences per forward pass of a replica; 0: by tokens."""
    micro_tokens: Natural = 0
    """Tokens packed into a forward pass of a device; 0: by sequences."""
    offload: Literal["none", "all"] = "none"
    """Whether the weights wait in host memory between passes."""


class Update(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Training of a model by dp replicas of tp x pp x cp devices, the first ones of the pool."""

    pool: str
    dp: Positive = 1
    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1
    """Pieces of its layers that a pipeline rank interleaves."""
    schedule: Literal["1f1b", "zero-bubble"] = "1f1b"
    """Order of a pipeline's passes: a backward pass after each forward one, or the same with gradients of weights put
    off until a rank would wait (ZB-H1, arXiv:2401.10241)."""
    cp: Positive = 1
    ep: Positive = 1
    etp: Positive = 1
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    shard: Natural = 0
    """Ranks, of the dp x cp that hold the same, among which ZeRO divides state (hybrid sharding): each group of so many
    has a copy, and gradients are reduced across groups; 0: among all."""
    micro_batch: Natural = 0
    """Sequences per forward and backward pass of a replica; 0: by tokens."""
    micro_tokens: Natural = 0
    """Tokens packed into a pass of a device; 0: by sequences."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What waits in host memory between updates."""
    precision: Literal["native", "fp8"] = "native"


class Fusions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which stages are merged; `ir.moves` says what each changes."""

    rollout_logprob: bool = False
    fold_old_logprob: bool = False
    merge_logprobs: bool = False
    stream: bool = False
    interleave_updates: bool = False
    reward_with_generation: bool = False


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which models run on another's weights; `ir.moves` says what each changes."""

    reference_adapter: bool = False
    critic_trunk: bool = False
    reward_trunk: bool = False


Sync = Literal["reshard", "broadcast", "p2p", "disk", "delta", "delta-disk"]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of plan.toml."""

    pools: Annotated[tuple[Pool, ...], Meta(min_length=1)]
    generate: Generate
    reward: Pass | None = None
    """Of a reward model; a verifier has no section."""
    reference_logprob: Pass | None = None
    """With `merge_logprobs`, the one visit that computes the old log-probs too."""
    teacher_logprob: Pass | None = None
    old_logprob: Pass | None = None
    values: Pass | None = None
    update_critic: Update | None = None
    update_actor: Update
    fusions: Fusions = Fusions()
    sharing: Sharing = Sharing()
    staleness: Natural = 0
    """Bound on the updates between the weights that generate a sample and those it trains."""
    in_flight: bool = False
    """Whether engines take new weights between two decode steps, in the middle of sequences; else each sequence is
    finished by the weights that began it."""
    sync: Sync = "reshard"
    """How new weights reach the engines: within a pool by resharding, else by a gather and broadcast, point to point
    between shards, or through files; with `delta` only values that changed since the last time are broadcast, with
    `delta-disk` only those go through files."""

    @property
    def identity(self) -> str:
        """Hash of the canonical JSON."""
        return digest(self)

    @property
    def sections(self) -> dict[Op, Generate | Pass | Update]:
        """The sections that are there, in the order of the stages."""
        return {op: section for op in SECTIONS if (section := getattr(self, op)) is not None}

    @property
    def colocated(self) -> bool:
        """Whether generation and training share their devices."""
        return self.generate.pool == self.update_actor.pool

    def devices_of(self, pool: str) -> int:
        """Size of a pool, 0 if the plan has none of that name."""
        return next((p.devices for p in self.pools if p.name == pool), 0)

    @property
    def num_devices(self) -> int:
        """Devices of all pools together."""
        return sum(pool.devices for pool in self.pools)

    def describe(self) -> str:
        """The plan in a few words: what differs from the plainest form of each section."""
        where = " + ".join(f"{pool.name} {pool.devices}" for pool in self.pools)
        ahead = f"k={self.staleness}" + ("~" if self.in_flight else "")
        sync = [self.sync] if self.sync != "reshard" else []
        layouts = [f"{_SHORT[op]}[{_layout_words(section)}]" for op, section in self.sections.items()]
        flags = [short for name, short in _FLAGS.items() if self._is_on(name)]
        return " ".join([where, ahead, *sync, *layouts, *(["+".join(flags)] if flags else [])])

    def _is_on(self, flag: str) -> bool:
        return bool(getattr(self.fusions, flag, False) or getattr(self.sharing, flag, False))


SECTIONS: dict[Op, type[Generate] | type[Pass] | type[Update]] = {
    Op.GENERATE: Generate,
    Op.REWARD: Pass,
    Op.REFERENCE_LOGPROB: Pass,
    Op.TEACHER_LOGPROB: Pass,
    Op.OLD_LOGPROB: Pass,
    Op.VALUES: Pass,
    Op.UPDATE_CRITIC: Update,
    Op.UPDATE_ACTOR: Update,
}
"""The stages that have a section, and its kind."""

_SHORT = {
    Op.GENERATE: "gen",
    Op.REWARD: "rew",
    Op.REFERENCE_LOGPROB: "ref",
    Op.TEACHER_LOGPROB: "teach",
    Op.OLD_LOGPROB: "old",
    Op.VALUES: "val",
    Op.UPDATE_CRITIC: "critic",
    Op.UPDATE_ACTOR: "actor",
}

_FLAGS = {
    "rollout_logprob": "rollout-logprob",
    "fold_old_logprob": "fold",
    "merge_logprobs": "merge",
    "stream": "stream",
    "interleave_updates": "interleave",
    "reward_with_generation": "reward-early",
    "reference_adapter": "adapter",
    "critic_trunk": "trunk",
    "reward_trunk": "reward-trunk",
}

_WORDS = {
    "concurrency": "x{}",
    "micro_batch": "mb{}",
    "micro_tokens": "{}tok",
    "memory_percent": "{}%",
    "prefill_tokens": "chunk{}",
    "draft_tokens": "draft{}",
    "recompute": "re-{}",
    "offload": "off-{}",
    "precision": "{}",
    "zero": "z{}",
    "shard": "shard{}",
    "schedule": "{}",
}
"""How fields are written; the others by their name and value."""


def _layout_words(section: Generate | Pass | Update) -> str:
    words = []
    for name in section.__struct_fields__:
        value = getattr(section, name)
        plain = (0, "none", "native", "1f1b") if name in _WORDS else (1,)
        if name != "pool" and value not in plain:
            words.append(_WORDS[name].format(value) if name in _WORDS else f"{name}{value}")
    return " ".join(words)
