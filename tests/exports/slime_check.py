"""Judge exported slime scripts: python slime_check.py FOLDER prints a line of JSON a plan.

slime's parser needs Megatron-LM and SGLang, so flags are held against the list in `data/slime_keys.txt`, and the rules
are those of `slime_validate_args`, `build_dp_schedule` and Megatron-LM's `validate_args`, on the numbers given.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verdicts import report

KEYS = Path(__file__).parent / "data" / "slime_keys.txt"
SHIM = 'source() { MODEL_ARGS=(); }; python3() { printf "%s\\0" "$@"; }; . "$0"'
"""Bash that runs a script with the model's arguments left out and the trainer replaced by one that prints its own."""
DEFAULTS: Mapping[str, Any] = {"micro-batch-size": 1, "rollout-num-gpus-per-engine": 1, "sglang-pp-size": 1}


def arguments(script: Path) -> tuple[str, dict[str, Any]]:
    """The program that the script starts, and its flags."""
    found = subprocess.run(["bash", "-c", SHIM, str(script)], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(found.stderr.strip())
    program, *words = found.stdout.split("\0")[:-1]
    return program, parsed(words)


def parsed(words: list[str]) -> dict[str, Any]:
    """Flags with their values, of the types that the parser gives them."""
    types = dict(line.split() for line in KEYS.read_text().splitlines() if line and not line.startswith("#"))
    flags: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        name = word.removeprefix("--")
        if not word.startswith("--") or name not in types:
            raise ValueError(f"{word} is no flag")
        if name in flags:
            raise ValueError(f"{word} is given twice")
        flags[name] = True if types[name] == "flag" else typed(types[name], next(waiting))
    return {**DEFAULTS, **flags}


def typed(kind: str, text: str) -> Any:
    """A value of a type, or one of several choices."""
    if kind in ("int", "float", "str"):
        return {"int": int, "float": float, "str": str}[kind](text)
    if text not in kind.split("|"):
        raise ValueError(f"{text} is not one of {kind}")
    return text


def complaints(program: str, f: Mapping[str, Any], world: Mapping[str, int]) -> Iterator[str]:
    """What is wrong."""
    yield from placement_complaints(program, f, world)
    yield from batch_complaints(f)
    yield from algorithm_complaints(f)
    yield from megatron_complaints(f)


def placement_complaints(program: str, f: Mapping[str, Any], world: Mapping[str, int]) -> Iterator[str]:
    """Of `create_placement_groups`, `train_async.py` and SGLang's server."""
    train, node = trainers(f), f["num-gpus-per-node"]
    rollout = train if f.get("colocate") else f["rollout-num-gpus"]
    if program not in ("train.py", "train_async.py"):
        yield f"no program {program}"
    if program == "train_async.py" and f.get("colocate"):
        yield "train_async.py asserts that nothing is colocated"
    if (train if f.get("colocate") else train + rollout) > world["devices"] or node != world["per_node"]:
        yield f"{train} + {rollout} GPUs of nodes of {node} are more than there are"
    engine, pp, ep = f["rollout-num-gpus-per-engine"], f["sglang-pp-size"], f.get("sglang-ep-size", 1)
    if rollout % engine or engine % pp or (engine // pp) % ep or (engine > node and engine % node):
        yield f"engines of {engine} GPUs in {pp} stages with {ep} parts of experts do not fill {rollout} GPUs"
    if pp > 1 and f.get("sglang-enable-mixed-chunk"):
        yield "SGLang asserts no mixed chunks with a pipeline"
    if not 0 < f["sglang-mem-fraction-static"] < 1:
        yield "the memory fraction is not between 0 and 1"
    if f.get("update-weight-transport") == "disk" and not f.get("update-weight-disk-dir"):
        yield "disk transport needs a directory"
    if f.get("update-weight-mode") == "delta" and (
        f.get("colocate")
        or f.get("update-weight-transport") != "disk"
        or not f.get("update-weight-local-checkpoint-dir")
    ):
        yield "changes need disk transport, a local checkpoint, and engines of their own"


def batch_complaints(f: Mapping[str, Any]) -> Iterator[str]:
    """Of `slime_validate_args` and `build_dp_schedule`."""
    sequences, batch = f["rollout-batch-size"] * f["n-samples-per-prompt"], f["global-batch-size"]
    replicas = trainers(f) // max(replica(f), 1)
    dynamic = f.get("use-dynamic-batch-size", False)
    if sequences % batch:
        yield f"{batch} sequences of an update do not divide {sequences}"
    if replicas and batch % (replicas * (1 if dynamic else f["micro-batch-size"])):
        yield f"micro-batches of {replicas} replicas do not divide {batch} sequences"
    if dynamic != ("max-tokens-per-gpu" in f):
        yield "dynamic batches and max-tokens-per-gpu go together"
    if f.get("over-sampling-batch-size", f["rollout-batch-size"]) < f["rollout-batch-size"]:
        yield "over-sampling is below the rollout batch"
    if f["rollout-max-prompt-len"] >= f["rollout-max-context-len"]:
        yield "prompts leave no room in the context"


def algorithm_complaints(f: Mapping[str, Any]) -> Iterator[str]:
    """Of `slime_validate_args`."""
    if f.get("kl-coef") and f.get("kl-loss-coef"):
        yield "kl-coef excludes kl-loss-coef"
    if (f.get("kl-coef") or f.get("use-kl-loss")) and not f.get("ref-load"):
        yield "a KL penalty needs ref-load"
    if f["advantage-estimator"].startswith("reinforce_plus_plus") and not f.get("normalize-advantages"):
        yield "reinforce++ needs normalize-advantages"
    if f.get("use-rollout-logprobs") and f.get("use-tis"):
        yield "use-rollout-logprobs excludes use-tis"
    if f["advantage-estimator"] == "ppo" and f.get("no-offload-train"):
        yield "a critic forces offload-train"


def megatron_complaints(f: Mapping[str, Any]) -> Iterator[str]:
    """Of Megatron-LM's `validate_args`."""
    world, pp, tp = trainers(f), f["pipeline-model-parallel-size"], f["tensor-model-parallel-size"]
    ep, etp = f.get("expert-model-parallel-size", 1), f.get("expert-tensor-parallel-size", tp)
    if world % replica(f):
        yield f"{world} GPUs are no multiple of tp x pp x cp = {replica(f)}"
    if "expert-model-parallel-size" in f and world % (ep * etp * pp):
        yield f"{world} GPUs are no multiple of ep x etp x pp"
    if ep > 1 and tp > 1 and not f.get("sequence-parallel"):
        yield "experts with tensor parallelism need sequence-parallel"
    if f.get("sequence-parallel") and tp == 1:
        yield "sequence-parallel needs tensor parallelism"
    virtual, last = "num-layers-per-virtual-pipeline-stage" in f, "decoder-last-pipeline-num-layers" in f
    if ((virtual or last) and pp == 1) or (virtual and last):
        yield "virtual stages or a smaller last stage need a pipeline, and exclude each other"
    full = f.get("recompute-granularity") == "full"
    if full != ("recompute-method" in f) or full != ("recompute-num-layers" in f):
        yield "full recomputation has a method and a number of layers, and nothing else has"


def trainers(f: Mapping[str, Any]) -> int:
    """GPUs that train."""
    return int(f["actor-num-nodes"] * f["actor-num-gpus-per-node"])


def replica(f: Mapping[str, Any]) -> int:
    """GPUs of a replica."""
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    return int(f[names[0]] * f[names[1]] * f[names[2]])


def check(folder: Path, world: Mapping[str, int]) -> Iterator[str]:
    yield from complaints(*arguments(folder / "run.sh"), world)


if __name__ == "__main__":
    report(check)
