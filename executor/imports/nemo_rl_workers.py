"""Workers of a NeMo-RL configuration that train a model and run its passes, as sections of a plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from executor.imports.settings import Settings
from ir.frameworks.megatron import NAMES
from ir.plan import Pass, Update
from ir.workload import Workload

_DTENSOR = {"tp": "tensor_parallel_size", "cp": "context_parallel_size", "ep": "expert_parallel_size"}
_PRODUCT = re.compile(r"\$\{mul:\s*(\d+)\s*,\s*(\d+)\s*\}")
_MICRO = 4
"""`train_micro_batch_size` of the base configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of the policy or of the value model."""

    settings: Settings
    key: str
    """policy or value."""
    pool: str
    devices: int
    workload: Workload

    def passing(self, *, offload: Literal["none", "all"] = "none") -> Pass:
        """Their forward passes."""
        degrees, (sequences, tokens) = self._degrees(), self._micro("logprob")
        return Pass(
            pool=self.pool,
            tp=degrees["tp"],
            pp=degrees["pp"],
            cp=degrees["cp"],
            ep=degrees["ep"],
            zero=3 if self._zero() == 3 else 0,
            micro_batch=sequences,
            micro_tokens=tokens,
            offload=offload,
        )

    def update(self, *, offload: Literal["none", "optimizer", "all"]) -> Update:
        """Their training."""
        degrees, (sequences, tokens) = self._degrees(), self._micro("train")
        fp8 = self._megatron and self._flag("megatron_cfg.fp8_cfg.enabled")
        return Update(
            pool=self.pool,
            dp=degrees["dp"],
            tp=degrees["tp"],
            pp=degrees["pp"],
            cp=degrees["cp"],
            ep=degrees["ep"],
            etp=degrees["etp"],
            zero=self._zero(),
            shard=self._shard(),
            micro_batch=sequences,
            micro_tokens=tokens,
            recompute=self._recompute(),
            offload="all" if self._flag("dtensor_cfg.cpu_offload") and not self._megatron else offload,
            precision="fp8" if fp8 else "native",
        )

    @property
    def _megatron(self) -> bool:
        return self._flag("megatron_cfg.enabled")

    def _flag(self, name: str, default: bool = False) -> bool:
        return self.settings.flag(f"{self.key}.{name}", default)

    def _degrees(self) -> dict[str, int]:
        names, section = (NAMES, "megatron_cfg") if self._megatron else (_DTENSOR, "dtensor_cfg")
        sizes = {axis: self.settings.whole(f"{self.key}.{section}.{name}", 1) for axis, name in names.items()}
        replica = prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp"))
        if self.devices % replica:
            rule = f"must, by their product, divide the {self.devices} devices that train"
            raise self.settings.error(f"{self.key}.{section}", rule, replica)
        return {"pp": 1, "etp": 1, **sizes, "dp": self.devices // replica}

    def _zero(self) -> int:
        degrees = self._degrees()
        if degrees["dp"] * degrees["cp"] == 1:
            return 0
        if not self._megatron:
            return 3
        return int(self._flag("megatron_cfg.optimizer.use_distributed_optimizer", True))

    def _shard(self) -> int:
        """Ranks of a copy, where DTensor keeps several."""
        copies = self.settings.whole(f"{self.key}.dtensor_cfg.dp_replicate_size", 1)
        degrees = self._degrees()
        return degrees["dp"] * degrees["cp"] // copies if copies > 1 and self._zero() == 3 else 0

    def _recompute(self) -> Literal["none", "selective", "full"]:
        section = "megatron_cfg" if self._megatron else "dtensor_cfg"
        if not self._flag(f"{section}.activation_checkpointing"):
            return "none"
        granularity = self.settings.get(f"{self.key}.megatron_cfg.recompute_granularity", "full")
        return "selective" if self._megatron and granularity == "selective" else "full"

    def _micro(self, phase: Literal["train", "logprob"]) -> tuple[int, int]:
        """Sequences and tokens of a device, one of them 0: the budget is a replica's, which context parallelism
        divides."""
        s, longest = self.settings, self.workload.max_tokens
        train = s.whole(f"{self.key}.train_micro_batch_size", _MICRO)
        sequences = s.whole(f"{self.key}.logprob_batch_size", train) if phase == "logprob" else train
        for way, default in (("sequence_packing", self.key == "policy"), ("dynamic_batching", False)):
            if self._flag(f"{way}.enabled", default):
                budget = self._product(f"{self.key}.{way}.{phase}_mb_tokens", longest * sequences)
                return 0, ceil(max(budget, longest) / self._degrees()["cp"])
        return sequences, 0

    def _product(self, key: str, default: int) -> int:
        """A number of tokens, which the base configuration gives as a product."""
        value = self.settings.get(key)
        found = _PRODUCT.fullmatch(value) if isinstance(value, str) else None
        return int(found[1]) * int(found[2]) if found else self.settings.whole(key, default)
