"""Exports on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from executor.export.exporters import Exporter
from executor.export.production import Production
from ir.documents import write_atomically


def write_exports(production: Production, exporters: Sequence[Exporter], out: Path) -> Iterator[Path]:
    """Write each format into a folder of its name; scripts can be run. Gives the files as they are written."""
    for exporter in exporters:
        for name, text in exporter.write(production).items():
            file = out / exporter.name / name
            write_atomically(file, text.encode())
            if file.suffix == ".sh":
                file.chmod(0o755)
            yield file
