"""Judge exported Slurm scripts: python slurm_check.py FOLDER prints a line of JSON a plan.

Bash reads the script, its directives are held against options of sbatch, and it is run with stand-ins for Slurm's
commands, which note what they are asked: every node must start Ray once, and the command must be the last.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from verdicts import report

OPTIONS = {
    "job-name": r"[a-z0-9-]+",
    "nodes": r"[1-9]\d*",
    "ntasks-per-node": r"1",
    "gpus-per-node": r"[1-9]\d*",
}

STAND_INS = {
    "scontrol": "printf 'node-%s\\n' 1 2 3",
    "sleep": "exit 0",
    "srun": """echo "$*" >> "$LOG"
case "$*" in *hostname*) echo 10.0.0.1;; *Alive*) echo "$NODES";; esac""",
}


def components(script: str) -> Iterator[dict[str, int | str]]:
    """Options of each component of the job.

    Raises:
        ValueError: an option that is not known, or a value that is not of its form.
    """
    current: dict[str, int | str] = {}
    for line in script.splitlines():
        if line == "#SBATCH hetjob":
            yield current
            current = {}
        elif line.startswith("#SBATCH"):
            found = re.fullmatch(r"#SBATCH --([a-z-]+)=(\S+)", line)
            if not found or not re.fullmatch(OPTIONS.get(found[1], r"(?!)"), found[2]):
                raise ValueError(f"{line} is no directive")
            current[found[1]] = int(found[2]) if found[2].isdigit() else found[2]
    yield current


def steps(script: Path, nodes: int) -> list[str]:
    """What the script asks of srun, in order."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, body in STAND_INS.items():
            (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (folder / name).chmod(0o755)
        lists = {name: "node-[1-3]" for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_0")}
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder / "log")}
        environment |= {"NODES": str(nodes), **lists}
        whole = ["bash", "-c", '. "$0"; wait', str(script)]
        subprocess.run(whole, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return (folder / "log").read_text().splitlines()


def complaints(script: Path, world: Mapping[str, int]) -> Iterator[str]:
    """What is wrong."""
    subprocess.run(["bash", "-n", str(script)], check=True)
    found = list(components(script.read_text()))
    nodes = sum(int(component["nodes"]) for component in found)
    if nodes > world["nodes"] or any(int(c.get("gpus-per-node", 0)) > world["per_node"] for c in found):
        yield f"{nodes} nodes are more than there are"
    asked = steps(script, nodes)
    starting = [step for step in asked if "ray start" in step]
    started = sum(int(match[1]) for step in starting if (match := re.search(r"--nodes=(\d+)", step)))
    if started != nodes:
        yield f"Ray is started on {started} of {nodes} nodes"
    if len([step for step in starting if "--head" in step]) != 1:
        yield "there must be one head"
    if "bash -c" not in [step for step in asked if step not in starting][-1]:
        yield "the command must be the last step"


def check(folder: Path, world: Mapping[str, int]) -> Iterator[str]:
    yield from complaints(folder / "job.sbatch", world)


if __name__ == "__main__":
    report(check)
