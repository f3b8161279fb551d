"""Weights on their way, staleness, bounds, money and error bars: closed forms by hand."""

from __future__ import annotations

import build
import msgspec
import numpy as np
import pytest

from analytic.bounds import bounds
from analytic.compose import cycles
from analytic.costs import KINDS
from analytic.estimate import estimate
from analytic.fit import machine_of, setup
from analytic.money import energy_per_step, price_per_million_samples, price_per_step
from analytic.resharding import Sharding, lacking, node_share
from analytic.staleness import mean_staleness, queue_wait, staleness
from analytic.steps import steps
from analytic.transfer import (
    chain_seconds,
    network_share,
    pieces_seconds,
    point_to_point_seconds,
    sync_seconds,
    wire_seconds,
)
from analytic.uncertainty import propagated, stage_error, stage_weights, step_error
from ir.batch import batch_of
from ir.graph import Op
from ir.known_models import known_config
from ir.lower import lower
from ir.model import shape_from_config
from ir.systems import load_cluster

JOB, CLUSTER = build.job(), build.cluster()


def one(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([value])


def sharding(**degrees: int) -> Sharding:
    plain = dict.fromkeys(Sharding.__dataclass_fields__, 1) | degrees
    return Sharding(**{name: np.array([value]) for name, value in plain.items()})


def test_a_device_that_trains_what_it_generates_with_lacks_nothing() -> None:
    assert lacking(build.SHAPE, sharding(devices=4, tp=4, engine_tp=4))[0] == pytest.approx(0.0)
    assert lacking(build.SHAPE, sharding(devices=4, dp=4))[0] == pytest.approx(0.0)


def test_what_other_shardings_lack_by_hand() -> None:
    whole = build.SHAPE.parameters
    # Each has a half and wants all of it.
    assert lacking(build.SHAPE, sharding(devices=2, tp=2))[0] == pytest.approx(whole / 2)
    # Each has all layers' first or second half, and wants half of every matrix: a quarter of all is missing.
    assert lacking(build.SHAPE, sharding(devices=2, pp=2, engine_tp=2))[0] == pytest.approx(whole / 4)
    # ZeRO-3 leaves a quarter of what each wants.
    assert lacking(build.SHAPE, sharding(devices=4, dp=4, over=4))[0] == pytest.approx(0.75 * whole)
    assert node_share(sharding(tp=4, pp=2), 4.0)[0] == 0.5
    assert node_share(sharding(tp=2, pp=2), 4.0)[0] == 1.0


def test_transfers_by_hand() -> None:
    assert chain_seconds(one(16e9), 1000, 16e9, steps().sync.tensor_s)[0] == pytest.approx(
        1.0 + 1000 * steps().sync.tensor_s
    )
    share = steps().sync.point_to_point
    # 8 devices send 80 GB to one engine of 4: its devices' links are the narrowest.
    got = point_to_point_seconds(one(80e9), one(8.0), one(4.0), one(1.0), one(50e9))
    assert got[0] == pytest.approx(80e9 / 4 / 50e9 / share)
    # Sixteen engines feed each other, so that the trainers send the model not much more than once.
    many = point_to_point_seconds(one(80e9), one(8.0), one(4.0), one(16.0), one(50e9))
    assert many[0] == pytest.approx(got[0])


def test_what_a_nodes_cards_carry_by_hand() -> None:
    machine = machine_of(load_cluster("dgx-a100:32").groups[0])
    cards = 8 * 23.5e9
    assert wire_seconds(machine, one(cards), one(8.0), 2.0, 23.5e9)[0] == pytest.approx(1.0)
    # Trainers on two nodes gather float32 first.
    assert wire_seconds(machine, one(cards), one(16.0), 2.0, 23.5e9)[0] == pytest.approx(3.0)
    # Engines of another group may be reached more slowly.
    assert wire_seconds(machine, one(cards), one(8.0), 2.0, 4.7e9)[0] == pytest.approx(5.0)


@pytest.mark.parametrize(("name", "share"), [("Qwen3-4B", 0.669), ("Qwen3-30B-A3B", 0.950), ("DeepSeek-V3", 0.976)])
def test_what_goes_from_shard_to_shard(name: str, share: float) -> None:
    """NeMo-RL documentation, nccl-reshard-refit."""
    shape = shape_from_config(known_config(name, where="test"), where="test")
    assert network_share(shape) == pytest.approx(share, abs=0.005)
    places, size = (one(16.0), one(8.0), one(2.0)), one(2.0 * shape.parameters)
    less = point_to_point_seconds(size * network_share(shape), *places, one(50e9))
    assert pieces_seconds(shape, size, places, one(50e9))[0] > less[0] + steps().sync.begin_s


def test_every_method_of_a_large_model_takes_seconds() -> None:
    job = build.job(kl_coefficient=0.0)
    cluster = load_cluster("dgx-h100:16")
    plans = [build.plan(rollout=8, train=8, dp=8, reference=False)]
    plans += [msgspec.structs.replace(plans[0], sync=method) for method in ("p2p", "disk")]
    plans += [build.plan(colocated=True, train=16, dp=16, reference=False)]
    seconds = sync_seconds(setup(job, cluster), batch_of(plans))
    assert (seconds >= steps().sync.pause_s).all()
    assert (seconds[:-1] < 1.2).all()
    assert seconds[-1] == pytest.approx(steps().sync.pause_s + steps().sync.wake_s, rel=0.1)


def handed_over_seconds(*, generate: float, train: float, sync: float, pieces: int, ahead: float) -> float:
    """Period of two pools that hand over `pieces` mini-batches a step, generation at most `ahead` steps, or a part of
    one, before training: the closed form of what `cycles` gives for whole numbers.

    Args:
        generate: Seconds a step's samples take; with the drain where engines stop at each version.
        train: Seconds of a step's training, all mini-batches.
        sync: Seconds to bring the weights to the engines.
        pieces: Mini-batches of a step.
        ahead: Bound on staleness in steps.
    """
    circuit = sync + max(generate / pieces + train, generate + train / pieces)
    return max(train + sync, generate, circuit / (1.0 + ahead))


def test_the_published_curve_of_staleness() -> None:
    """7B over 64 + 64 GPUs with 4 mini-batches: 25 s a mini-batch, 3 s a transfer, generation 203 s where it stops at
    each version and 150 s where it does not, both read off the curve's ends. Printed: 231, 171, 146 and 151 s (verl
    documentation, fully_async, staleness ablation)."""

    def period(generate: float, ahead: float) -> float:
        return handed_over_seconds(generate=generate, train=100.0, sync=3.0, pieces=4, ahead=ahead)

    assert period(203.0, 0.0) == pytest.approx(231.0, rel=0.01)
    assert [period(150.0, ahead) for ahead in (0.1, 0.3, 0.5)] == pytest.approx([171.3, 146.1, 150.6], rel=0.06)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_cycles_agree_with_the_closed_form(ahead: int) -> None:
    job = build.job(minibatches=4, kl_coefficient=0.0)
    rpeg = lower(job, build.plan(rollout_logprob=True, reference=False, staleness=ahead))
    times = {Op.GENERATE: 30.0, Op.UPDATE_ACTOR: 21.0, Op.SYNC_WEIGHTS: 2.0}
    found = cycles(rpeg, lambda s: one(times.get(s.ops[-1], 0.0)), np.ones(1), 0.0, np.array([ahead]), np.array([True]))
    # Here engines also stand still for the transfer.
    expected = handed_over_seconds(generate=30.0, train=21.0, sync=2.0, pieces=4, ahead=ahead)
    assert max(float(v[0]) for v in found.values()) == pytest.approx(max(expected, 32.0))


def test_staleness_by_hand() -> None:
    assert queue_wait(np.array([0.5, 2.0, 2.0]), np.array([2.0, 1.0, 3.0])).tolist() == [0.5, 0.75, 2.75]
    assert mean_staleness(one(0.5), one(0.6), one(2.0), 1.4)[0] == pytest.approx(1.2)


def test_staleness_stays_within_its_bound() -> None:
    plans = [build.plan(staleness=k, concurrency=8) for k in range(5)]
    found = staleness(estimate(JOB, batch_of(plans), CLUSTER))
    assert found.mean[0] == found.largest[0] == 0.0
    assert (found.mean <= found.largest + 1e-9).all()
    assert (found.largest <= np.arange(5)).all()


def test_no_plan_beats_its_bound() -> None:
    plans = [build.plan(staleness=k, concurrency=c, stream=s) for k in (0, 2) for c in (4, 16) for s in (False, True)]
    batch = batch_of(plans)
    priced, least = estimate(JOB, batch, CLUSTER), bounds(JOB, batch, CLUSTER)
    assert (least.gap(priced.step_seconds) >= 1.0).all()
    assert (least.work[Op.UPDATE_ACTOR] == 3.0 * least.work[Op.REFERENCE_LOGPROB]).all()


def test_money_and_energy_by_hand() -> None:
    cluster, batch = load_cluster("dgx-h100:16"), batch_of([build.plan(rollout=8, train=4)])
    device = cluster.device
    assert device.price_per_hour is not None and device.watts is not None
    price = price_per_step(batch, cluster, one(1800.0))
    samples = price_per_million_samples(JOB, batch, cluster, one(1800.0))
    energy = energy_per_step(batch, cluster, one(10.0))
    assert price is not None and samples is not None and energy is not None
    assert price[0] == pytest.approx(12 * device.price_per_hour / 2)
    assert samples[0] == pytest.approx(price[0] / 16 * 1e6)
    assert energy[0] == pytest.approx(12 * device.watts * 10.0)
    assert price_per_step(batch, CLUSTER, one(1.0)) is None


def test_error_bars_by_hand() -> None:
    assert set(steps().errors) == set(KINDS)
    parts = {"compute": one(3.0), "host": one(1.0)}
    assert stage_error(parts, one(4.0))[0] == pytest.approx(np.hypot(3 * 0.08, 1 * 0.30) / 4)
    assert stage_error({}, one(4.0))[0] == pytest.approx(0.5), "what is not told apart is guessed"
    half = np.array([[0.5, 0.5]])
    shared = steps().shared
    assert propagated(half, 0.2 * np.ones((1, 2)))[0] == pytest.approx(np.sqrt(shared * 0.04 + (1 - shared) * 0.02))


def test_weights_of_stages_add_up_to_a_step() -> None:
    found = estimate(JOB, batch_of([build.plan(), build.plan(staleness=2)]), CLUSTER)
    weights = stage_weights(found)
    assert (weights >= -1e-6).all() and (weights.sum(axis=1) <= 1.0 + 1e-6).all()
    assert (step_error(found, CLUSTER) > step_error(found, CLUSTER, calibrated=True)).all()
