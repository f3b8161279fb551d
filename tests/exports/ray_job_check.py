"""Judge exported Ray jobs: python ray_job_check.py FOLDER prints a line of JSON a plan.

Ray's own checks of a submitted request and of its runtime environment run on the submission, the latter on the
RayJob's too; the RayJob's fields are held against the list in `data/ray_job_keys.txt`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from ray.dashboard.modules.job.common import JobSubmitRequest, validate_request_type
from ray.runtime_env import RuntimeEnv
from verdicts import report

KEYS = Path(__file__).parent / "data" / "ray_job_keys.txt"
TYPES = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of a document; empty lists and mappings are values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path, value


def misfits(document: Mapping[str, Any]) -> Iterator[str]:
    """Fields that a RayJob does not have, or that are of another type."""
    known = dict(line.split() for line in KEYS.read_text().splitlines() if line and not line.startswith("#"))
    for path, value in leaves(document):
        kind = known.get(path) or known.get(re.sub(r"limits\..*", "limits.*", path))
        if kind is None:
            yield f"{path} is no field of a RayJob"
        elif type(value) is not TYPES[kind]:
            yield f"{path} must be {kind}, got {value!r}"


def devices(group: Mapping[str, Any]) -> int:
    """Of a node."""
    limits = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return sum(limits.values())


def complaints(submission: dict[str, Any], job: dict[str, Any], world: Mapping[str, int]) -> Iterator[str]:
    """What is wrong."""
    request = validate_request_type(submission, JobSubmitRequest)
    RuntimeEnv(**request.runtime_env)
    RuntimeEnv(**yaml.safe_load(job["spec"]["runtimeEnvYAML"]))
    yield from misfits(job)
    if (job["apiVersion"], job["kind"]) != ("ray.io/v1", "RayJob") or not NAME.fullmatch(job["metadata"]["name"]):
        yield "it is no RayJob of a valid name"
    if job["spec"]["entrypoint"] != submission["entrypoint"]:
        yield "the two start different commands"
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"]
    total = devices(cluster["headGroupSpec"]) + sum(group["replicas"] * devices(group) for group in workers)
    if not 0 < total <= world["nodes"] * world["per_node"]:
        yield f"{total} devices are not among those there are"
    if any(not NAME.fullmatch(group["groupName"]) for group in workers):
        yield "names of groups must be labels"


def check(folder: Path, world: Mapping[str, int]) -> Iterator[str]:
    submission = json.loads((folder / "submission.json").read_text())
    yield from complaints(submission, yaml.safe_load((folder / "rayjob.yaml").read_text()), world)


if __name__ == "__main__":
    report(check)
