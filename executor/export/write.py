"""Exports on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from executor.export.exporters import Exporter
from executor.export.production import Files, Production
from ir.documents import write_atomically


def write_exports(production: Production, exporters: Sequence[Exporter], out: Path) -> Iterator[Path]:
    """Write each format into a folder of its name; scripts can be run. What starts a command starts the script of the
    framework that is written along, if there is one. Gives the files as they are written."""
    written: dict[str, Files] = {e.name: e.write(production) for e in exporters if e.launch is None}
    scripts = [f"bash {name}/{file}" for name, files in written.items() for file in files if file.endswith(".sh")]
    for exporter in exporters:
        if exporter.launch is not None:
            started = exporter.launch(production, scripts[0]) if scripts else exporter.write(production)
            written[exporter.name] = started
    for name, files in written.items():
        for file, text in files.items():
            path = out / name / file
            write_atomically(path, text.encode())
            if path.suffix == ".sh":
                path.chmod(0o755)
            yield path
