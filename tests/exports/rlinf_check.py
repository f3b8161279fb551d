"""Judge exported RLinf configurations: python rlinf_check.py FOLDER prints a line of JSON a plan.

RLinf's own `validate_reasoning_cfg`, `validate_megatron_cfg`, `validate_fsdp_cfg` and `ModelParallelComponentPlacement`
run on them, the last with a cluster made up of what world.json says. What needs GPUs, a Ray cluster or the model's
files is checked here: the end of `validate_cfg`, `MegatronWorker.__init__`, `run_inference`, and the GPUs of a node.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from rlinf import config as rlinf_config
from rlinf.scheduler.cluster.node import NodeGroupInfo, NodeInfo
from rlinf.scheduler.hardware import HardwareInfo, HardwareResource
from rlinf.utils.placement import ModelParallelComponentPlacement
from verdicts import report


class World:
    """A cluster of equal nodes, as placements ask for it."""

    def __init__(self, world: Mapping[str, int]) -> None:
        count = min(world["per_node"], world["devices"])
        self.nodes = [node(rank, count) for rank in range(world["nodes"])]
        self.num_accelerators = count * len(self.nodes)

    def get_node_group(self, label: str | None = None) -> NodeGroupInfo:
        """All nodes."""
        return NodeGroupInfo(label=label or NodeGroupInfo.DEFAULT_GROUP_LABEL, nodes=self.nodes)

    def get_node_info(self, rank: int) -> NodeInfo:
        """One of them."""
        return self.nodes[rank]


def node(rank: int, count: int) -> NodeInfo:
    """A node of so many GPUs."""
    gpus = HardwareResource(type="Accelerator", infos=[HardwareInfo(type="Accelerator", model="NVIDIA_GPU")] * count)
    fields: dict[str, Any] = dict.fromkeys(NodeInfo.__dataclass_fields__)
    fields |= {"node_rank": rank, "hardware_resources": [gpus]}
    return NodeInfo(**{name: value for name, value in fields.items() if NodeInfo.__dataclass_fields__[name].init})


def complaints(config: Any, gpus: int, world: Mapping[str, int]) -> Iterator[str]:
    """What the loaders leave to the cluster."""
    batch = config.data.rollout_batch_size * config.algorithm.group_size
    if config.algorithm.adv_type == "grpo" and config.algorithm.group_size < 2:
        yield "grpo needs groups"
    engine = config.rollout.tensor_parallel_size
    if gpus % engine or engine > world["per_node"]:
        yield f"engines of {engine} do not fill {gpus} GPUs inside nodes"
    vllm, longest = config.rollout.vllm, config.runner.seq_length
    if vllm.max_num_batched_tokens < config.rollout.max_running_requests:
        yield "vLLM needs max_num_batched_tokens of at least max_num_seqs"
    if not vllm.enable_chunked_prefill and vllm.max_num_batched_tokens < longest:
        yield "vLLM needs max_num_batched_tokens of at least max_model_len without chunked prefill"
    if batch // config.algorithm.n_minibatches != config.actor.global_batch_size:
        yield "global batches do not make up the batch"
    for role in ("actor", *(["critic"] if config.critic.use_critic_model else [])):
        part = config[role]
        check = fsdp_complaints if part.training_backend == "fsdp" else megatron_complaints
        yield from check(part, config, gpus, batch)


def fsdp_complaints(part: Any, config: Any, gpus: int, batch: int) -> Iterator[str]:
    """Of `validate_cfg` and the FSDP actor."""
    if part.global_batch_size % (part.micro_batch_size * gpus):
        yield "global_batch_size must be a multiple of micro_batch_size x world"
    if config.data.rollout_batch_size % gpus:
        yield "ranks must have equally many prompts"
    if config.critic.use_critic_model:
        yield "the FSDP actor asserts not do_offload beside a critic"


def megatron_complaints(part: Any, config: Any, gpus: int, batch: int) -> Iterator[str]:
    """Of `MegatronWorker` and Megatron-LM."""
    model = part.model
    replica = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    if gpus % replica:
        yield f"{gpus} GPUs are no multiple of {replica}"
        return
    replicas, divided = gpus // replica, model.expert_model_parallel_size * (model.expert_tensor_parallel_size or 1)
    if gpus % (divided * model.pipeline_model_parallel_size):
        yield "experts do not divide the GPUs of a stage"
    if batch % replicas or part.global_batch_size % (part.micro_batch_size * replicas):
        yield "replicas and micro-batches must divide the batch"
    passes = config.algorithm.logprob_forward_micro_batch_size
    if not config.runner.enable_dynamic_batch_size and batch // replicas % passes:
        yield "micro-batches of passes must divide a replica's sequences"
    held = config.runner.max_tokens_per_mbs * model.context_parallel_size
    if config.runner.enable_dynamic_batch_size and held < config.runner.seq_length:
        yield "max_tokens_per_mbs x cp must hold the longest sequence"
    if (model.tensor_model_parallel_size > 1) != model.sequence_parallel:
        yield "sequence_parallel goes with tensor parallelism"


def check(folder: Path, world: Mapping[str, int]) -> Iterator[str]:
    with initialize_config_dir(version_base="1.1", config_dir=str(folder.resolve())):
        config = compose("rlinf")
    with open_dict(config):
        config = rlinf_config.validate_reasoning_cfg(config)
        for role in ("actor", *(["critic"] if config.critic.use_critic_model else [])):
            kind = config[role].training_backend
            config[role] = getattr(rlinf_config, f"validate_{kind}_cfg")(config[role])
    placement = ModelParallelComponentPlacement(config, World(world))
    yield from complaints(config, placement.actor_world_size, world)
    if not placement.is_collocated:
        yield "not collocated"


def main() -> None:
    logging.disable(logging.WARNING)
    # Importing Megatron's manager needs Megatron; validation only asks it for this.
    name = "rlinf.hybrid_engines.megatron.megatron_model_manager"
    sys.modules[name] = types.SimpleNamespace(HAVE_FUSCO=False)  # type: ignore[assignment]
    report(check)


if __name__ == "__main__":
    main()
