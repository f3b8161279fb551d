"""Slurm: an sbatch script that starts a Ray cluster over the plan's nodes, and a command on its head.

Several groups of devices are components of a heterogeneous job, and the first has the head.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from executor.export.entries import comments
from executor.export.nodes import ENTRYPOINT, Nodes, label, nodes
from executor.export.production import Files, Production

_TO_SET = (
    "Submit with sbatch. Still to be set: partition, account and time as #SBATCH lines, and how an environment with",
    "the framework is entered (a module, a container of srun) before the first srun.",
)

_PORT = 6379


def write(production: Production) -> Files:
    """For a run of the plan by this tool."""
    return launch(production, ENTRYPOINT)


def launch(production: Production, entrypoint: str) -> Files:
    """`job.sbatch`, which starts `entrypoint`."""
    return {"job.sbatch": "\n".join([*_script(production, nodes(production), entrypoint), ""])}


def _script(production: Production, found: tuple[Nodes, ...], entrypoint: str) -> Iterator[str]:
    yield "#!/usr/bin/env bash"
    yield from comments((*production.header, *_TO_SET))
    yield f"#SBATCH --job-name={label(production.job.document.name)}"
    for index, group in enumerate(found):
        if index:
            yield "#SBATCH hetjob"
        yield f"# plan: nodes of its pools in {group.name}, and devices of a node"
        yield f"#SBATCH --nodes={group.count}"
        yield "#SBATCH --ntasks-per-node=1"
        if group.accelerators:
            yield f"#SBATCH --gpus-per-node={group.accelerators}"
    variable = "SLURM_JOB_NODELIST_HET_GROUP_0" if len(found) > 1 else "SLURM_JOB_NODELIST"
    total, first = sum(group.count for group in found), _component(found, 0)
    yield from ("set -euo pipefail", "")
    yield f'mapfile -t hosts < <(scontrol show hostnames "${variable}")'
    yield "head=${hosts[0]}"
    yield f'on_head() {{ srun {first}--overlap --nodes=1 --ntasks=1 --nodelist="$head" "$@"; }}'
    yield "ip=$(on_head hostname --ip-address | awk '{print $1}')"
    yield f'address="$ip:{_PORT}"'
    yield from ("", "# Ray: its head, then the other nodes, which try until the head is there.")
    yield f'on_head ray start --head --node-ip-address="$ip" --port={_PORT}{_devices(found[0])} --block &'
    for index, group in enumerate(found):
        others = group.count - (index == 0)
        if others:
            where = ' --exclude="$head"' if index == 0 else ""
            step = f"srun {_component(found, index)}--overlap --nodes={others} --ntasks={others}{where}"
            start = f"ray start --address=$address{_devices(group)} --block"
            yield f'{step} bash -c "until {start}; do sleep 5; done" &'
    yield from ("", "# All nodes must have joined before the command starts.")
    yield 'export RAY_ADDRESS="$address"'
    alive = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    yield f'joined() {{ on_head python -c "{alive}"; }}'
    yield f'until [ "$(joined)" = {total} ]; do sleep 5; done'
    yield ""
    yield f"on_head bash -c {shlex.quote(entrypoint)}"


def _component(found: tuple[Nodes, ...], index: int) -> str:
    """The option that names a component of a heterogeneous job."""
    return f"--het-group={index} " if len(found) > 1 else ""


def _devices(group: Nodes) -> str:
    return f" --num-gpus={group.accelerators}" if group.accelerators else f" --num-cpus={group.devices}"
