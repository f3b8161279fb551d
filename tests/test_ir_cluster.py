"""Clusters: documents of any depth, known devices and systems, and what is refused."""

from __future__ import annotations

import tomllib
from math import prod
from pathlib import Path
from typing import Any

import build
import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from ir.cluster import Cluster, CollectiveFit, Device, Gemm, Group, Level, Link, device_bandwidth
from ir.documents import digest, from_data, plain, read_document, write_document
from ir.errors import InputError
from ir.systems import KNOWN_DEVICES, KNOWN_SYSTEMS, known_device, load_cluster, system

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "ir" / "data"


def level(name: str, size: int, bandwidth: float, links: int = 1) -> Level:
    return Level(name=name, size=size, latency_s=1e-5, bandwidth=bandwidth, links=links)


def through_toml(document: object, kind: type[Any]) -> Any:
    return from_data(tomllib.loads(tomli_w.dumps(plain(document))), kind, where="test")


def shape(cluster: Cluster) -> list[tuple[str, int, int]]:
    return [(found.name, found.size, found.links) for found in cluster.levels]


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_known_devices_are_whole(name: str) -> None:
    device = known_device(name, where="test")
    assert through_toml(device, Device) == device
    assert device.gemm is not None and device.peak_bandwidth is not None and device.kind in ("cuda", "rocm")
    assert device.bytes_per_value == 2 and device.base_memory_bytes == 1_150_000_000
    # What is achieved stays below the data sheet, and the rarer the bits the higher the peak.
    assert device.attention_flops < device.gemm.flops < device.peak_flops["bf16"]
    assert max(device.gemm.bandwidth, device.kv_bandwidth, device.memory_bandwidth) < device.peak_bandwidth
    peaks = [device.peak_flops[p] for p in ("bf16", "fp8", "fp4") if p in device.peak_flops]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("name", KNOWN_SYSTEMS)
@pytest.mark.parametrize("devices", [1, 4, 144])
def test_known_systems_are_whole(name: str, devices: int) -> None:
    cluster = system(name, devices, where="test")
    assert through_toml(cluster, Cluster) == cluster
    assert cluster.num_devices == devices and cluster.is_uniform and cluster.between is None
    assert cluster.name == f"{name}:{devices}" and cluster.groups[0].name == name
    assert all(fit.ranks <= found.size for found in cluster.levels for fit in found.fits)
    rates = [device_bandwidth(cluster.levels, i) for i in range(len(cluster.levels))]
    assert rates == sorted(rates, reverse=True)


def test_the_lists_of_names() -> None:
    assert {"a100-40", "a100-80", "h100", "h200", "gh200", "b200", "b300", "gb200", "gb300"} <= set(KNOWN_DEVICES)
    assert {"h20", "mi300x", "mi325x", "mi355x", "l40s", "rtx4090", "rtx5090", "rtx-a6000"} <= set(KNOWN_DEVICES)
    assert len(KNOWN_DEVICES) == 19
    assert {"dgx-a100", "dgx-h100", "dgx-h200", "hgx-b200", "gb200-nvl72", "mi300x"} <= set(KNOWN_SYSTEMS)
    assert {"alps-gh200", "jupiter", "l40s", "rtx4090", "h20"} <= set(KNOWN_SYSTEMS)


@pytest.mark.parametrize("file", ["devices.toml", "systems.toml"])
def test_every_table_names_its_sources_and_every_source_is_used(file: str) -> None:
    data = tomllib.loads((DATA / file).read_text(encoding="utf-8"))
    tables = [entry for kind in ("devices", "systems", "fits") for entry in data.get(kind, {}).values()]
    assert all(table["source"] and set(table["source"]) <= set(data["sources"]) for table in tables)
    assert all(data["sources"].values())
    named = {key for table in tables for key in table["source"]}
    # Named in comments beside figures that all devices share.
    assert set(data["sources"]) - named <= {"overheads", "launches"}


def test_figures_of_h100() -> None:
    device = known_device("h100", where="test")
    assert device.peak_flops == {"bf16": 989e12, "fp8": 1979e12}
    assert device.memory_bytes == 84_940_000_000 and device.peak_bandwidth == 3.35e12
    assert device.gemm is not None
    assert device.gemm.flops == pytest.approx(0.806 * 989e12) and device.gemm.bandwidth == pytest.approx(2.881e12)
    assert device.gemm.launch_s == pytest.approx(3.5e-6) and device.gemm.p == 2.8
    assert device.attention_flops == pytest.approx(652.74e12) and device.attention_launch_s == pytest.approx(13e-6)
    assert device.kv_bandwidth == pytest.approx(3.015e12) and device.kv_launch_s == pytest.approx(12e-6)
    assert device.host.decode_layer_s == 0.0 and device.host.train_layer_s == 1.8e-4
    assert (device.processors, device.cache_bytes, device.watts) == (132, 50_000_000, 700)
    assert (device.scale_up_link, device.host_link) == (450e9, 64e9)
    assert (device.price_per_hour, device.price_date) == (2.95, "2026-05-20")


def test_figures_of_others() -> None:
    assert known_device("gb200", where="test").host_link == 225e9
    assert known_device("gh200", where="test").host.decode_step_s == pytest.approx(1.3 * 1.5e-3)
    assert known_device("rtx4090", where="test").scale_up_link is None
    assert known_device("gh200", where="test").price_per_hour is None
    assert known_device("mi300x", where="test").kind == "rocm"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alps-gh200:4", [("node", 4, 1)]),
        ("alps-gh200:256", [("node", 4, 1), ("group", 64, 4)]),
        # 512 modules are 128 nodes, more than the 112 of a group: two groups of 64, each with its 256 cards.
        ("alps-gh200:512", [("node", 4, 1), ("group", 64, 4), ("machine", 2, 256)]),
        ("dgx-h100:2", [("node", 2, 1)]),
        ("dgx-h100:128", [("node", 8, 1), ("network", 16, 8)]),
        ("rtx4090:8", [("node", 8, 1)]),
        ("rtx4090:16", [("node", 8, 1), ("network", 2, 1)]),
        ("gb200-nvl72:8", [("tray", 4, 1), ("rack", 2, 4)]),
        ("gb200-nvl72:72", [("tray", 4, 1), ("rack", 18, 4)]),
        ("gb200-nvl72:144", [("tray", 4, 1), ("rack", 18, 4), ("network", 2, 72)]),
    ],
)
def test_levels_from_the_inside_out(text: str, expected: list[tuple[str, int, int]]) -> None:
    cluster = load_cluster(text)
    assert shape(cluster) == expected
    assert cluster.num_devices == int(text.split(":")[1])
    # NVLink reaches through the rack at almost the speed of a tray; elsewhere the innermost level is much the fastest.
    reach = prod(size for name, size, _ in expected if name in ("tray", "rack")) if "nvl72" in text else expected[0][1]
    assert cluster.groups[0].domain == reach


@given(name=st.sampled_from(KNOWN_SYSTEMS), nodes=st.integers(1, 300))
def test_whole_nodes_are_never_lost(name: str, nodes: int) -> None:
    node = system(name, 4096, where="test").groups[0].domain if "nvl72" not in name else 72
    assert system(name, node * nodes, where="test").num_devices == node * nodes


def test_fits_are_those_of_the_sizes_that_there_are() -> None:
    fit = CollectiveFit(op="all_reduce", ranks=8, latency_s=15.6e-6, bandwidth=478e9, p=0.60, table="h100")
    assert fit in system("dgx-h100", 8, where="test").levels[0].fits
    half = system("dgx-h100", 4, where="test").levels[0].fits
    assert {found.ranks for found in half} == {2, 4} and len(half) == 8


def test_a_device_shares_the_links_of_its_member() -> None:
    levels = (level("node", 8, 400e9), level("rack", 2, 50e9, links=8), level("machine", 3, 100e9, links=4))
    assert device_bandwidth(levels, 0) == 400e9
    assert device_bandwidth(levels, 1) == 50e9
    # 16 devices share 4 links of 100 GB/s.
    assert device_bandwidth(levels, 2) == 25e9
    # One card for a box of eight.
    assert device_bandwidth((level("box", 8, 12e9), level("network", 2, 12e9)), 1) == 1.5e9
    # Wide links above do not widen the ones below.
    assert device_bandwidth((level("box", 8, 12e9), level("network", 2, 100e9, links=8)), 1) == 12e9


def test_a_heterogeneous_cluster() -> None:
    cluster = load_cluster("h20:64+dgx-h100:32")
    assert [group.name for group in cluster.groups] == ["h20", "dgx-h100"]
    assert cluster.num_devices == 96 and not cluster.is_uniform
    assert cluster.devices_of("h20") == range(64) and cluster.devices_of("dgx-h100") == range(64, 96)
    assert cluster.device == known_device("h20", where="test") and cluster.levels == cluster.groups[0].levels
    assert through_toml(cluster, Cluster) == cluster
    with pytest.raises(InputError, match="must have the group, one of h20, dgx-h100, got h100"):
        cluster.devices_of("h100")


def test_groups_meet_on_the_slower_network_even_if_each_is_one_node() -> None:
    # A box has one card for eight GPUs: 11.75 / 8 GB/s.
    found = load_cluster("dgx-h100:8+rtx4090:8").between
    assert found == Link(latency_s=24.2e-6, bandwidth=1.46875e9)
    assert load_cluster("dgx-h100:8+mi300x:8").between == Link(latency_s=17.2 / 1e6, bandwidth=47e9)


def test_the_fingerprint_is_that_of_the_content() -> None:
    one, two = load_cluster("dgx-h100:64"), load_cluster("dgx-h100:128")
    assert one.fingerprint == digest({"groups": one.groups, "between": None}) and len(one.fingerprint) == 16
    assert one.fingerprint != two.fingerprint
    assert one.fingerprint == system("dgx-h100", 64, where="test").fingerprint


def test_a_file_may_name_a_known_device(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    cluster = load_cluster("dgx-h100:16")
    data = plain(cluster)
    data["groups"][0]["device"] = "h100"
    path.write_text(tomli_w.dumps(data))
    assert load_cluster(str(path)) == cluster
    data["groups"][0]["device"] = "h10"
    path.write_text(tomli_w.dumps(data))
    with pytest.raises(InputError) as caught:
        load_cluster(str(path))
    assert str(caught.value) == f"{path}: groups[0].device: must be a known device, the closest is h100, got h10"


def test_a_file_may_hold_everything(tmp_path: Path) -> None:
    cluster = build.cluster(devices=4)
    write_document(tmp_path / "measured.toml", cluster)
    assert load_cluster(str(tmp_path / "measured.toml")) == cluster
    assert cluster.num_devices == 4 and cluster.groups[0].name == "test" and cluster.device.gemm is None


def test_the_measured_example() -> None:
    cluster = read_document(ROOT / "examples" / "arithmetic" / "cluster.toml", Cluster)
    assert cluster.fingerprint == "f792d1a8c692" and cluster.num_devices == 2 and cluster.is_uniform
    assert len(cluster.device.matmul) == 42 and len(cluster.device.passes) == 6
    assert cluster.device.memory_bytes == 10_488_965_529 and cluster.levels[0].bandwidth == 2932452729.005421
    assert len(cluster.levels[0].collectives) == 12 and cluster.levels[0].fits == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-h100:12", "dgx-h100:12: must be a multiple of the 8 devices of a node, or fewer, got 12"),
        ("gb200-nvl72:6", "gb200-nvl72:6: must be a multiple of the 4 devices of a tray, or fewer, got 6"),
        ("gb200-nvl72:100", "gb200-nvl72:100: must be a multiple of the 72 devices of a rack, or fewer, got 100"),
        ("dgx-h100:0", "dgx-h100:0: must have at least 1 device, got 0"),
        ("dgx-h10:8", "dgx-h10:8: must be a known system, the closest is dgx-h100, got dgx-h10"),
        ("h20:8+alps:8", "h20:8+alps:8: must be a known system, the closest is alps-gh200, got alps"),
        ("h20:8+h20:8", "cluster h20:8+h20:8: groups: must have different names, got h20, h20"),
        (
            "dgx-h100",
            "cluster: must be a cluster.toml or NAME:DEVICES, as in dgx-h100:64 or h20:64+dgx-h100:64, got dgx-h100",
        ),
        ("absent.toml", "absent.toml: must be a readable file, got No such file or directory"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_cluster(text)
    assert str(caught.value) == message


GEMM = Gemm(flops=1e12, bandwidth=1e11, launch_s=1e-6, p=2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gemm": GEMM}, "device core: must have exactly one of `matmul` and `gemm`, got both"),
        ({"matmul": ()}, "device core: must have exactly one of `matmul` and `gemm`, got neither"),
        ({"peak_flops": {"bf61": 1e12}}, "device core: peak_flops: must be of fp32, bf16, fp8, fp4, got bf61"),
        ({"price_per_hour": 1.0}, "device core: must have both `price_per_hour` and `price_date` or neither"),
    ],
)
def test_devices_that_are_refused(change: dict[str, Any], message: str) -> None:
    device = build.cluster().device
    with pytest.raises(InputError) as caught:
        msgspec.structs.replace(device, **change)
    assert str(caught.value) == message
    with pytest.raises(InputError) as read:
        from_data({**msgspec.to_builtins(device), **msgspec.to_builtins(change)}, Device, where="x.toml")
    assert str(read.value) == f"x.toml: {message}"


def test_too_few_products_are_refused() -> None:
    device = build.cluster().device
    with pytest.raises(InputError, match="device core: must have at least 4 points in `matmul`, got 3"):
        msgspec.structs.replace(device, matmul=device.matmul[:3])


def test_an_error_in_a_file_names_its_place() -> None:
    data = plain(build.cluster())
    data["groups"][0]["device"]["matmul"] = []
    with pytest.raises(InputError) as caught:
        from_data(data, Cluster, where="x.toml")
    assert str(caught.value) == (
        "x.toml: groups[0].device: device core: must have exactly one of `matmul` and `gemm`, got neither"
    )


def test_groups_need_a_link_and_one_group_has_none() -> None:
    cluster, link = build.cluster(), Link(latency_s=1e-5, bandwidth=1e9)
    two = (cluster.groups[0], Group(name="other", device=cluster.device, levels=cluster.levels))
    with pytest.raises(InputError, match="cluster test: must say in `between` what joins its groups, got 2 groups"):
        msgspec.structs.replace(cluster, groups=two)
    with pytest.raises(InputError, match="cluster test: must have several groups where it has `between`, got 1 group"):
        msgspec.structs.replace(cluster, between=link)
    assert msgspec.structs.replace(cluster, groups=two, between=link).num_devices == 4
