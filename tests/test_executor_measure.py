"""Measuring a device: the code of accelerators on small tensors of a core, and how figures become a document."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from executor.kernels import GRIDS, Grids, expert_loads, measure_kernels, multiplies, precisions
from executor.known import known_as, seed
from executor.links import hidden_share
from executor.measure import device_of, level_of
from executor.microbench import Accelerator, DeviceFigures, measure_accelerator, merge_figures
from executor.timing import median_seconds
from ir.cluster import Cluster, CollectivePoint, Device, Group, Host, KernelPoint
from ir.documents import read_document, write_document
from ir.systems import KNOWN_DEVICES, known_device

CPU = torch.device("cpu")
SMALL = Grids(
    products=((1, 64, 64), (64, 64, 128)),
    prefill=((1, 16, 2, 8), (2, 32, 2, 8)),
    decode=((1, 32, 2, 2, 8), (4, 64, 2, 2, 8)),
    experts=((4, 32, 16, 16),),
    rotated_bytes=1 << 16,
    traffic_values=1 << 12,
    copies=(1 << 12, 1 << 14, 1 << 16),
    budget_s=0.0,
)
HOST = Host(
    decode_step_s=1e-3, decode_layer_s=1e-4, decode_sequence_s=1e-6, forward_s=1e-3, forward_layer_s=1e-4,
    train_s=1e-3, train_layer_s=1e-4, optimizer_s=1e-4, optimizer_layer_s=1e-5,
)  # fmt: skip
KERNELS = (
    KernelPoint(kind="product", precision="bf16", sizes=(4096, 4096, 4096), seconds=200e-6),
    KernelPoint(kind="product", precision="bf16", sizes=(1, 4096, 4096), seconds=20e-6),
    KernelPoint(kind="product", precision="fp16", sizes=(4096, 4096, 4096), seconds=100e-6),
    KernelPoint(kind="product", precision="fp8", sizes=(4096, 4096, 4096), seconds=125e-6),
    KernelPoint(kind="prefill", precision="bf16", sizes=(1, 2048, 32, 128), seconds=100e-6),
    KernelPoint(kind="decode", precision="bf16", sizes=(16, 2048, 8, 4, 128), seconds=70e-6),
    KernelPoint(kind="launch", precision="bf16", sizes=(1,), seconds=5e-6),
)


def figures(name: str, gigabytes: float = 80.0) -> DeviceFigures:
    about = Accelerator(
        kind="cuda",
        name=name,
        memory_bytes=round(gigabytes * 1e9),
        processors=100,
        cache_bytes=50_000_000,
        host_link=50e9,
        kernels=KERNELS,
    )
    return DeviceFigures(memory_bandwidth=2e12, host=HOST, accelerator=about)


@pytest.fixture(scope="module")
def measured() -> DeviceFigures:
    return measure_accelerator(CPU, SMALL)


def test_an_accelerator_measures_all_kernels_of_its_grids(measured: DeviceFigures) -> None:
    assert measured.accelerator is not None
    found = {(point.kind, point.sizes) for point in measured.accelerator.kernels}
    assert found == {
        ("product", (1, 64, 64)),
        ("product", (64, 64, 128)),
        ("prefill", (1, 16, 2, 8)),
        ("prefill", (2, 32, 2, 8)),
        ("decode", (1, 32, 2, 2, 8)),
        ("decode", (4, 64, 2, 2, 8)),
        ("experts", (4, 8, 32, 16, 16)),
        ("experts", (4, 32, 32, 16, 16)),
        ("launch", (1,)),
    }
    assert measured.memory_bandwidth > 1e6 and measured.accelerator.host_link > 1e6
    assert measured.host.forward_layer_s > 0


def test_what_was_measured_is_a_document(measured: DeviceFigures, tmp_path: Path) -> None:
    device = device_of(measured, "cuda", 2, 0)
    level = level_of(2, (), call_s=1e-3, bandwidth=1e9, overlap=0.5)
    group = Group(name="here", device=device, levels=(level,))
    cluster = Cluster(name="c", fingerprint="f", groups=(group,), call_s=0.0, process_start_s=0.0)
    write_document(tmp_path / "cluster.toml", cluster)
    assert read_document(tmp_path / "cluster.toml", Cluster) == cluster


def test_a_known_device_keeps_the_tables_and_takes_what_was_measured_outright() -> None:
    device, known = device_of(figures("NVIDIA H100 80GB HBM3"), "cuda", 8, 0), known_device("h100", where="")
    assert (device.name, device.gemm, device.peak_flops) == (known.name, known.gemm, known.peak_flops)
    assert (device.memory_bandwidth, device.host_link, device.host) == (2e12, 50e9, HOST)
    assert (device.kernels, device.processors) == (KERNELS, 100)


def test_an_unknown_device_starts_from_the_best_that_was_seen() -> None:
    device = device_of(figures("NVIDIA X1"), "cuda", 8, 0)
    assert device.gemm is not None and device.name == "NVIDIA X1" and device.bytes_per_value == 2
    assert device.gemm.flops == pytest.approx(2 * 4096**3 / 200e-6)
    assert device.gemm.launch_s == 20e-6
    assert device.peak_flops == pytest.approx({"bf16": 2 * 4096**3 / 200e-6, "fp8": 2 * 4096**3 / 125e-6})
    assert device.attention_flops == pytest.approx(2 * 32 * 128 * 2048**2 / 100e-6)
    assert device.kv_bandwidth == pytest.approx(2 * 2 * 16 * 2048 * 8 * 128 / 70e-6)


@pytest.mark.parametrize(
    ("name", "gigabytes", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "h100"),
        ("NVIDIA H100 PCIe", 85.0, None),
        ("NVIDIA H100 NVL", 100.0, None),
        ("NVIDIA H200", 150.0, "h200"),
        ("NVIDIA H20", 102.0, "h20"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85.0, "a100-80"),
        ("NVIDIA GH200 480GB", 102.0, "gh200"),
        ("NVIDIA GH200 144G HBM3e", 154.0, "gh200-144"),
        ("NVIDIA GB200", 198.0, "gb200"),
        ("NVIDIA L40S", 48.0, "l40s"),
        ("NVIDIA GeForce RTX 4090", 25.4, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", 25.4, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.0, None),
        ("NVIDIA RTX A6000", 51.0, "rtx-a6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 102.0, "rtx-pro-6000"),
        ("AMD Instinct MI300X", 206.0, "mi300x"),
        ("Tesla V100-SXM2-16GB", 17.0, None),
    ],
)
def test_drivers_names_of_known_devices(name: str, gigabytes: float, key: str | None) -> None:
    assert known_as(name, round(gigabytes * 1e9)) == key


def test_every_known_device_is_found_by_its_own_key() -> None:
    for key in KNOWN_DEVICES:
        assert known_as(key.replace("-", " "), known_device(key, where="").memory_bytes) == key


def test_workers_agree_on_medians_and_leave_out_what_one_had_no_room_for() -> None:
    three = [figures("NVIDIA X1"), figures("NVIDIA X1"), figures("NVIDIA X1")]
    about = three[2].accelerator
    assert about is not None
    slower = tuple(msgspec.structs.replace(point, seconds=9 * point.seconds) for point in KERNELS[1:])
    three[2] = replace(three[2], memory_bandwidth=1e12, accelerator=replace(about, kernels=slower, memory_bytes=7))
    merged = merge_figures(three)
    assert merged.memory_bandwidth == 2e12 and merged.accelerator is not None
    assert merged.accelerator.kernels == KERNELS[1:] and merged.accelerator.memory_bytes == 7


def test_a_core_is_described_by_what_the_model_of_a_core_uses() -> None:
    core = DeviceFigures(memory_bandwidth=1e10, host=HOST, attention_flops=1e10, kv_bandwidth=1e9)
    with pytest.raises(ValueError, match="exactly one of `matmul` and `gemm`"):
        device_of(core, "cpu", 2, 1 << 20)


def test_loads_of_experts_add_up() -> None:
    assert expert_loads(4, 8, 32) == [8, 8, 8, 8]
    assert expert_loads(4, 32, 32) == [32, 0, 0, 0]
    loads = expert_loads(32, 512, 4096)
    assert sum(loads) == 4096 and loads == sorted(loads, reverse=True) and abs(loads[0] - 512) <= 1


def test_a_core_multiplies_in_float32_only_by_choice() -> None:
    assert precisions(CPU) == ("fp32",)
    assert multiplies(CPU, "bf16")


def test_the_grids_are_those_that_the_model_needs() -> None:
    assert len(GRIDS.products) == 42 and len(GRIDS.prefill) == 12 and 12 <= len(GRIDS.decode) <= 16
    assert {m for m, _, _ in GRIDS.products} == {1, 16, 64, 256, 1024, 4096, 16384}


def test_what_is_hidden_of_two_activities() -> None:
    assert hidden_share(1.0, 2.0, 2.0) == 1.0
    assert hidden_share(1.0, 2.0, 3.0) == 0.0
    assert hidden_share(1.0, 2.0, 2.5) == 0.5
    assert hidden_share(1.0, 2.0, 9.0) == 0.0


def test_messages_say_what_a_level_is_where_they_were_measured() -> None:
    def point(op: str, size: int, seconds: float) -> CollectivePoint:
        return msgspec.convert({"op": op, "ranks": 2, "bytes": size, "seconds": seconds}, CollectivePoint)

    broadcast = (point("broadcast", 1024, 1e-4), point("broadcast", 1 << 20, 1e-3))
    level = level_of(2, broadcast, call_s=1.0, bandwidth=1.0)
    assert (level.latency_s, level.bandwidth) == (1e-4, (1 << 20) / 1e-3)
    level = level_of(2, (*broadcast, point("send", 1024, 1e-5), point("send", 1 << 20, 1e-4)), call_s=1, bandwidth=1)
    assert (level.latency_s, level.bandwidth, level.overlap) == (1e-5, (1 << 20) / 1e-4, None)
    assert level_of(1, (), call_s=1e-3, bandwidth=5e9).bandwidth == 5e9


_RANK = """
import sys, torch, torch.distributed as dist
from executor.links import measure_collective, measure_overlap
rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
device = torch.device("cpu")
for op in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"):
    for size in (1 << 10, 1 << 14):
        print(op, size, measure_collective(op, size, dist.group.WORLD, device), flush=True)
print("overlap", 0, measure_overlap("all_reduce", 1 << 16, dist.group.WORLD, device), flush=True)
dist.destroy_process_group()
"""


def test_all_collectives_between_two_processes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = Path(__file__).resolve().parent.parent
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(rank), port], stdout=subprocess.PIPE, text=True, cwd=root)
        for rank in range(2)
    ]
    lines = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for words in lines:
        values = {(op, int(size)): float(value) for op, size, value in zip(*[iter(words)] * 3, strict=True)}
        assert len(values) == 13 and 0.0 <= values.pop(("overlap", 0)) <= 1.0
        assert all(1e-6 < value < 1.0 for value in values.values())


def test_a_median_counts_no_warm_up() -> None:
    calls = []
    assert median_seconds(lambda: calls.append(time.sleep(0.0 if calls else 0.1)), budget_s=0.0) < 0.05
    assert len(calls) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured_within_its_time_and_below_its_peak() -> None:
    begun = time.monotonic()
    found = measure_accelerator(torch.device("cuda"))
    assert time.monotonic() - begun < 120.0
    assert found.accelerator is not None
    kinds = {point.kind for point in found.accelerator.kernels}
    assert kinds == {"product", "prefill", "decode", "experts", "launch"}
    device: Device = seed(found, found.accelerator)
    peak = device.peak_flops.get("bf16", float("inf"))
    for point in found.accelerator.kernels:
        if point.kind == "product" and point.precision == "bf16":
            m, k, n = point.sizes
            assert point.seconds > 1e-6 and 2 * m * k * n / point.seconds < 1.05 * peak
    assert found.memory_bandwidth > 1e11 and found.accelerator.host_link > 1e9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_multiplies_in_fp8_is_faster_at_it() -> None:
    device = torch.device("cuda")
    if not multiplies(device, "fp8"):
        pytest.skip("no products in fp8 here")
    grids = replace(SMALL, products=((4096, 8192, 8192),), budget_s=0.1)
    points = {p.precision: p.seconds for p in measure_kernels(device, grids) if p.kind == "product"}
    assert points["fp8"] < points["bf16"]
