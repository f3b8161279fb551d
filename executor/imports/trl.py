"""A GRPO configuration of TRL 1.16.0, with accelerate's and the vLLM server's, as a job and a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from executor.imports.imported import Imported, assumed_lengths, assumed_nodes
from executor.imports.trl_keys import REMARKS, Keys, keys_of
from ir.frameworks.trl import ENGINE_TOKENS
from ir.job import Algorithm, JobDocument, Models, ModelSource, Workload
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Sharing, Update

PROMPT_TOKENS = 1024
"""The longest prompt where no key says it."""

SERVER_SEQUENCES, SERVER_TOKENS = 1024, 8192
"""`max_num_seqs` and `max_num_batched_tokens` of vLLM's server on devices of 70 GB or more."""

_ALGORITHMS = {"dr_grpo": "dr-grpo", "cispo": "cispo"}
_FSDP = {"true": 3, "FULL_SHARD": 3, "1": 3, "false": 2, "SHARD_GRAD_OP": 2, "2": 2}


def read(text: str, *, where: str) -> Imported:
    """What the keys say; those that are not set have the defaults of 1.16.0, and accelerate's are those of TRL's
    zero2.yaml. Several files may follow each other with lines of `---` between them: the GRPO configuration, that of
    accelerate, and the script that starts the server.

    Raises:
        InputError: a key that is unknown, or that says what no plan can.
    """
    k = keys_of(text, where)
    if not k.on("use_vllm"):
        raise k.error("use_vllm", "must be true: generation by transformers is not planned for")
    for remark in _remarks(k):
        k.note(remark)
    job = _job(k)
    plan = _plan(k, job)
    nodes, per_node, note = assumed_nodes(plan.num_devices)
    k.note(note)
    return Imported(job=job, plan=plan, nodes=nodes, per_node=per_node, assumed=tuple(k.notes))


def _remarks(k: Keys) -> Iterator[str]:
    for key, what in REMARKS.items():
        if k.has(key) and str(k.get(key)).lower() != "false":
            yield f"{key}: {what}"
    for key in ("num_processes", "zero_stage"):
        if not k.has(key) and k.get("distributed_type") == "DEEPSPEED":
            yield f"{key}: taken as {k.get(key)}, as in TRL's zero2.yaml"
    if _colocated(k) and not k.on("vllm_enable_sleep_mode"):
        yield "vllm_enable_sleep_mode: taken as set, so that engines give up their memory for training"


def _colocated(k: Keys) -> bool:
    return k.get("vllm_mode") == "colocate" and not k.has("vllm_device")


# The job


def _job(k: Keys) -> JobDocument:
    actor = k.get("model_name_or_path")
    if actor is None:
        raise k.error("model_name_or_path", "must be set")
    reward = k.get("reward_model_name_or_path")
    return JobDocument(
        name="trl",
        algorithm=_algorithm(k),
        models=Models(
            actor=ModelSource(name=actor, lora_rank=k.count("lora_r") if k.on("use_peft") else None),
            reward=ModelSource(name=reward) if reward is not None else None,
        ),
        workload=_workload(k),
    )


def _algorithm(k: Keys) -> Algorithm:
    loss = str(k.get("loss_type"))
    name = "gspo" if k.get("importance_sampling_level") == "sequence" else _ALGORITHMS.get(loss, "grpo")
    if name == "grpo" and loss != "grpo":
        k.note(f"loss_type {loss}: planned as grpo, whose step is the same")
    return Algorithm(
        name=name,  # type: ignore[arg-type]
        learning_rate=k.number("learning_rate"),
        clip=k.number("epsilon"),
        kl_coefficient=k.number("beta"),
        max_importance_weight=k.number("vllm_importance_sampling_clip_max"),
        max_gradient_norm=k.number("max_grad_norm"),
    )


def _sequences(k: Keys) -> tuple[int, int]:
    """Sequences of a step and of a minibatch."""
    at_once = k.count("per_device_train_batch_size") * k.count("num_processes")
    accumulated = k.count("gradient_accumulation_steps")
    step = k.count("steps_per_generation") if k.has("steps_per_generation") else accumulated
    sequences = k.count("generation_batch_size") if k.has("generation_batch_size") else at_once * step
    if sequences % (at_once * accumulated):
        key = "generation_batch_size" if k.has("generation_batch_size") else "steps_per_generation"
        raise k.error(key, f"must be whole minibatches, of {at_once * accumulated} sequences", sequences)
    return sequences, at_once * accumulated


def _workload(k: Keys) -> Workload:
    (sequences, minibatch), samples = _sequences(k), k.count("num_generations", least=2)
    if sequences % samples:
        raise k.error("num_generations", f"must divide the {sequences} sequences of a step", samples)
    response = k.count("max_completion_length")
    prompt = _prompt(k, response)
    lengths, note = assumed_lengths(prompt, response)
    k.note(note)
    return Workload(
        prompts_per_step=sequences // samples,
        samples_per_prompt=samples,
        minibatches=sequences // minibatch,
        epochs=k.count("num_iterations"),
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        temperature=k.number("temperature"),
        seed=k.count("seed", least=0),
        lengths=lengths,
    )


def _prompt(k: Keys, response: int) -> int:
    """Most tokens of a prompt: what is left of an engine's longest sequence."""
    if k.has("max_prompt_length"):
        return k.count("max_prompt_length")
    key = "vllm_max_model_length" if _colocated(k) else "max_model_len"
    if k.has(key) and k.count(key) > response:
        return k.count(key) - response
    k.note(f"{key}: taken as {response + PROMPT_TOKENS}, for prompts of {PROMPT_TOKENS} tokens")
    return PROMPT_TOKENS


# The plan


def _plan(k: Keys, job: JobDocument) -> Plan:
    world, generate = k.count("num_processes"), _engines(k, job)
    pools = {"all": world} if _colocated(k) else {"rollout": _served(k), "train": world}
    pool = "all" if _colocated(k) else "train"
    micro, stage = k.count("per_device_train_batch_size"), _stage(k, world)
    visit = Pass(pool=pool, micro_batch=micro, zero=3 if stage == 3 else 0)
    workload, referred = job.workload, job.algorithm.kl_coefficient > 0
    folded = not k.on("vllm_importance_sampling_correction") and workload.minibatches * workload.epochs == 1
    scored = Pass(pool=pool, micro_batch=workload.sequences // world, zero=visit.zero)
    return Plan(
        pools=tuple(Pool(name=name, devices=devices) for name, devices in pools.items()),
        generate=generate,
        reward=scored if job.models.reward is not None else None,
        reference_logprob=visit if referred else None,
        old_logprob=None if folded else visit,
        update_actor=Update(
            pool=pool,
            dp=world,
            zero=stage,
            micro_batch=micro,
            recompute="full" if k.on("gradient_checkpointing") else "none",
            offload=_offload(k),
        ),
        fusions=Fusions(fold_old_logprob=folded),
        sharing=Sharing(reference_adapter=referred and k.on("use_peft")),
        sync="reshard" if _colocated(k) else "broadcast",
    )


def _served(k: Keys) -> int:
    """Devices of the server; releases that had `vllm_device` ran one engine on one."""
    return 1 if k.has("vllm_device") else k.count("tensor_parallel_size") * k.count("data_parallel_size")


def _engines(k: Keys, job: JobDocument) -> Generate:
    if _colocated(k):
        tp, world = k.count("vllm_tensor_parallel_size"), k.count("num_processes")
        if world % tp:
            raise k.error("vllm_tensor_parallel_size", f"must divide the {world} processes", tp)
        share = job.workload.sequences * tp // world
        return Generate(
            pool="all", tp=tp, concurrency=share, prefill_tokens=ENGINE_TOKENS, memory_percent=_percent(k, "vllm_gpu_")
        )
    tp = 1 if k.has("vllm_device") else k.count("tensor_parallel_size")
    fields: dict[str, Any] = {}
    for name, key, default in (
        ("concurrency", "max-num-seqs", SERVER_SEQUENCES),
        ("prefill_tokens", "max-num-batched-tokens", SERVER_TOKENS),
    ):
        if not k.has(key):
            k.note(f"{key}: taken as {default}, as on devices of 70 GB or more")
        fields[name] = k.count(key) if k.has(key) else default
    share = -(-job.workload.sequences * tp // _served(k))
    fields["concurrency"] = min(fields["concurrency"], share)
    prefix = "vllm_gpu_" if k.has("vllm_device") else "gpu_"
    return Generate(pool="rollout", tp=tp, memory_percent=_percent(k, prefix), **fields)


def _percent(k: Keys, prefix: str) -> int:
    key = f"{prefix}memory_utilization"
    return k.percent(key, k.number(key))


def _stage(k: Keys, world: int) -> int:
    """The ZeRO stage; FSDP divides as the second or the third."""
    kind = str(k.get("distributed_type"))
    if kind == "FSDP":
        key = "fsdp_reshard_after_forward" if k.has("fsdp_reshard_after_forward") else "fsdp_sharding_strategy"
        how = str(k.get(key) if k.has(key) else "true")
        stage = _FSDP.get(how if how in _FSDP else how.lower())
        if stage is None:
            raise k.error(key, "must divide all or gradients and states", repr(how))
        k.note(f"distributed_type FSDP: planned as ZeRO stage {stage}, which divides the same")
    elif kind == "DEEPSPEED":
        stage = k.count("zero_stage", least=0)
    elif kind in ("MULTI_GPU", "NO"):
        stage = 0
    else:
        raise k.error("distributed_type", "must be DEEPSPEED, FSDP, MULTI_GPU or NO", repr(kind))
    return stage if world > 1 else 0


def _offload(k: Keys) -> Any:
    """What waits in host memory. TRL leaves it there while it updates."""
    away = {key: k.has(key) and str(k.get(key)).lower() not in ("none", "false") for key in _OFFLOADS}
    found = next((_OFFLOADS[key] for key in _OFFLOADS if away[key]), "none")
    if found != "none":
        key = next(key for key in _OFFLOADS if away[key])
        k.note(
            f"{key}: planned as what comes to the device for each update, which takes more of its memory than TRL's, "
            "which leaves it in host memory"
        )
    return found


_OFFLOADS = {"offload_param_device": "all", "fsdp_offload_params": "all", "offload_optimizer_device": "optimizer"}
