"""Loads exported plans with verl's own code, in an environment of tests/exports/verl_requirements.txt.

    python verl_check.py FOLDER

Every sub-folder holds run.sh and world.json. Hydra composes the overrides, `validate_config` and the dataclasses of the
workers check them; model paths are replaced by a tiny model, because the dataclasses read it. What verl asserts only in
its workers, on GPUs, is asserted here again. Prints a JSON line a plan: {"plan", "ok", "error"}.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from tokenizers import Tokenizer, models
from verdicts import report
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_reward_model
from verl.utils.config import omega_conf_to_dataclass, validate_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8,
    "max_position_embeddings": 1 << 20,
}


def tiny_model(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return str(folder)


def without_vllm():
    """validate_config asks vLLM's module for the largest rank of adapters, and is answered without it."""

    def get_vllm_max_lora_rank(rank):
        if not 0 < rank <= 512:
            raise ValueError(f"lora_rank must be at most 512, got {rank}")

    name = "verl.workers.rollout.vllm_rollout"
    sys.modules[name], sys.modules[f"{name}.utils"] = ModuleType(name), ModuleType(f"{name}.utils")
    sys.modules[f"{name}.utils"].get_vllm_max_lora_rank = get_vllm_max_lora_rank


def overrides(script):
    """What the script would give python, as bash has it."""
    command = f"python3() {{ printf '%s\\0' \"${{@:3}}\"; }}; source {shlex.quote(str(script))}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def with_model(words, path):
    keys = ("actor_rollout_ref.model.path=", "critic.model.path=", "reward.reward_model.model_path=")
    return [next((f"{key}{path}" for key in keys if word.startswith(key)), word) for word in words]


def load(words):
    """As verl.trainer.main_ppo and the workers it starts do."""
    cfg = compose("ppo_trainer", overrides=words)
    validate_config(cfg, need_reference_policy(cfg), need_critic(cfg))
    hybrid = cfg.actor_rollout_ref
    for part in (hybrid.rollout, hybrid.model, hybrid.rollout.checkpoint_engine):
        omega_conf_to_dataclass(part)
    omega_conf_to_dataclass(cfg.trainer.v1.separate_async.hybrid_rollout)
    if need_reference_policy(cfg):
        reference = OmegaConf.create(OmegaConf.to_container(hybrid.ref, resolve=True))
        # verl/workers/engine_workers.py, init_model.
        with open_dict(reference):
            reference.ppo_micro_batch_size = reference.pop("log_prob_micro_batch_size")
            reference.ppo_micro_batch_size_per_gpu = reference.pop("log_prob_micro_batch_size_per_gpu")
            reference.use_dynamic_bsz = reference.pop("log_prob_use_dynamic_bsz")
            reference.ppo_max_token_len_per_gpu = reference.pop("log_prob_max_token_len_per_gpu")
        omega_conf_to_dataclass(reference)
    if need_critic(cfg):
        omega_conf_to_dataclass(cfg.critic)
    if need_reward_model(cfg):
        omega_conf_to_dataclass(cfg.reward.reward_model.rollout)
    return cfg


def degrees(cfg, model, fsdp):
    """(pure model parallel, context parallel) of a training engine."""
    if model.strategy == "megatron":
        engine = model.megatron
        return engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size, engine.context_parallel_size
    return 1, model[fsdp].ulysses_sequence_parallel_size


def check_training(cfg, name, model, fsdp, micro):
    """Minibatches over replicas, and micro-batches in them; `micro`: (dynamic, tokens, sequences) of pass and update."""
    gpus = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    parallel, context = degrees(cfg, model, fsdp)
    assert gpus % (parallel * context) == 0, f"{name}: degrees must divide {gpus} GPUs"
    if model.strategy == "megatron":
        engine = model.megatron
        experts = engine.expert_model_parallel_size * engine.expert_tensor_parallel_size
        assert gpus % (experts * engine.pipeline_model_parallel_size) == 0, f"{name}: experts must divide {gpus} GPUs"
    replicas = gpus // (parallel * context)
    sequences = cfg.actor_rollout_ref.actor.ppo_mini_batch_size * cfg.actor_rollout_ref.rollout.n
    assert sequences % replicas == 0, (
        f"{name}: a minibatch of {sequences} sequences must divide over {replicas} replicas"
    )
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for dynamic, tokens, size in micro:
        if dynamic:
            assert tokens * context >= longest, f"{name}: {tokens} x {context} tokens must hold {longest}"
        else:
            assert sequences // replicas % size == 0, f"{name}: micro-batches of {size} must divide a replica's share"


def check_engines(name, gpus, per_node, rollout):
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    assert gpus % size == 0, f"{name}: engines of {size} must divide {gpus} GPUs"
    assert size <= per_node or size % per_node == 0, f"{name}: engines over nodes must fill them"
    assert per_node % rollout.tensor_model_parallel_size == 0 or rollout.data_parallel_size == 1
    assert rollout.max_num_batched_tokens >= rollout.max_num_seqs, f"{name}: tokens of a step below its sequences"
    if not rollout.enable_chunked_prefill:
        assert rollout.max_num_batched_tokens >= rollout.max_model_len, f"{name}: whole prompts must fit a step"


def check_pools(cfg, world):
    pools = [(cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node)]
    rollout, reward = cfg.actor_rollout_ref.rollout, cfg.reward.reward_model
    if rollout.nnodes:
        pools.append((rollout.nnodes, rollout.n_gpus_per_node))
    if reward.enable and reward.enable_resource_pool:
        pools.append((reward.nnodes, reward.n_gpus_per_node))
    free = [world["per_node"]] * world["nodes"]
    for nodes, per_node in sorted(pools, key=lambda pool: -pool[1]):
        for _ in range(nodes):
            node = next((i for i, left in enumerate(free) if left >= per_node), None)
            assert node is not None, f"pools {pools} must fit {world}"
            free[node] -= per_node


def check_asynchrony(cfg):
    """verl/trainer/ppo/v1: trainer_separate_async.py and replay_buffer.py."""
    v1, rollout = cfg.trainer.v1, cfg.actor_rollout_ref.rollout
    threshold = v1.sampler.max_off_policy_threshold
    assert isinstance(threshold, int) and threshold > 0
    assert v1.sampler.max_off_policy_strategy in ("drop", "wait")
    assert v1.trainer_mode in ("sync", "separate_async")
    if v1.trainer_mode == "sync":
        assert (
            rollout.nnodes == 0 and rollout.checkpoint_engine.backend == "naive" and cfg.actor_rollout_ref.hybrid_engine
        )
        return
    steps = v1.separate_async.parameter_sync_step
    assert cfg.data.train_batch_size == steps * cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    assert rollout.nnodes > 0 and rollout.n_gpus_per_node > 0 and rollout.checkpoint_engine.backend != "naive"
    assert not need_reward_model(cfg) or cfg.reward.reward_model.enable_resource_pool


def check(cfg, world):
    hybrid = cfg.actor_rollout_ref
    actor, rollout, ref, reward = hybrid.actor, hybrid.rollout, hybrid.ref, cfg.reward.reward_model
    assert actor.use_dynamic_bsz == rollout.log_prob_use_dynamic_bsz
    update = (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)
    old = (actor.use_dynamic_bsz, rollout.log_prob_max_token_len_per_gpu, rollout.log_prob_micro_batch_size_per_gpu)
    check_training(cfg, "actor", actor, "fsdp_config", [update, old])
    # With adapters the reference is the actor without them: trainer_base.py, ref_in_actor.
    if need_reference_policy(cfg) and not (hybrid.model.lora_rank or hybrid.model.lora.rank):
        frozen = (
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
            ref.log_prob_micro_batch_size_per_gpu,
        )
        check_training(cfg, "ref", ref, "fsdp_config", [frozen])
        assert degrees(cfg, ref, "fsdp_config") == degrees(cfg, actor, "fsdp_config")
    if need_critic(cfg):
        loaded = omega_conf_to_dataclass(cfg.critic)
        engine, budget = loaded.engine, loaded.ppo_infer_max_token_len_per_gpu
        sizes = (engine.micro_batch_size_per_gpu, engine.infer_micro_batch_size_per_gpu)
        check_training(cfg, "critic", cfg.critic, "fsdp", [(engine.use_dynamic_bsz, budget, size) for size in sizes])
        if cfg.critic.strategy == "megatron":
            assert degrees(cfg, cfg.critic, "fsdp") == degrees(cfg, actor, "fsdp_config"), "one set of process groups"
    gpus = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    own = (rollout.nnodes * rollout.n_gpus_per_node, rollout.n_gpus_per_node)
    check_engines("rollout", *(own if rollout.nnodes else (gpus, cfg.trainer.n_gpus_per_node)), rollout)
    if need_reward_model(cfg):
        pool = (reward.nnodes * reward.n_gpus_per_node, reward.n_gpus_per_node)
        shared = (gpus, cfg.trainer.n_gpus_per_node)
        check_engines("reward", *(pool if reward.enable_resource_pool else shared), reward.rollout)
    if cfg.algorithm.filter_groups.enable:
        assert not reward.enable or reward.enable_resource_pool, "groups are filtered by rewards as they finish"
    check_pools(cfg, world)
    check_asynchrony(cfg)


def main():
    without_vllm()
    with tempfile.TemporaryDirectory() as temporary, initialize_config_module("verl.trainer.config", version_base=None):
        model = tiny_model(Path(temporary))
        report(lambda folder, world: check(load(with_model(overrides(folder / "run.sh"), model)), world))


if __name__ == "__main__":
    main()
