"""The training of plans as DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from framework_plans import JOBS, QWEN, changed, drawn, exported, job, setting, space

from ir.errors import InputError
from ir.plan import Generate, Pass, Plan, Pool, Update
from ir.rules import check

VISIT = Pass(pool="train", micro_batch=8)
PLAN = Plan(
    pools=(Pool(name="rollout", devices=8), Pool(name="train", devices=8)),
    generate=Generate(pool="rollout", tp=2, concurrency=64),
    reward=VISIT,
    reference_logprob=VISIT,
    old_logprob=VISIT,
    values=VISIT,
    update_critic=Update(pool="train", dp=2, cp=4, zero=1, micro_batch=8),
    update_actor=Update(pool="train", dp=8, zero=3, micro_batch=4, recompute="full"),
    sync="broadcast",
)


def configuration(files: dict[str, str], role: str) -> dict[str, Any]:
    found = json.loads(files[f"{role}.json"])
    assert isinstance(found, dict)
    return found


def test_a_file_for_each_trained_model() -> None:
    files = exported(JOBS["ppo-reward"], PLAN, "deepspeed-json")
    assert set(files) == {f"{role}{end}" for role in ("actor", "critic") for end in (".json", ".sh", "-reasons.txt")}
    actor, critic = configuration(files, "actor"), configuration(files, "critic")
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    # A minibatch is 512 sequences.
    assert [actor[key] for key in batches] == [512, 4, 16]
    assert [critic[key] for key in batches] == [512, 8, 32]
    assert actor["zero_optimization"]["stage"] == 3 and critic["zero_optimization"]["stage"] == 1
    assert (critic["sequence_parallel_size"], critic["data_parallel_size"]) == (4, 2)
    assert "tensor_parallel" not in actor and "sequence_parallel_size" not in actor
    assert "--num_nodes 1 " in files["actor.sh"] and "--num_gpus 8 " in files["actor.sh"]
    assert "zero_optimization.stage = 3: plan: update_actor.zero" in files["actor-reasons.txt"]
    assert "# predicted: 9 s a step\n" in files["critic.sh"]


def test_tensor_parallel_devices_are_counted_in_the_batch() -> None:
    plan = changed(PLAN, update_actor={"tp": 2, "dp": 4, "zero": 1})
    found = configuration(exported(JOBS["ppo-reward"], plan, "deepspeed-json"), "actor")
    assert found["tensor_parallel"] == {"autotp_size": 2}
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (1024, 32)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"micro_batch": 0, "micro_tokens": 8192}, "backend-supports-update_actor.micro_tokens"),
        ({"offload": "optimizer"}, "backend-supports-update_actor.offload"),
        ({"dp": 2, "pp": 4, "zero": 0}, "backend-supports-update_actor.pp"),
        ({"dp": 2, "tp": 2, "cp": 2}, "deepspeed-divides-tensors-or-sequences"),
        ({"micro_batch": 24}, "micro-batches-are-even"),
        ({"dp": 1, "cp": 8}, "deepspeed-sequences-divide-the-heads"),
    ],
)
def test_what_it_cannot_run_is_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rf"\(rule {rule}\)"):
        check(changed(PLAN, update_actor=fields), setting(JOBS["ppo-reward"], "deepspeed-json"))


@pytest.mark.parametrize("name", ["grpo", "ppo-reward", "dapo", "gspo", "rloo", "adapters"])
def test_every_plan_of_its_space_is_written(name: str) -> None:
    found = space(JOBS[name], "deepspeed-json", "dgx-h100:16")
    assert found.num_plans > 0
    assert found.space["update_actor.shard"] == (0,), "DeepSpeed 0.19.8 has no MiCS any more"
    for plan in drawn(JOBS[name], "deepspeed-json"):
        files = exported(JOBS[name], plan, "deepspeed-json")
        trained = [update for update in (plan.update_actor, plan.update_critic) if update is not None]
        assert len([file for file in files if file.endswith(".json")]) == len(trained)
        actor = configuration(files, "actor")
        steps = actor["train_micro_batch_size_per_gpu"] * actor["gradient_accumulation_steps"]
        assert actor["train_batch_size"] == steps * plan.update_actor.dp * plan.update_actor.tp


def test_the_model_has_28_heads() -> None:
    """What the refusal of eight ways rests on."""
    assert job(model=QWEN).actor.heads == 28
