"""slime v0.3.1 (THUDM/slime): a script that starts `train.py`, or `train_async.py` one rollout ahead.

Flags are those of `slime/utils/arguments.py`, of Megatron-LM, and of SGLang's server behind `--sglang-`. Rollout
batches are prompts, `--global-batch-size` is sequences, token budgets are per GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from executor.export.entries import Entry, commented, comments, entry, flags
from executor.export.production import Files, Production
from ir.job import Role

_ESTIMATORS = {
    "dr-grpo": "grpo",
    "dapo": "grpo",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++-baseline": "reinforce_plus_plus_baseline",
}
"""Where slime has another name for an algorithm."""

_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"

_TO_SET = (
    "slime v0.3.1. Run it in slime's checkout inside a Ray cluster (ray job submit). Still to be set, in place of",
    "/path/to: the model's arguments (scripts/models of slime), checkpoints, prompts and their keys; and the reward",
    "(--rm-type or --custom-rm-path), --num-rollout, --save and what else a run needs, as arguments of this script.",
)


_CRITIC = "The critic starts from the actor's checkpoint unless --megatron-config-path gives it another."


def write(production: Production) -> Files:
    """`run.sh`."""
    header = [*production.header, *_TO_SET, *([_CRITIC] if production.job.algorithm.uses_critic else [])]
    return {"run.sh": _script(header, _program(production), list(_entries(production)))}


def _script(header: Sequence[str], program: str, entries: Sequence[Entry]) -> str:
    body = [commented(f"  {words}", why) for words, why in flags(entries)]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *comments(header),
            "set -euo pipefail",
            "",
            commented(
                "source /path/to/slime/scripts/models/MODEL.sh", "to be set: gives MODEL_ARGS, the model's sizes"
            ),
            "",
            "arguments=(",
            *body,
            ")",
            "",
            f'python3 {program} "${{MODEL_ARGS[@]}}" "${{arguments[@]}}" "$@"',
            "",
        ]
    )


def _program(production: Production) -> str:
    """Synchronous, or the next rollout beside training."""
    return "train_async.py" if production.plan.staleness else "train.py"


def _entries(production: Production) -> Iterator[Entry]:
    yield from _placement(production)
    yield from _checkpoints(production)
    yield from _batch(production)
    yield from _algorithm(production)
    yield from _trainer(production)
    yield from _engine(production)


def _placement(production: Production) -> Iterator[Entry]:
    plan = production.plan
    train, rollout = plan.update_actor.pool, plan.generate.pool
    yield entry("actor-num-nodes", production.nodes(train), f"plan: pool {train}")
    yield entry("actor-num-gpus-per-node", production.per_node(train), f"plan: pool {train}")
    yield entry("num-gpus-per-node", production.node, "cluster: devices of a node")
    if plan.colocated:
        yield entry("colocate", True, "plan: generate and update_actor share their pool")
    else:
        yield entry("rollout-num-gpus", plan.devices_of(rollout), f"plan: pool {rollout}")
        yield from _sync(plan.sync)
    away = plan.update_actor.offload == "all"
    yield entry("offload-train" if away else "no-offload-train", True, "plan: update_actor.offload")


def _sync(method: str) -> Iterator[Entry]:
    yield entry("update-weight-transport", "nccl" if method == "broadcast" else "disk", "plan: sync")
    if method != "broadcast":
        yield entry("update-weight-disk-dir", "/path/to/shared/weights", "to be set: seen by all nodes")
    if method == "delta-disk":
        yield entry("update-weight-mode", "delta", "plan: sync")
        local = "to be set: of every engine's node, for a checkpoint that is patched"
        yield entry("update-weight-local-checkpoint-dir", "/path/to/local/checkpoint", local)


def _checkpoints(production: Production) -> Iterator[Entry]:
    model = production.model(Role.ACTOR)
    if production.plan.generate.precision == "fp8":
        yield entry("hf-checkpoint", "/path/to/fp8/model", f"plan: generate.precision; to be set: {model} in fp8")
    else:
        yield entry("hf-checkpoint", model, "job: models.actor; must be on disk")
    start = production.model(Role.REFERENCE)
    yield entry("ref-load", "/path/to/torch_dist/model", f"to be set: {start} in Megatron's format")
    if start != model:
        yield entry("load", "/path/to/torch_dist/actor", f"to be set: {model} in Megatron's format")
    yield entry("prompt-data", "/path/to/prompts.jsonl", "to be set")


def _batch(production: Production) -> Iterator[Entry]:
    workload = production.job.workload
    yield entry("rollout-batch-size", workload.prompts_per_step, "job: workload.prompts_per_step")
    yield entry("n-samples-per-prompt", workload.samples_per_prompt, "job: workload.samples_per_prompt")
    global_batch = workload.sequences // workload.minibatches
    yield entry("global-batch-size", global_batch, "job: sequences of one of workload.minibatches")
    started = ceil(workload.prompts_per_step * workload.oversampling / (workload.useful_groups or 1.0))
    if started > workload.prompts_per_step:
        yield entry("over-sampling-batch-size", started, "job: workload.oversampling and useful_groups")
    yield entry("rollout-max-prompt-len", workload.max_prompt_tokens, "job: workload.max_prompt_tokens")
    yield entry("rollout-max-response-len", workload.max_response_tokens, "job: workload.max_response_tokens")
    yield entry("rollout-max-context-len", workload.max_tokens, "job: longest prompt and response")
    yield entry("rollout-temperature", workload.temperature, "job: workload.temperature")
    yield entry("rollout-seed", workload.seed, "job: workload.seed")
    yield entry("seed", workload.seed, "job: workload.seed")
    if workload.turns is not None:
        yield entry("custom-generate-function-path", "your_module.generate", "job: workload.turns; to be set")


def _algorithm(production: Production) -> Iterator[Entry]:
    algorithm, plan = production.job.algorithm, production.plan
    yield entry("advantage-estimator", _ESTIMATORS.get(algorithm.name, algorithm.name), "job: algorithm.name")
    yield entry("disable-grpo-std-normalization", algorithm.name == "dr-grpo", "job: algorithm.name")
    yield entry("normalize-advantages", algorithm.name.startswith("reinforce++"), "rule: its estimators need it")
    if algorithm.dynamic_sampling:
        yield entry("dynamic-sampling-filter-path", _FILTER, "job: algorithm.name drops groups of equal rewards")
    yield entry("lr", algorithm.learning_rate, "job: algorithm.learning_rate")
    yield entry("eps-clip", algorithm.clip, "job: algorithm.clip")
    yield entry("clip-grad", algorithm.max_gradient_norm, "job: algorithm.max_gradient_norm")
    if algorithm.kl_coefficient and algorithm.kl_in_reward:
        yield entry("kl-coef", algorithm.kl_coefficient, "job: algorithm.kl_coefficient, in the reward")
    elif algorithm.kl_coefficient:
        yield entry("use-kl-loss", True, "job: algorithm.kl_coefficient, in the loss")
        yield entry("kl-loss-coef", algorithm.kl_coefficient, "job: algorithm.kl_coefficient")
        yield entry("kl-loss-type", "low_var_kl", "job: algorithm.name")
    if plan.fusions.rollout_logprob:
        yield entry("use-rollout-logprobs", True, "plan: fusions.rollout_logprob")
    elif plan.staleness:
        yield entry("use-tis", True, "plan: staleness; old log-probs over the engines'")
        yield entry("tis-clip", algorithm.max_importance_weight, "job: algorithm.max_importance_weight")


def _trainer(production: Production) -> Iterator[Entry]:
    update, shape = production.plan.update_actor, production.job.actor
    yield entry("tensor-model-parallel-size", update.tp, "plan: update_actor.tp")
    yield entry("sequence-parallel", update.tp > 1, "rule: with tensor parallelism")
    yield entry("pipeline-model-parallel-size", update.pp, "plan: update_actor.pp")
    piece = -(-shape.layers // update.pp)
    if update.vpp > 1:
        yield entry("num-layers-per-virtual-pipeline-stage", piece // update.vpp, "plan: update_actor.vpp")
    elif shape.layers % update.pp:
        yield entry("decoder-last-pipeline-num-layers", shape.layers - (update.pp - 1) * piece, "rule: layers left")
    yield entry("context-parallel-size", update.cp, "plan: update_actor.cp")
    if shape.is_moe:
        yield entry("expert-model-parallel-size", update.ep, "plan: update_actor.ep")
        yield entry("expert-tensor-parallel-size", update.etp, "plan: update_actor.etp")
    if update.micro_tokens:
        yield entry("use-dynamic-batch-size", True, "plan: update_actor.micro_tokens")
        yield entry("max-tokens-per-gpu", update.micro_tokens, "plan: update_actor.micro_tokens")
    else:
        yield entry("micro-batch-size", update.micro_batch, "plan: update_actor.micro_batch")
    if update.recompute != "none":
        yield entry("recompute-granularity", update.recompute, "plan: update_actor.recompute")
    if update.recompute == "full":
        yield entry("recompute-method", "uniform", "plan: update_actor.recompute")
        yield entry("recompute-num-layers", 1, "plan: update_actor.recompute, each layer")
    if update.precision == "fp8":
        yield entry("transformer-impl", "transformer_engine", "rule: multiplies in fp8")
        yield entry("fp8-format", "e4m3", "plan: update_actor.precision")
        yield entry("fp8-recipe", "blockwise", "plan: update_actor.precision")


def _engine(production: Production) -> Iterator[Entry]:
    engine, shape = production.plan.generate, production.job.actor
    yield entry("rollout-num-gpus-per-engine", engine.tp * engine.pp, "plan: generate.tp x generate.pp")
    yield entry("sglang-pp-size", engine.pp, "plan: generate.pp")
    if shape.is_moe:
        yield entry("sglang-ep-size", engine.ep, "plan: generate.ep")
    yield entry("sglang-mem-fraction-static", engine.memory_percent / 100, "plan: generate.memory_percent")
    yield entry("sglang-max-running-requests", engine.concurrency, "plan: generate.concurrency")
    yield entry("sglang-server-concurrency", engine.concurrency, "plan: generate.concurrency")
    yield entry("sglang-context-length", production.job.workload.max_tokens, "job: longest prompt and response")
    # A chunk is shared with the sequences that decode, a token each.
    chunk = engine.prefill_tokens + engine.concurrency if engine.prefill_tokens else -1
    yield entry("sglang-chunked-prefill-size", chunk, "plan: generate.prefill_tokens and a token a sequence")
    yield entry("sglang-enable-mixed-chunk", engine.prefill_tokens > 0, "plan: generate.prefill_tokens")
