"""plan.toml: how one RL step is laid out. A plan is a small declarative record; its hash is its identity."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ir.documents import digest

Positive = Annotated[int, Meta(ge=1)]


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named group of devices. Pools take devices in the order in which the plan lists them."""

    name: str
    devices: Positive


class Generate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollout: every device of the pool runs one engine."""

    pool: str
    concurrency: Positive
    """Sequences decoded together by an engine; its KV cache holds this many of the longest length."""


class LogProb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forward passes of reference and actor over the batch, on every device of the pool."""

    pool: str
    micro_batch: Positive
    """Sequences per forward pass."""


class Update(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Training of the actor."""

    pool: str
    dp: Positive
    """Data-parallel ranks, the first ones of the pool."""
    micro_batch: Positive
    """Sequences per forward and backward pass of a rank."""
    recompute: bool = False
    """Recompute a layer's activations in the backward pass instead of keeping them."""


class Fusions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which stages are merged; `ir.moves` says what each changes."""

    rollout_logprob: bool = False
    fold_old_logprob: bool = False
    merge_logprobs: bool = False
    stream: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of plan.toml."""

    pools: Annotated[tuple[Pool, ...], Meta(min_length=1)]
    generate: Generate
    logprob: LogProb
    update: Update
    fusions: Fusions = Fusions()
    staleness: Annotated[int, Meta(ge=0)] = 0
    """Bound on the updates between the weights that generate a sample and those it trains."""

    @property
    def identity(self) -> str:
        """Hash of the canonical JSON."""
        return digest(self)

    @property
    def colocated(self) -> bool:
        """Whether generation and training share their devices."""
        return self.generate.pool == self.update.pool

    def devices_of(self, pool: str) -> int:
        """Size of a pool, 0 if the plan has none of that name."""
        return next((p.devices for p in self.pools if p.name == pool), 0)

    def describe(self) -> str:
        """The plan in a few words."""
        where = (
            f"colocated {self.devices_of(self.generate.pool)}"
            if self.colocated
            else f"rollout {self.devices_of(self.generate.pool)} + train {self.devices_of(self.update.pool)}"
        )
        names = {
            "rollout_logprob": "rollout-logprob",
            "fold_old_logprob": "fold",
            "merge_logprobs": "merge",
            "stream": "stream",
        }
        fused = "+".join(short for name, short in names.items() if getattr(self.fusions, name))
        parts = [
            where,
            f"k={self.staleness}",
            f"conc={self.generate.concurrency}",
            f"lp={self.logprob.micro_batch}",
            f"mb={self.update.micro_batch}",
            f"dp={self.update.dp}",
        ]
        parts += ["recompute"] if self.update.recompute else []
        parts += [fused] if fused else []
        return " ".join(parts)
