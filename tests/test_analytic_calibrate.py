"""A cluster corrected by measurements: kernels made by known constants, and runs made by known scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import accuracy_calibration
import build
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from analytic.calibrate import fitted, refit, shrunk, stage_ratios, without_scales
from analytic.estimate import Estimate, estimate
from analytic.kernelfit import MISFIT, RATE_DEVIATION, fit_kernels, kernel_errors, robust_fit, seed_of
from analytic.scales import kind_of, scale_of
from ir.backends import backend
from ir.cluster import Cluster, Device, Gemm, Group, KernelPoint, StageScale
from ir.documents import digest, read_document, write_document
from ir.errors import InputError
from ir.graph import Op
from ir.systems import system
from search.report import cluster_text
from search.runs import locate
from search.survey import Survey, survey
from traces.rundir import RunDirectory
from traces.schema import Trial, TrialState
from traces.store import read_trials, write_trial

Float = NDArray[np.float64]

JOB, CLUSTER = build.job(), build.cluster()
SURVEY: Survey = survey(JOB, CLUSTER, backend=backend("local"))
TRUTH = {"generate": 1.5, "passes": 0.8, "update": 1.25, "sync": 2.0, "reward": 0.7}

# Kernels

H100 = system("dgx-h100", 8, where="").groups[0]
TRUE_GEMM = Gemm(flops=300e12, bandwidth=1.2e12, launch_s=5e-6, p=2.5)


def unknown(kernels: tuple[KernelPoint, ...]) -> Group:
    """A device of no table that starts from rough figures."""
    rough = Gemm(flops=400e12, bandwidth=2e12, launch_s=8e-6, p=2.0)
    device = msgspec.structs.replace(
        H100.device, name="X1", gemm=rough, attention_flops=100e12, kv_bandwidth=1e12, kernels=kernels
    )
    return msgspec.structs.replace(H100, device=device)


def knee(gemm: Gemm, m: int, k: int, n: int) -> float:
    compute, traffic = 2.0 * m * k * n / gemm.flops, 2.0 * (m * k + k * n + m * n) / gemm.bandwidth
    return float((compute**gemm.p + traffic**gemm.p) ** (1.0 / gemm.p) + gemm.launch_s)


def products(gemm: Gemm, *, outliers: bool = False) -> tuple[KernelPoint, ...]:
    shapes = [(m, k, n) for m in (1, 16, 256, 1024, 4096) for k, n in ((1024, 3072), (4096, 4096), (8192, 10240))]
    return tuple(
        KernelPoint(
            kind="product", precision="bf16", sizes=s, seconds=knee(gemm, *s) * (4.0 if outliers and i % 8 == 3 else 1)
        )
        for i, s in enumerate(shapes)
    )


ATTENTION = tuple(
    [
        KernelPoint(
            kind="prefill",
            precision="bf16",
            sizes=(b, s, 32, 128),
            seconds=2.0 * b * 32 * 128 * s**2 / 250e12 + 20e-6,
        )
        for b, s in ((1, 512), (1, 2048), (4, 2048), (1, 8192))
    ]
    + [
        KernelPoint(
            kind="decode", precision="bf16", sizes=(b, s, 8, 4, 128), seconds=4.0 * b * s * 8 * 128 / 1.5e12 + 15e-6
        )
        for b, s in ((1, 512), (16, 2048), (64, 4096), (256, 4096))
    ]
    + [KernelPoint(kind="experts", precision="bf16", sizes=(32, 512, 16384, 2048, 1536), seconds=1e-3)]
)


def test_the_constants_that_made_the_kernels_of_an_unknown_device_are_found() -> None:
    device = fit_kernels(unknown(products(TRUE_GEMM) + ATTENTION))
    assert device.gemm is not None and type(device.gemm.flops) is float
    assert device.gemm.flops == pytest.approx(300e12, rel=0.02)
    assert device.gemm.bandwidth == pytest.approx(1.2e12, rel=0.02)
    assert device.gemm.launch_s == pytest.approx(5e-6, rel=0.05)
    assert device.attention_flops == pytest.approx(250e12, rel=0.02)
    assert device.attention_launch_s == pytest.approx(20e-6, rel=0.02)
    assert device.kv_bandwidth == pytest.approx(1.5e12, rel=0.02)
    assert device.kv_launch_s == pytest.approx(15e-6, rel=0.02)
    assert device.expert_efficiency == pytest.approx(2 * 16384 * 2048 * 1536 / 1e-3 / device.gemm.flops)
    group = msgspec.structs.replace(H100, device=device)
    assert max(kernel_errors(group).values()) < 0.02
    said = "the model is off its kernels by, in the median: product 0%, prefill 0%, decode 0%"
    assert said in cluster_text(msgspec.structs.replace(CLUSTER, groups=(group,)))


def test_a_few_bad_kernels_do_not_bend_the_fit() -> None:
    gemm = fit_kernels(unknown(products(TRUE_GEMM, outliers=True))).gemm
    assert gemm is not None and gemm.flops == pytest.approx(300e12, rel=0.1)
    assert gemm.bandwidth == pytest.approx(1.2e12, rel=0.15)


def test_fitting_again_changes_next_to_nothing() -> None:
    cluster = msgspec.structs.replace(CLUSTER, groups=(unknown(products(TRUE_GEMM) + ATTENTION),))
    once = fitted(cluster)
    again = fitted(once).device
    assert once.device.gemm is not None and again.gemm is not None
    # Of a device in no table the start moves, whose pull is weak.
    assert again.gemm.flops == pytest.approx(once.device.gemm.flops, rel=0.01)
    known = msgspec.structs.replace(H100, device=msgspec.structs.replace(H100.device, kernels=products(TRUE_GEMM)))
    first = fit_kernels(known)
    assert fit_kernels(msgspec.structs.replace(known, device=first)) == first


def test_the_prior_weighs_as_much_as_its_deviation_says() -> None:
    # One kernel says 10 % slower: a normal with the misfit's deviation against the prior's.
    def predict(x: Float) -> Float:
        return np.array([np.exp(-x[0])])

    off = float(robust_fit(predict, np.array([np.exp(0.01)]), np.array([RATE_DEVIATION]))[0])
    assert off == pytest.approx(-0.01 * RATE_DEVIATION**2 / (RATE_DEVIATION**2 + MISFIT**2), rel=0.01)


def test_a_known_device_leaves_the_tables_as_far_as_many_kernels_make_it() -> None:
    seed = H100.device.gemm
    assert seed is not None

    def flops(slower: float, count: int) -> float:
        own = tuple(
            msgspec.structs.replace(point, seconds=slower * seconds)
            for point, seconds in zip(SHAPES[:count], PRICED[:count], strict=True)
        )
        gemm = fit_kernels(msgspec.structs.replace(H100, device=msgspec.structs.replace(H100.device, kernels=own))).gemm
        assert gemm is not None
        return gemm.flops / seed.flops

    assert flops(1.0, len(SHAPES)) == pytest.approx(1.0, abs=0.005)
    few, many = flops(1.3, 1), flops(1.3, len(SHAPES))
    assert 1 / 1.3 - 0.01 < many < few < 1.0
    assert many < 0.82


SHAPES = tuple(
    KernelPoint(kind="product", precision="bf16", sizes=(m, k, n), seconds=1.0)
    for m in (2048, 4096, 8192, 16384)
    for k, n in ((4096, 4096), (8192, 8192), (4096, 14336), (8192, 28672))
)
"""Large products, which the arithmetic bounds."""


def _priced() -> list[float]:
    from analytic.fit import machine_of
    from analytic.kernels import gemm_seconds

    m, k, n = np.array([point.sizes for point in SHAPES], dtype=float).T
    return list(np.asarray(gemm_seconds(machine_of(H100), m, k, n)))


PRICED = _priced()


def test_cores_and_described_devices_stay_as_they_are() -> None:
    assert fitted(CLUSTER) == CLUSTER
    described = system("dgx-h100", 8, where="")
    assert fitted(described) == described
    assert seed_of(described.device) == described.device and seed_of(CLUSTER.device) is None


def test_new_fields_do_not_change_the_identity_of_a_cluster_without_them() -> None:
    text = msgspec.to_builtins(CLUSTER)
    for name in ("kernels", "expert_efficiency", "scales"):
        assert text["groups"][0]["device"][name] is None
        del text["groups"][0]["device"][name]
    for level in text["groups"][0]["levels"]:
        del level["overlap"]
    assert digest(text) == digest(CLUSTER)


def test_a_few_dozen_measured_products_make_a_device_of_no_table_known() -> None:
    found = accuracy_calibration.SETS["calibration_gemm"](Path(__file__).parent / "data")
    assert found is not None
    figures = found.figures()
    # 0.112, 0.175 and 0.98 when this was written; a constant rate errs by more than 200 %.
    assert figures["median"] < 0.14 and figures["mean"] < 0.21 and figures["spearman"] > 0.97
    assert figures["mean"] < 0.2 * figures["baseline_mean"]


# Runs


def scaled_cluster(factors: Mapping[str, float]) -> Cluster:
    """The machine as it really is: so many times slower than the model says."""
    scales = {kind: StageScale(factor=factor, plans=1, deviation=0.0) for kind, factor in factors.items()}
    group = CLUSTER.groups[0]
    device = msgspec.structs.replace(group.device, scales=scales)
    return msgspec.structs.replace(CLUSTER, groups=(msgspec.structs.replace(group, device=device),))


def trial(index: int, params: dict[str, str], real: Estimate, noise: Float, **changes: object) -> Trial:
    """A run of a plan on the real machine, a row of `real`."""
    seconds = real.stage_seconds[index] * noise
    at = datetime(2026, 1, 1, 0, 0, index, tzinfo=UTC)
    fields: dict[str, object] = {
        "run_id": f"r{index}",
        "study": "s",
        "plan_id": f"p{index}",
        "params": params,
        "space_version": "2",
        "model_version": "2",
        "hardware": CLUSTER.fingerprint,
        "software": "",
        "state": TrialState.COMPLETE,
        "step_seconds": (float(real.compose(seconds[None], np.array([index]))[0]),),
        "stage_seconds": {name: float(s) for name, s in zip(real.stages, seconds, strict=True) if s > 0},
        "started_at": at,
        "ended_at": at,
    }
    return Trial(**fields | changes)  # type: ignore[arg-type]


def runs(count: int, *, noise: float, seed: int = 0) -> tuple[NDArray[np.intp], list[Trial]]:
    """Rows of the survey and runs of those plans."""
    generator = np.random.default_rng(seed)
    rows = generator.choice(len(SURVEY.legal.batch), size=count, replace=False)
    real = estimate(JOB, SURVEY.legal.batch.take(rows), scaled_cluster(TRUTH))
    axes = SURVEY.space.axes
    trials = []
    for index, row in enumerate(rows):
        levels = SURVEY.legal.levels[row]
        params = {axis.name: str(axis.values[level]) for axis, level in zip(axes, levels, strict=True)}
        factors = np.exp(noise * generator.standard_normal(len(real.stages)))
        trials.append(trial(index, params, real, factors))
    return rows, trials


def factors_of(cluster: Cluster) -> dict[str, float]:
    return {kind: scale.factor for kind, scale in (cluster.device.scales or {}).items()}


def test_scales_multiply_the_seconds_of_their_stages_and_nothing_else() -> None:
    batch = SURVEY.legal.batch.take(np.arange(0, len(SURVEY.legal.batch), 97))
    plain, real = estimate(JOB, batch, CLUSTER), estimate(JOB, batch, scaled_cluster(TRUTH))
    for index, key in enumerate(plain.stages):
        kind = kind_of(key)
        assert kind is not None
        assert real.stage_seconds[:, index] == pytest.approx(TRUTH[kind] * plain.stage_seconds[:, index])
    assert real.latency_ratio == pytest.approx(plain.latency_ratio)
    assert real.memory.fill.tolist() == plain.memory.fill.tolist()
    assert scale_of(CLUSTER.device, Op.GENERATE) == 1.0


def test_known_scales_are_recovered() -> None:
    rows, trials = runs(20, noise=0.02)
    found = factors_of(refit(CLUSTER, JOB, SURVEY.legal.batch.take(rows), trials))
    assert found == pytest.approx(TRUTH, rel=0.03)


def test_few_noisy_plans_say_little() -> None:
    few = shrunk(np.array([1.8, 1.1]))
    many = shrunk(np.array([1.8, 1.1] * 20))
    assert few is not None and many is not None
    middle = float(np.sqrt(1.8 * 1.1))
    assert 1.0 < few.factor < 1.0 + 0.6 * (middle - 1.0) < many.factor < middle
    assert few.deviation > 2 * many.deviation and (few.plans, many.plans) == (2, 40)
    assert shrunk(np.array([np.nan])) is None


def test_one_strange_plan_does_not_count() -> None:
    usual = np.exp(0.05 * np.random.default_rng(1).standard_normal(12)) * 1.2
    plain, strange = shrunk(usual), shrunk(np.append(usual, 20.0))
    assert plain is not None and strange is not None
    assert strange.factor == pytest.approx(plain.factor, rel=0.03)


def test_a_refitted_cluster_predicts_plans_that_were_held_out(tmp_path: Path) -> None:
    rows, trials = runs(24, noise=0.08, seed=3)
    directory = RunDirectory(tmp_path)
    directory.path.mkdir(exist_ok=True)
    write_document(tmp_path / "cluster.toml", CLUSTER)
    for one in trials[:12]:
        write_trial(tmp_path, one)
    stored = read_trials(tmp_path)
    at = np.array([locate(SURVEY.candidates, one.params) for one in stored])
    assert at.tolist() == rows[:12].tolist()
    better = refit(directory.cluster(), JOB, SURVEY.legal.batch.take(at), stored)
    held_out = SURVEY.legal.batch.take(rows[12:])
    measured = np.array([one.step_seconds[0] for one in trials[12:]])
    before, after = (np.abs(estimate(JOB, held_out, c).step_seconds / measured - 1.0) for c in (CLUSTER, better))
    assert np.median(after) < 0.6 * np.median(before) and np.median(after) < 0.1
    write_document(tmp_path / "better.toml", better)
    assert read_document(tmp_path / "better.toml", Cluster) == better


def test_the_same_runs_twice_give_the_same_cluster() -> None:
    rows, trials = runs(8, noise=0.05)
    plans = SURVEY.legal.batch.take(rows)
    once = refit(CLUSTER, JOB, plans, trials)
    assert refit(once, JOB, plans, trials) == once
    assert without_scales(once) == CLUSTER
    doubled = refit(CLUSTER, JOB, SURVEY.legal.batch.take(np.concatenate([rows, rows])), [*trials, *trials])
    assert factors_of(doubled) == pytest.approx(factors_of(once)), "a plan that ran twice is one plan"


def test_runs_that_did_not_complete_count_for_nothing() -> None:
    rows, trials = runs(4, noise=0.0)
    plans = SURVEY.legal.batch.take(rows)
    failed = [replace(one, state=TrialState.FAILED) for one in trials]
    assert refit(CLUSTER, JOB, plans, failed) == CLUSTER
    assert refit(CLUSTER, JOB, plans.take(np.zeros(4, dtype=bool)), []) == CLUSTER
    half = refit(CLUSTER, JOB, plans, [trials[0], *failed[1:]])
    assert {scale.plans for scale in (half.device.scales or {}).values()} == {1}


def test_stages_of_a_kind_count_together() -> None:
    rows, trials = runs(30, noise=0.0)
    modelled = estimate(JOB, SURVEY.legal.batch.take(rows), CLUSTER)
    ratios = stage_ratios(modelled, trials)
    assert ratios["passes"][np.isfinite(ratios["passes"])] == pytest.approx(0.8)
    assert ratios["update"] == pytest.approx(1.25)


def test_a_scale_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="must be of generate, passes, update, sync, reward"):
        scaled_cluster({"generating": 1.0})


def test_measured_kernels_stay_beside_what_was_fitted_to_them() -> None:
    device: Device = fit_kernels(unknown(products(TRUE_GEMM)))
    assert device.kernels == products(TRUE_GEMM)
