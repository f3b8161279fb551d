"""How sequences are divided over ranks and cut into micro-batches, so that padding and waiting are small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank: longest first, dealt there and back, so that counts differ by at most one and tokens
    are about equal."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(order):
        turn, seat = divmod(place, ranks)
        hands[seat if turn % 2 == 0 else ranks - 1 - seat].append(index)
    return hands


def micro_batches(items: Sequence[T], lengths: Sequence[int], size: int) -> list[list[T]]:
    """Items cut into batches of `size`, neighbours in length together, longest first."""
    order = sorted(range(len(items)), key=lambda i: -lengths[i])
    return [[items[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
