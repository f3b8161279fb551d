"""Judge exported ROLL configurations: python roll_check.py FOLDER prints a line of JSON a plan.

ROLL is on no package index, so fields are held against the classes in `data/roll_keys.txt`, and the rules are those of
their `__post_init__`, of `validate_megatron_batch_size` and of the workers, on the numbers given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from verdicts import report

KEYS = Path(__file__).parent / "data" / "roll_keys.txt"
Config = Mapping[str, Any]
Classes = Mapping[str, Mapping[str, str]]
PLAIN = {"int": int, "str": str, "bool": bool, "list": list, "dict": dict, "float": (int, float)}


def classes() -> Classes:
    """Fields and their types, by class."""
    found: dict[str, dict[str, str]] = {}
    for line in KEYS.read_text().splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = {}
        elif line and not line.startswith("#"):
            name, kind = line.split()
            found[list(found)[-1]][name] = kind
    return found


def misfits(value: Any, kind: str, path: str, known: Classes) -> Iterator[str]:
    """Where a value is not of a type."""
    if kind.startswith("{"):
        for name, inner in value.items():
            yield from misfits(inner, kind.strip("{}"), f"{path}.{name}", known)
    elif kind in known:
        for name, inner in value.items():
            if name not in known[kind]:
                yield f"{path}.{name} is no field of {kind}"
            else:
                yield from misfits(inner, known[kind][name], f"{path}.{name}", known)
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{path} must be {kind}, got {value!r}"
    elif str(value).lower() not in kind.split("|"):
        yield f"{path} must be one of {kind}, got {value!r}"


def complaints(config: Config, world: Mapping[str, int], known: Classes) -> Iterator[str]:
    """What is wrong."""
    fields = {name: value for name, value in config.items() if name != "hydra"}
    wrong = list(misfits(fields, "RLVRConfig", "config", known))
    yield from wrong
    if wrong:
        return
    workers = {name: config[name] for name in ("actor_train", "actor_infer", "reference", "critic") if name in config}
    devices = {name: eval(worker["device_mapping"]) for name, worker in workers.items()}
    if max(max(mapped) for mapped in devices.values()) >= world["devices"]:
        yield f"the roles' devices are not among the {world['devices']} there are"
    for name, worker in workers.items():
        strategy = worker["strategy_args"]["strategy_name"]
        table = strategy.partition("_")[0]
        yield from misfits(worker["strategy_args"]["strategy_config"], table, f"{name}.strategy_config", known)
        if table == "megatron":
            yield from megatron_complaints(name, worker, len(devices[name]), config)
        elif table == "fsdp2":
            yield from batch_complaints(name, worker, len(devices[name]), config)
    yield from engine_complaints(workers["actor_infer"], len(devices["actor_infer"]), world)
    yield from pipeline_complaints(config, devices)


def sequences(config: Config) -> int:
    """Of a step."""
    return int(config["rollout_batch_size"] * config["num_return_sequences_in_group"])


def batch_complaints(name: str, worker: Config, replicas: int, config: Config) -> Iterator[str]:
    """Of `train_step` and `compute_log_probs`."""
    share, left = divmod(sequences(config), replicas)
    if left:
        yield f"{name}: {replicas} replicas do not divide {sequences(config)} sequences"
    if share % worker["infer_batch_size"]:
        yield f"{name}: infer_batch_size does not divide {share} sequences"
    if training := worker.get("training_args"):
        backward = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
        if share % backward:
            yield f"{name}: minibatches of {backward} do not divide {share} sequences of a replica"


def megatron_complaints(name: str, worker: Config, gpus: int, config: Config) -> Iterator[str]:
    """Of `validate_megatron_batch_size` and Megatron-LM."""
    s = worker["strategy_args"]["strategy_config"]
    tp, pp, cp = (s[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context"))
    if name == "critic":
        yield "critic: there is no Megatron value model"
    if gpus % (tp * pp * cp):
        yield f"{name}: {gpus} GPUs are no multiple of tp x pp x cp"
        return
    replicas = gpus // (tp * pp * cp)
    yield from batch_complaints(name, worker, replicas, config)
    if name == "actor_train" and config["rollout_batch_size"] % replicas:
        yield f"{name}: {replicas} replicas do not divide the prompts"
    if gpus % (s["expert_model_parallel_size"] * pp):
        yield f"{name}: experts do not divide the GPUs of a stage"
    if s["sequence_parallel"] != (tp > 1):
        yield f"{name}: sequence_parallel goes with tensor parallelism"
    if "virtual_pipeline_model_parallel_size" in s and pp == 1:
        yield f"{name}: virtual stages need a pipeline"
    packing = worker.get("sequence_packing_args", {})
    longest = config["prompt_length"] + config["response_length"]
    for key in ("max_packed_sequence_length_forward", "max_packed_sequence_length_train"):
        if packing.get(key, longest) < longest:
            yield f"{name}: {key} does not hold the longest sequence"
    if packing.get("algorithm") == "load_balance" and len(packing) == 1:
        yield f"{name}: load_balance needs a packed length"


def engine_complaints(worker: Config, gpus: int, world: Mapping[str, int]) -> Iterator[str]:
    """Of `WorkerConfig` and vLLM."""
    if worker["strategy_args"]["strategy_name"] not in ("vllm", "sglang"):
        yield "actor_infer must be vllm or sglang"
    s = worker["strategy_args"]["strategy_config"]
    engine = s["tensor_parallel_size"] * s["pipeline_parallel_size"]
    if gpus % engine or (engine > world["per_node"] and engine % world["per_node"]):
        yield f"engines of {engine} GPUs do not fill {gpus}"
    if s["max_num_batched_tokens"] < s["max_num_seqs"]:
        yield "max_num_batched_tokens must be at least max_num_seqs"
    if not s["enable_chunked_prefill"] and s["max_num_batched_tokens"] < s["max_model_len"]:
        yield "max_num_batched_tokens must be at least max_model_len without chunked prefill"


def pipeline_complaints(config: Config, devices: Mapping[str, list[int]]) -> Iterator[str]:
    """Of `PPOConfig` and `RLVRConfig`."""
    ratio = config["async_generation_ratio"]
    if ratio and (config["generate_opt_level"] != 1 or ratio < 1):
        yield "generation ahead needs generate_opt_level 1 and a ratio of at least 1"
    if ratio and set(devices["actor_infer"]) & set(devices["actor_train"]):
        yield "engines that generate ahead share devices with training"
    if (config["use_kl_loss"] or config["init_kl_coef"] > 0) != config["enable_reference"]:
        yield "a KL term and the reference go together"
    if config["enable_reference"] != ("reference" in config):
        yield "enable_reference and a reference go together"
    if (config["adv_estimator"] == "gae") != ("critic" in config):
        yield "gae and a critic go together"
    if config["train_infer_correction"]["is_weight"]["enabled"] and not config["enable_old_logprobs_recompute"]:
        yield "importance weights need recomputed log-probs"


def main() -> None:
    known = classes()
    report(lambda folder, world: complaints(yaml.safe_load((folder / "roll.yaml").read_text()), world, known))


if __name__ == "__main__":
    main()
