"""How long calls take on a device: medians of repeats, with the host's time or without it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

Call = Callable[[], object]

GRAPH_SECONDS = 1e-3
"""Work in one graph: long enough that its own launch does not count."""
MOST_CALLS = 64
"""Calls in one graph: capturing takes the host some 20 us each."""


def median_seconds(call: Call, *, budget_s: float, at_least: int = 5) -> float:
    """Median seconds of a call, from asking for it until it is done: as many as the budget holds, one to warm up not
    counted."""
    call()
    _wait()
    seconds: list[float] = []
    until = time.perf_counter() + budget_s
    while len(seconds) < at_least or time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        _wait()
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))


def kernel_seconds(calls: Sequence[Call], device: torch.device, *, budget_s: float) -> float:
    """Median seconds of kernels without the host's time.

    Args:
        calls: They do the same on different tensors, so that what one has read is no longer in the cache when its turn
            comes again.
        device: On a GPU the calls are captured in a graph. Elsewhere the host's time is part of a kernel, and only
            the first call counts.
        budget_s: Time for repeats.
    """
    if device.type != "cuda":
        return median_seconds(calls[0], budget_s=budget_s)
    once = _warmed_up(calls)
    number = max(len(calls), min(math.ceil(GRAPH_SECONDS / once), MOST_CALLS))
    many = [calls[i % len(calls)] for i in range(number)]
    try:
        play: Call = _captured(many)
    except RuntimeError:
        # What cannot be captured is asked for one by one: the host's time counts where it is the longer.
        torch.cuda.synchronize()

        def play() -> None:
            for call in many:
                call()

    return event_seconds(play, budget_s=budget_s) / number


def event_seconds(call: Call, *, budget_s: float, at_least: int = 5) -> float:
    """Median seconds between a GPU's beginning and ending what a call asks for, one to warm up not counted."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    torch.cuda.synchronize()
    seconds: list[float] = []
    until = time.perf_counter() + budget_s
    while len(seconds) < at_least or time.perf_counter() < until:
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return float(np.median(seconds))


def _warmed_up(calls: Sequence[Call]) -> float:
    """Seconds of a call once libraries have chosen their kernels; capturing needs them to have done so."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(aside)
    return max(event_seconds(calls[0], budget_s=0.0, at_least=3), 1e-7)


def _captured(calls: Sequence[Call]) -> Call:
    graph = torch.cuda.CUDAGraph()
    # Threads that watch over communicators may look at events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph.replay


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
