"""Launch scripts are read without running them."""

from __future__ import annotations

import pytest

from executor.imports.shell import words
from ir.errors import InputError

SCRIPT = """
#!/usr/bin/env bash
set -x
export VLLM_USE_V1=1   # a comment
NNODES=${NNODES:-2}
n_resp=8
tokens=$((1024 + n_resp * 2))
long=$(( (tokens + 8) / 2 ))
DATA=(
    data.train_batch_size=256  # prompts
    data.max_prompt_length=${tokens}
    # data.dropped=1
)
DATA+=("data.files=['a.parquet', 'b.parquet']")
CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo --config-name=ppo \\
    "${DATA[@]}" \\
    # in between
    trainer.nnodes=$NNODES \\
    data.max_response_length="$long" \\
    model.path=$HOME/models/x "$@" 2>&1 | tee out.log
"""


def test_a_script_with_arrays_sums_and_defaults():
    assert words(SCRIPT, "run.sh") == [
        "--config-name=ppo",
        "data.train_batch_size=256",
        "data.max_prompt_length=1040",
        "data.files=['a.parquet', 'b.parquet']",
        "trainer.nnodes=2",
        "data.max_response_length=524",
        "model.path=$HOME/models/x",
    ]


def test_a_ray_job_submission():
    text = 'ray job submit --address=x \\\n  --runtime-env-json=\'{"working_dir": "/a b"}\' \\\n  -- python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --train.colocate_all'
    assert words(text, "run.sh") == ["--actor.num_nodes", "1", "--train.colocate_all"]


def test_arguments_in_a_here_document():
    text = "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_ppo_ray \\\n  --zero_stage 3 \\\n  --adam_offload\nEOF\n\nif [[ $1 != slurm ]]; then\n    deepspeed --module $training_commands\nfi\n"
    assert words(text, "run.sh") == ["--zero_stage", "3", "--adam_offload"]


def test_the_longest_command_counts():
    text = "python3 prepare.py --data x\npython train.py --a 1 --b 2\n"
    assert words(text, "run.sh") == ["--a", "1", "--b", "2"]


def test_a_plain_list_of_arguments():
    assert words("# origin\na.b=1\nmodel_engine=megatron\n--flag 2 # why\n", "x.txt") == [
        "a.b=1",
        "model_engine=megatron",
        "--flag",
        "2",
    ]


@pytest.mark.parametrize("text", ["", "echo 'open", "ls -l"])
def test_what_launches_nothing_is_refused(text):
    with pytest.raises(InputError):
        words(text, "run.sh")


def test_nothing_of_a_script_is_run(tmp_path):
    words(
        f"x=$(touch {tmp_path}/made)\n`touch {tmp_path}/made`\npython -m m a=1 b=$(touch {tmp_path}/made)\n", "run.sh"
    )
    assert not (tmp_path / "made").exists()


def test_a_list_whose_last_quote_or_escape_does_not_close_is_refused():
    for text in ("a.b=1\nc.d='2\n", "a.b=1\nc.d=\\"):
        with pytest.raises(InputError, match=r"x\.txt: must be a script whose quotes close"):
            words(text, "x.txt")
