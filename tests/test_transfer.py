"""How new weights reach the engines: seconds by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from framework_plans import changed
from test_examples import FOLDER

from analytic.fit import machine_of, setup
from analytic.transfer import changed_bytes, compared_seconds, point_to_point_seconds, sync_seconds
from ir.batch import batch_of
from ir.cluster import Link
from ir.job import Job, load_job
from ir.plan import Fusions, Generate, Plan, Pool, Update
from ir.systems import load_cluster

H100 = machine_of(load_cluster("dgx-h100:32").groups[0])
DENSE, EXPERTS = (load_job(FOLDER / name / "job.toml") for name in ("grpo-qwen2.5-7b", "grpo-qwen3-235b"))
APART = Plan(
    pools=(Pool(name="rollout", devices=16), Pool(name="train", devices=16)),
    generate=Generate(pool="rollout", tp=2, concurrency=64, memory_percent=80),
    update_actor=Update(pool="train", dp=16, zero=2, micro_tokens=4096),
    fusions=Fusions(rollout_logprob=True),
    sync="broadcast",
)


def seconds(of: Job, method: str, devices: tuple[int, int] = (16, 16), **sections: Any) -> float:
    """Of a plan on nodes of 8 H100, with so many devices that generate and that train."""
    pools = tuple(Pool(name=name, devices=n) for name, n in zip(("rollout", "train"), devices, strict=True))
    plan = msgspec.structs.replace(changed(APART, **sections), pools=pools, sync=method)
    return float(sync_seconds(setup(of, load_cluster(f"dgx-h100:{sum(devices)}")), batch_of([plan]))[0])


@pytest.mark.parametrize(
    ("trainers", "engines", "sent"),
    [
        # An engine's rank is the bottleneck: its quarter of 64 GB.
        (8, 1, 16e9),
        # Few trainers: each sends its quarter to one engine.
        (2, 1, 32e9),
        # To two engines directly it would be 64 GB; one passes 32 pieces on to the other.
        (2, 2, 33e9),
        # A chain of 16: 15 pieces more than for one engine.
        (2, 16, 47e9),
    ],
)
def test_engines_pass_pieces_on(trainers: float, engines: float, sent: float) -> None:
    places = np.array([trainers]), np.array([4.0]), np.array([engines])
    found = point_to_point_seconds(np.array([64e9]), *places, np.array([50e9]))
    assert found == pytest.approx(sent / (0.55 * 50e9))


def test_a_broadcast_takes_as_long_to_many_engines_as_to_one() -> None:
    few, many = (seconds(DENSE, "broadcast", (engines, 16)) for engines in (8, 64))
    assert few == pytest.approx(many)


def test_changed_values_and_their_places() -> None:
    """3 % of 50 G values, of 2 bytes and a place of 4 each; old weights come and new ones go over the host's link."""
    assert changed_bytes(H100, np.array([100e9])) == pytest.approx(9e9)
    assert compared_seconds(H100, np.array([11e9])) == pytest.approx(22e9 / H100.device.host_link)


def test_changes_by_hand() -> None:
    """Qwen2.5-7B, 7.616 G values in 28 x 9 + 3 tensors: a rank compares a sixteenth; 1.37 GB go at 5 GB/s, with a quarter
    of a millisecond a tensor; the pause, and half of the weights copied at 0.4 of the memory's bandwidth."""
    size, device = 7_615_616_512 * 2.0, H100.device
    found, copied = 2.0 * size / 16 / device.host_link, size / 2 / (0.4 * device.memory_bandwidth)
    sent = size * 0.09 / 5e9 + (28 * 9 + 3) * 2.5e-4
    assert seconds(DENSE, "delta") == pytest.approx(0.8 + copied + found + sent)


def test_more_trainers_find_changes_faster_and_engines_do_not_matter() -> None:
    assert seconds(DENSE, "delta", (16, 32), update_actor={"dp": 32}) < seconds(DENSE, "delta")
    assert seconds(DENSE, "delta", (64, 16)) == pytest.approx(seconds(DENSE, "delta"))


@pytest.mark.parametrize("of", [DENSE, EXPERTS])
def test_changes_go_faster_than_whole_weights_and_files_slower_than_a_network(of: Job) -> None:
    assert seconds(of, "delta") < seconds(of, "broadcast")
    assert seconds(of, "delta") < seconds(of, "delta-disk") < seconds(of, "disk")


def test_a_slow_link_between_groups_makes_whole_weights_wait() -> None:
    """15.2 GB over eight links of 0.5 GB/s each, or 9 % of that."""
    cluster = load_cluster("dgx-h100:8+l40s:4")
    slow = msgspec.structs.replace(cluster, between=Link(latency_s=1e-4, bandwidth=0.5e9))
    pools = (Pool(name="rollout", devices=4, group=1), Pool(name="train", devices=8))
    plan = changed(msgspec.structs.replace(APART, pools=pools), update_actor={"dp": 8})

    def over(method: str) -> float:
        return float(sync_seconds(setup(DENSE, slow), batch_of([msgspec.structs.replace(plan, sync=method)]))[0])

    size = 7_615_616_512 * 2.0
    assert over("broadcast") > size / (8 * 0.5e9)
    assert over("delta") < 0.5 * over("broadcast")


def test_a_node_that_holds_both_pools_needs_no_network() -> None:
    assert seconds(DENSE, "delta", (4, 4), update_actor={"dp": 4}) < seconds(DENSE, "delta")
