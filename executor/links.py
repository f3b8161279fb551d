"""Collectives, measured by the ranks of a pool together; every rank of the group must make the same calls."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from executor.timing import Call, event_seconds, median_seconds

REPEATS = 12
"""A fixed count, so that all ranks agree."""

AT_ONCE = 10
"""Collectives that a GPU is asked for at a time, so that the host's time does not count for those that are short."""

LONG_BYTES = 1 << 24
"""Larger ones take so long that it does not count anyway."""

PRODUCT = 4096
"""Rows and columns of the product that a collective is measured beside: it fills a device."""

RATIOS = (0.5, 1.0, 2.0)
"""Seconds of products over those of the collective beside them."""


def measure_collective(op: str, size: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Median seconds of a collective.

    Args:
        op: What is done; `send` is to the next rank, while the one before sends.
        size: Bytes of the whole tensor; for `all_to_all` and `send`, those that a rank sends.
        group: The ranks, the first of the pool.
        device: Where the tensors are.
    """
    call = collective(op, size, group, device)
    if device.type != "cuda":
        return median_seconds(call, budget_s=0.0, at_least=REPEATS)
    number = AT_ONCE if size <= LONG_BYTES else 1

    def several() -> None:
        for _ in range(number):
            call()

    return event_seconds(several, budget_s=0.0, at_least=REPEATS) / number


def collective(op: str, size: int, group: dist.ProcessGroup | None, device: torch.device) -> Call:
    """A call of a collective on tensors of its own."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    part = max(size // 4 // ranks, 1)
    mine, all_parts, others = (torch.zeros(n * part, device=device) for n in (1, ranks, ranks))
    match op:
        case "all_reduce":
            return lambda: dist.all_reduce(all_parts, group=group)
        case "broadcast":
            return lambda: dist.broadcast(all_parts, src=0, group=group)
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(all_parts, mine, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(mine, all_parts, group=group)
        case "all_to_all":
            return lambda: dist.all_to_all_single(others, all_parts, group=group)
    assert op == "send", op
    return lambda: _pass_on(all_parts, others, (rank + 1) % ranks, (rank - 1) % ranks, group)


def _pass_on(
    sent: torch.Tensor, received: torch.Tensor, after: int, before: int, group: dist.ProcessGroup | None
) -> None:
    """Ranks of a group are those of the pool, of which it has the first."""
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
    ):
        work.wait()


def measure_overlap(op: str, size: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Share of the shorter of products and an all-reduce that is hidden under the longer, if both are asked for at
    once: the median over several ratios of the two."""
    assert op == "all_reduce", "what gradients take is what is hidden"
    tensor, a = torch.zeros(size // 4, device=device), _square(device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    def both(count: int) -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        products(count)
        work.wait()

    alone = measure_collective(op, size, group, device)
    each = _seconds(lambda: products(1), device)
    found = []
    for ratio in RATIOS:
        count = max(round(ratio * alone / each), 1)
        together = _seconds(lambda count=count: both(count), device)  # type: ignore[misc]
        found.append(hidden_share(_seconds(lambda count=count: products(count), device), alone, together))  # type: ignore[misc]
    return float(np.median(found))


def hidden_share(x: float, y: float, together: float) -> float:
    """w of `max(x, y) + (1 - w) min(x, y)`, within 0 and 1."""
    return min(max((x + y - together) / min(x, y), 0.0), 1.0)


def _square(device: torch.device) -> torch.Tensor:
    gpu = device.type == "cuda"
    side = PRODUCT if gpu else PRODUCT // 16
    return torch.randn(side, side, device=device, dtype=torch.bfloat16 if gpu else torch.float32)


def _seconds(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        return event_seconds(call, budget_s=0.0, at_least=REPEATS)
    return median_seconds(call, budget_s=0.0, at_least=REPEATS)
