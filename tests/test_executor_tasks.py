"""Prompts do not depend on how they are drawn; every worked solution passes its verifier."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import msgspec
import pytest

from executor.tasks import demonstration, prompts, running_totals, verify
from ir.errors import InputError
from ir.job import Task, Workload

SHORT = Task(dataset="chain_sum", weight=3.0, params={"min_terms": 2, "max_terms": 4, "max_digits": 2})
LONG = Task(dataset="chain_sum", weight=1.0, params={"min_terms": 10, "max_terms": 20, "allow_negation": True})


def workload(*tasks: Task, seed: int = 7) -> Workload:
    return Workload(
        tasks=tasks or (SHORT, LONG),
        prompts_per_step=4,
        samples_per_prompt=2,
        max_prompt_tokens=64,
        max_response_tokens=64,
        seed=seed,
    )


def test_prompts_do_not_depend_on_the_range_drawn() -> None:
    whole = prompts(workload(), first=0, count=40)
    parts = prompts(workload(), first=0, count=7) + prompts(workload(), first=7, count=33)
    assert whole == parts
    assert [prompt.index for prompt in whole] == list(range(40))


def test_prompts_depend_on_the_seed() -> None:
    questions = {prompt.question for prompt in prompts(workload(), first=0, count=40)}
    others = {prompt.question for prompt in prompts(workload(seed=8), first=0, count=40)}
    assert len(questions & others) < 10


def test_prompts_can_be_sent_to_a_worker() -> None:
    prompt = prompts(workload(), first=3, count=1)[0]
    assert pickle.loads(pickle.dumps(prompt)) == prompt


@pytest.mark.parametrize("first", [0, 1000])
def test_every_range_holds_its_share_of_each_task(first: int) -> None:
    drawn = prompts(workload(), first=first, count=80)
    terms = [json.loads(prompt.entry_json)["metadata"]["num_terms"] for prompt in drawn]
    counts = Counter(count <= 4 for count in terms)
    assert abs(counts[True] - 60) <= 3


def test_every_demonstration_is_right() -> None:
    for prompt in prompts(workload(), first=0, count=200):
        assert verify(prompt, demonstration(prompt)) == 1.0


@pytest.mark.parametrize(
    ("expression", "solution"),
    [
        ("7", "<answer>7</answer>"),
        ("5 + 9 - 7", "5+9=14;14-7=7;<answer>7</answer>"),
        ("-3 + -8", "-3+-8=-11;<answer>-11</answer>"),
    ],
)
def test_running_totals(expression: str, solution: str) -> None:
    assert running_totals(expression) == solution


def test_wrong_and_absent_answers_earn_nothing() -> None:
    prompt = prompts(workload(SHORT), first=0, count=1)[0]
    answer = int(json.loads(prompt.entry_json)["answer"])
    for completion in ("", str(answer), f"<answer>{answer}", "<answer></answer>", f"<answer>{answer + 1000}</answer>"):
        assert verify(prompt, completion) == 0.0


@pytest.mark.parametrize(
    ("task", "where"),
    [
        (Task(dataset="no_such_data_set"), r"workload\.tasks\[1\]\.dataset"),
        (Task(dataset="chain_sum", params={"no_such_key": 1}), r"workload\.tasks\[1\]\.params"),
        (Task(dataset="chain_sum", params={"min_terms": 5, "max_terms": 2}), r"workload\.tasks\[1\]\.params"),
        (Task(dataset="chain_sum", params={"seed": 1}), r"workload\.tasks\[1\]\.params"),
    ],
)
def test_a_wrong_task_is_named(task: Task, where: str) -> None:
    with pytest.raises(InputError, match=where):
        prompts(workload(SHORT, task), first=0, count=1)


def test_a_data_set_without_solutions_is_refused() -> None:
    other = msgspec.structs.replace(workload(), tasks=(Task(dataset="gcd"),))
    prompt = prompts(other, first=0, count=1)[0]
    with pytest.raises(InputError, match="worked solutions"):
        demonstration(prompt)
