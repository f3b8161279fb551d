"""Plans of a batch share work: what is priced once must be what each plan costs alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from analytic.comm import collective_seconds
from analytic.distinct import distinct, grouped, largest
from analytic.estimate import estimate
from ir.job import load_job
from ir.rules import setting_of
from ir.systems import load_cluster
from space.build import default_space
from space.enumerate import legal_space

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

SPANS = (1, 2, 5, 300, 1 << 20, 1 << 31)
"""Of columns: those that a table holds, and those that none does."""


def columns_of(seed: int, num_rows: int, spans: list[int]) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    columns = [rng.integers(-(span // 2), (span + 1) // 2, num_rows).astype(np.int32) for span in spans]
    # Rows repeat, as layouts do.
    rows = rng.integers(0, max(num_rows // 3, 1), num_rows)
    return [column[rows] for column in columns]


@given(st.integers(0, 99), st.sampled_from((1, 7, 5000)), st.lists(st.sampled_from(SPANS), max_size=6))
@settings(max_examples=60, deadline=None)
def test_rows_are_told_apart_as_by_sorting_them(seed: int, num_rows: int, spans: list[int]) -> None:
    columns = columns_of(seed, num_rows, spans)
    table = np.stack([*columns, np.zeros(num_rows, dtype=np.int32)], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    found_first, found_inverse = distinct(columns, num_rows)
    assert found_first.tolist() == first.tolist()
    assert found_inverse.tolist() == inverse.reshape(-1).tolist()


def test_columns_of_any_type_tell_rows_apart() -> None:
    columns = [np.array([0.5, 0.5, 0.25, 0.5]), np.array([True, False, True, True]), np.broadcast_to(np.int32(3), 4)]
    first, inverse = distinct(columns, 4)
    assert first.tolist() == [2, 1, 0]
    assert inverse.tolist() == [2, 1, 0, 2]
    assert [part.tolist() for part in distinct([], 3)] == [[0], [0, 0, 0]]
    assert [part.tolist() for part in distinct([np.zeros(0, dtype=np.int32)], 0)] == [[], []]


def test_rows_by_their_number() -> None:
    found = {number: rows.tolist() for number, rows in grouped(np.array([3, 0, 3, 1, 0]))}
    assert found == {0: [1, 4], 1: [3], 3: [0, 2]}
    assert list(grouped(np.zeros(0, dtype=np.intp))) == []
    assert largest([np.array([1.0, 5.0]), np.array([2.0, 4.0]), np.array([0.0, 6.0])]).tolist() == [2.0, 6.0]


@pytest.mark.parametrize(
    ("example", "system"),
    [("ppo-70b", "alps-gh200:16"), ("grpo-deepseek-v3", "dgx-h100:256"), ("ppo-heterogeneous", "h20:8+dgx-h100:8")],
)
def test_a_plan_costs_in_a_batch_what_it_costs_alone(example: str, system: str) -> None:
    job, cluster = load_job(EXAMPLES / example / "job.toml"), load_cluster(system)
    setting = setting_of(job, cluster)
    # More than are sorted, so that tables are used too.
    batch = legal_space(default_space(setting), setting).sample(3000, np.random.default_rng(0))
    whole = estimate(job, batch, cluster)
    for row in range(0, len(batch), 251):
        alone = estimate(job, batch.part(row, row + 1), cluster)
        assert alone.stage_seconds[0] == pytest.approx(whole.stage_seconds[row], rel=1e-12)
        assert alone.step_seconds[0] == pytest.approx(whole.step_seconds[row], rel=1e-12)
        assert alone.memory.fill[0] == pytest.approx(whole.memory.fill[row], rel=1e-12)
        expected = {role: size[row] for role, size in whole.memory.expected.items()}
        assert {role: size[0] for role, size in alone.memory.expected.items()} == pytest.approx(expected, rel=1e-12)
        present = {name: size[row] for name, size in whole.memory.terms.items() if size[row]}
        assert {n: s[0] for n, s in alone.memory.terms.items() if s[0]} == pytest.approx(present, rel=1e-12)


@pytest.mark.parametrize("system", ["alps-gh200:256", "dgx-h100:512", "gb200-nvl72:144"])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "broadcast", "send"])
def test_groups_of_ranks_do_not_meet(system: str, op: str) -> None:
    levels = load_cluster(system).levels
    ranks, strides, sizes = (
        values.reshape(-1)
        for values in np.meshgrid([1, 2, 3, 4, 8, 12, 64, 128], [1, 2, 4, 16], [1e3, 1e6, 1e9], indexing="ij")
    )
    for engine in (None, "vllm", "sglang", "trtllm"):
        found = collective_seconds(levels, op, sizes, ranks, strides, engine=engine)  # type: ignore[arg-type]
        alone = [
            float(collective_seconds(levels, op, size, n, stride, engine=engine))  # type: ignore[arg-type]
            for size, n, stride in zip(sizes, ranks, strides, strict=True)
        ]
        assert found == pytest.approx(np.array(alone), rel=1e-12)
        assert (found[ranks == 1] == 0).all() and (found[ranks > 1] > 0).all()
