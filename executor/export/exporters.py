"""The exporters by the name that `tune.py export --to` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from executor.export import (
    areal,
    deepspeed_json,
    nemo_rl,
    openrlhf,
    ray_job,
    rlinf,
    roll,
    slime,
    slurm,
    trl,
    verl,
    vllm_args,
)
from executor.export.production import Files, Production
from ir.errors import chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """Writes plans as one framework's configuration."""

    name: str
    what: str
    """In words, with the version whose keys it writes."""
    backend: str | None
    """The backend that says which plans it can express; None for all."""
    write: Callable[[Production], Files]
    """Pure. The plan must be legal for the backend."""
    launch: Callable[[Production, str], Files] | None = None
    """Of what starts a command, the same for a given command."""


_ALL: tuple[Exporter, ...] = (
    Exporter(name="verl", what="verl 0.9.1: a script of Hydra overrides", backend="verl", write=verl.write),
    Exporter(name="openrlhf", what="OpenRLHF 0.11.2: a script of flags", backend="openrlhf", write=openrlhf.write),
    Exporter(name="areal", what="AReaL 1.0.4: YAML and the command that reads it", backend="areal", write=areal.write),
    Exporter(name="nemo-rl", what="NeMo-RL: YAML on its base configuration", backend="nemo-rl", write=nemo_rl.write),
    Exporter(name="slime", what="slime v0.3.1: a script of flags", backend="slime", write=slime.write),
    Exporter(name="trl", what="TRL 1.16.0: GRPO and accelerate YAML", backend="trl", write=trl.write),
    Exporter(name="rlinf", what="RLinf 0.3.0: YAML of its reasoning runner", backend="rlinf", write=rlinf.write),
    Exporter(name="roll", what="ROLL 0.3.0: YAML of its RLVR pipeline", backend="roll", write=roll.write),
    Exporter(
        name="deepspeed-json", what="DeepSpeed 0.19.8: JSON", backend="deepspeed-json", write=deepspeed_json.write
    ),
    Exporter(name="vllm-args", what="vLLM 0.33: engine arguments", backend="vllm-args", write=vllm_args.write),
    Exporter(
        name="ray-job",
        what="Ray 2.60: a job, and KubeRay's RayJob",
        backend=None,
        write=ray_job.write,
        launch=ray_job.launch,
    ),
    Exporter(
        name="slurm",
        what="Slurm: a batch script with a Ray cluster",
        backend=None,
        write=slurm.write,
        launch=slurm.launch,
    ),
)

EXPORTERS: Mapping[str, Exporter] = {exporter.name: exporter for exporter in _ALL}


def exporter(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        InputError: there is none.
    """
    return chosen(name, EXPORTERS, "to")
