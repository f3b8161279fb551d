"""The rooms: who may import whom, what stays light, and that documents and examples are true."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "ir": set(),
    "traces": {"ir"},
    "space": {"ir"},
    "analytic": {"ir", "traces"},
    "search": {"ir", "traces", "space", "analytic"},
    "executor": {"ir", "traces"},
}
HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "reasoning_gym"}


def imports(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room: str) -> None:
    for file in (ROOT / room).glob("**/*.py"):
        ours = imports(file) & set(MAY_IMPORT)
        assert ours <= MAY_IMPORT[room] | {room}, file
        assert "tune" not in imports(file), file


@pytest.mark.parametrize("room", sorted(set(MAY_IMPORT) - {"executor"}))
def test_the_planning_rooms_load_nothing_heavy(room: str) -> None:
    modules = [f"{room}.{file.stem}" for file in (ROOT / room).glob("*.py") if file.stem != "__init__"]
    code = f"import sys, {', '.join(modules)}\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_are_those_of_this_checkout(room: str) -> None:
    # Their names are also distributions on PyPI: another one installed over ours would go unnoticed.
    module = importlib.import_module(room)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / room


def test_the_readme_names_every_command_and_every_room() -> None:
    text = (ROOT / "README.md").read_text()
    for command in ("search", "resume", "run", "predict", "space", "describe", "calibrate", "show"):
        assert f"tune.py {command}" in text, command
    for room in MAY_IMPORT:
        assert f"{room}/" in text, room


def test_files_stay_short() -> None:
    for room in MAY_IMPORT:
        for file in (ROOT / room).glob("**/*.py"):
            assert len(file.read_text().splitlines()) <= 400, file
