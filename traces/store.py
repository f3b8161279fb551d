"""Trials, steps and spans on disk: a folder of Parquet files that is only ever added to.

Every write is a new file that appears whole or not at all, so a kill at any moment
leaves the folder readable and any number of writers may share it. A file that
cannot be read costs its own rows and a warning, nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from traces.schema import (
    SCHEMA_VERSION,
    SPAN_SCHEMA,
    STEP_SCHEMA,
    TRIAL_SCHEMA,
    Span,
    Step,
    Trial,
    TrialState,
)

R = TypeVar("R", Step, Span)

TRIALS = "trials"
STEPS = "steps"
SPANS = "spans"

_ABSENT: dict[str, Any] = {
    "study": "",
    "plan_id": "",
    "params": {},
    "space_version": "",
    "model_version": "",
    "hardware": "",
    "software": "",
}
"""What a column stands for in files written before it existed, where the record has no default of its own."""


class UnreadableTrace(UserWarning):
    """A file or row of a run directory was left out: which one, and why."""


def objective(step_seconds: Sequence[float]) -> float | None:
    """What a search minimises: the mean step in seconds, None if no step was measured.

    Not the median: steps differ by their longest answers, and a layout that is slow on every second step is slow.
    """
    return statistics.fmean(step_seconds) if step_seconds else None


def write_trial(run_dir: Path, trial: Trial) -> Path:
    """Add one trial; returns its file, which is on disk when this returns."""
    row = asdict(trial) | {
        "schema_version": SCHEMA_VERSION,
        "objective": objective(trial.step_seconds),
        "state": trial.state.value,
        "params": list(trial.params.items()),
        "stage_seconds": list(trial.stage_seconds.items()),
        # Details quote logs, and a log may hold bytes that are no text: they must not cost the trial.
        "failure_detail": trial.failure_detail.encode("utf-8", "replace").decode(),
    }
    return _write(run_dir / TRIALS, pa.Table.from_pylist([row], schema=TRIAL_SCHEMA))


def write_spans(run_dir: Path, spans: Iterable[Span]) -> Path | None:
    """Add spans as one file; returns it, or None if there were none."""
    return _write_records(run_dir / SPANS, SPAN_SCHEMA, spans)


def write_steps(run_dir: Path, steps: Iterable[Step]) -> Path | None:
    """Add steps as one file; returns it, or None if there were none."""
    return _write_records(run_dir / STEPS, STEP_SCHEMA, steps)


def read_trials(run_dir: Path) -> list[Trial]:
    """Every trial, by start time. Of rows with the same run id the one written last counts.

    Warns:
        UnreadableTrace: names a file or row that was left out.
    """
    trials: dict[str, Trial] = {}
    for file, row in _rows(run_dir / TRIALS, TRIAL_SCHEMA):
        try:
            trial = _trial(row)
        except (KeyError, TypeError, ValueError) as error:
            _warn(file, f"trial {row.get('run_id')!r} left out: {error!r}")
            continue
        trials[trial.run_id] = trial
    return sorted(trials.values(), key=lambda trial: (trial.started_at, trial.run_id))


def read_spans(run_dir: Path, run_id: str | None = None) -> list[Span]:
    """The spans of one run, or of all, each once, by run, start and device.

    Warns:
        UnreadableTrace: names a file or row that was left out.
    """
    spans = _read_records(run_dir / SPANS, SPAN_SCHEMA, Span, run_id)
    return sorted(spans, key=lambda s: (s.run_id, s.start_s, s.device, s.end_s))


def read_steps(run_dir: Path, run_id: str | None = None) -> list[Step]:
    """The steps of one run, or of all, each once, by run and number.

    Warns:
        UnreadableTrace: names a file or row that was left out.
    """
    steps = _read_records(run_dir / STEPS, STEP_SCHEMA, Step, run_id)
    return sorted(steps, key=lambda s: (s.run_id, s.step))


def compact(run_dir: Path) -> None:
    """Merge the files of trials, of steps and of spans into one each: many small ones take long to read.

    The merged file is complete before the first old one goes; a crash in between, or another process that merges too,
    leaves rows twice, which reading mends. Files that others write meanwhile, and unreadable ones, stay; so do columns
    of later versions.

    Warns:
        UnreadableTrace: names a file that was left as it is.
    """
    for folder in (run_dir / TRIALS, run_dir / STEPS, run_dir / SPANS):
        parts = _read_parts(folder)
        if len(parts) < 2:
            continue
        _write(folder, pa.concat_tables([table for _, table in parts], promote_options="permissive"))
        for file, _ in parts:
            file.unlink(missing_ok=True)


def _write_records(folder: Path, schema: pa.Schema, records: Iterable[Step | Span]) -> Path | None:
    rows = [asdict(record) | {"schema_version": SCHEMA_VERSION} for record in records]
    return _write(folder, pa.Table.from_pylist(rows, schema=schema)) if rows else None


def _read_records(folder: Path, schema: pa.Schema, kind: type[R], run_id: str | None) -> Iterable[R]:
    """Records of one run or of all, each once: a merge that was cut short leaves them twice."""
    records: dict[R, None] = {}
    for file, row in _rows(folder, schema):
        if run_id is not None and row.get("run_id") != run_id:
            continue
        row.pop("schema_version", None)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        try:
            record = kind(**values)
        except TypeError as error:
            _warn(file, f"row of run {row.get('run_id')!r} left out: {error}")
            continue
        records[record] = None
    return records


def _write(folder: Path, table: pa.Table) -> Path:
    """One new file in the folder: written aside, synced, renamed, and the name synced too."""
    folder.mkdir(parents=True, exist_ok=True)
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    name = f"part-{time}-{host}-{os.getpid()}-{secrets.token_hex(4)}.parquet"
    aside = folder / f".{name}"
    with aside.open("wb") as file:
        pq.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())
    target = folder / name
    os.replace(aside, target)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return target


def _rows(folder: Path, schema: pa.Schema) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Rows under the given schema in the order of writing, without the fields that are null."""
    for file, table in _read_parts(folder):
        try:
            rows = _conform(table, schema).to_pylist()
        except (pa.ArrowException, KeyError, ValueError) as error:
            _warn(file, f"left out: {error}")
            continue
        for row in rows:
            yield file, {name: value for name, value in row.items() if value is not None}


def _read_parts(folder: Path) -> list[tuple[Path, pa.Table]]:
    """Every readable file with its content, oldest first. A dot-file is a write that never ended."""
    while True:
        try:
            files = sorted(file for file in folder.glob("[!._]*.parquet") if file.is_file())
            parts = [(file, _read(file)) for file in files]
        except FileNotFoundError:
            continue  # A merge took a file away after it was listed; its rows are in a newer one.
        return [(file, table) for file, table in parts if table is not None]


def _read(file: Path) -> pa.Table | None:
    try:
        with pq.ParquetFile(file) as parquet:
            return parquet.read()
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        _warn(file, f"left out: {error}")
        return None


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The schema's columns, cast to its types; null where the file has none."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _trial(row: dict[str, Any]) -> Trial:
    stored_only = ("schema_version", "objective")
    known = _ABSENT | {name: value for name, value in row.items() if name not in stored_only}
    return Trial(
        **known
        | {
            "params": dict(known["params"]),
            "state": TrialState(known["state"]),
            "step_seconds": tuple(float(seconds) for seconds in known.get("step_seconds", ())),
            "stage_seconds": {name: float(seconds) for name, seconds in known.get("stage_seconds", ())},
            "ended_at": known.get("ended_at", known["started_at"]),
        }
    )


def _warn(file: Path, message: str) -> None:
    warnings.warn(f"{file}: {message}", UnreadableTrace, stacklevel=4)
