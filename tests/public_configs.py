"""Public configurations of frameworks: read, judged, and compared with the best plan on the same devices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from executor.imports.imported import Imported
from executor.imports.importers import importer
from ir.backends import backend
from ir.cluster import Cluster
from ir.job import Job, resolve, with_limits
from ir.plan import Plan
from ir.rules import Setting, setting_of
from ir.systems import load_cluster
from search.best import best_against
from search.compare import Comparison, compare

FOLDER = Path(__file__).parent / "data" / "public"


@dataclass(frozen=True)
class PublicConfig:
    """One configuration."""

    file: Path

    @property
    def framework(self) -> str:
        """The framework it is for."""
        return self.file.parent.name

    @property
    def name(self) -> str:
        """Framework and file."""
        return f"{self.framework}/{self.file.stem}"

    @cached_property
    def text(self) -> str:
        """Its content."""
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def imported(self) -> Imported:
        """What it says."""
        return importer(self.framework)(self.text, where=self.name)

    @cached_property
    def cluster(self) -> Cluster:
        """As many devices as it asks for, of the system that its header names."""
        named = re.search(r"^# system: (\S+)", self.text, re.MULTILINE)
        return load_cluster(f"{named[1] if named else 'dgx-h100'}:{self.imported.devices}")

    @cached_property
    def job(self) -> Job:
        """Its job, kept as fresh as the configuration keeps it."""
        job = resolve(self.imported.job, self.file.parent, where=self.name)
        limits = msgspec.structs.replace(job.limits, max_staleness=self.imported.plan.staleness)
        return with_limits(job, limits)

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.imported.plan

    @property
    def setting(self) -> Setting:
        """What plans for its framework are judged against."""
        return setting_of(self.job, self.cluster, backend(self.framework))

    def best(self) -> Plan:
        """The best plan that its framework can run on as many devices."""
        return best_against(self.plan, self.job, self.cluster, backend=backend(self.framework))

    def compared(self) -> Comparison:
        """It and the best plan."""
        return compare(self.setting, self.cluster, self.plan, self.best())


CONFIGS = [PublicConfig(file) for file in sorted(FOLDER.glob("*/*")) if file.is_file()]
