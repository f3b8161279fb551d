"""AReaL's strings of engines and degrees: `backend` of an engine, and the `allocation_mode` of earlier releases.

Grammar: areal/api/alloc_mode.py of AReaL 1.0.4; releases before 0.4 wrote a dot for the colon and left out the
trainer's name, which then was Megatron for a pipeline or experts and FSDP else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ir.errors import InputError

_DIMS = r"(?:[dtpce]\d+)+"
_ONE = re.compile(rf"(?:(?P<kind>[a-z]+)?(?:\[(?P<name>\w+)\])?[:.])?(?P<dims>{_DIMS})")
_FOLDED = re.compile(
    rf"(?:(?P<kind>[a-z]+)(?:\[(?P<name>\w+)\])?[:.])?\(?attn:(?P<dims>{_DIMS})\|ffn:(?P<experts>{_DIMS})\)?"
)
_SERVERS = ("sglang", "vllm")
_TRAINERS = ("fsdp", "megatron", "archon")
_RULE = "must be an engine and degrees such as 'sglang:d4t2', 'fsdp:d8' or 'megatron:(attn:d4t2|ffn:e8)'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine with its degrees."""

    kind: str
    """sglang, vllm, fsdp, megatron or archon."""
    name: str | None = None
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def devices(self) -> int:
        """Devices it takes; experts are divided over the same ones."""
        return self.dp * self.tp * self.pp * self.cp


def parse_backend(text: str, *, where: str) -> Engine:
    """One engine.

    Raises:
        InputError: the text is none, or its degrees do not go together.
    """
    folded = _FOLDED.fullmatch(text)
    found = folded or _ONE.fullmatch(text)
    if found is None:
        raise InputError(where, _RULE, repr(text))
    dims = _degrees(found["dims"])
    experts = _degrees(folded["experts"]) if folded else {"ep": dims.pop("ep", 1)}
    kind = found["kind"] or ("megatron" if dims.get("pp", 1) > 1 or experts.get("ep", 1) > 1 else "fsdp")
    if kind not in (*_SERVERS, *_TRAINERS):
        raise InputError(where, f"must name one of {', '.join((*_SERVERS, *_TRAINERS))}", repr(kind))
    engine = Engine(kind=kind, name=found["name"], **dims, ep=experts.get("ep", 1), etp=experts.get("tp", 1))
    if engine.devices % (engine.pp * engine.ep * engine.etp) or experts.get("pp", engine.pp) != engine.pp:
        raise InputError(where, "must divide attention and experts over the same devices and stages", repr(text))
    return engine


def _degrees(text: str) -> dict[str, int]:
    return {f"{letter}p": int(size) for letter, size in re.findall(r"([dtpce])(\d+)", text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The engines of an `allocation_mode`."""

    rollout: Engine
    trainers: tuple[Engine, ...]
    """The first is the actor's; others are named."""
    colocated: bool
    """Whether the actor's engine shares the servers' devices."""

    def trainer(self, *names: str) -> Engine:
        """The engine of that name, the actor's if there is none."""
        return next((engine for engine in self.trainers if engine.name in names), self.trainers[0])


def parse_allocation(text: str, *, where: str) -> Allocation:
    """Engines of an `allocation_mode`: `+` between engines on devices of their own, `|` between those that share.

    Raises:
        InputError: it does not have servers and a trainer.
    """
    groups = [[parse_backend(part, where=where) for part in _split(group, "|")] for group in _split(text, "+")]
    engines = [engine for group in groups for engine in group]
    servers = [engine for engine in engines if engine.kind in _SERVERS]
    trainers = [engine for engine in engines if engine.kind in _TRAINERS]
    trainers.sort(key=lambda engine: engine.name not in (None, "actor"))
    if len(servers) != 1 or not trainers:
        raise InputError(where, "must have one engine that generates and one that trains", repr(text))
    shared = any(servers[0] in group and trainers[0] in group for group in groups)
    if len(trainers) == 1:
        trainers = [replace(trainers[0], name=None)]
    return Allocation(rollout=servers[0], trainers=tuple(trainers), colocated=shared)


def _split(text: str, at: str) -> list[str]:
    """Parts at a character outside parentheses."""
    parts, depth = [""], 0
    for letter in text.replace(" ", ""):
        depth += (letter == "(") - (letter == ")")
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
