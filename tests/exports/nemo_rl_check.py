"""Checks exported plans against the keys and rules of NeMo-RL, which has no package to load them with.

    python nemo_rl_check.py FOLDER

Every sub-folder holds nemo_rl.yaml and world.json. Keys and types are those of data/nemo_rl_keys.txt, for NeMo-RL
itself passes over keys that it does not know; the rules are those that its setup and workers assert. Prints a JSON line
a plan: {"plan", "ok", "error"}.
"""

from pathlib import Path

import msgspec
from verdicts import report

KEYS = Path(__file__).parent / "data" / "nemo_rl_keys.txt"
TYPES = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list}


def known_keys():
    found, sections = {}, [""]
    for line in KEYS.read_text().splitlines():
        if line.startswith("["):
            sections = [section.strip("[]") for section in line.split()]
        elif line and not line.startswith("#"):
            name, kind, *_ = line.split()
            found |= {f"{section}.{name}".lstrip("."): kind for section in sections}
    return found


def flat(node, path=""):
    for key, value in node.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            yield from flat(value, here)
        else:
            yield here, value


def check_keys(values, known):
    for key, value in values.items():
        assert key in known, f"unknown key {key}"
        kind = known[key]
        if value is None:
            assert kind.endswith("?"), f"{key} must not be null"
        else:
            good = isinstance(value, TYPES[kind.rstrip("?")]) and (kind.startswith("bool") == isinstance(value, bool))
            assert good, f"{key} must be {kind}, got {value!r}"


def check_workers(v, key, devices, samples):
    """lm_policy.py, its value twin, and the setup of the two trainers."""
    megatron, dtensor = v[f"{key}.megatron_cfg.enabled"], v[f"{key}.dtensor_cfg.enabled"]
    assert megatron != dtensor, f"{key}: exactly one of Megatron and DTensor"
    section = f"{key}.megatron_cfg." if megatron else f"{key}.dtensor_cfg."
    model = "model_" if megatron else ""
    tp = v[f"{section}tensor_{model}parallel_size"]
    pp = v[f"{section}pipeline_model_parallel_size"] if megatron else 1
    cp = v[f"{section}context_parallel_size"]
    assert devices % (tp * pp * cp) == 0, f"{key}: {devices} devices must divide by PP x CP x TP"
    dp = devices // (tp * pp * cp)
    packed, dynamic = v[f"{key}.sequence_packing.enabled"], v[f"{key}.dynamic_batching.enabled"]
    assert not (packed and dynamic) and not (dynamic and pp > 1)
    micro = v[f"{key}.train_micro_batch_size"]
    logprob = v.get(f"{key}.logprob_batch_size", micro)
    assert tp < 4 or micro == logprob, f"{key}: TP of 4 and more needs equal micro-batches"
    batch = v[f"{key}.train_global_batch_size"]
    assert samples % batch == 0 and batch % (dp if packed else dp * micro) == 0, f"{key}: batches must divide"
    assert samples % (dp if packed else dp * logprob) == 0, f"{key}: log-probs must divide"
    longest = v[f"{key}.max_total_sequence_length"]
    if packed:
        budgets = [v[f"{key}.sequence_packing.{phase}_mb_tokens"] for phase in ("train", "logprob")]
        assert min(budgets) >= longest, f"{key}: a pack must hold the longest sequence"
    if megatron:
        assert cp == 1 or packed, f"{key}: CP of Megatron needs packing"
        ep, etp = v[f"{section}expert_model_parallel_size"], v[f"{section}expert_tensor_parallel_size"]
        assert (dp * cp * tp) % (ep * etp) == 0, f"{key}: experts must divide over the devices of a stage"
        assert ep == 1 or tp == 1 or v[f"{section}sequence_parallel"], (
            f"{key}: experts with TP need sequence parallelism"
        )
        assert v[f"{section}optimizer.use_distributed_optimizer"] or not (
            v[f"{section}optimizer.use_precision_aware_optimizer"]
            or v[f"{section}distributed_data_parallel_config.overlap_param_gather"]
        ), f"{key}: both need the distributed optimizer"
    else:
        assert cp == 1 or not packed, f"{key}: CP of DTensor excludes packing"
        assert cp == 1 or not v[f"{section}sequence_parallel"]
        assert key == "policy" or (cp == 1 and not packed), "a value model on DTensor has no CP and no packing"
    assert longest % v[f"{key}.make_sequence_length_divisible_by"] == 0 or packed or cp == 1


def check_devices(v, world):
    """Devices that generate and train, as the setup of GRPO and PPO parts them."""
    nodes, per_node = v["cluster.num_nodes"], v["cluster.gpus_per_node"]
    assert nodes <= world["nodes"] and per_node <= world["per_node"], "the cluster must be part of the world"
    total, resources = nodes * per_node, "policy.generation.colocated.resources"
    if v["policy.generation.colocated.enabled"]:
        return total, total
    asked_nodes, asked = v[f"{resources}.num_nodes"], v[f"{resources}.gpus_per_node"]
    if nodes == 1:
        assert asked_nodes in (None, 1) and 0 < asked < per_node, "training must keep devices of the only node"
        return asked, total - asked
    assert asked_nodes > 0 and asked == per_node and asked_nodes < nodes
    return asked_nodes * asked, total - asked_nodes * asked


def check_generation(v, devices):
    """vllm_generation.py, and vLLM's scheduler configuration."""
    prefix = "policy.generation.vllm_cfg."
    tp, pp, ep = (v[f"{prefix}{name}_parallel_size"] for name in ("tensor", "pipeline", "expert"))
    asynchronous = v[f"{prefix}async_engine"]
    assert devices % (tp * pp) == 0, "engines must fill the devices"
    assert pp == 1 or asynchronous
    assert ep == 1 or (ep % tp == 0 and (ep == tp or not asynchronous)), "EP must be TP or a multiple of it"
    kwargs = "policy.generation.vllm_kwargs."
    batched = v[f"{kwargs}max_num_batched_tokens"]
    assert batched >= v[f"{kwargs}max_num_seqs"]
    assert v[f"{kwargs}enable_chunked_prefill"] or batched >= v[f"{prefix}max_model_len"]
    assert 0 < v[f"{prefix}gpu_memory_utilization"] < 1


def check_step(v, section, samples):
    """What the training loops assert at their start."""
    ahead = f"{section}.async_{section}"
    if v[f"{ahead}.enabled"]:
        assert not v["policy.generation.colocated.enabled"], "asynchronous runs need devices of their own"
        assert v["policy.generation.vllm_cfg.async_engine"] and v["loss_fn.use_importance_sampling_correction"]
        assert not v.get(f"{section}.use_dynamic_sampling", False)
        assert not v[f"{section}.reward_shaping.enabled"] and not v[f"{section}.reward_scaling.enabled"]
        assert v[f"{ahead}.max_trajectory_age_steps"] >= 1
    assert v.get("grpo.batch_multiplier", 1) == 1 or v["grpo.use_dynamic_sampling"]
    if v["loss_fn.force_on_policy_ratio"]:
        assert v["policy.train_global_batch_size"] == samples, "an on-policy ratio needs a single update"
    skipped = v[f"{section}.skip_reference_policy_logprobs_calculation"]
    assert not (skipped and v["loss_fn.reference_policy_kl_penalty"] > 0)


def check(folder, world, known):
    document = msgspec.yaml.decode((folder / "nemo_rl.yaml").read_bytes())
    v = dict(flat(document))
    check_keys(v, known)
    section = v["defaults"].partition("_")[0]
    assert section in ("grpo", "ppo") and (section == "ppo") == ("value" in document)
    samples = v[f"{section}.num_prompts_per_step"] * v[f"{section}.num_generations_per_prompt"]
    rollout, train = check_devices(v, world)
    check_generation(v, rollout)
    for key in ("policy", *(["value"] if section == "ppo" else [])):
        check_workers(v, key, train, samples)
    check_step(v, section, samples)


def main():
    known = known_keys()
    report(lambda folder, world: check(folder, world, known))


if __name__ == "__main__":
    main()
