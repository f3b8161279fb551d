"""Judge exported vLLM engine arguments: python vllm_args_check.py FOLDER prints a line of JSON a plan.

vLLM's own `EngineArgs` takes the JSON document, and its own parser of `vllm serve` the script's options; both must
say the same. What only a running engine checks is checked here: `SchedulerConfig` and the GPUs of the plan.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# Grammars are no part of the arguments, and these packages are large.
GRAMMARS = (
    "xgrammar",
    "xgrammar.structural_tag",
    "xgrammar.openai_tool_call_schema",
    "llguidance",
    "llguidance.hf",
    "llguidance.torch",
)
sys.modules.update({name: MagicMock() for name in GRAMMARS})

import vllm.platforms as platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

platforms._current_platform = CpuPlatform()

from verdicts import report  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

SHIM = 'vllm() { printf "%s\\0" "$@"; }; . "$0"'
"""Bash that runs a script with vLLM replaced by one that prints its arguments."""


def served(script: Path) -> EngineArgs:
    """What `vllm serve` makes of the script's options."""
    found = subprocess.run(["bash", "-c", SHIM, str(script)], capture_output=True, text=True, check=True)
    _, model, *words = found.stdout.split("\0")[:-1]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(words))
    arguments.model = model
    return arguments


def complaints(e: EngineArgs, world: Mapping[str, int]) -> Iterator[str]:
    """What is wrong."""
    devices = e.tensor_parallel_size * e.pipeline_parallel_size * e.data_parallel_size
    if devices > world["devices"] or e.tensor_parallel_size > world["per_node"]:
        yield f"an engine of {devices} devices is more than there are"
    if e.max_num_batched_tokens < e.max_num_seqs:
        yield "max_num_batched_tokens must be at least max_num_seqs"
    if not e.enable_chunked_prefill and e.max_num_batched_tokens < e.max_model_len:
        yield "max_num_batched_tokens must be at least max_model_len without chunked prefill"
    if not 0 < e.gpu_memory_utilization <= 1:
        yield "gpu_memory_utilization must be a share"


def differences(one: EngineArgs, other: EngineArgs, names: Iterator[str] | Mapping[str, Any]) -> Iterator[str]:
    """Where the document and the script disagree."""
    for name in names:
        if getattr(one, name) != getattr(other, name):
            yield f"{name} is {getattr(one, name)!r} in the document and {getattr(other, name)!r} in the script"


def check(folder: Path, world: Mapping[str, int]) -> Iterator[str]:
    document = json.loads((folder / "engine_args.json").read_text())
    arguments = EngineArgs(**document)
    yield from complaints(arguments, world)
    yield from differences(arguments, served(folder / "serve.sh"), document)


if __name__ == "__main__":
    report(check)
