"""Exports judged by the frameworks themselves: plans are drawn, exported, and loaded by each framework's own loader.

    python tests/exports/run.py [NAME ...]

Every framework has an environment of its own, made from NAME_requirements.txt (and NAME_nodeps.txt, installed without
what those packages ask for) and kept in .venv-exports; equal requirements share one. In it NAME_check.py loads the
exported plans. A row a framework is printed, and JSON lines with the figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]

from draw import plans  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402

from executor.export.exporters import EXPORTERS, Exporter  # noqa: E402
from executor.export.production import Production  # noqa: E402
from executor.export.write import write_exports  # noqa: E402
from ir.backends import backend  # noqa: E402
from ir.errors import InputError  # noqa: E402
from ir.rules import check, setting_of  # noqa: E402

LEGAL, ANY = 48, 24
"""Plans drawn over a framework's own space, and over the space of all plans."""

ENVIRONMENTS = ROOT / ".venv-exports"


@dataclass(slots=True)
class Row:
    """What became of a framework's plans."""

    name: str
    tried: int = 0
    loaded: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By the rule that refused them."""
    failures: list[str] = field(default_factory=list)


def drawn(framework: str | None, count: int) -> list[Production]:
    """That many plans, always the same."""
    found: list[Production] = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(plans(framework))
    def keep(one: Production) -> None:
        found.append(one)

    keep()
    return found


def export(exporter: Exporter, one: Production, folder: Path) -> str | None:
    """Write a plan into a folder of its own; the name of the rule that refuses it, if one does."""
    if exporter.backend is not None:
        try:
            check(one.plan, setting_of(one.job, one.cluster, backend(exporter.backend)))
        except InputError as error:
            return error.rule.rpartition("(rule ")[2].rstrip(")")
    for _ in write_exports(one, [exporter], folder.parent.parent / "written"):
        pass
    (folder.parent.parent / "written" / exporter.name).rename(folder)
    devices = one.cluster.num_devices
    world = {"nodes": max(devices // one.node, 1), "per_node": min(one.node, devices), "devices": devices}
    (folder / "world.json").write_text(json.dumps(world))
    return None


def environment(stem: str) -> Path:
    """Python of the environment that a framework's loader needs, made if it is not there."""
    files = [file for part in ("requirements", "nodeps") if (file := HERE / f"{stem}_{part}.txt").exists()]
    if not files:
        return Path(sys.executable)
    content = "".join(file.read_text() for file in files).encode()
    home = ENVIRONMENTS / hashlib.sha256(content).hexdigest()[:12]
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        uv = str(Path(sys.executable).with_name("uv"))
        run(uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(home))
        for file in files:
            nodeps = ["--no-deps"] if file.stem.endswith("nodeps") else []
            install = [uv, "pip", "install", "--quiet", "--python", str(python), *torch_backend(), *nodeps]
            run(*install, "--requirement", str(file))
        done.touch()
    return python


def torch_backend() -> list[str]:
    """Loaders need no GPU: the CPU build of torch, from a local folder if there is one."""
    folder = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    if folder and any(Path(folder).glob("torch-*.whl")):
        os.environ["UV_FIND_LINKS"] = folder
        return []
    return ["--torch-backend=cpu"]


def run(*command: str) -> None:
    """Run a command; its output is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


def judged(python: Path, stem: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Name of every plan, with what its loader says against it: nothing, or an error."""
    script = str(HERE / f"{stem}_check.py")
    done = subprocess.run([str(python), script, str(folder)], capture_output=True, text=True, check=False, cwd=folder)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"plan"')]
    said = {line["plan"]: "" if line["ok"] else str(line["error"]) for line in lines}
    for plan in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        yield plan, said.get(plan, f"the loader did not answer: {done.stderr[-600:]}")


def judge(exporter: Exporter) -> Row:
    """Draw, export and load."""
    row, stem = Row(exporter.name), exporter.name.replace("-", "_")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "plans"
        folder.mkdir()
        for one in drawn(exporter.backend, LEGAL) + drawn(None, ANY):
            rule = export(exporter, one, folder / f"{row.tried:03}")
            row.tried += 1
            if rule is not None:
                row.refused[rule] += 1
        for plan, error in judged(environment(stem), stem, folder):
            row.loaded += not error
            if error:
                row.failures.append(f"{plan}: {error}")
    return row


def main() -> int:
    """Judge the frameworks named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"frameworks (all: {', '.join(EXPORTERS)})")
    names = parser.parse_args().names or list(EXPORTERS)
    rows = []
    print(f"{'framework':16}{'tried':>7}{'loaded':>8}{'refused':>9}  most often refused by", flush=True)
    for name in names:
        started, row = time.monotonic(), judge(EXPORTERS[name])
        rows.append(row)
        why = ", ".join(f"{rule} ({count})" for rule, count in row.refused.most_common(2))
        seconds = time.monotonic() - started
        refused = row.refused.total()
        print(f"{name:16}{row.tried:7}{row.loaded:8}{refused:9}  {why}  [{seconds:.0f} s]", flush=True)
        for failure in row.failures[:5]:
            print(f"    FAILED {failure}", flush=True)
    good = [row for row in rows if not row.failures and row.loaded >= 40]
    print(json.dumps({"name": "export.frameworks", "value": len(good), "unit": "frameworks"}))
    print(json.dumps({"name": "export.plans_loaded", "value": sum(row.loaded for row in rows), "unit": "plans"}))
    return 0 if len(good) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
