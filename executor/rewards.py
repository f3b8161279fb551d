"""From responses to rewards, and from the rewards of a group to its advantages."""

from __future__ import annotations

from collections.abc import Sequence

from executor.grpo import group_advantages
from executor.records import Finding, Row
from executor.tasks import prompts, verify
from ir.job import Workload


def reward(workload: Workload, group: int, completion: str) -> float:
    """Reward in [0, 1] of a response to the prompt with that index."""
    (prompt,) = prompts(workload, first=group, count=1)
    score = verify(prompt, completion)
    return float(score >= 1.0) if workload.full_marks else score


def advantages(rows: Sequence[Row]) -> list[Finding]:
    """The advantage of every row within its group; each row must have its reward."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.sample.group, []).append(row)
    return [
        Finding(key=row.sample.key, advantage=float(advantage))
        for members in groups.values()
        for row, advantage in zip(members, group_advantages([_reward_of(r) for r in members]), strict=True)
    ]


def _reward_of(row: Row) -> float:
    assert row.reward is not None
    return row.reward
