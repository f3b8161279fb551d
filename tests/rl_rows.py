"""Published RL steps as jobs, clusters and plans: what a row says, else the default of its framework."""

from __future__ import annotations

import msgspec
from rl_jobs import (
    GSM8K,
    MODELS,
    PROMPT_TOKENS,
    VERL_SEQUENCES,
    VLLM_SEQUENCES,
    Case,
    Row,
    cluster_of,
    count,
    job_of,
    size_of,
)

from ir.job import Job
from ir.plan import Generate, Pass, Plan, Pool, Update


def nemo(row: Row) -> Case:
    """A row of NeMo-RL's performance summary: Megatron with packed sequences, vLLM; states in host memory while a
    colocated engine generates; engines of their own take weights in flight (recipes `*-async-*`)."""
    if row["algorithm"] != "GRPO":
        raise ValueError(f"{row['algorithm']} says too little of what is dropped or answered by an environment")
    longest, mean = count(row, "max_seq_len"), float(row["avg_seq_len_tokens"])
    sequences, samples = count(row, "gen_global_batch"), count(row, "recipe_generations_per_prompt", 32)
    job = job_of(
        model=MODELS.get(row["model"], row["model"]),
        prompts=sequences // samples,
        samples=samples,
        minibatches=sequences // count(row, "train_global_batch", sequences),
        caps=(256, longest - round(PROMPT_TOKENS)),
        means=(PROMPT_TOKENS, mean - PROMPT_TOKENS),
        staleness=count(row, "staleness_steps", 0),
    )
    devices = count(row, "num_gpus")
    plan = _nemo_plan(row, job, devices, longest)
    return Case(
        job=job,
        cluster=cluster_of(row["gpu"], devices),
        plan=plan,
        seconds=float(row["step_time_s"]),
        tokens=sequences * mean / devices,
        group=f"NeMo-RL {row['gpu']}",
        rate=f"{row['gpu']} {row['precision_train']} {size_of(job)}",
    )


def _nemo_plan(row: Row, job: Job, devices: int, longest: int) -> Plan:
    apart = count(row, "staleness_steps", 0) > 0
    train = count(row, "recipe_train_gpus", devices // 2) if apart else devices
    degrees = {name: count(row, f"train_{name}") for name in ("tp", "pp", "cp", "ep")}
    dp = train // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    offload = "none" if apart else "all"
    home, micro = "train" if apart else "all", count(row, "recipe_train_micro_batch")
    visit = Pass(pool=home, micro_tokens=longest * count(row, "recipe_logprob_batch") // degrees["cp"], **degrees)
    recompute = "full" if row.get("recipe_activation_checkpointing") != "False" else "none"
    return Plan(
        pools=_pools(devices, train, apart),
        generate=Generate(
            pool="rollout" if apart else "all",
            tp=count(row, "gen_tp"),
            pp=count(row, "gen_pp"),
            ep=count(row, "gen_tp") if job.actor.is_moe else 1,
            concurrency=VLLM_SEQUENCES,
            memory_percent=round(100 * float(row.get("recipe_vllm_gpu_memory_utilization") or (0.8 if apart else 0.6))),
            prefill_tokens=8192,
            precision=_precision(row["precision_gen"]),
        ),
        # The reference's weights lie in host memory and are swapped in.
        reference_logprob=Pass(pool=home, micro_tokens=visit.micro_tokens, offload="all", **degrees),
        old_logprob=visit,
        update_actor=Update(
            pool=home,
            dp=dp,
            vpp=count(row, "train_vpp"),
            zero=1,
            micro_tokens=count(row, "recipe_train_mb_tokens", longest * micro) // degrees["cp"],
            recompute=recompute,
            offload=offload,
            precision=_precision(row["precision_train"]),
            **degrees,
        ),
        staleness=count(row, "staleness_steps", 0),
        in_flight=apart,
        sync="broadcast" if apart else "reshard",
    )


def _precision(name: str) -> str:
    return "fp8" if name.upper().startswith("FP8") else "native"


def _pools(devices: int, train: int, apart: bool) -> tuple[Pool, ...]:
    if not apart:
        return (Pool(name="all", devices=devices),)
    return Pool(name="rollout", devices=devices - train), Pool(name="train", devices=train)


def verl_blog(row: Row) -> Case:
    """A row of verl's comparison of two GPUs: GSM8K, one node, FSDP with all states on the devices, throughput only."""
    if not row["framework"].startswith("verl") or not row["tokens_per_s_per_gpu"]:
        raise ValueError(f"{row['framework']}: lengths, device or degrees are not printed")
    prompt, response = GSM8K[row["max_seq_len"]]
    prompts, samples, devices = count(row, "prompts_per_step"), count(row, "samples_per_prompt"), count(row, "num_gpus")
    caps = tuple(int(part) for part in row["max_seq_len"].split("+"))
    job = job_of(
        model=MODELS.get(row["model"], row["model"]),
        prompts=prompts,
        samples=samples,
        minibatches=prompts // count(row, "global_batch", prompts),
        caps=(caps[0], caps[1]),
        means=(prompt, response),
        critic=row["algorithm"] == "PPO",
    )
    tokens = prompts * samples * (prompt + response) / devices
    return Case(
        job=job,
        cluster=cluster_of(row["gpu"], devices),
        plan=_verl_plan(row, devices, critic=row["algorithm"] == "PPO"),
        seconds=tokens / float(row["tokens_per_s_per_gpu"]),
        tokens=tokens,
        group=f"verl {row['gpu']}",
        rate=f"{row['gpu']} BF16 {size_of(job)}",
    )


def _verl_plan(row: Row, devices: int, *, critic: bool) -> Plan:
    visit = Pass(pool="all", zero=3, micro_batch=count(row, "inference_micro_batch_per_gpu", 8))
    update = Update(
        pool="all", dp=devices, zero=3, micro_batch=count(row, "train_micro_batch_per_gpu", 4), recompute="full"
    )
    return Plan(
        pools=(Pool(name="all", devices=devices),),
        generate=Generate(
            pool="all",
            tp=count(row, "rollout_tp"),
            concurrency=VERL_SEQUENCES,
            memory_percent=round(100 * float(row["gpu_memory_utilization"] or 0.5)),
            prefill_tokens=8192,
        ),
        reference_logprob=visit,
        old_logprob=visit,
        values=visit if critic else None,
        update_critic=update if critic else None,
        update_actor=update,
        sync="reshard",
    )


def verl_log(row: Row) -> Case:
    """A window of a training log of verl, if it names its GPUs and prints whole steps."""
    if not row["gpu_stated"] or not row["step_s"]:
        raise ValueError("the log names no GPU or no step")
    critic = "critic" in row["algorithm"] and "critic-free" not in row["algorithm"]
    prompts, samples, devices = count(row, "prompts_per_step"), count(row, "samples_per_prompt"), count(row, "num_gpus")
    means = float(row["prompt_len_mean"]), float(row["response_len_mean"])
    job = job_of(
        model=MODELS.get(row["model"], row["model"]),
        prompts=prompts,
        samples=samples,
        minibatches=prompts // count(row, "ppo_mini_batch_prompts", prompts),
        caps=(count(row, "max_prompt_len"), count(row, "max_response_len")),
        means=means,
        critic=critic,
        reference=bool(row["ref_s"]),
    )
    named = {
        "gpu_memory_utilization": row["gpu_memory_utilization"],
        "rollout_tp": row["rollout_tp"],
        "train_micro_batch_per_gpu": row["train_micro_batch_per_gpu"],
        "inference_micro_batch_per_gpu": row["logprob_micro_batch_per_gpu"],
    }
    if row["train_backend"] == "Megatron":
        raise ValueError("Megatron rows of these logs do not print the reference's degrees")
    plan = _verl_plan(named, devices, critic=critic)
    gpu = row["gpu_stated"].split()[0]
    return Case(
        job=job,
        cluster=cluster_of(gpu, devices),
        plan=plan if row["ref_s"] else msgspec.structs.replace(plan, reference_logprob=None),
        seconds=float(row["step_s"]),
        tokens=prompts * samples * sum(means) / devices,
        group=f"verl {gpu}",
        rate=f"{gpu} BF16 {size_of(job)}",
    )


def verl_table(row: Row) -> Case:
    """A row of verl's documentation: none prints mean lengths, all degrees and a known model."""
    raise ValueError("mean lengths or degrees are not printed, or the model is not known")
