"""Prompts, worked solutions and rewards of a workload, from reasoning-gym.

A prompt depends on the workload's seed and its own index only, so any process can
draw any range and all of them see the same data. A prompt is plain data and can be
sent to a worker; the data set's own verifier is found again there by name.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, takewhile
from math import gcd
from typing import Any, cast

import msgspec

from ir.errors import InputError
from ir.job import Task, Workload

with warnings.catch_warnings():
    # Importing reasoning-gym reads files of its own that it never closes.
    warnings.simplefilter("ignore", ResourceWarning)
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

DATASET_SIZE = 1_000_000
"""Entries of each data set; they are generated when asked for, and repeat after that many prompts."""

DEMONSTRATED = ("chain_sum",)
"""Data sets that worked solutions exist for."""

_WORDING_SAMPLE = 256
"""Questions per task that words are collected from: templates are few, so that finds them all."""

_GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio, modulo 1, fill [0, 1) evenly over every range of indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question and what its data set needs to score an answer."""

    index: int
    """Position in the workload's endless list of prompts."""
    dataset: str
    question: str
    entry_json: str
    """The reasoning-gym entry."""


def prompts(workload: Workload, *, first: int, count: int) -> list[Prompt]:
    """The prompts with indices `first` to `first + count - 1`, mixed over the tasks by weight.

    Tasks are chosen by systematic sampling: every step holds its exact share of each task, up to one prompt, so
    that steps differ by their answers and not by the mix they happened to draw.

    Raises:
        InputError: there is no task, or one names no data set, or parameters that the data set refuses.
    """
    if not workload.tasks:
        raise InputError("workload.tasks", "must name at least one data set to be run")
    sources = [_source(task, workload.seed, position) for position, task in enumerate(workload.tasks)]
    weights = [task.weight for task in workload.tasks]
    bounds = [total / sum(weights) for total in accumulate(weights)]
    period = workload.distinct_prompts
    indices = [index if period is None else index % period for index in range(first, first + count)]
    chosen = [_task_at(_point(workload, index), bounds) for index in indices]
    return [
        _prompt(index, workload.tasks[task].dataset, sources[task]) for index, task in zip(indices, chosen, strict=True)
    ]


def wording(workload: Workload, pieces: str) -> tuple[list[str], list[str]]:
    """The parts of the questions' words that match `pieces`, and what all questions of a task begin with."""
    parts: set[str] = set()
    openings: set[str] = set()
    for task in workload.tasks:
        alone = msgspec.structs.replace(workload, tasks=(task,))
        split = [prompt.question.split() for prompt in prompts(alone, first=0, count=_WORDING_SAMPLE)]
        parts.update(part for question in split for word in question for part in re.findall(pieces, word))
        shared = takewhile(lambda words: len(set(words)) == 1, zip(*split, strict=False))
        openings.add(" ".join(words[0] for words in shared))
    return sorted(parts), sorted(openings - {""})


def verify(prompt: Prompt, completion: str) -> float:
    """Reward in [0, 1]: the data set's score of the text between the last <answer> and </answer>.

    0.0 when there is no such text.
    """
    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    return float(_scorer(prompt.dataset)(answer, json.loads(prompt.entry_json)))


def demonstration(prompt: Prompt) -> str:
    """A worked solution, ending in <answer>...</answer>, that `verify` gives 1.0.

    Raises:
        InputError: the prompt's data set has no worked solutions.
    """
    if prompt.dataset not in DEMONSTRATED:
        raise InputError(
            "workload.tasks",
            f"a warm start needs data sets with worked solutions ({', '.join(DEMONSTRATED)})",
            repr(prompt.dataset),
        )
    return running_totals(json.loads(prompt.entry_json)["metadata"]["expression"])


def running_totals(expression: str) -> str:
    """Work out a chain of + and - term by term: `5 + 9 - 7` is `5+9=14;14-7=7;<answer>7</answer>`."""
    first, *rest = expression.split()
    total, steps = int(first), ""
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + (int(term) if operator == "+" else -int(term))
        steps += f"{before}{operator}{term}={total};"
    return f"{steps}<answer>{total}</answer>"


def _prompt(index: int, dataset: str, source: Any) -> Prompt:
    entry = source[index % DATASET_SIZE]
    return Prompt(
        index=index,
        dataset=dataset,
        question=entry["question"],
        entry_json=json.dumps(entry, default=str),
    )


def _point(workload: Workload, index: int) -> float:
    """Where in [0, 1) a prompt falls: a step's points lie evenly, in a mixed order, shifted from step to step."""
    step, position = divmod(index, workload.prompts_per_step)
    size = workload.prompts_per_step
    stride = min((a for a in range(1, size + 1) if gcd(a, size) == 1), key=lambda a: abs(a - size * _GOLDEN))
    shift = (_derived_seed(workload.seed, "mix") / 2**32 + step * _GOLDEN) % 1.0
    return (position * stride % size + shift) / size


def _task_at(point: float, bounds: list[float]) -> int:
    """The task whose share of [0, 1) holds `point`; rounding may leave the last bound below 1."""
    return next((task for task, bound in enumerate(bounds) if point < bound), len(bounds) - 1)


def _source(task: Task, seed: int, position: int) -> Any:
    where = f"workload.tasks[{position}]"
    for key in ("seed", "size"):
        if key in task.params:
            raise InputError(f"{where}.params", f"must not set `{key}`, which the workload sets", task.params[key])
    params = json.dumps(task.params, sort_keys=True, default=str)
    return _dataset(task.dataset, params, _derived_seed(seed, f"task {position}"), where)


@lru_cache(maxsize=64)
def _dataset(name: str, params: str, seed: int, where: str) -> Any:
    if name not in reasoning_gym.factory.DATASETS:
        raise InputError(f"{where}.dataset", "must be a data set of reasoning-gym", repr(name))
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=DATASET_SIZE, **json.loads(params))
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"{where}.params", f"must suit reasoning-gym's {name} ({error})", params) from error


@lru_cache(maxsize=64)
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    return cast(Callable[[str, dict[str, Any]], float], reasoning_gym.get_score_answer_fn(dataset))


def _derived_seed(seed: int, purpose: str) -> int:
    """A seed in [0, 2**32) for one purpose. reasoning-gym adds an entry's index to its seed, so
    neighbouring seeds would make data sets that are shifted copies of each other."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:4], "big")
