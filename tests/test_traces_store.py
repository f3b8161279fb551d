"""What is written is read back; what is broken costs itself only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import build
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.errors import InputError
from ir.job import Algorithm, Job, Lengths, Models, ModelSource, WarmStart, resolve, with_lengths
from traces.rundir import RunDirectory
from traces.schema import Span, Step, Trial, TrialState
from traces.store import (
    UnreadableTrace,
    compact,
    objective,
    read_spans,
    read_steps,
    read_trials,
    write_spans,
    write_steps,
    write_trial,
)

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
SECONDS = st.floats(0, 1e6, allow_nan=False)
WHEN = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
COUNT = st.integers(0, 2**62)


def trial(run_id: str = "a", **changes: Any) -> Trial:
    base = Trial(
        run_id=run_id,
        study="job",
        plan_id="p",
        params={"dp": "2"},
        space_version="1",
        model_version="1",
        hardware="h",
        software="s",
        state=TrialState.COMPLETE,
        step_seconds=(3.0, 1.0, 2.0),
        stage_seconds={"generate": 1.5},
        started_at=NOON,
        ended_at=NOON + timedelta(seconds=9),
    )
    return replace(base, **changes)


def span(run_id: str = "a", step: int = 0, **changes: Any) -> Span:
    return replace(
        Span(run_id=run_id, step=step, stage="generate", pool="all", device=0, start_s=1.0, end_s=2.0), **changes
    )


TRIALS = st.builds(
    Trial,
    run_id=TEXT,
    study=TEXT,
    plan_id=TEXT,
    label=TEXT,
    params=st.dictionaries(TEXT, TEXT, max_size=3),
    space_version=TEXT,
    model_version=TEXT,
    hardware=TEXT,
    software=TEXT,
    state=st.sampled_from(TrialState),
    failure=TEXT,
    failure_detail=TEXT,
    step_seconds=st.lists(SECONDS, max_size=4).map(tuple),
    stage_seconds=st.dictionaries(TEXT, SECONDS, max_size=3),
    peak_bytes=COUNT,
    max_staleness=COUNT,
    mean_reward=st.floats(-1e3, 1e3),
    response_tokens=SECONDS,
    setup_seconds=SECONDS,
    warm=st.booleans(),
    others_share=st.none() | st.floats(0, 1),
    started_at=WHEN,
    ended_at=WHEN,
    host=TEXT,
)
SPANS = st.builds(
    Span,
    run_id=TEXT,
    step=COUNT,
    stage=TEXT,
    pool=TEXT,
    device=COUNT,
    start_s=SECONDS,
    end_s=SECONDS,
    sequences=COUNT,
    tokens=COUNT,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(TRIALS, max_size=3, unique_by=lambda t: t.run_id))
def test_trials_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, trials: list[Trial]) -> None:
    folder = tmp_path_factory.mktemp("run")
    for one in trials:
        write_trial(folder, one)
    assert read_trials(folder) == sorted(trials, key=lambda t: (t.started_at, t.run_id))


@settings(max_examples=15, deadline=None)
@given(st.lists(SPANS, max_size=4, unique=True))
def test_spans_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, spans: list[Span]) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_spans(folder, spans)
    assert set(read_spans(folder)) == set(spans)


def test_steps_come_back_as_they_were(tmp_path: Path) -> None:
    steps = [Step(run_id="a", step=i, seconds=1.5, reward=0.5, response_tokens=9.0, staleness=(0, i)) for i in (0, 1)]
    write_steps(tmp_path, reversed(steps))
    assert read_steps(tmp_path, "a") == steps
    assert read_steps(tmp_path, "b") == []


def test_nothing_there_is_nothing(tmp_path: Path) -> None:
    assert read_trials(tmp_path / "none") == []
    assert read_spans(tmp_path) == []
    assert write_spans(tmp_path, []) is None
    compact(tmp_path)


def test_spans_of_one_run(tmp_path: Path) -> None:
    write_spans(tmp_path, [span("a", 1, start_s=5.0), span("a", 0), span("b")])
    assert [(s.run_id, s.step) for s in read_spans(tmp_path, "a")] == [("a", 0), ("a", 1)]


def test_trials_are_sorted_by_start_and_the_last_row_of_a_run_counts(tmp_path: Path) -> None:
    write_trial(tmp_path, trial("late", started_at=NOON + timedelta(hours=1)))
    write_trial(tmp_path, trial("early", host="first"))
    write_trial(tmp_path, trial("early", host="second"))
    assert [(t.run_id, t.host) for t in read_trials(tmp_path)] == [("early", "second"), ("late", "")]


@pytest.mark.parametrize(("steps", "median"), [((3.0, 1.0, 2.0), 2.0), ((1.0, 2.0), 1.5), ((), None)])
def test_the_objective_is_the_median_step(tmp_path: Path, steps: tuple[float, ...], median: float | None) -> None:
    assert objective(steps) == median
    file = write_trial(tmp_path, trial(step_seconds=steps))
    assert pq.read_table(file).column("objective").to_pylist() == [median]


@pytest.mark.parametrize("keep", [0, 10, 0.5, -1])
def test_a_truncated_file_is_reported_and_costs_only_itself(tmp_path: Path, keep: float) -> None:
    write_trial(tmp_path, trial("a"))
    broken = write_trial(tmp_path, trial("b"))
    write_trial(tmp_path, trial("c"))
    content = broken.read_bytes()
    broken.write_bytes(content[: int(len(content) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.warns(UnreadableTrace, match=broken.name):
        assert [t.run_id for t in read_trials(tmp_path)] == ["a", "c"]


def test_a_row_that_is_no_trial_is_reported(tmp_path: Path) -> None:
    file = write_trial(tmp_path, trial("a"))
    table = pq.read_table(file)
    at = table.column_names.index("state")
    pq.write_table(table.set_column(at, "state", pa.array(["paused"])), file.with_name("part-x.parquet"))
    with pytest.warns(UnreadableTrace, match="paused"):
        assert [t.run_id for t in read_trials(tmp_path)] == ["a"]


def test_columns_of_other_versions(tmp_path: Path) -> None:
    """A column that is missing takes its default; one that is unknown is passed over."""
    file = write_trial(tmp_path, trial("a", label="preset", host="h1", software="s1", peak_bytes=7, others_share=0.5))
    table = pq.read_table(file).drop_columns(["label", "host", "software", "ended_at", "objective", "others_share"])
    pq.write_table(table.append_column("power_watts", pa.array([300.0])), file)
    (read,) = read_trials(tmp_path)
    assert (read.label, read.host, read.software, read.peak_bytes) == ("", "", "", 7)
    assert read.others_share is None
    assert read.ended_at == read.started_at


def test_integers_are_read_where_floats_are_stored_today(tmp_path: Path) -> None:
    file = write_trial(tmp_path, trial("a"))
    table = pq.read_table(file)
    at = table.column_names.index("mean_reward")
    pq.write_table(table.set_column(at, "mean_reward", pa.array([1], pa.int64())), file)
    assert read_trials(tmp_path)[0].mean_reward == 1.0


def test_details_that_are_no_text_do_not_cost_the_trial(tmp_path: Path) -> None:
    write_trial(tmp_path, trial(failure_detail="log: \udcff"))
    assert read_trials(tmp_path)[0].failure_detail == "log: ?"


def test_merging_keeps_every_row_and_leaves_one_file(tmp_path: Path) -> None:
    for name in "abc":
        write_trial(tmp_path, trial(name))
        write_spans(tmp_path, [span(name, step) for step in range(3)])
    write_trial(tmp_path, trial("b", host="again"))
    trials, spans = read_trials(tmp_path), read_spans(tmp_path)
    compact(tmp_path)
    assert len(list((tmp_path / "trials").iterdir())) == len(list((tmp_path / "spans").iterdir())) == 1
    assert (read_trials(tmp_path), read_spans(tmp_path)) == (trials, spans)
    write_trial(tmp_path, trial("a", host="later"))
    assert {t.run_id: t.host for t in read_trials(tmp_path)} == {"a": "later", "b": "again", "c": ""}


def test_a_merge_cut_short_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        write_trial(tmp_path, trial(name))
        write_spans(tmp_path, [span(name)])
    trials, spans = read_trials(tmp_path), read_spans(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", _interrupt)
        compact(tmp_path)
    assert len(list((tmp_path / "trials").iterdir())) == 4
    compact(tmp_path)
    assert (read_trials(tmp_path), read_spans(tmp_path)) == (trials, spans)


def test_two_that_merge_at_once_lose_and_double_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        write_trial(tmp_path, trial(name))
    trials, unlink = read_trials(tmp_path), Path.unlink

    def gone_already(file: Path, missing_ok: bool = False) -> None:
        unlink(file)
        unlink(file, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", gone_already)
        compact(tmp_path)
    assert read_trials(tmp_path) == trials


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_merging_keeps_columns_it_does_not_know_and_files_it_cannot_read(tmp_path: Path) -> None:
    file = write_trial(tmp_path, trial("a"))
    pq.write_table(pq.read_table(file).append_column("power_watts", pa.array([300.0])), file)
    write_trial(tmp_path, trial("b"))
    broken = file.with_name("part-0.parquet")
    broken.write_bytes(b"PAR1")
    with pytest.warns(UnreadableTrace):
        compact(tmp_path)
    assert broken.exists()
    broken.unlink()
    (merged,) = (tmp_path / "trials").glob("*.parquet")
    assert pq.read_table(merged).column("power_watts").to_pylist() == [300.0, None]


WRITER = """
import sys
from pathlib import Path
import test_traces_store as t
for i in range(100000):
    t.write_trial(Path(sys.argv[1]), t.trial(f"{i:06d}"))
    t.write_spans(Path(sys.argv[1]), [t.span(f"{i:06d}", step) for step in range(50)])
"""


def test_a_killed_writer_leaves_whole_rows(tmp_path: Path) -> None:
    """Reads while it writes and after SIGKILL: every row that was reported written is there, none in part."""
    here = Path(__file__).parent
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        cwd=here.parent,
        env=os.environ | {"PYTHONPATH": f"{here.parent}{os.pathsep}{here}"},
    )
    try:
        deadline = time.monotonic() + 30
        while len(read_trials(tmp_path)) < 20:
            assert writer.poll() is None and time.monotonic() < deadline
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    trials = read_trials(tmp_path)
    assert [t.run_id for t in trials] == [f"{i:06d}" for i in range(len(trials))]
    assert trials[-1] == trial(trials[-1].run_id)
    spans = read_spans(tmp_path)
    assert len(spans) % 50 == 0 and len(spans) // 50 in (len(trials) - 1, len(trials))


def job_with_models(folder: Path) -> Job:
    """A PPO job whose models come from everywhere: a configuration beside the job, a directory, and known names."""
    for place in (folder / "policy", folder / "else"):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(build.QWEN3_CONFIG))
    models = Models(
        actor=ModelSource(path="policy/config.json", warm_start=WarmStart(steps=3, batch=4, learning_rate=1e-3)),
        critic=ModelSource(name="Qwen/Qwen3-8B"),
        reference=ModelSource(path=str(folder / "else")),
        reward=ModelSource(path="else"),
    )
    document = msgspec.structs.replace(
        build.job().document,
        algorithm=Algorithm(name="ppo", learning_rate=1e-6, kl_coefficient=0.1),
        models=models,
    )
    return resolve(document, folder, where="job")


def test_a_run_directory_keeps_every_model_of_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    job, directory = job_with_models(folder), RunDirectory(tmp_path / "run")
    directory.create(job, build.cluster())
    kept = directory.job()
    assert (kept.identity, kept.models) == (job.identity, job.models)
    assert kept.document == msgspec.structs.replace(
        job.document,
        models=msgspec.structs.replace(
            job.document.models,
            actor=msgspec.structs.replace(job.document.models.actor, path="actor.config.json"),
            reward=ModelSource(path=str(folder / "else")),
        ),
    )
    assert directory.cluster() == build.cluster()
    directory.check(job)


def test_a_configuration_is_kept_though_the_jobs_own_goes(tmp_path: Path) -> None:
    job, directory = job_with_models(tmp_path / "home"), RunDirectory(tmp_path / "run")
    directory.create(job, build.cluster())
    shutil.rmtree(tmp_path / "home" / "policy")
    assert directory.job().actor == job.actor
    # A search may be started from what a run directory keeps, into that directory.
    directory.create(directory.job(), build.cluster())
    assert directory.job().identity == job.identity


def test_a_run_directory_refuses_another_job(tmp_path: Path) -> None:
    job, directory = job_with_models(tmp_path / "home"), RunDirectory(tmp_path / "run")
    directory.create(job, build.cluster())
    critic = msgspec.structs.replace(job.document.models, critic=ModelSource(name="Qwen/Qwen3-4B"))
    other = resolve(msgspec.structs.replace(job.document, models=critic), job.directory, where="job")
    with pytest.raises(InputError, match=r"job\.toml: must be the job searched"):
        directory.check(other)


def test_lengths_of_a_run_directory_are_those_that_were_measured(tmp_path: Path) -> None:
    job, directory = job_with_models(tmp_path / "home"), RunDirectory(tmp_path / "run")
    directory.create(with_lengths(job, Lengths(prompt=(1.0, 2.0), response=(3.0, 4.0))), build.cluster())
    assert directory.job().workload.lengths == Lengths(prompt=(1.0, 2.0), response=(3.0, 4.0))
    directory.check(job)
