"""Figures against measured kernels and links, and what their forms must obey."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accuracy_kernels import SETS
from numpy.typing import NDArray

from analytic import comm
from analytic.device import overlapped
from analytic.exchange import Exchange, distinct, exchange_seconds, reached
from analytic.fit import machine_of
from analytic.grids import Axis, Grid, grid, kernel_facts
from analytic.kernels import decode_attention_seconds, gemm_closed, gemm_seconds
from analytic.layers import Forward, Routing, Spread, Work, forward, ulysses_seconds
from analytic.setup import Machine
from ir.known_models import known_config
from ir.model import ModelShape, shape_from_config
from ir.systems import KNOWN_DEVICES, known_device, system

DATA = Path(__file__).parent / "data"
Array = NDArray[np.float64]


def machine(name: str, devices: int = 8) -> Machine:
    return machine_of(system(name, devices, where="test").groups[0])


def model(name: str) -> ModelShape:
    return shape_from_config(known_config(name, where="test"), where="test")


def spread(fp8: bool = False, **degrees: int) -> Spread:
    columns = {name: np.array([degrees.get(name, 1)]) for name in ("tp", "pp", "cp", "ep", "etp", "dp")}
    return Spread(**columns, shard=np.array([0]), fp8=np.array([fp8]))


def work(tokens: float, length: float = 2048.0) -> Work:
    return Work(tokens=np.array([tokens]), squares=np.array([tokens * length]), head_tokens=np.array([tokens]))


@pytest.mark.parametrize(
    ("name", "mean", "median"),
    [
        ("gemm_bf16", 0.065, 0.045),
        ("gemm_bf16_small", 0.065, 0.042),
        ("gemm_fp8", 0.062, 0.035),
        ("prefill", 0.055, 0.035),
        ("decode", 0.073, 0.038),
        ("mla_prefill", 0.05, 0.035),
        ("mla_decode", 0.073, 0.047),
        ("experts", 0.19, 0.10),
        ("collectives", 0.06, 0.034),
        ("collectives_int8", 0.063, 0.037),
        ("engine_all_reduce", 0.12, 0.04),
        ("ep_alltoall", 0.03, 0.02),
    ],
)
def test_held_out_shapes_are_met(name: str, mean: float, median: float) -> None:
    found = SETS[name](DATA)
    assert found is not None
    figures = found.figures()
    assert float(figures["mean"]) < mean
    assert float(figures["median"]) < median
    assert float(figures["mean"]) < 0.65 * float(figures["baseline_mean"]), "a constant rate is far off"


def test_every_table_is_of_a_known_device() -> None:
    names = {known_device(name, where="test").name for name in KNOWN_DEVICES}
    tables = kernel_facts()["tables"]
    assert set(tables) <= names
    assert all(grid(f"gemm/{table}/bf16") is not None for table in tables.values())
    assert {name for name in names if name not in tables} == {"MI300X", "MI325X", "MI355X"}, "none were measured"


def test_a_grid_is_linear_in_logarithms_and_flat_beyond_its_edges() -> None:
    made = Grid((Axis.of([0.0, 1.0, 2.0]), Axis.of([0.0, 3.0])), np.log([[1.0, 2.0], [4.0, 8.0], [4.0, 8.0]]))
    x, y = np.array([1.0, 2.0, 2.0**0.5, 1e9, 1e-9]), np.array([1.0, 8.0, 1.0, 1e9, 1e-9])
    assert made.factor(x, y).tolist() == pytest.approx([1.0, 8.0, 2.0, 8.0, 1.0])
    assert made.factor(x, 8.0).tolist() == pytest.approx([2.0, 8.0, 4.0, 8.0, 2.0]), "a number takes an axis away"
    assert made.factor(2.0, 1.0) == pytest.approx(4.0)
    uneven = Grid((Axis.of([0.0, 1.0, 4.0]),), np.log([1.0, 2.0, 16.0]))
    assert uneven.factor(np.array([2.0, 4.0, 1e9])).tolist() == pytest.approx([2.0, 4.0, 16.0])


def test_products_by_device() -> None:
    m = np.array([1.0, 256.0, 8192.0])
    h100, h200, mi = machine("dgx-h100"), machine("dgx-h200"), machine("mi300x")
    seconds = gemm_seconds(h100, m, 8192.0, 8192.0)
    rate = 2 * m * 8192**2 / seconds
    assert 0.6 < rate[2] / 989e12 < 0.9, "a large product nears the peak"
    assert 0.5 < 2 * 8192**2 / seconds[0] / 3.35e12 < 0.95, "a single row streams the weights"
    assert gemm_seconds(h200, m, 8192.0, 8192.0)[0] < seconds[0]
    assert gemm_seconds(h100, m, 8192.0, 8192.0, "fp8")[2] < 0.75 * seconds[2]
    no_table = gemm_seconds(mi, m, 8192.0, 8192.0)
    assert no_table == pytest.approx(gemm_closed(mi, m, 8192.0, 8192.0)), "MI300X has p = 2 and no table"


def test_decode_attention_reads_the_cache() -> None:
    h100, dense, latent = machine("dgx-h100"), model("Qwen/Qwen2.5-7B-Instruct"), model("deepseek-ai/DeepSeek-V3")
    batch, length = np.array([256.0]), np.array([8192.0])
    read = 256 * 8192 * dense.kv_bytes_per_token(2)
    alone = decode_attention_seconds(h100, dense, 1, batch, length)[0]
    assert 0.6 < read / alone / 3.35e12 < 1.0
    assert decode_attention_seconds(h100, dense, 4, batch, length)[0] == pytest.approx(alone / 4, rel=0.15)
    repeated = decode_attention_seconds(h100, dense, 8, batch, length)[0]
    assert repeated > 0.85 * alone / 4, "four KV heads cannot be divided by eight"
    few = decode_attention_seconds(h100, latent, 8, np.array([8.0]), length)[0]
    more = decode_attention_seconds(h100, latent, 16, np.array([8.0]), length)[0]
    assert more > 0.7 * few, "every rank reads the whole latent"
    window = replace(dense, windows=(1024,) * dense.layers)
    assert decode_attention_seconds(h100, window, 1, batch, length)[0] < alone / 5


def test_parts_of_a_forward_pass() -> None:
    h100, dense = machine("dgx-h100"), model("Qwen/Qwen2.5-7B-Instruct")
    one = forward(h100, dense, spread(), work(16384.0))
    assert 0.5 < 2 * dense.active_parameters * 16384 / one.kernels[0] / 989e12 < 0.8
    assert 0 < one.attention[0] < 0.2 * one.kernels[0]
    assert 0 < one.head[0] < 0.2 * one.kernels[0]
    assert one.compute[0] + one.memory[0] == pytest.approx(one.kernels[0])
    assert one.memory[0] < 0.25 * one.kernels[0]
    decode = forward(h100, dense, spread(), work(8.0, 0.0))
    assert decode.memory[0] > 0.8 * decode.kernels[0], "few tokens stream the weights"
    assert forward(h100, dense, spread(tp=8), work(16384.0)).kernels[0] > one.kernels[0] / 8
    nothing = forward(h100, dense, spread(), work(0.0))
    assert nothing.seconds[0] == 0.0


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "hgx-b200", "gb200-nvl72", "mi300x", "rtx4090"])
def test_every_system_prices_every_kind_of_model(name: str) -> None:
    for shape in (model("Qwen/Qwen3-30B-A3B"), model("deepseek-ai/DeepSeek-V3"), model("google/gemma-3-27b-it")):
        for routing in (Routing(), Routing(engine=True), Routing(imbalance=1.0)):
            one = forward(machine(name, 8), shape, spread(tp=2, cp=2, ep=4, dp=2), work(4096.0), routing)
            assert np.isfinite(one.seconds).all()
            assert (one.kernels > 0).all()
            assert (one.collectives > 0).all()


def test_routing_of_experts() -> None:
    h100, shape = machine("dgx-h100", 64), model("Qwen/Qwen3-30B-A3B")

    def seconds(tokens: float, routing: Routing, **degrees: int) -> Forward:
        return forward(h100, shape, spread(**degrees), work(tokens), routing)

    uneven, even = (seconds(65536.0, r, ep=8, dp=8) for r in (Routing(), Routing(imbalance=1.0)))
    assert 1.05 < uneven.kernels[0] / even.kernels[0] < 1.34
    few = [seconds(4.0, r, ep=8, dp=8).kernels[0] for r in (Routing(), Routing(imbalance=1.0))]
    assert few[0] == few[1], "few tokens are bound by weights"
    quick, plain = (seconds(64.0, r, ep=8, dp=8) for r in (Routing(engine=True), Routing()))
    assert quick.collectives[0] < 0.7 * plain.collectives[0], "engines exchange few tokens at low latency"
    wide = seconds(8192.0, Routing(), ep=64, dp=64)
    near = seconds(8192.0, Routing(), ep=8, dp=64)
    assert wide.collectives[0] > 2 * near.collectives[0], "across nodes"


def test_exchanges() -> None:
    assert distinct(1, 8) == 1.0
    assert distinct(8, 1) == pytest.approx(1.0)
    assert distinct(64, 8) == pytest.approx(64 * (1 - (63 / 64) ** 8))
    one = Exchange(tokens=np.array([4096.0]), hidden=7168, experts_per_token=8, combine=False, value_bytes=1.0)
    measured = {8: 0.491e-3, 16: 0.81e-3, 32: 1.85e-3, 64: 6.2e-3}
    for ranks, seconds in measured.items():
        where, limited = machine("dgx-h200", max(ranks, 8)), replace(one, groups=8, groups_per_token=4)
        assert exchange_seconds(where, limited, np.array([ranks]))[0] == pytest.approx(seconds, rel=0.15)
    assert exchange_seconds(machine("dgx-h200"), one, np.array([1]))[0] == 0.0


@pytest.mark.parametrize(
    ("nodes", "groups", "chosen", "expected"),
    [
        # 8 experts are expected to lie on 5.25 of 8 nodes; in 4 of 8 groups, a node each, on 4 at most.
        (8, 1, 1, 8 * (1 - (7 / 8) ** 8)),
        (8, 8, 4, 4.0),
        # Two groups a node, of which 4 may lie on any 4 nodes: no limit.
        (4, 8, 4, 4 * (1 - (3 / 4) ** 8)),
        # Two nodes a group.
        (16, 8, 2, 4.0),
        (16, 8, 4, 16 * (1 - (15 / 16) ** 8)),
    ],
)
def test_nodes_that_a_token_goes_to(nodes: int, groups: int, chosen: int, expected: float) -> None:
    one = Exchange(
        tokens=np.array([4096.0]), hidden=7168, experts_per_token=8, combine=False, groups=groups,
        groups_per_token=chosen,
    )  # fmt: skip
    assert reached(one, nodes) == pytest.approx(expected)
    assert reached(replace(one, low_latency=True), nodes) == pytest.approx(distinct(nodes, 8))


def test_groups_of_experts_spare_the_network() -> None:
    """4 of 5.25 nodes over 8; on one node nothing is spared."""
    free = Exchange(tokens=np.array([8192.0]), hidden=7168, experts_per_token=8, combine=True)
    limited = replace(free, groups=8, groups_per_token=4)
    far, near = machine("dgx-h200", 64), machine("dgx-h200")
    ratio = exchange_seconds(far, limited, np.array([64])) / exchange_seconds(far, free, np.array([64]))
    assert 4 / 5.26 < ratio[0] < 0.85
    assert exchange_seconds(near, limited, np.array([8])) == exchange_seconds(near, free, np.array([8]))


def test_collectives_between_and_beyond_fits() -> None:
    levels, size = machine("dgx-h100").levels, np.full(4, 64e6)
    by_ranks = comm.collective_seconds(levels, "all_gather", size, np.array([2, 4, 6, 8]))
    assert (np.diff(by_ranks) > 0).all()
    rack = machine("gb200-nvl72", 72).levels
    wide = comm.collective_seconds(rack, "all_gather", 1e9, np.array([72]))[0]
    assert 71 / 72 * 1e9 / wide == pytest.approx(570e9, rel=0.25), "a rack is one domain of fast links"


def test_collectives_over_the_network() -> None:
    levels = machine("dgx-h100", 1024).levels
    sizes = np.array([16e6, 256e6, 4e9])
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        rate = [
            comm.traffic(op, n) * sizes / comm.collective_seconds(levels, op, sizes, np.full(3, n)) for n in (16, 128)
        ]
        assert (np.diff(rate, axis=1) > 0).all(), "small messages wait for latency"
        assert (rate[1] < rate[0]).all(), "more so over many nodes"
        assert 0.75 < rate[0][2] / (8 * 50e9) < 0.95
    rail = comm.collective_seconds(levels, "all_gather", 1e9, np.array([16]), 8)[0]
    assert rail == pytest.approx(15 / 16 * 1e9 / 47e9, rel=0.05), "a group on one rail has one card"
    assert comm.nodes_of(levels, 16, 1) == 2
    assert comm.nodes_of(levels, 16, 8) == 16


ENGINES: tuple[comm.Own, ...] = ("trtllm", "vllm")


def test_engines_have_their_own_all_reduce() -> None:
    levels, size, eight = machine("dgx-h100").levels, np.array([64e3, 256e6]), np.array([8, 8])
    library = comm.collective_seconds(levels, "all_reduce", size, eight)
    own = comm.collective_seconds(levels, "all_reduce", size, eight, engine="vllm")
    assert own[0] < 0.6 * library[0]
    assert own[1] == library[1]


def test_which_engine_reduces_fastest_depends_on_the_ranks() -> None:
    levels, size = machine("hgx-b200").levels, np.array([2e6])
    pair, eight = (
        [comm.collective_seconds(levels, "all_reduce", size, np.array([n]), engine=engine)[0] for engine in ENGINES]
        for n in (2, 8)
    )
    assert pair[0] < 0.6 * pair[1], "TensorRT-LLM's, over two"
    assert eight[0] > 1.2 * eight[1], "vLLM's, over eight"


def test_overlap() -> None:
    assert overlapped(np.array([3.0]), np.array([1.0]), 0.5)[0] == 3.5
    levels = machine("dgx-h100", 64).levels
    assert comm.overlap_of(levels, np.array([8, 16, 2]), np.array([1, 1, 8])).tolist() == [0.5, 0.93, 0.93]


def test_what_levels_take_of_products_adds_up() -> None:
    """16 ranks on two nodes: of a byte, 7/8 go over 362 GB/s inside and 15/16 of an eighth over 47 GB/s outside; the
    former take half of their time from products, the latter 7 %."""
    levels = machine("dgx-h100", 64).levels
    found = comm.collective_overlap(levels, np.array([8, 16, 2, 1]), np.array([1, 1, 8, 1]))
    inside, outside = 7 / 8 / 362, 15 / 16 / 8 / 47
    both = 1 - (0.5 * inside + 0.07 * outside) / outside
    assert found.tolist() == pytest.approx([0.5, both, 0.93, 0.5])


def test_context_parallelism() -> None:
    h100, shape = machine("dgx-h100", 64), model("meta-llama/Llama-3.1-70B-Instruct")
    long, at = work(131072.0, 131072.0), spread(tp=8, cp=4)
    ring = (
        forward(h100, shape, at, long).collectives - forward(h100, shape, spread(tp=8), work(131072.0 / 4)).collectives
    )
    assert 0 < ring[0] < forward(h100, shape, at, long).attention[0], "hidden under a long core but for a part"
    assert ulysses_seconds(h100, shape, at, np.array([32768.0]))[0] > 0
    assert ulysses_seconds(h100, shape, spread(tp=8), np.array([32768.0]))[0] == 0.0


def test_few_bytes_across_nodes_as_measured() -> None:
    """All-reduces over two nodes of 8 A100 (microsoft/vidur, data/profiling/network): nothing was fitted to them."""
    sizes, measured = np.array([2048.0, 26624.0, 59392.0, 108544.0]), np.array([65e-6, 77e-6, 81e-6, 115e-6])
    levels = machine("dgx-a100", 16).levels
    found = comm.collective_seconds(levels, "all_reduce", sizes, np.full(4, 16))
    assert np.abs(found / measured - 1.0) == pytest.approx(np.zeros(4), abs=0.35)
    assert np.abs(found / measured - 1.0).mean() <= 0.15
    # Large ones go round a ring as before: 15/8 of a gigabyte over the cards of a node.
    large = comm.collective_seconds(levels, "all_reduce", np.array([1e9]), np.full(1, 16))[0]
    assert large == pytest.approx(15 / 8 * 1e9 / (8 * 23.5e9), rel=0.3)


def test_a_tree_grows_with_the_logarithm_of_the_nodes() -> None:
    few = np.array([1024.0])
    levels = machine("dgx-h100", 128).levels
    two, four, eight = (comm.collective_seconds(levels, "all_reduce", few, np.array([8 * n]))[0] for n in (2, 4, 8))
    assert four - two == pytest.approx(eight - four, rel=0.05)
    assert four - two == pytest.approx(2 * levels[-1].latency_s, rel=0.05)
