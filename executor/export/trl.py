"""A plan as TRL 1.16.0's GRPO configuration with accelerate's, and the vLLM server where engines have own devices."""

from __future__ import annotations

from collections.abc import Iterator

from executor.export.entries import Entry, entry, flags, shell_script, yaml
from executor.export.production import Files, Production
from ir.frameworks.trl import ENGINE_TOKENS
from ir.job import Role

PORT, TRAINERS_PORT = 8000, 29500

_LOSS = {"grpo": "grpo", "dr-grpo": "dr_grpo", "gspo": "grpo", "cispo": "cispo"}

_TO_SET = (
    "To set before it runs: dataset_name, reward_funcs, output_dir, and the learning rate's schedule, which is TRL's",
    "default.",
)


def write(production: Production) -> Files:
    """Configurations, and scripts that start training (on every machine, with MACHINE_RANK) and the server."""
    header = [*production.header, *_TO_SET]
    training = [*_job(production), *_batches(production), *_algorithm(production), *_engines(production)]
    files = {
        "grpo.yaml": yaml(header, training),
        "accelerate.yaml": yaml(production.header, list(_accelerate(production))),
        "run.sh": _run(production),
    }
    return files if production.plan.colocated else files | {"serve.sh": _serve(production)}


def _job(p: Production) -> Iterator[Entry]:
    yield entry("model_name_or_path", p.model(Role.ACTOR), "job: models.actor")
    yield entry("dtype", "bfloat16", "plan: update_actor.precision")
    if p.job.actor.lora_rank:
        yield entry("use_peft", True, "job: models.actor.lora_rank")
        yield entry("lora_r", p.job.actor.lora_rank, "job: models.actor.lora_rank")
    if Role.REWARD in p.job.models:
        yield entry("reward_model_name_or_path", p.model(Role.REWARD), "job: models.reward")
    else:
        yield entry("reward_funcs", ["accuracy_reward"], "to be set: the job has a verifier")
    yield entry("dataset_name", "path/to/prompts", "to be set")
    yield entry("output_dir", "output", "to be set")


def _batches(p: Production) -> Iterator[Entry]:
    workload, update = p.job.workload, p.plan.update_actor
    minibatch = workload.sequences // workload.minibatches
    accumulated = minibatch // (update.micro_batch * update.dp)
    yield entry("num_generations", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    yield entry("generation_batch_size", workload.sequences, "job: sequences of a step, prompts x samples")
    yield entry("per_device_train_batch_size", update.micro_batch, "plan: update_actor.micro_batch")
    yield entry("gradient_accumulation_steps", accumulated, "job: sequences of a minibatch over micro_batch x dp")
    yield entry("num_iterations", workload.epochs, "job: workload.epochs")
    yield entry("max_completion_length", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry("temperature", workload.temperature, "job: workload.temperature")
    yield entry("seed", workload.seed, "job: workload.seed")
    yield entry("gradient_checkpointing", update.recompute == "full", "plan: update_actor.recompute")
    yield entry("bf16", True, "plan: update_actor.precision")


def _algorithm(p: Production) -> Iterator[Entry]:
    algorithm = p.job.algorithm
    why = f"job: algorithm.name {algorithm.name}"
    yield entry("loss_type", _LOSS[algorithm.name], why)
    yield entry("importance_sampling_level", "sequence" if algorithm.name == "gspo" else "token", why)
    yield entry("scale_rewards", "none" if algorithm.name == "dr-grpo" else "group", why)
    yield entry("beta", algorithm.kl_coefficient, "job: algorithm.kl_coefficient; 0: no reference")
    yield entry("epsilon", algorithm.clip, "job: algorithm.clip")
    yield entry("learning_rate", algorithm.learning_rate, "job: algorithm.learning_rate")
    yield entry("max_grad_norm", algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")
    corrects = not p.plan.fusions.fold_old_logprob
    yield entry("vllm_importance_sampling_correction", corrects, "plan: whether old log-probs are a pass of their own")
    if corrects:
        cap = algorithm.max_importance_weight
        yield entry("vllm_importance_sampling_mode", "token_truncate", "job: algorithm.max_importance_weight is a cap")
        yield entry("vllm_importance_sampling_clip_max", cap, "job: algorithm.max_importance_weight")


def _engines(p: Production) -> Iterator[Entry]:
    engine = p.plan.generate
    yield entry("use_vllm", True, "rule: engines are vLLM's")
    yield entry("vllm_mode", "colocate" if p.plan.colocated else "server", "plan: generate.pool")
    if p.plan.colocated:
        yield entry("vllm_tensor_parallel_size", engine.tp, "plan: generate.tp")
        yield entry("vllm_gpu_memory_utilization", engine.memory_percent / 100, "plan: generate.memory_percent")
        yield entry("vllm_enable_sleep_mode", True, "plan: engines share their devices with training")
        yield entry("vllm_max_model_length", p.job.workload.max_tokens, "job: longest prompt and response")
    else:
        yield entry("vllm_server_base_url", f"http://localhost:{PORT}", "to be set where serve.sh runs elsewhere")


def _accelerate(p: Production) -> Iterator[Entry]:
    update = p.plan.update_actor
    devices, stage = p.plan.devices_of(update.pool), update.zero
    yield entry("compute_environment", "LOCAL_MACHINE", "")
    yield entry("distributed_type", "DEEPSPEED", "rule: update_actor.zero is a DeepSpeed stage")
    yield entry("deepspeed_config.zero_stage", stage, "plan: update_actor.zero")
    yield entry("deepspeed_config.offload_optimizer_device", "none", "plan: update_actor.offload")
    yield entry("deepspeed_config.offload_param_device", "none", "plan: update_actor.offload")
    yield entry("deepspeed_config.zero3_init_flag", stage == 3, "plan: update_actor.zero")
    yield entry("deepspeed_config.zero3_save_16bit_model", stage == 3, "plan: update_actor.zero")
    yield entry("deepspeed_config.deepspeed_multinode_launcher", "standard", "")
    yield entry("mixed_precision", "bf16", "plan: update_actor.precision")
    yield entry("num_machines", p.nodes(update.pool), f"plan: devices of pool {update.pool}")
    yield entry("num_processes", devices, f"plan: devices of pool {update.pool}, a process each")
    yield entry("machine_rank", 0, "set by run.sh")
    yield entry("main_training_function", "main", "")
    yield entry("rdzv_backend", "static", "")
    yield entry("same_network", True, "")
    yield entry("use_cpu", False, "")


def _visible(p: Production, pool: str) -> list[str]:
    """Devices of a pool where the pools share a node: they lie in the order of the plan."""
    if p.plan.colocated or p.plan.num_devices > p.node:
        return []
    span = p.rpeg.pool(pool)
    return ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, span.device_ids))}"]


def _run(p: Production) -> str:
    command = [*_visible(p, p.plan.update_actor.pool), "accelerate", "launch"]
    launch = [
        ("--config_file accelerate.yaml", ""),
        ('--machine_rank "${MACHINE_RANK:-0}"', "each machine has its own"),
        ('--main_process_ip "${MAIN_IP:-localhost}"', "of the machine of rank 0"),
        (f"--main_process_port {TRAINERS_PORT}", ""),
        ("-m trl.scripts.grpo", ""),
        ("--config grpo.yaml", ""),
    ]
    return shell_script(p.header, command, launch)


def _serve(p: Production) -> str:
    engine, workload = p.plan.generate, p.job.workload
    engines = p.plan.devices_of(engine.pool) // engine.tp
    tokens = f"rule: {ENGINE_TOKENS}, as engines in the training processes have it"
    entries = [
        entry("model", p.model(Role.ACTOR), "job: models.actor"),
        entry("tensor_parallel_size", engine.tp, "plan: generate.tp"),
        entry("data_parallel_size", engines, "plan: devices of generate.pool over generate.tp"),
        entry("gpu_memory_utilization", engine.memory_percent / 100, "plan: generate.memory_percent"),
        entry("max_model_len", workload.max_tokens, "job: longest prompt and response"),
        entry("enable_prefix_caching", "true", "rule: a prompt is read once for its samples"),
        entry("dtype", "bfloat16", "plan: generate.precision"),
        entry("port", PORT, ""),
        entry("max-num-seqs", engine.concurrency, "plan: generate.concurrency, for vLLM itself"),
        entry("max-num-batched-tokens", ENGINE_TOKENS, tokens),
    ]
    command = [*_visible(p, engine.pool), "python3", "-m", "trl.scripts.vllm_serve"]
    return shell_script([*p.header, "Start it before run.sh."], command, flags(entries))
