"""verl configurations read as jobs and plans."""

from __future__ import annotations

import pytest

from executor.imports.verl import read
from ir.errors import InputError

BASE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": "256",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
    "data.max_prompt_length": "1024",
    "data.max_response_length": "3072",
    "actor_rollout_ref.model.path": "$HOME/models/Qwen3-8B",
    "actor_rollout_ref.rollout.n": "8",
    "actor_rollout_ref.actor.use_dynamic_bsz": "True",
}


def text(**changes: str | None) -> str:
    """Overrides, one a line; `__` stands for a dot, and A for actor_rollout_ref."""
    values: dict[str, str | None] = BASE | {
        key.replace("__", ".").replace("A.", "actor_rollout_ref."): value for key, value in changes.items()
    }
    return "\n".join(f"{key}={value}" for key, value in values.items() if value is not None)


def test_defaults_are_those_of_verl() -> None:
    found = read(text(), where="x.txt")
    assert (found.nodes, found.per_node) == (1, 8)
    assert found.plan.describe() == (
        "all 8 k=0 gen[tp2 x256 50% chunk7936] old[z3 16384tok] actor[dp8 z3 16384tok re-full] reward-early"
    )
    assert found.job.models.actor.name == "Qwen/Qwen3-8B"
    assert found.job.workload.minibatches == 4
    assert found.job.algorithm.name == "grpo"


def test_yaml_is_read_as_overrides_are() -> None:
    document = """
algorithm: {adv_estimator: grpo}
data: {train_batch_size: 256, max_prompt_length: 1024, max_response_length: 3072}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B}
  rollout: {n: 8, log_prob_use_dynamic_bsz: "${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"}
  actor: {ppo_mini_batch_size: 64, use_dynamic_bsz: true, ppo_micro_batch_size: null}
"""
    pytest.importorskip("yaml")
    assert read(document, where="x.yaml").plan == read(text(), where="x.txt").plan


def test_the_v1_trainer_apart() -> None:
    """Generation one step ahead by default, within a threshold of eight versions that it does not reach."""
    apart = {
        "trainer__v1__trainer_mode": "separate_async",
        "A__rollout__nnodes": "1",
        "A__rollout__n_gpus_per_node": "4",
        "trainer__n_gpus_per_node": "4",
        "A__rollout__checkpoint_engine__backend": "nccl",
    }
    found = read(text(**apart), where="x.txt")
    assert (found.nodes, found.per_node) == (1, 8)
    assert found.plan.describe().startswith("rollout 4 + train 4 k=1~ broadcast")
    assert "staleness 1: generation runs so many steps ahead; single responses may be older" in found.assumed
    deeper = apart | {
        "trainer__v1__separate_async__num_warmup_batches": "3",
        "trainer__v1__sampler__max_off_policy_threshold": "3",
    }
    assert read(text(**deeper), where="x.txt").plan.staleness == 2
    with pytest.raises(
        InputError, match=r"parameter_sync_step: must be data.train_batch_size / ppo_mini_batch_size = 4, got 2"
    ):
        read(text(**apart, trainer__v1__separate_async__parameter_sync_step="2"), where="x.txt")


def test_the_fully_async_recipe() -> None:
    """A step is what is trained between two syncs: 64 prompts x 2 batches x 4."""
    keys = {
        "async_training__staleness_threshold": "0.5",
        "async_training__require_batches": "2",
        "A__hybrid_engine": "False",
        "rollout__nnodes": "2",
        "data__train_batch_size": "0",
    }
    found = read(text(**keys), where="x.txt")
    workload = found.job.workload
    assert (workload.prompts_per_step, workload.minibatches) == (512, 8)
    assert found.plan.describe().startswith("rollout 16 + train 8 k=1~ broadcast")
    assert found.plan.fusions.rollout_logprob
    assert found.devices == 24


def test_the_one_step_off_recipe() -> None:
    found = read(text(A__hybrid_engine="False", A__rollout__nnodes="1"), where="x.txt")
    assert (found.plan.staleness, found.plan.in_flight, found.plan.sync) == (1, False, "broadcast")


@pytest.mark.parametrize(
    ("backend", "sync", "told"),
    [("nccl", "broadcast", False), ("delta_sharded", "delta", False), ("mooncake", "broadcast", True)],
)
def test_how_weights_are_sent(backend: str, sync: str, told: bool) -> None:
    keys = {"A__hybrid_engine": "False", "A__rollout__nnodes": "1", "A__rollout__checkpoint_engine__backend": backend}
    found = read(text(**keys), where="x.txt")
    assert found.plan.sync == sync
    assert any("read as a broadcast" in note for note in found.assumed) == told


def test_older_spellings_of_micro_batches() -> None:
    """Sequences of all replicas together, not of each."""
    old = {
        "A__actor__use_dynamic_bsz": None,
        "A__actor__ppo_micro_batch_size": "32",
        "A__rollout__log_prob_micro_batch_size": "64",
    }
    plan = read(text(**old), where="x.txt").plan
    assert plan.old_logprob is not None
    assert (plan.update_actor.micro_batch, plan.old_logprob.micro_batch) == (4, 8)


def test_megatron_and_its_uneven_stages() -> None:
    keys = {
        "model_engine": "megatron",
        "A__actor__megatron__pipeline_model_parallel_size": "8",
        "A__actor__megatron__override_transformer_config__num_layers_in_last_pipeline_stage": "8",
        "A__actor__megatron__override_transformer_config__recompute_granularity": "full",
        "A__actor__megatron__param_offload": "True",
    }
    found = read(text(**keys), where="x.txt")
    update = found.plan.update_actor
    assert (update.pp, update.dp, update.zero, update.recompute, update.offload) == (8, 1, 0, "full", "all")
    assert any("division of the layers" in note for note in found.assumed)
    assert any("param_offload without optimizer_offload" in note for note in found.assumed)


def test_a_critic_by_sequences_is_a_warning() -> None:
    keys = {
        "algorithm__adv_estimator": "gae",
        "critic__model__path": "Qwen/Qwen3-8B",
        "critic__use_dynamic_bsz": "False",
        "critic__ppo_micro_batch_size_per_gpu": "4",
        "critic__model__fsdp_config__param_offload": "True",
        "critic__model__fsdp_config__optimizer_offload": "True",
    }
    found = read(text(**keys), where="x.txt")
    assert found.plan.update_critic is not None
    assert found.plan.update_critic.micro_batch == 4
    assert found.plan.update_critic.offload == "all"
    assert any("V1 trainer" in note and "packs" in note for note in found.assumed)


def test_what_cannot_be_is_brought_to_the_nearest() -> None:
    found = read(text(A__rollout__max_num_seqs="2048", A__actor__ppo_max_token_len_per_gpu="3000"), where="x.txt")
    assert found.plan.generate.concurrency == 512
    assert found.plan.update_actor.micro_tokens == 4096
    assert "generate.concurrency 512: an engine has no more in flight, of max_num_seqs 2048" in found.assumed


def test_keys_that_nothing_reads_are_told() -> None:
    found = read(text(A__actor__entropy_coeff="0.1", trainer__logger="['console','wandb']"), where="x.txt")
    assert found.assumed[-1] == "not part of a job or plan: actor_rollout_ref.actor.entropy_coeff, trainer.logger"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__nnodes": "$NNODES"}, r"x.txt: trainer.nnodes: must be a whole number, got '\$NNODES'"),
        ({"trainer__v1__trainer_mode": "colocate_async"}, "trainer_mode: must be sync or separate_async"),
        ({"model_engine": "veomni"}, "model_engine: must be dp or fsdp"),
        ({"algorithm__adv_estimator": "tree"}, "algorithm.adv_estimator: must be one of gae"),
        ({"A__actor__ppo_mini_batch_size": "100"}, "must divide data.train_batch_size = 256, got 100"),
        ({"A__actor__use_dynamic_bsz": "False"}, "ppo_micro_batch_size_per_gpu: must be given"),
        (
            {"A__actor__use_dynamic_bsz": "False", "A__actor__ppo_micro_batch_size": "many"},
            "ppo_micro_batch_size: must be a whole number, got 'many'",
        ),
        ({"A__rollout__disaggregation__enabled": "True"}, "disaggregation.enabled: must be false"),
        ({"A__actor__fsdp_config__ulysses_sequence_parallel_size": "3"}, "degrees that divide the 8 devices, got 3"),
        ({"A__model__path": "/data/some-model"}, "must be a known model"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text(**changes), where="x.txt")
