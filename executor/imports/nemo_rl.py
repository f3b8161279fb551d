"""NeMo-RL configurations as (job, plan, devices): YAML on the base configuration of GRPO or PPO, as of September 2026,
or its values as `key=value` lines."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from executor.imports.imported import Imported
from executor.imports.nemo_rl_job import BASES, read_job
from executor.imports.nemo_rl_workers import Workers
from executor.imports.settings import Settings, read_settings
from ir.errors import InputError
from ir.job import JobDocument
from ir.plan import Fusions, Generate, Plan, Pool, Sync

_SHARE, _SEQUENCES, _STEP_TOKENS = 0.6, 256, 8192
"""`policy.generation.vllm_cfg.gpu_memory_utilization` of the base configuration; vLLM's own `max_num_seqs` and
`max_num_batched_tokens` on large GPUs, where `vllm_kwargs` does not set them."""

_SYNC: dict[str | None, Sync] = {
    None: "broadcast",
    "nccl_reshard": "p2p",
    "nixl": "p2p",
    "vllm_zmq_sparse": "broadcast",
    "vllm_s3_sparse": "disk",
}
_GENERATION = "policy.generation"
_SECTIONS = ("policy.", "grpo.", "ppo.", "loss_fn.", "cluster.")
"""Of these a configuration has some; it may leave all to the base configuration that it names."""


def read(text: str, *, where: str) -> Imported:
    """A configuration; `where` is its name, for errors.

    Raises:
        InputError: it lacks what a plan needs, or asks for what none can express.
    """
    s = read_settings(text, where=where)
    if not any(key == "defaults" or key.startswith(_SECTIONS) for key in s.values):
        raise InputError(where, f"must have keys of NeMo-RL, which begin with {', '.join(_SECTIONS)} or are `defaults`")
    base = str(s.get("defaults") or "").rpartition("/")[2]
    if base and base not in BASES:
        raise s.error("defaults", f"must be {' or '.join(BASES)}, with what lies between written out", repr(base))
    if (backend := s.get(f"{_GENERATION}.backend", "vllm")) != "vllm":
        raise s.error(f"{_GENERATION}.backend", "must be vllm, the only engine that is read", repr(backend))
    job = read_job(s)
    devices = _devices(s)
    plan = _plan(s, job, devices)
    return Imported(job=job, plan=plan, nodes=devices.nodes, per_node=devices.per_node, assumed=tuple(s.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    """Which devices generate and which train."""

    nodes: int
    per_node: int
    rollout: int
    """0 where all do both."""

    @property
    def train(self) -> int:
        """Devices that train."""
        return self.nodes * self.per_node - self.rollout


def _devices(s: Settings) -> _Devices:
    nodes, per_node = s.whole("cluster.num_nodes", 1), s.whole("cluster.gpus_per_node", 1)
    key = f"{_GENERATION}.colocated"
    if s.flag(f"{key}.enabled", True):
        return _Devices(nodes=nodes, per_node=per_node, rollout=0)
    asked = s.required_whole(f"{key}.resources.gpus_per_node")
    rollout = asked if nodes == 1 else asked * s.required_whole(f"{key}.resources.num_nodes")
    if rollout >= nodes * per_node:
        raise s.error(f"{key}.resources", f"must leave devices to train on, of {nodes} x {per_node}", rollout)
    return _Devices(nodes=nodes, per_node=per_node, rollout=rollout)


def _plan(s: Settings, job: JobDocument, devices: _Devices) -> Plan:
    colocated = devices.rollout == 0
    home = "all" if colocated else "train"
    engines = [] if colocated else [Pool(name="rollout", devices=devices.rollout)]
    pools = (*engines, Pool(name=home, devices=devices.train))
    policy = Workers(settings=s, key="policy", pool=home, devices=devices.train, workload=job.workload)
    critic = None
    if job.algorithm.uses_critic:
        critic = Workers(settings=s, key="value", pool=home, devices=devices.train, workload=job.workload)
    folded = s.flag("loss_fn.force_on_policy_ratio")
    stale = job.limits.max_staleness
    section = "ppo" if job.algorithm.uses_critic else "grpo"
    return Plan(
        pools=pools,
        generate=_generate(s, job, pools[0], stale),
        reference_logprob=policy.passing(offload="all") if job.algorithm.kl_coefficient > 0 else None,
        old_logprob=None if folded else policy.passing(),
        values=critic.passing() if critic else None,
        update_critic=critic.update(offload="all") if critic else None,
        update_actor=policy.update(offload="all" if colocated else _offload(s)),
        fusions=Fusions(
            fold_old_logprob=folded, reward_with_generation=stale > 0 or s.flag(f"{_GENERATION}.vllm_cfg.async_engine")
        ),
        staleness=stale,
        in_flight=stale > 0 and s.flag(f"{section}.async_{section}.in_flight_weight_updates"),
        sync="reshard" if colocated else _sync(s),
    )


def _offload(s: Settings) -> Literal["none", "optimizer"]:
    return "optimizer" if s.flag("policy.offload_optimizer_for_logprob") else "none"


def _sync(s: Settings) -> Sync:
    transport = s.get(f"{_GENERATION}.refit_transport")
    if transport not in _SYNC:
        known = ", ".join(name or "null" for name in _SYNC)
        raise s.error(f"{_GENERATION}.refit_transport", f"must be one of {known}", repr(transport))
    return _SYNC[transport]


def _generate(s: Settings, job: JobDocument, pool: Pool, staleness: int) -> Generate:
    engine, options = f"{_GENERATION}.vllm_cfg", f"{_GENERATION}.vllm_kwargs"
    share = f"{engine}.gpu_memory_utilization"
    tp, pp = s.whole(f"{engine}.tensor_parallel_size", 1), s.whole(f"{engine}.pipeline_parallel_size", 1)
    running = ceil(_started(job) * (1 + staleness) * tp * pp / pool.devices)
    asked = s.whole(f"{options}.max_num_seqs", _SEQUENCES)
    if asked > running or s.get(f"{options}.max_num_seqs") is None:
        s.took(f"{options}.max_num_seqs", f"{min(asked, running)} sequences of an engine, of {running} that may run")
    return Generate(
        pool=pool.name,
        tp=tp,
        pp=pp,
        ep=s.whole(f"{engine}.expert_parallel_size", 1),
        concurrency=min(asked, running),
        memory_percent=s.percent(share, s.number(share, _SHARE)),
        prefill_tokens=_prefill(s, options),
        precision="fp8" if "fp8" in str(s.get(f"{engine}.precision")) else "native",
    )


def _started(job: JobDocument) -> int:
    """Sequences that a step starts."""
    return ceil(job.workload.sequences / (job.workload.useful_groups or 1.0))


def _prefill(s: Settings, options: str) -> int:
    if not s.flag(f"{options}.enable_chunked_prefill", True):
        return 0
    if s.get(f"{options}.max_num_batched_tokens") is None:
        s.took(f"{options}.max_num_batched_tokens", f"{_STEP_TOKENS}, vLLM's own on large GPUs")
    return s.whole(f"{options}.max_num_batched_tokens", _STEP_TOKENS)
