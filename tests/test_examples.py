"""Example jobs: each is read, has presets on the cluster it names, and they survive every form a plan has."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from analytic.estimate import estimate
from ir.backends import backend
from ir.batch import batch_of
from ir.documents import read_document, write_document
from ir.graph import Op
from ir.job import load_job
from ir.lower import lower
from ir.plan import Plan
from ir.setting import Setting, setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.presets import presets

FOLDER = Path(__file__).resolve().parent.parent / "examples"

EXAMPLES = {
    "ppo-70b": "alps-gh200:256",
    "grpo-qwen3-235b": "dgx-h100:128",
    "grpo-deepseek-v3": "dgx-h100:512",
    "grpo-qwen2.5-7b": "dgx-a100:8",
    "grpo-qwen2.5-1.5b": "rtx4090:8",
    "dapo-qwen2.5-32b": "dgx-h100:128",
    "agentic-qwen3-8b": "dgx-h200:16",
    "ppo-heterogeneous": "h20:64+dgx-h100:64",
}
"""The cluster that each job is meant for."""

EVERYWHERE = {
    "colocated-sync",
    "disaggregated-sync",
    "one-step-off",
    "async",
    "verl-colocated",
    "verl-separate-async",
    "areal",
    "nemo-rl-on-policy",
}
OPENRLHF = {"openrlhf-colocate-all", "openrlhf-separate"}

PRESETS_OF = {
    "ppo-70b": EVERYWHERE | OPENRLHF | {"nemo-rl-one-step-off", "real", "deepspeed-chat"},
    # Half of the devices cannot hold 18 bytes a parameter, with which NeMo-RL needs 256 to generate apart. OpenRLHF's
    # engines have tensor parallelism only: neither model fits in a node's. ReaL has no experts.
    "grpo-qwen3-235b": {"colocated-sync", "verl-colocated", "nemo-rl-on-policy"},
    "grpo-deepseek-v3": EVERYWHERE | {"nemo-rl-one-step-off"},
    "grpo-qwen2.5-7b": EVERYWHERE | OPENRLHF | {"nemo-rl-one-step-off", "real"},
    "grpo-qwen2.5-1.5b": EVERYWHERE | OPENRLHF | {"nemo-rl-one-step-off", "real"},
    "dapo-qwen2.5-32b": EVERYWHERE,
    "agentic-qwen3-8b": EVERYWHERE | OPENRLHF | {"nemo-rl-one-step-off", "real"},
    "ppo-heterogeneous": EVERYWHERE | OPENRLHF | {"nemo-rl-one-step-off", "real", "deepspeed-chat"},
}


@cache
def setting(name: str) -> Setting:
    return setting_of(load_job(FOLDER / name / "job.toml"), load_cluster(EXAMPLES[name]))


@cache
def plans(name: str) -> dict[str, Plan]:
    return presets(setting(name))


CASES = [(name, preset) for name, found in PRESETS_OF.items() for preset in sorted(found)]


def test_every_example_is_in_the_table() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/job.toml")} == set(EXAMPLES) | {"arithmetic"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_it_is_and_names_its_cluster(name: str) -> None:
    lines = (FOLDER / name / "job.toml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[1] == f"# cluster: {EXAMPLES[name]}"
    job = setting(name).job
    assert job.document.name == name
    assert job.lengths is not None


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_presets_of_the_frameworks_that_can_run_it(name: str) -> None:
    assert set(plans(name)) == PRESETS_OF[name]


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_a_preset_lowers_to_stages_that_fit_their_pools(name: str, preset: str) -> None:
    rpeg = lower(setting(name).job, plans(name)[preset])
    assert {op for stage in rpeg.stages for op in stage.ops} == setting(name).ops
    sizes = {pool.name: pool.devices for pool in rpeg.pools}
    assert all(stage.layout.ranks <= sizes[stage.pool] for stage in rpeg.stages)


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_a_preset_survives_toml_and_arrays(name: str, preset: str, tmp_path: Path) -> None:
    plan = plans(name)[preset]
    write_document(tmp_path / "plan.toml", plan)
    assert read_document(tmp_path / "plan.toml", Plan) == plan
    assert batch_of([plan]).plan(0) == plan


@pytest.mark.parametrize("name", EXAMPLES)
def test_presets_lie_in_the_default_space(name: str) -> None:
    space, batch = default_space(setting(name)), batch_of(list(plans(name).values()))
    decoded = space.decode(space.encode(batch))
    assert [decoded.plan(row) for row in range(len(decoded))] == list(plans(name).values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_presets_fit_in_memory_by_the_model(name: str) -> None:
    job, cluster = setting(name).job, load_cluster(EXAMPLES[name])
    fill = estimate(job, batch_of(list(plans(name).values())), cluster).memory.fill
    # Presets choose their degrees by a rule of thumb, which may use up part of the margin.
    assert dict(zip(plans(name), fill <= 0.97, strict=True)) == dict.fromkeys(plans(name), True)


@pytest.mark.parametrize("trainer", ["torch", "deepspeed", "megatron"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_presets_follow_the_backend_and_lie_in_its_space(name: str, trainer: str) -> None:
    narrowed = setting_of(setting(name).job, load_cluster(EXAMPLES[name]), backend(trainer))
    found = presets(narrowed)
    assert "colocated-sync" in found
    # Their engines size caches by themselves, which the backends' engine does not.
    assert not {"real", "deepspeed-chat"} & set(found)
    batch = batch_of(list(found.values()))
    assert len(default_space(narrowed).encode(batch)) == len(found)


def test_generation_and_training_take_their_own_kind_of_device() -> None:
    plan = plans("ppo-heterogeneous")["disaggregated-sync"]
    assert [(pool.name, pool.devices, pool.group) for pool in plan.pools] == [("rollout", 64, 0), ("train", 64, 1)]
    assert [(pool.name, pool.devices, pool.group) for pool in plans("ppo-heterogeneous")["colocated-sync"].pools] == [
        ("all", 64, 1)
    ]


def test_the_multi_turn_example_has_an_environment_beside_its_engines() -> None:
    rpeg = lower(setting("agentic-qwen3-8b").job, plans("agentic-qwen3-8b")["areal"])
    assert rpeg.stage(Op.GENERATE).ops == (Op.GENERATE, Op.ENVIRONMENT, Op.REWARD)
