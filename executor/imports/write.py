"""An imported configuration as documents."""

from __future__ import annotations

from pathlib import Path

from executor.imports.imported import Imported
from ir.cluster import Cluster
from ir.documents import write_document
from traces.rundir import CLUSTER, JOB

PLAN = "plan.toml"


def write_import(found: Imported, cluster: Cluster, out: Path) -> None:
    """Write job.toml, plan.toml and cluster.toml into a folder."""
    write_document(out / JOB, found.job)
    write_document(out / PLAN, found.plan)
    write_document(out / CLUSTER, cluster)
