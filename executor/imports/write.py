"""An imported configuration as documents."""

from __future__ import annotations

from pathlib import Path

import msgspec

from executor.imports.imported import Imported
from ir.cluster import Cluster
from ir.documents import write_document
from traces.rundir import CLUSTER, JOB

PLAN = "plan.toml"


def write_import(found: Imported, cluster: Cluster, out: Path) -> None:
    """Write job.toml, plan.toml and cluster.toml into a folder. The job allows no more staleness than the plan has:
    what is learnt shall not change unless its owner asks for it."""
    limits = msgspec.structs.replace(found.job.limits, max_staleness=found.plan.staleness)
    write_document(out / JOB, msgspec.structs.replace(found.job, limits=limits))
    write_document(out / PLAN, found.plan)
    write_document(out / CLUSTER, cluster)
