"""Configurations that frameworks publish are read as jobs and plans, and priced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analytic.estimate import estimate
from executor.imports.importers import importer
from ir.batch import batch_of
from ir.job import resolve
from ir.rules import check
from ir.setting import setting_of
from ir.systems import load_cluster

PUBLIC = Path(__file__).parent / "data" / "public"
CONFIGS = sorted(path for path in PUBLIC.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", CONFIGS, ids=[f"{path.parent.name}/{path.stem}" for path in CONFIGS])
def test_a_public_configuration_is_read_and_priced(path: Path) -> None:
    """A folder has the name of its framework's importer."""
    found = importer(path.parent.name)(path.read_text(), where=path.name)
    assert found.plan.num_devices <= found.devices == found.nodes * found.per_node
    job, cluster = resolve(found.job, path.parent, where=path.name), load_cluster(f"dgx-h100:{found.devices}")
    check(found.plan, setting_of(job, cluster), where=path.name)
    estimates = estimate(job, batch_of([found.plan]), cluster)
    assert np.isfinite(estimates.step_seconds).all() and (estimates.step_seconds > 0).all()
    assert (estimates.memory.fill > 0).all()
