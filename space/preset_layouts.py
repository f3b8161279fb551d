"""How frameworks lay a job out: pools by share, and the smallest degrees at which weights and optimizer leave room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

from ir.batch import HOME, PLACED, POOL_NAMES, ROLES
from ir.errors import InputError
from ir.graph import Op
from ir.job import Role
from ir.model import ModelShape
from ir.plan import SECTIONS, Fusions, Generate, Pass, Plan, Pool, Update
from ir.setting import Devices, Section, Setting
from space.build import MAX_CONTEXT, MAX_PIPELINE, MIN_TOKENS, pool_sizes

TRAIN_SHARE, COLOCATED_SHARE, ENGINE_SHARE = 0.75, 0.9, 0.75
"""Of a device's memory, what weights, gradients and optimizer may take, so that activations fit too; what they and an
engine on the same devices may take together; of an engine's part, what its weights may take: the rest is its cache."""

LOGITS_SHARE, PASS_BYTES, UPDATE_BYTES = 0.15, 16, 28
"""Of a device's memory, what the logits of a micro-batch may take, the largest activations where layers are recomputed;
their bytes a token and word: several copies, some of them in float32, and gradients in an update."""

OWN_PERCENT = 60
"""Memory that engines without a share of their own are judged by, in percent."""

MAX_SEQUENCES, MIN_SEQUENCES = 256, 8
"""Sequences that an engine decodes together: at most (vLLM's `max_num_seqs` in verl and AReaL), and at least where it
sizes its cache for the longest."""

MICRO_PASS, MICRO_UPDATE = 8, 4
"""Most sequences in a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a framework lays models out. A backend that the setting asks for decides what trains in its place."""

    trainer: str = "auto"
    """plain: replicas; zero: replicas that divide the states; megatron: tensor, pipeline and expert parallel too;
    auto: megatron for models with experts, else zero."""
    stages: tuple[int, ...] = (3,)
    """ZeRO stages of `zero`, the first that fits."""
    percent: int = 0
    """Memory of an engine; 0: a cache that holds its sequences."""
    prefill: int = 8192
    """Prompt tokens taken in with a decode step; 0: prompts are prefilled whole."""
    beyond: str = "layers"
    """What engines divide where tensor parallelism inside a domain is not enough: layers, experts or nothing."""
    tokens: int = 0
    """Most tokens packed into a micro-batch where the longest sequence is shorter; 0: micro-batches by sequences."""
    offload: str = "none"
    """What waits in host memory while engines of the same pool generate, where all would fit."""
    early_reward: bool = False
    """Whether responses are verified beside the engines, each when it is finished."""
    frozen_away: bool = False
    """Whether a frozen model that replicas divide waits in host memory, wherever it runs."""
    context: bool = True
    """Whether sequences can be divided over devices."""
    per_call: bool = False
    """Whether every pass has its own degrees, instead of those its model trains with."""
    algorithms: tuple[str, ...] = ()
    """Those that the framework runs; empty for all."""
    experts: bool = True
    """Whether models with experts are supported."""


# Pools


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """A pool, and what is laid out there."""

    setting: Setting
    style: Style
    pool: Pool
    roles: tuple[str, ...]

    @property
    def device(self) -> Devices:
        return self.setting.groups[self.pool.group]

    @property
    def colocated(self) -> bool:
        return {"rollout", "actor"} <= set(self.roles)

    def trainer(self, shape: ModelShape) -> str:
        """What trains a model: the backend's trainer, or the framework's."""
        backend = self.setting.backend
        if backend is not None:
            return {"local": "plain", "megatron": "megatron"}.get(backend.name, "zero")
        return self.style.trainer if self.style.trainer != "auto" else "megatron" if shape.is_moe else "zero"

    def room(self, op: Op, *, away: bool) -> float:
        """Bytes of a device for a model's states beside the pool's other models, and beside its engine unless they go
        `away` while it generates. Small models with degrees of their own get more than in proportion, for
        to divide them saves little."""
        if self.trainer(self.setting.shape(op)) == "plain":
            return inf
        beside = COLOCATED_SHARE - (self.style.percent or OWN_PERCENT) / 100
        share = min(TRAIN_SHARE, beside) if self.colocated and not away else TRAIN_SHARE
        if away and self.style.offload == "all":
            return share * self.device.memory_bytes
        placed = {PLACED[role]: self.setting.shape(PLACED[role]) for role in self.roles if role != "rollout"}
        # With gradients and optimizer, a trained weight takes nine times the bytes of a frozen one.
        even = not self.style.per_call and len(set(placed.values())) == 1
        sizes = {op: (9.0 if SECTIONS[op] is Update else 1.0) * shape.parameters for op, shape in placed.items()}
        parts = sizes if even else {op: sqrt(size) for op, size in sizes.items()}
        return share * self.device.memory_bytes * parts[PLACED[HOME[op]]] / sum(parts.values())

    def tokens(self, op: Op, tp: int) -> int:
        """Tokens of a micro-batch whose logits fit a device."""
        size = UPDATE_BYTES if SECTIONS[op] is Update else PASS_BYTES
        return int(LOGITS_SHARE * self.device.memory_bytes * tp / (size * self.setting.shape(op).vocab))

    def contexts(self, devices: int) -> list[int]:
        """Ways to divide sequences over at most so many devices."""
        longest = self.setting.job.workload.max_tokens
        divides = self.style.context and self.trainer(self.setting.job.actor) != "plain"
        ways = _powers(min(devices, MAX_CONTEXT)) if divides else [1]
        return [n for n in ways if n == 1 or longest % (2 * n) == 0]


def colocated(setting: Setting, style: Style) -> Plan:
    """Everything on all devices; of several groups, the last."""
    group = len(setting.groups) - 1
    pool = Pool(name="all", devices=_devices(setting, group), group=group)
    return _plan(setting, style, {pool: setting.roles}, fusions=_early(setting, style))


def _early(setting: Setting, style: Style) -> Fusions:
    verifier = Op.REWARD in setting.ops and Role.REWARD not in setting.job.models
    return Fusions(reward_with_generation=style.early_reward and verifier)


def apart(
    setting: Setting,
    style: Style,
    *,
    shares: tuple[float, ...] = (0.5,),
    own: frozenset[str] = frozenset(),
    **ahead: Any,
) -> Plan:
    """Generation on a share of the devices, the first that leaves training enough; the roles in `own` share a pool."""
    for share in shares:
        try:
            pools = _pools(setting, share, own & set(setting.roles))
            return _plan(setting, style, pools, fusions=_early(setting, style), sync="broadcast", **ahead)
        except InputError as error:
            failed = error
    raise failed


def _pools(setting: Setting, share: float, own: frozenset[str]) -> dict[Pool, tuple[str, ...]]:
    """Pools with their roles. Of several groups, the first generates and the last trains. A critic's pool is half of
    the training side; one without, that only scores, a quarter of the other, so that training keeps its round size."""
    last = len(setting.groups) - 1
    if last:
        rollout, train = _devices(setting, 0), _devices(setting, last)
    else:
        rollout, train = _split(setting, _devices(setting, 0), share)
    side, group = 0, 0
    if "critic" in own:
        (train, side), group = _split(setting, train, 0.5), last
    elif own:
        rollout, side = _split(setting, rollout, 0.75)
    pools = {
        Pool(name="rollout", devices=rollout): ("rollout",),
        Pool(name=POOL_NAMES["actor"], devices=train, group=last): tuple(
            role for role in setting.roles if role not in own and role != "rollout"
        ),
    }
    if own:
        roles = tuple(role for role in ROLES if role in own)
        pools[Pool(name=roles[0], devices=side, group=group)] = roles
    return pools


def _devices(setting: Setting, group: int) -> int:
    """The largest pool of a group that the job allows."""
    most = min(setting.groups[group].count, setting.job.limits.most_devices(setting.num_devices))
    return max((size for size in pool_sizes(setting) if size <= most), default=0)


def _split(setting: Setting, devices: int, share: float) -> tuple[int, int]:
    """Sizes of two pools, the first as near to its share as the space allows."""
    sizes = set(pool_sizes(setting))
    options = [size for size in sorted(sizes) if devices - size in sizes]
    if not options:
        raise InputError("preset", "must have devices for two pools", devices)
    first = min(options, key=lambda size: abs(size - round(devices * share)))
    return first, devices - first


# Layouts


def _plan(setting: Setting, style: Style, pools: Mapping[Pool, tuple[str, ...]], **structure: Any) -> Plan:
    name, own = setting.job.algorithm.name, setting.backend is not None and setting.backend.name == "local"
    if style.algorithms and (own or name not in style.algorithms):
        raise InputError("preset", "must be of a framework that runs the algorithm, on an engine of its own", name)
    if not style.experts and any(shape.is_moe for shape in setting.job.models.values()):
        raise InputError("preset", "must be of a framework that runs models with experts")
    sites = {r: _Site(setting=setting, style=style, pool=p, roles=roles) for p, roles in pools.items() for r in roles}
    updates = {HOME[op]: _update(sites[HOME[op]], op) for op in setting.sections if SECTIONS[op] is Update}
    if len(style.stages) > 1 and len({update.zero for update in updates.values()}) > 1:
        # Frameworks have one ZeRO stage for all models.
        return _plan(setting, replace(style, stages=style.stages[-1:]), pools, **structure)
    sections: dict[str, Any] = {Op.GENERATE: _engine(sites["rollout"])}
    sections |= {PLACED[role]: update for role, update in updates.items()}
    sections |= {op: _pass(sites[HOME[op]], op, updates) for op in setting.sections if SECTIONS[op] is Pass}
    return Plan(pools=tuple(pools), **{str(op): section for op, section in sections.items()}, **structure)


def _engine(site: _Site) -> Generate:
    """The smallest engine whose weights leave a cache room."""
    shape, workload, style = site.setting.job.actor, site.setting.job.workload, site.style
    plain = site.trainer(shape) == "plain"
    memory = (style.percent or OWN_PERCENT) / 100 * site.device.memory_bytes
    shares: dict[str, Any] = {} if plain else {"memory_percent": style.percent, "prefill_tokens": style.prefill}
    for tp, pp, ep in _engine_degrees(site, shape):
        weights = 2 * _held(shape, tp, pp, max(tp, ep))
        wanted = min(MAX_SEQUENCES, _power_at_most(-(-workload.sequences * tp * pp // site.pool.devices)))
        cached = shape.kv_bytes(workload.max_tokens, 2) / (pp * (1 if shape.mla else min(tp, shape.kv_heads)))
        held = wanted if plain or style.percent else min(wanted, _power_at_most(int((memory - weights) / cached)))
        if plain or (weights <= ENGINE_SHARE * memory and held >= min(MIN_SEQUENCES, wanted)):
            return Generate(pool=site.pool.name, tp=tp, pp=pp, ep=ep, concurrency=held, **shares)
    raise InputError("preset", "must have devices for an engine whose weights fit their memory", site.pool.devices)


def _engine_degrees(site: _Site, shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, ep) of engines, smallest first. Experts are divided over an engine's own devices, or over more."""
    experts = shape.moe.experts if shape.moe is not None else 1
    pairs = _degrees(site, shape, pipeline=site.style.beyond == "layers", tensors_first=True)
    yield from ((tp, pp, tp if experts % tp == 0 else 1) for tp, pp in pairs)
    if site.style.beyond == "experts" and site.setting.backend is None:
        for ep in _powers(min(experts, site.pool.devices)):
            fitting = experts % ep == 0 and site.pool.devices % ep == 0
            yield from ((tp, 1, ep) for tp, _ in pairs if fitting and ep > tp)


def _update(site: _Site, op: Op) -> Update:
    """The smallest degrees at which the states fit; where none do, they wait in host memory while engines generate."""
    shape, style = site.setting.shape(op), site.style
    plain, sequences = site.trainer(shape) == "plain", Section(op=op, setting=site.setting).sequences
    offloads = dict.fromkeys([style.offload, "all"] if site.colocated and site.device.host and not plain else ["none"])
    for offload in offloads:
        room = site.room(op, away=offload == "all")
        for degrees in _update_degrees(site, op, sequences):
            if _training_bytes(shape, degrees) <= room:
                share = sequences // (degrees["dp"] * degrees["pp"])
                micro = _micro(site, op, share, degrees["tp"], degrees["cp"])
                rest: dict[str, Any] = {"recompute": "none" if plain else "full", "offload": offload}
                return Update(pool=site.pool.name, **degrees, **micro, **rest)
    raise InputError("preset", f"must have devices for {op} whose memory fits the model's states", site.pool.devices)


def _update_degrees(site: _Site, op: Op, sequences: int) -> Iterator[dict[str, Any]]:
    shape, devices = site.setting.shape(op), site.pool.devices
    trainer = site.trainer(shape)
    if trainer != "megatron":
        dp = _replicas(devices // _context(site, op, devices, 1), sequences)
        # Devices that a minibatch has no sequences for take part of those of others.
        cp = max(n for n in site.contexts(devices // dp) if devices % n == 0)
        for stage in site.style.stages if trainer == "zero" and dp * cp > 1 else (0,):
            yield {"tp": 1, "pp": 1, "cp": cp, "ep": 1, "dp": dp, "zero": stage}
        return
    for tp, pp, ep in _divisions(site, shape):
        cp = _context(site, op, devices // (tp * pp), tp)
        dp = _replicas(devices // (tp * pp * cp), sequences)
        if sequences >= dp * pp and 2 * tp * pp * cp * dp >= devices and tp * cp * dp % ep == 0:
            yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp, "zero": min(dp * cp - 1, 1)}


def _context(site: _Site, op: Op, devices: int, tp: int) -> int:
    """Devices that the longest sequence is divided over so that its logits fit, or as many as can be."""
    ways = [n for n in site.contexts(devices) if devices % n == 0]
    longest, tokens = site.setting.job.workload.max_tokens, site.tokens(op, tp)
    return next((n for n in ways if longest <= n * tokens), ways[-1])


def _divisions(site: _Site, shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, ep) of Megatron, smallest first. Experts are divided inside a domain, else over two of them; pipelines
    before tensors would make them thin."""
    experts = shape.moe.experts if shape.moe is not None else 1
    for tp, pp in _degrees(site, shape, pipeline=True, tensors_first=not shape.is_moe):
        same = site.pool.devices // pp
        fitting = [ep for ep in _powers(2 * site.device.domain) if experts % ep == 0 and same % ep == 0]
        yield from ((tp, pp, ep) for ep in fitting[-2:])


def _training_bytes(shape: ModelShape, degrees: Mapping[str, int]) -> float:
    """Bytes of a device: 2 for a weight, 4 for its gradient and 12 for its optimizer state, as ZeRO divides them."""
    held = _held(shape, degrees["tp"], degrees["pp"], degrees["ep"])
    divided = shape.parameters / (degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["dp"])
    weight, gradient, state = (divided if degrees["zero"] >= stage else held for stage in (3, 2, 1))
    trained = shape.trainable_parameters / shape.parameters
    return 2 * weight + trained * (4 * gradient + 12 * state)


def _pass(site: _Site, op: Op, updates: Mapping[str, Update]) -> Pass:
    """As its model trains, or as the actor does if it is of its shape; else the smallest degrees that fit."""
    setting, style, devices = site.setting, site.style, site.pool.devices
    shape, actor = setting.shape(op), updates["actor"]
    away = HOME[op] not in updates and site.colocated and site.device.host and style.offload == "all"
    alike = actor if shape == setting.job.actor and site.pool.name == actor.pool else None
    like = None if style.per_call else updates.get(HOME[op], alike)
    degrees = (like.tp, like.pp, like.cp, like.ep) if like is not None else _pass_degrees(site, op, away=away)
    tp, pp, cp, ep = degrees
    fits = 2 * _held(shape, tp, pp, ep) <= site.room(op, away=away)
    divided = site.trainer(shape) == "zero" and devices > 1 and (actor.zero == 3 or not fits)
    micro = _micro(site, op, -(-setting.job.workload.sequences * tp * pp * cp // devices), tp, cp)
    waits = away or (style.frozen_away and divided and HOME[op] not in updates and site.device.host)
    rest: dict[str, Any] = {"zero": 3 if divided else 0, "offload": "all" if waits else "none"}
    return Pass(pool=site.pool.name, tp=tp, pp=pp, cp=cp, ep=ep, **micro, **rest)


def _pass_degrees(site: _Site, op: Op, *, away: bool) -> tuple[int, int, int, int]:
    shape, room = site.setting.shape(op), site.room(op, away=away)
    if site.trainer(shape) != "megatron":
        return 1, 1, 1, 1
    for tp, pp, ep in _divisions(site, shape):
        if 2 * _held(shape, tp, pp, ep) <= room:
            return tp, pp, 1, ep
    raise InputError("preset", f"must have devices for {op} whose memory fits the model", site.pool.devices)


def _micro(site: _Site, op: Op, sequences: int, tp: int, cp: int) -> dict[str, Any]:
    """A micro-batch of a replica that has `sequences`: by tokens if the framework packs, else by sequences."""
    # The space's smallest budget is an eighth of the longest sequence.
    part, tokens = -(-site.setting.job.workload.max_tokens // min(cp, 8)), site.tokens(op, tp)
    if site.style.tokens:
        most = min(tokens, site.style.tokens)
        return {"micro_tokens": part * max(n for n in (1, 2, 4) if n == 1 or n * part <= most)}
    most = MICRO_UPDATE if SECTIONS[op] is Update else MICRO_PASS
    least = 1 << (-(-MIN_TOKENS // site.setting.job.workload.max_tokens) - 1).bit_length()
    return {"micro_batch": min(most, _power_at_most(sequences), max(_power_at_most(tokens // part), least))}


def _replicas(limit: int, sequences: int) -> int:
    """The largest power of two within the limit that divides the sequences."""
    return max(n for n in _powers(limit) if sequences % n == 0)


def _held(shape: ModelShape, tp: int, pp: int, ep: int) -> float:
    """Parameters that a device of the fullest pipeline rank holds if replicas divide nothing."""
    share = -(-shape.layers // pp) / shape.layers
    return ((shape.parameters - shape.expert_parameters) / tp + shape.expert_parameters / ep) * share


def _degrees(site: _Site, shape: ModelShape, *, pipeline: bool, tensors_first: bool) -> list[tuple[int, int]]:
    """(tp, pp) that divide the pool and the model, smallest first."""
    devices, domain = site.pool.devices, site.device.domain
    found = [
        (tp, pp)
        for tp in _powers(min(domain, devices))
        for pp in (_powers(min(MAX_PIPELINE, shape.layers)) if pipeline else (1,))
        if devices % (tp * pp) == 0 and domain % tp == 0 and shape.heads % tp == 0
        if shape.mla is not None or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
        if (pp - 1) * -(-shape.layers // pp) < shape.layers
    ]
    return sorted(found, key=lambda d: (d[0] * d[1], d[1] if tensors_first else d[0]))


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length())]


def _power_at_most(value: int) -> int:
    """At least 1."""
    return 1 << (max(value, 1).bit_length() - 1)
