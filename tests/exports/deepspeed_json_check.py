"""Exported plans, read by DeepSpeed's own configuration class. Run by a Python that has deepspeed.

python deepspeed_json_check.py FOLDER    # FOLDER/PLAN/{actor.json,actor.sh,world.json[,critic.json,critic.sh]}
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.config as runtime
from verdicts import report

KNOWN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "zero_optimization", "tensor_parallel", "sequence_parallel_size", "data_parallel_size", "optimizer",
}  # fmt: skip
"""Top-level keys in use: DeepSpeed takes unknown ones without a word."""


def arguments(script: str) -> list[str]:
    """The words of the array `arguments=( ... )`."""
    found = re.search(r"^arguments=\(\n(.*?)^\)$", script, re.MULTILINE | re.DOTALL)
    assert found, "the script has no array of arguments"
    return shlex.split(found[1], comments=True)


def world_of(script: str) -> int:
    words = arguments(script)
    return int(words[words.index("--num_nodes") + 1]) * int(words[words.index("--num_gpus") + 1])


def load(path: Path, world: int) -> Any:
    """DeepSpeed's view of the file where `world` processes run; it takes data parallelism from the mesh that the keys
    describe, and otherwise from all processes."""
    content = json.loads(path.read_text())
    assert not set(content) - KNOWN, f"unknown keys {set(content) - KNOWN}"
    assert ("sequence_parallel_size" in content) == ("data_parallel_size" in content), "half a mesh"
    replicas = content.get("data_parallel_size", world)
    assert replicas * content.get("sequence_parallel_size", 1) == world, "the mesh is not all processes"
    config = runtime.DeepSpeedConfig(str(path), SimpleNamespace(get_data_parallel_world_size=lambda: replicas))
    assert config.world_size == replicas
    return config


def check_config(config: Any, world: int) -> None:
    tp = config.tensor_parallel_config.autotp_size
    assert tp == 0 or world % tp == 0, "tensor parallel groups do not fill the processes"
    assert config.bfloat16_config.enabled and not config.float16_config.enabled, "precision"
    assert config.optimizer_name == "adamw", config.optimizer_name
    product = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * config.world_size
    assert config.train_batch_size == product, "batch"
    offloaded = config.zero_config.offload_param
    assert offloaded is None or config.zero_optimization_stage == 3, "offload_param does nothing below stage 3"


def check(folder: Path, world: dict[str, Any]) -> None:
    files = sorted(file for file in folder.glob("*.json") if file.name != "world.json")
    assert files, "nothing is trained"
    for file in files:
        processes = world_of(file.with_suffix(".sh").read_text())
        assert processes <= world["devices"], "more devices than there are"
        check_config(load(file, processes), processes)


def main() -> None:
    # Without processes the world would be taken as one.
    runtime.dist.get_rank = lambda *_args, **_kwargs: 0
    report(check)


if __name__ == "__main__":
    main()
