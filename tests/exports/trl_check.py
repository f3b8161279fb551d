"""Exported plans, read by TRL's own parser, GRPOConfig and accelerate's configuration. Run by a Python that has them.

What TRL checks only in its trainer, on GPUs, is checked here.

    python trl_check.py FOLDER    # FOLDER/PLAN/{grpo.yaml,accelerate.yaml,run.sh,world.json[,serve.sh]}
"""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import transformers
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.vllm_serve import ScriptArguments, build_command
from verdicts import report

LEGAL_PLUGIN = set(DeepSpeedPlugin.__dataclass_fields__) | {"deepspeed_multinode_launcher"}
"""Keys of `deepspeed_config`, which `accelerate launch` passes on by name."""

KINDS = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)


def parse(path: Path, world: int) -> tuple[Any, Any, Any]:
    """Script, training and model arguments; unknown keys are errors. There are no GPUs here, which is all that
    `use_cpu` says."""
    transformers.TrainingArguments.world_size = property(lambda _: world)
    arguments = ["--config", str(path), "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    script, training, model, _ = TrlParser(KINDS).parse_args_and_config(args=arguments)
    return script, training, model


def arguments(script: str) -> list[str]:
    """The words of the array `arguments=( ... )`."""
    found = re.search(r"^arguments=\(\n(.*?)^\)$", script, re.MULTILINE | re.DOTALL)
    assert found, "the script has no array of arguments"
    return shlex.split(found[1], comments=True)


def check_accelerate(path: Path) -> Any:
    config = load_config_from_file(str(path))
    assert str(config.distributed_type).endswith("DEEPSPEED"), config.distributed_type
    unknown = set(config.deepspeed_config) - LEGAL_PLUGIN
    assert not unknown, f"unknown in deepspeed_config: {unknown}"
    assert config.deepspeed_config["zero_stage"] in (0, 1, 2, 3), "zero_stage"
    assert config.num_processes % config.num_machines == 0, "machines have unlike numbers of processes"
    return config


def check_training(script: Any, a: Any, model: Any, world: int) -> None:
    """GRPOTrainer's conditions; GRPOConfig has checked the divisibilities on its own."""
    assert model.model_name_or_path and script.dataset_name, "model and data"
    assert all(isinstance(value, float) for value in (a.learning_rate, a.beta, a.epsilon)), "numbers read as text"
    assert bool(script.reward_funcs) != bool(script.reward_model_name_or_path), "one source of rewards"
    minibatch = a.per_device_train_batch_size * world * a.gradient_accumulation_steps
    assert a.generation_batch_size % minibatch == 0, "a step is not whole minibatches"
    assert a.steps_per_generation % a.gradient_accumulation_steps == 0, "generation would fall inside a minibatch"
    assert a.use_vllm and a.vllm_mode in ("colocate", "server"), "vllm_mode"
    if a.vllm_mode == "colocate":
        assert world % a.vllm_tensor_parallel_size == 0, "tensor parallel engines do not fill the world"
        assert 0 < a.vllm_gpu_memory_utilization < 1, "vllm_gpu_memory_utilization"
        assert a.vllm_max_model_length > a.max_completion_length, "no room for a prompt"


def check_server(path: Path, model: Any) -> int:
    """Devices that the server takes."""
    a, rest = TrlParser((ScriptArguments,)).parse_args_and_config(
        args=arguments(path.read_text()), return_remaining_strings=True
    )
    command = build_command(a, rest)
    assert a.model == model.model_name_or_path, "another model"
    assert rest[::2] == ["--max-num-seqs", "--max-num-batched-tokens"] and int(rest[3]) >= int(rest[1]), command
    return int(a.tensor_parallel_size * a.data_parallel_size)


def check(folder: Path, world: dict[str, Any]) -> None:
    config = check_accelerate(folder / "accelerate.yaml")
    script, training, model = parse(folder / "grpo.yaml", config.num_processes)
    check_training(script, training, model, config.num_processes)
    serve = folder / "serve.sh"
    assert serve.exists() == (training.vllm_mode == "server"), "serve.sh"
    served = check_server(serve, model) if serve.exists() else 0
    assert config.num_processes + served <= world["devices"], "more devices than there are"
    assert config.num_processes // config.num_machines <= world["per_node"], "more processes than devices of a node"


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    report(check)


if __name__ == "__main__":
    main()
