"""An engine of an AReaL configuration that computes with a model over batches, as sections of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from executor.imports.areal_backends import Engine
from executor.imports.settings import Settings
from ir.plan import Pass, Update
from ir.workload import Workload

_RECOMPUTE = {
    "fsdp": ("gradient_checkpointing", "full"),
    "megatron": ("megatron.recompute_granularity", "full"),
    "archon": ("archon.ac_mode", "selective"),
}
"""The key that says what is computed again where `gradient_checkpointing` is on, and its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """An engine with its settings."""

    settings: Settings
    engine: Engine
    key: str
    """Section of the configuration: actor, critic or ref."""
    pool: str
    workload: Workload

    def passing(self, *, offload: bool = False) -> Pass:
        """Its forward passes; `offload` where their weights wait by a setting of their own."""
        away = offload and self.settings.flag(f"{self.key}.offload")
        sequences, tokens = self._micro(self.workload.sequences)
        return Pass(
            pool=self.pool,
            tp=self.engine.tp,
            pp=self.engine.pp,
            cp=self.engine.cp,
            ep=self.engine.ep,
            zero=3 if self._zero() >= 2 else 0,
            micro_batch=sequences,
            micro_tokens=tokens,
            offload="all" if away else "none",
        )

    def update(self, *, away: bool = False) -> Update:
        """Its training; `away` where it leaves the devices to the servers in any case."""
        sequences, tokens = self._micro(self.workload.sequences // self.workload.minibatches)
        return Update(
            pool=self.pool,
            dp=self.engine.dp,
            tp=self.engine.tp,
            pp=self.engine.pp,
            cp=self.engine.cp,
            ep=self.engine.ep,
            etp=self.engine.etp,
            zero=self._zero(),
            micro_batch=sequences,
            micro_tokens=tokens,
            recompute=self._recompute(),
            offload=self._offload(away),
            precision="fp8" if self._fp8() else "native",
        )

    def _flag(self, name: str, default: bool = False) -> bool:
        return self.settings.flag(f"{self.key}.{name}", default)

    def _zero(self) -> int:
        engine = self.engine
        if engine.dp * engine.cp == 1:
            return 0
        if engine.kind == "megatron":
            return int(self._flag("megatron.ddp.use_distributed_optimizer", True) and not self._flag("use_lora"))
        if engine.pp > 1:
            return 1
        kept = self.settings.get(f"{self.key}.archon.reshard_after_forward_policy") == "never"
        return 2 if kept and engine.kind == "archon" else 3

    def _micro(self, sequences: int) -> tuple[int, int]:
        """Sequences and tokens of a device, one of them 0: the budget is a replica's, which context parallelism
        divides."""
        cp, longest = self.engine.cp, self.workload.max_tokens
        budget = self.settings.whole(f"{self.key}.mb_spec.max_tokens_per_mb", 0, least=0)
        if budget and budget < longest:
            self.settings.took(f"{self.key}.mb_spec.max_tokens_per_mb", f"{longest}, the longest sequence")
        if budget:
            return 0, ceil(max(budget, longest) / cp)
        batches = self.settings.whole(f"{self.key}.mb_spec.n_mbs", 1)
        return max(ceil(sequences / self.engine.dp / batches), 1), 0

    def _recompute(self) -> Literal["none", "selective", "full"]:
        if self.settings.whole(f"{self.key}.megatron.virtual_pipeline_parallel_size", 1) > 1:
            self.settings.took(f"{self.key}.megatron.virtual_pipeline_parallel_size", "read as a plain pipeline")
        if not self._flag("gradient_checkpointing"):
            return "none"
        key, default = _RECOMPUTE[self.engine.kind]
        chosen = self.settings.get(f"{self.key}.{key}", default)
        if chosen in (None, "none"):
            return "none"
        return "selective" if chosen in ("selective", "memory_budget") else "full"

    def _offload(self, away: bool) -> Literal["none", "optimizer", "all"]:
        if away or self._flag("offload") or self._flag(f"{self.engine.kind}.offload_params"):
            return "all"
        return "optimizer" if self._flag("fsdp.per_layer_optim_step") else "none"

    def _fp8(self) -> bool:
        key = f"{self.key}.{self.engine.kind}.fp8_config"
        return self.settings.has(key) and self.settings.get(f"{key}.mode", "e4m3") != "disabled"
