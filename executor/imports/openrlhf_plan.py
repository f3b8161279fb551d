"""How a step is laid out by OpenRLHF's flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.imports.imported import MAX_STALENESS
from executor.imports.openrlhf_flags import Flags
from ir.frameworks.openrlhf_layout import ENGINE_SEQUENCES, ENGINE_TOKENS
from ir.job import JobDocument
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Update


def staleness_of(f: Flags) -> int:
    """The bound on staleness: batches that wait in the queue."""
    if not f.on("train.async_enable"):
        return 0
    asked = f.count("train.async_queue_size")
    if asked > MAX_STALENESS:
        f.note(f"train.async_queue_size {asked}: planned as {MAX_STALENESS}, the largest staleness")
    return min(asked, MAX_STALENESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sites:
    """Pools, and which role runs on which."""

    pools: Mapping[str, int]
    of: Mapping[str, str]


def plan_of(f: Flags, job: JobDocument) -> Plan:
    """The plan; what is taken for granted is noted."""
    sites, staleness = _sites(f, job), staleness_of(f)
    interleaved = sites.of.get("critic") == sites.of["actor"] and not f.on("ds.enable_sleep")
    if interleaved:
        f.note("ds.enable_sleep: not set, so that actor and critic are updated at the same time")
    if f.on("ds.adam_offload"):
        f.note(
            "ds.adam_offload: planned as optimizer states that come to the device for each update, which takes more of "
            "its memory than DeepSpeed's update in host memory"
        )
    passing = _Passes(flags=f, job=job, sites=sites)
    return Plan(
        pools=tuple(Pool(name=name, devices=devices) for name, devices in sites.pools.items()),
        generate=_engines(f, job, sites),
        reward=passing.of("reward") if job.models.reward is not None else None,
        reference_logprob=passing.of("reference") if job.algorithm.kl_coefficient else None,
        old_logprob=passing.of("actor"),
        values=passing.of("critic") if job.models.critic is not None else None,
        update_critic=passing.update("critic") if job.models.critic is not None else None,
        update_actor=passing.update("actor"),
        fusions=Fusions(reward_with_generation=job.models.reward is None, interleave_updates=interleaved),
        staleness=staleness,
        in_flight=f.on("train.partial_rollout_enable") and staleness > 0,
        sync="reshard" if len(sites.pools) == 1 else "broadcast",
    )


def _sites(f: Flags, job: JobDocument) -> _Sites:
    roles = {"actor": "actor"} | ({"critic": "critic"} if job.models.critic is not None else {})
    roles |= {"reference": "ref"} if job.algorithm.kl_coefficient else {}
    roles |= {"reward": "reward"} if job.models.reward is not None else {}
    sizes = {role: f.count(f"{name}.num_nodes") * f.count(f"{name}.num_gpus_per_node") for role, name in roles.items()}
    engines = f.count("vllm.num_engines", least=0) * f.count("vllm.tensor_parallel_size")
    if not engines:
        raise f.error("vllm.num_engines", "must be above 0: generation by vLLM is what is planned for")
    everything = f.on("train.colocate_all")
    if everything and not f.on("train.async_enable"):
        return _together({"rollout": engines, **sizes}, "all", f)
    host = {role: "train" if role == "actor" or everything else role for role in roles}
    if f.on("train.colocate_actor_ref") and "reference" in host:
        host["reference"] = "train"
    if f.on("train.colocate_critic_reward") and {"critic", "reward"} <= host.keys() and not everything:
        host["reward"] = "critic"
    pools = {"rollout": engines}
    for name in dict.fromkeys(host.values()):
        pools |= _together({role: sizes[role] for role in roles if host[role] == name}, name, f).pools
    return _Sites(pools=pools, of={"rollout": "rollout", **host})


def _together(sizes: Mapping[str, int], pool: str, f: Flags) -> _Sites:
    """Roles that share their devices, of which each must have as many."""
    size = sizes["actor"] if "actor" in sizes else next(iter(sizes.values()))
    for role, own in sizes.items():
        if own != size:
            key = (
                "vllm.num_engines"
                if role == "rollout"
                else f"{'ref' if role == 'reference' else role}.num_gpus_per_node"
            )
            raise f.error(key, f"must give as many devices as what shares them, {size}", own)
    return _Sites(pools={pool: size}, of=dict.fromkeys(sizes, pool))


def _engines(f: Flags, job: JobDocument, sites: _Sites) -> Generate:
    share = "vllm.gpu_memory_utilization"
    tp = f.count("vllm.tensor_parallel_size")
    engines = max(sites.pools[sites.of["rollout"]] // tp, 1)
    return Generate(
        pool=sites.of["rollout"],
        tp=tp,
        concurrency=min(-(-job.workload.sequences // engines), ENGINE_SEQUENCES),
        memory_percent=f.percent(share, f.number(share)),
        prefill_tokens=ENGINE_TOKENS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """What the DeepSpeed flags, which are all models', say of a role's passes and updates."""

    flags: Flags
    job: JobDocument
    sites: _Sites

    def of(self, role: str) -> Pass:
        """Forward passes of a role."""
        stage, offload = self._stage(role), "ref" if role == "reference" else role
        weights = offload in ("ref", "reward") and self.flags.on(f"{offload}.offload") and stage == 3
        return Pass(
            pool=self.sites.of[role],
            tp=self._degrees()["tp"],
            cp=self._degrees()["cp"],
            **self._micro("rollout", role, self.job.workload.sequences),
            zero=3 if stage == 3 else 0,
            offload="all" if weights else "none",
        )

    def update(self, role: str) -> Update:
        """Training of a role."""
        f, workload = self.flags, self.job.workload
        away = f.on("ds.enable_sleep") or f.on("ds.adam_offload")
        return Update(
            pool=self.sites.of[role],
            dp=self._replicas(role),
            tp=self._degrees()["tp"],
            cp=self._degrees()["cp"],
            **self._micro("train", role, workload.sequences // workload.minibatches),
            zero=self._stage(role),
            recompute="full" if f.on("actor.gradient_checkpointing_enable") else "none",
            offload="optimizer" if away else "none",
        )

    def _degrees(self) -> dict[str, int]:
        return {"tp": self.flags.count("ds.tensor_parallel_size"), "cp": self.flags.count("ds.ring_attn_size")}

    def _replicas(self, role: str) -> int:
        return max(self.sites.pools[self.sites.of[role]] // math.prod(self._degrees().values()), 1)

    def _stage(self, role: str) -> int:
        """ZeRO has nothing to divide over where there is a single device for each shard."""
        divides = self._replicas(role) * self._degrees()["cp"] > 1
        return self.flags.count("ds.zero_stage", least=0) if divides else 0

    def _micro(self, kind: str, role: str, sequences: int) -> dict[str, Any]:
        f, degrees = self.flags, self._degrees()
        if not f.on("train.dynamic_batch_enable"):
            asked, most = f.count(f"{kind}.micro_batch_size"), -(-sequences // self._replicas(role))
            if asked > most:
                f.note(f"{kind}.micro_batch_size {asked}: planned as {most}, all that a replica has")
            return {"micro_batch": min(asked, most)}
        key = "rollout.max_tokens_per_gpu" if kind == "rollout" and f.on("rollout.max_tokens_per_gpu") else None
        asked = f.count(key or "train.max_tokens_per_gpu") * degrees["tp"]
        least = -(-self.job.workload.max_tokens // (degrees["cp"] * degrees["tp"])) * degrees["tp"]
        if asked < least:
            f.note(f"{kind}.max_tokens_per_gpu: planned as {least // degrees['tp']}, which holds the longest sequence")
        return {"micro_tokens": max(asked, least)}
