"""Engines as vLLM's arguments, and plans started by Ray and Slurm."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml
from framework_plans import JOBS, colocated, job, production, setting

from executor.export import ray_job, slurm, vllm_args
from executor.export.entries import commented, entry
from executor.export.entries import yaml as as_yaml
from executor.export.exporters import EXPORTERS
from executor.export.nodes import label
from executor.export.production import Production
from executor.export.write import write_exports
from ir.errors import InputError
from ir.lower import lower
from ir.plan import Generate, Pass, Plan, Pool, Update
from ir.rules import check
from ir.systems import load_cluster

ENGINES = Generate(pool="rollout", tp=4, pp=2, concurrency=64, memory_percent=80, prefill_tokens=2048, precision="fp8")
APART = Plan(
    pools=(Pool(name="rollout", devices=16), Pool(name="train", devices=8)),
    generate=ENGINES,
    old_logprob=Pass(pool="train", micro_batch=4),
    update_actor=Update(pool="train", dp=8, micro_batch=4),
    sync="broadcast",
)
FREE = job(kl=0.0)


def made(plan: Plan = APART, cluster: str = "dgx-h100:32") -> Production:
    return production(FREE, plan, None, cluster)


# vLLM


def test_engine_arguments() -> None:
    files = vllm_args.write(made())
    found = json.loads(files["engine_args.json"])
    assert found == {
        "model": "Qwen/Qwen2.5-7B-Instruct", "tensor_parallel_size": 4, "pipeline_parallel_size": 2,
        "gpu_memory_utilization": 0.8, "max_num_seqs": 64, "max_model_len": 4096, "enable_chunked_prefill": True,
        "max_num_batched_tokens": 2112, "enable_prefix_caching": True, "enable_sleep_mode": False, "seed": 0,
        "quantization": "fp8",
    }  # fmt: skip
    assert "To be started 2 times, each on 8 devices of its own." in files["engine_args.reasons.txt"]
    assert "tensor_parallel_size = 4: plan: generate.tp" in files["engine_args.reasons.txt"]


def test_a_cache_for_the_longest_sequences_and_whole_prompts() -> None:
    engine = Generate(pool="rollout", tp=2, concurrency=8)
    found = json.loads(vllm_args.write(made(msgspec.structs.replace(APART, generate=engine)))["engine_args.json"])
    # 28 layers x 4 KV heads x 128 x 2 of 2 bytes, of 8 sequences of 4096 tokens, over 2 devices.
    assert found["kv_cache_memory_bytes"] == 28 * 4 * 128 * 2 * 2 * 8 * 4096 // 2
    assert (found["enable_chunked_prefill"], found["max_num_batched_tokens"]) == (False, 4096)
    assert "gpu_memory_utilization" not in found


def test_engines_that_share_experts_are_one_of_several_data_parallel_ranks() -> None:
    plan = colocated(
        update={"dp": 16, "micro_batch": 1}, reference_logprob=Pass(pool="all", micro_batch=1),
        old_logprob=Pass(pool="all", micro_batch=1),
        generate=Generate(pool="all", tp=2, ep=8, concurrency=64, memory_percent=50),
    )  # fmt: skip
    found = json.loads(vllm_args.write(production(JOBS["moe"], plan, "vllm-args"))["engine_args.json"])
    assert (found["enable_expert_parallel"], found["data_parallel_size"], found["enable_sleep_mode"]) == (True, 4, True)
    part = msgspec.structs.replace(plan, generate=Generate(pool="all", tp=4, ep=2, concurrency=64, memory_percent=50))
    with pytest.raises(InputError, match="experts-over-whole-engines"):
        check(part, setting(JOBS["moe"], "vllm-args"))


def test_the_script_serves_with_the_same_arguments() -> None:
    script = vllm_args.write(made())["serve.sh"]
    body = script.partition("arguments=(\n")[2].partition("\n)\n")
    words = [word for line in body[0].splitlines() for word in shlex.split(line, comments=True)]
    assert words[:4] == ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]
    assert "--no-enable-sleep-mode" in words and "--enable-chunked-prefill" in words
    assert body[2].strip().startswith("vllm serve Qwen/Qwen2.5-7B-Instruct ")


# Ray


def test_a_submission() -> None:
    found = json.loads(ray_job.launch(made(), "bash ../slime/run.sh")["submission.json"])
    assert found["entrypoint"] == "bash ../slime/run.sh"
    assert found["metadata"]["plan"] == APART.identity and found["metadata"]["predicted"] == "predicted: 9 s a step"
    assert found["runtime_env"] == {"env_vars": {"PYTHONUNBUFFERED": "1"}}


def test_a_rayjob_has_a_node_as_its_head_and_the_others_as_workers() -> None:
    found = yaml.safe_load(ray_job.write(made())["rayjob.yaml"])
    cluster = found["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (found["kind"], found["metadata"]["name"], workers["replicas"]) == ("RayJob", "grpo-test", 2)
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert found["spec"]["entrypoint"] == "python tune.py run plan.toml job.toml"


def test_part_of_a_node_and_devices_of_another_maker() -> None:
    half = msgspec.structs.replace(
        APART, pools=(Pool(name="rollout", devices=2), Pool(name="train", devices=2)),
        generate=Generate(pool="rollout", concurrency=8, memory_percent=50), update_actor=Update(pool="train", dp=2, micro_batch=4),
    )  # fmt: skip
    cluster = yaml.safe_load(ray_job.write(made(half, "mi300x:8"))["rayjob.yaml"])["spec"]["rayClusterSpec"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": 4} and cluster["workerGroupSpecs"] == []


# Slurm


def test_a_batch_script(tmp_path: Path) -> None:
    script = slurm.launch(made(), "bash 'my run.sh'")["job.sbatch"]
    (tmp_path / "job.sbatch").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sbatch")], check=True)
    directives = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives == ["job-name=grpo-test", "nodes=3", "ntasks-per-node=1", "gpus-per-node=8"]
    assert "srun --overlap --nodes=2 --ntasks=2 --exclude" in script and "= 3 ]" in script
    assert shlex.split(script.splitlines()[-1]) == ["on_head", "bash", "-c", "bash 'my run.sh'"]


def test_groups_of_devices_are_components_of_a_heterogeneous_job() -> None:
    cluster = load_cluster("h20:16+dgx-h100:8")
    mixed = msgspec.structs.replace(
        APART, pools=(Pool(name="rollout", devices=16), Pool(name="train", devices=8, group=1))
    )
    script = slurm.write(Production(plan=mixed, rpeg=lower(FREE, mixed), cluster=cluster))["job.sbatch"]
    assert script.count("#SBATCH hetjob") == 1 and "--het-group=1 --overlap --nodes=1" in script
    assert "SLURM_JOB_NODELIST_HET_GROUP_0" in script


def test_processor_cores_are_no_devices_to_ask_for() -> None:
    of = made()
    cores = replace(of, cluster=_on_cores(of))
    assert "gpus-per-node" not in slurm.write(cores)["job.sbatch"]
    assert "resources" not in ray_job.write(cores)["rayjob.yaml"]


def _on_cores(of: Production) -> object:
    group = of.cluster.groups[0]
    return msgspec.structs.replace(
        of.cluster, groups=(msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, kind="cpu")),)
    )


@pytest.mark.parametrize(
    ("text", "name"), [("GRPO Qwen2.5_7B", "grpo-qwen2-5-7b"), ("--", "job"), ("a" * 60, "a" * 40), ("é-1", "1")]
)
def test_labels(text: str, name: str) -> None:
    assert label(text) == name


# Formats


def test_a_comment_does_not_touch_a_long_line() -> None:
    assert commented("x" * 100, "why") == "x" * 100 + "  # why"
    assert commented("x", "why").index("#") == 88


def test_small_numbers_are_numbers_in_yaml() -> None:
    assert yaml.safe_load(as_yaml([], [entry("a.rate", 1e-06, "why"), entry("a.share", 0.5, "")])) == {
        "a": {"rate": 1e-06, "share": 0.5}
    }


def test_what_is_exported_along_is_started(tmp_path):
    exporters = [EXPORTERS["slurm"], EXPORTERS["verl"]]
    files = [str(file.relative_to(tmp_path)) for file in write_exports(made(), exporters, tmp_path)]
    assert files == ["verl/run.sh", "slurm/job.sbatch"]
    assert (tmp_path / "verl" / "run.sh").stat().st_mode & 0o100
    assert "bash verl/run.sh" in (tmp_path / "slurm" / "job.sbatch").read_text()
