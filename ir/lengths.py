"""Token counts of prompts and responses: the forms a document gives them in, and the one table they all become."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ir.errors import InputError
from ir.quantities import PositiveFloat, Share

Quantiles = Annotated[tuple[PositiveFloat, ...], Meta(min_length=2)]

COLUMNS = ("prompt_tokens", "response_tokens")
"""What a file of observed lengths holds, one sequence a row."""

FILE_RULE = "must be a readable Parquet (.parquet) or JSONL (.jsonl) file"


class Lognormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lognormal count of tokens, given by its mean or its median, and cut off at the most tokens allowed."""

    mean: PositiveFloat | None = None
    """Mean in tokens, before it is cut off."""
    median: PositiveFloat | None = None
    """Median in tokens."""
    sigma: PositiveFloat
    """Standard deviation of the logarithm."""

    def __post_init__(self) -> None:
        if (self.mean is None) == (self.median is None):
            raise ValueError("exactly one of `mean` and `median` must be given")

    @property
    def mu(self) -> float:
        """Mean of the logarithm."""
        if self.median is not None:
            return math.log(self.median)
        assert self.mean is not None
        return math.log(self.mean) - self.sigma**2 / 2


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token counts of prompts and of responses: each as quantiles or as a lognormal, or both by a file."""

    prompt: Quantiles | Lognormal | None = None
    response: Quantiles | Lognormal | None = None
    probabilities: tuple[Share, ...] | None = None
    """Where the quantiles are, from 0 to 1; None for even spacing."""
    file: str | None = None
    """Observed lengths, Parquet or JSONL with integer columns prompt_tokens and response_tokens; relative to the
    job file."""
    prompt_share: Share = 0.0
    """Part of the variance of log(response tokens) that the prompt explains."""

    def __post_init__(self) -> None:
        given = [value is not None for value in (self.prompt, self.response)]
        if given != [self.file is None] * 2:
            raise ValueError("either `file` or both of `prompt` and `response` must be given")
        lists = [value for value in (self.prompt, self.response) if isinstance(value, tuple)]
        if not all(_ascends(values) for values in lists):
            raise ValueError("quantiles must not descend")
        p = self.probabilities
        if p is None:
            return
        if not _ascends(p) or len(set(p)) < len(p) or (p[:1], p[-1:]) != ((0.0,), (1.0,)):
            raise ValueError("`probabilities` must ascend from 0 to 1")
        if len(lists) < 2 or any(len(values) != len(p) for values in lists):
            raise ValueError("with `probabilities`, both lists of quantiles must have their length")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileTable:
    """A distribution by its quantile function, linear between the points."""

    probabilities: tuple[float, ...]
    """Ascending from 0 to 1."""
    values: tuple[float, ...]
    """Tokens that a share `probabilities` of the counts do not exceed, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTables:
    """The lengths of a job in the one form that is computed with."""

    prompt: QuantileTable
    response: QuantileTable
    prompt_share: float
    """Part of the variance of log(response tokens) that the prompt explains."""


def tabulate(lengths: Lengths, *, max_prompt_tokens: int, max_response_tokens: int) -> LengthTables:
    """Tables of lengths whose file, if any, was read; nothing is longer than the most tokens allowed."""
    return LengthTables(
        prompt=_table(lengths.prompt, lengths.probabilities, max_prompt_tokens),
        response=_table(lengths.response, lengths.probabilities, max_response_tokens),
        prompt_share=lengths.prompt_share,
    )


def _table(
    form: tuple[float, ...] | Lognormal | None, probabilities: tuple[float, ...] | None, longest: int
) -> QuantileTable:
    assert form is not None, "a file is read when a job is loaded"
    if isinstance(form, Lognormal):
        normal = NormalDist(form.mu, form.sigma)
        # No count is below a token; the last point would lie at infinity. What is cut off anyway must not overflow.
        inside = [min(max(p, 1e-9), 1.0 - 1e-6) for p in GRID]
        logs = [min(max(normal.inv_cdf(p), 0.0), math.log(longest) + 1.0) for p in inside]
        values = [math.exp(log) for log in logs]
        return QuantileTable(probabilities=GRID, values=_capped(values, longest))
    at = probabilities or tuple(np.linspace(0.0, 1.0, len(form)).tolist())
    return QuantileTable(probabilities=at, values=_capped(form, longest))


def _capped(values: Sequence[float], longest: int) -> tuple[float, ...]:
    return tuple(min(float(value), float(longest)) for value in values)


def _tail_grid(half: int) -> tuple[float, ...]:
    """2 x half + 1 probabilities: even steps below the median, and p = 1 - 2^-x in even steps of x above it, because
    the longest of n sequences lies near 1 - 1/n and means are made by the tail."""
    lower = np.linspace(0.0, 0.5, half, endpoint=False)
    upper = 1.0 - 2.0 ** -np.linspace(1.0, 20.0, half)
    return (*lower.tolist(), *upper.tolist(), 1.0)


GRID = _tail_grid(128)
"""Probabilities that a lognormal or a file is tabulated at."""


def read_lengths(lengths: Lengths, directory: Path, *, where: str) -> Lengths:
    """The lengths with the quantiles of what their file holds in its place, unchanged if they name none.

    Raises:
        InputError: the file cannot be read, lacks a column, or holds anything but positive integers.
    """
    if lengths.file is None:
        return lengths
    place = f"{where}: workload.lengths.file"
    prompt, response = _read_columns(directory / lengths.file, place)
    at = np.asarray(GRID)
    return Lengths(
        prompt=tuple(np.quantile(prompt, at).tolist()),
        response=tuple(np.quantile(response, at).tolist()),
        probabilities=GRID,
        prompt_share=lengths.prompt_share,
    )


def _read_columns(path: Path, place: str) -> list[list[int]]:
    readers = {".parquet": _parquet_columns, ".jsonl": _jsonl_columns}
    if path.suffix not in readers:
        raise InputError(place, FILE_RULE, path)
    try:
        columns = readers[path.suffix](path)
    except (OSError, ValueError) as error:
        raise InputError(place, f"{FILE_RULE} ({' '.join(str(error).split())})", path) from error
    for name, values in zip(COLUMNS, columns, strict=True):
        if not values:
            raise InputError(place, "must hold at least one sequence", path)
        if wrong := [value for value in values if not _is_count(value)]:
            raise InputError(place, f"column {name} must hold positive integers", repr(wrong[0]))
    return columns


def _parquet_columns(path: Path) -> list[list[Any]]:
    # Lengths in a file are rare, and pyarrow takes longer to load than everything else here.
    from pyarrow import parquet

    table = parquet.read_table(path)
    return [table.column(name).to_pylist() if name in table.column_names else [None] for name in COLUMNS]


def _jsonl_columns(path: Path) -> list[list[Any]]:
    rows = list(_rows(path.read_text(encoding="utf-8")))
    return [[row.get(name) for row in rows] for name in COLUMNS]


def _rows(text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no object")
            yield row


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _ascends(values: Sequence[float]) -> bool:
    return all(a <= b for a, b in pairwise(values))
