"""Exported plans, read by OpenRLHF's own parser and argument checks. Run by a Python that has openrlhf's files.

The parser lives in the script's `__main__` block, which imports Ray, vLLM and DeepSpeed; stubs stand for them, and the
first of them that the training function calls gives back its arguments. What is checked only on GPUs is checked here.

    python openrlhf_check.py FOLDER    # FOLDER/PLAN/{run.sh,world.json}
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from verdicts import report

STUBS = {
    "ray": ("is_initialized", "get", "init"),
    "ray.util": (),
    "ray.util.placement_group": ("placement_group",),
    "openrlhf.utils": ("get_strategy",),
    "openrlhf.trainer": (),
    "openrlhf.trainer.ray": ("create_vllm_engines",),
    "openrlhf.trainer.ray.launcher": ("RayActorGroup", "ReferenceModelActor", "RewardModelActor"),
    "openrlhf.trainer.ray.ppo_actor": ("PolicyModelActor",),
    "openrlhf.trainer.ray.ppo_critic": ("CriticModelActor",),
}


class Loaded(Exception):
    """All argument checks passed."""


def package() -> Path:
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations is not None, "openrlhf is not installed"
    return Path(spec.submodule_search_locations[0])


def install_stubs(root: Path) -> None:
    for name, functions in STUBS.items():
        module = ModuleType(name)
        # `openrlhf.utils.config` is the real one.
        module.__path__ = [str(root / "utils")] if name == "openrlhf.utils" else []
        for function in functions:
            setattr(module, function, None)
        sys.modules[name] = module
    sys.modules["ray"].is_initialized = reached  # type: ignore[attr-defined]


def reached() -> bool:
    raise Loaded(sys._getframe(1).f_locals["args"])


def arguments(script: str) -> list[str]:
    """The words of the array `arguments=( ... )`."""
    found = re.search(r"^arguments=\(\n(.*?)^\)$", script, re.MULTILINE | re.DOTALL)
    assert found, "run.sh has no array of arguments"
    return shlex.split(found[1], comments=True)


def parse(words: list[str], root: Path) -> Any:
    before, sys.argv = sys.argv, ["train_ppo_ray.py", *words]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runpy.run_path(str(root / "cli" / "train_ppo_ray.py"), run_name="__main__")
    except Loaded as loaded:
        # A setting that the parser changes would not be the plan's any more.
        changed = [line for line in output.getvalue().splitlines() if "Set " in line or "equires" in line]
        assert not changed, changed[0]
        return loaded.args[0]
    except SystemExit as error:
        raise ValueError(output.getvalue().strip().splitlines()[-1]) from error
    finally:
        sys.argv = before
    raise AssertionError("the script ended without training")


def size(role: SimpleNamespace) -> int:
    return role.num_nodes * role.num_gpus_per_node


def used(a: Any, has_ref: bool, has_critic: bool, has_reward: bool) -> int:
    """Devices that `train` reserves: one bundle a device, for every placement group it makes."""
    engines = a.vllm.num_engines * a.vllm.tensor_parallel_size
    together = a.train.colocate_all or a.train.colocate_actor_ref
    total = size(a.actor) + (size(a.ref) if has_ref and not together else 0)
    if not (a.train.colocate_all and not a.train.async_enable):
        total += engines
    if not a.train.colocate_all:
        total += size(a.critic) if has_critic else 0
        shared = has_critic and a.train.colocate_critic_reward
        total += size(a.reward) if has_reward and not shared else 0
    return total


def check_placement(a: Any, world: dict[str, int]) -> None:
    has_ref, has_critic = a.algo.kl.init_coef > 0, bool(a.critic.model_name_or_path)
    has_reward = not a.reward.remote_url
    engines = a.vllm.num_engines * a.vllm.tensor_parallel_size
    if has_ref and (a.train.colocate_all or a.train.colocate_actor_ref):
        same = (a.actor.num_nodes, a.actor.num_gpus_per_node) == (a.ref.num_nodes, a.ref.num_gpus_per_node)
        assert same, "actor and ref differ in size"
    if a.train.colocate_all and not a.train.async_enable:
        assert size(a.actor) == engines, "engines do not fill the shared devices"
    if has_critic and a.train.colocate_critic_reward:
        same = (a.critic.num_nodes, a.critic.num_gpus_per_node) == (a.reward.num_nodes, a.reward.num_gpus_per_node)
        assert has_reward and same, "critic and reward differ in size"
    if a.train.colocate_all:
        others = [a.critic] * has_critic + [a.reward] * has_reward
        assert all(size(other) == size(a.actor) for other in others), "models on one pool differ in size"
    assert used(a, has_ref, has_critic, has_reward) <= world["devices"], "more devices than there are"
    assert not a.train.async_enable or a.train.async_queue_size > 0, "async_queue_size"
    assert 0 < a.vllm.gpu_memory_utilization < 1, "gpu_memory_utilization"


def check_batches(a: Any) -> None:
    """DeepSpeed's arithmetic and the cutting of batches, which are checked on GPUs only."""
    model_parallel = a.ds.ring_attn_size * a.ds.tensor_parallel_size
    sequences = a.rollout.batch_size * a.rollout.n_samples_per_prompt
    trained = [a.actor] + [a.critic] * bool(a.critic.model_name_or_path)
    frozen = [a.ref] * (a.algo.kl.init_coef > 0) + [a.reward] * (not a.reward.remote_url)
    assert sequences % a.train.batch_size == 0, "a step is not whole minibatches"
    assert a.ds.tensor_parallel_size == 1 or a.ds.zero_stage < 3, "weight sync gathers tensor or ZeRO shards, not both"
    assert a.ds.tensor_parallel_size == 1 or a.ds.param_dtype == "bf16", "tensor parallel training needs bf16"
    assert 0 <= a.ds.zero_stage <= 3, "zero_stage"
    for role in trained:
        assert size(role) % model_parallel == 0, "replicas do not fill their devices"
        replicas = size(role) // model_parallel
        assert a.train.batch_size % replicas == 0, "replicas do not divide a minibatch"
        if not a.train.dynamic_batch_enable:
            assert a.train.batch_size % (replicas * a.train.micro_batch_size) == 0, (
                "gradient accumulation is no integer"
            )
            assert sequences % (replicas * a.rollout.micro_batch_size) == 0, "replicas get unlike parts"
    for role in frozen:
        assert size(role) % model_parallel == 0, "replicas do not fill their devices"
        if not a.train.dynamic_batch_enable:
            batches = -(-sequences // a.rollout.micro_batch_size)
            assert batches >= size(role) // model_parallel, "a replica gets no micro-batch"
    if a.train.dynamic_batch_enable:
        assert all(size(a.actor) % size(role) == 0 for role in trained), "the critic's replicas get unlike parts"
        assert all(size(role) <= size(a.actor) for role in frozen), "a replica may get no micro-batch"
    assert not a.ds.enable_sleep or a.ds.zero_stage > 0, "only ZeRO optimizers can be offloaded"
    assert not (a.ref.offload or a.reward.offload) or a.ds.zero_stage == 3, "offload does nothing below stage 3"


def main() -> None:
    root = package()
    install_stubs(root)

    def check(folder: Path, world: dict[str, Any]) -> None:
        a = parse(arguments((folder / "run.sh").read_text()), root)
        check_placement(a, world)
        check_batches(a)

    report(check)


if __name__ == "__main__":
    main()
