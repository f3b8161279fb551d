"""Ray 2.60 jobs: `submission.json` for a cluster that runs (`JobSubmissionClient.submit_job(**body)`, or
`POST /api/jobs/`), and `rayjob.yaml` for KubeRay, which starts one."""

from __future__ import annotations

import json
from collections.abc import Iterator

from executor.export.entries import Entry, as_json, commented, comments, entry, reasons
from executor.export.nodes import ENTRYPOINT, Nodes, label, nodes
from executor.export.production import Files, Production

_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
_IMAGE = "rayproject/ray:2.60.0-gpu"

_TO_SET = (
    "KubeRay (ray.io/v1). Still to be set: the image with the framework, processors and memory of a node, volumes with",
    "models and data.",
)


def write(production: Production) -> Files:
    """For a run of the plan by this tool."""
    return launch(production, ENTRYPOINT)


def launch(production: Production, entrypoint: str) -> Files:
    """`submission.json` with where its values come from, and `rayjob.yaml`; both start `entrypoint`."""
    entries = list(_submission(production, entrypoint))
    return {
        "submission.json": as_json(entries),
        "submission.reasons.txt": reasons(production.header, entries),
        "rayjob.yaml": "\n".join([*_kuberay(production, entrypoint), ""]),
    }


def _submission(production: Production, entrypoint: str) -> Iterator[Entry]:
    plan = production.plan
    yield entry("entrypoint", entrypoint, "command of the framework that is exported along, or of this tool")
    yield entry("runtime_env.env_vars", _ENVIRONMENT, "rule: lines are shown as they are printed")
    yield entry("metadata.job", production.job.document.name, "job: name")
    yield entry("metadata.plan", plan.identity, "plan: its identity")
    yield entry("metadata.layout", plan.describe(), "plan: in words")
    if production.notes:
        yield entry("metadata.predicted", "; ".join(production.notes), "predicted of the plan")
    yield entry("entrypoint_num_cpus", 1, "rule: the driver only waits; workers take the devices")


def _kuberay(production: Production, entrypoint: str) -> Iterator[str]:
    head, *others = _groups(nodes(production))
    yield from comments((*production.header, *_TO_SET))
    yield "apiVersion: ray.io/v1"
    yield "kind: RayJob"
    yield "metadata:"
    yield commented(f"  name: {label(production.job.document.name)}", "job: name")
    yield "spec:"
    yield commented(f"  entrypoint: {json.dumps(entrypoint)}", "command of the framework, or of this tool")
    yield "  runtimeEnvYAML: |"
    yield "    env_vars:"
    yield from (f"      {name}: {json.dumps(value)}" for name, value in _ENVIRONMENT.items())
    yield commented("  shutdownAfterJobFinishes: true", "rule: devices are given back")
    yield "  rayClusterSpec:"
    yield "    rayVersion: '2.60.0'"
    yield "    headGroupSpec:"
    yield "      rayStartParams: {}"
    yield from _template(head, "ray-head", "      ")
    yield "    workerGroupSpecs:" if others else "    workerGroupSpecs: []"
    for group in others:
        yield f"      - groupName: {label(group.name)}"
        for field in ("replicas", "minReplicas", "maxReplicas"):
            yield commented(f"        {field}: {group.count}", "plan: nodes of its pools; the head is one of the first")
        yield "        rayStartParams: {}"
        yield from _template(group, "ray-worker", "        ")


def _groups(found: tuple[Nodes, ...]) -> Iterator[Nodes]:
    """The head, which is one of the first group's nodes, and the groups of workers."""
    first, *rest = found
    yield first
    if first.count > 1:
        yield Nodes(name=first.name, count=first.count - 1, devices=first.devices, resource=first.resource)
    yield from rest


def _template(group: Nodes, name: str, indent: str) -> Iterator[str]:
    yield f"{indent}template:"
    yield f"{indent}  spec:"
    yield f"{indent}    containers:"
    yield f"{indent}      - name: {name}"
    yield commented(f"{indent}        image: {_IMAGE}", "to be set: with the framework")
    if group.resource:
        yield f"{indent}        resources:"
        yield f"{indent}          limits:"
        yield commented(f"{indent}            {group.resource}: {group.devices}", "plan: devices of a node")
