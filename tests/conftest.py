"""Shared: one fleet of workers for all tests that run for real, and a tiny actor for them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import build
import pytest

from ir.job import Job

if TYPE_CHECKING:
    from executor.fleet import Fleet

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose actor is a configuration of a few thousand parameters."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "config.json").write_text(json.dumps(build.QWEN3_CONFIG | {"initializer_range": 0.1}))
    return build.job(directory=folder, warm_start=200)


@pytest.fixture(scope="session")
def tiny_actor(tiny_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory after a warm start long enough that some answers are right: else nothing would be learnt."""
    from executor.policy import prepare_actor

    return prepare_actor(tiny_job, tmp_path_factory.mktemp("actors"))


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Workers for up to three devices, even where there are fewer cores: they share them then."""
    from executor.fleet import Fleet

    with Fleet(3) as started:
        yield started
