"""The nodes that a plan takes, for what starts it: Ray and Slurm."""

from __future__ import annotations

from dataclasses import dataclass

from executor.export.production import Production

ENTRYPOINT = "python tune.py run plan.toml job.toml"
"""The command that is started where no framework's is: this project's own executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Like nodes."""

    name: str
    """Of their group of devices."""
    count: int
    devices: int
    """Of each."""
    resource: str
    """Name of a device as a Kubernetes resource; empty for processor cores."""

    @property
    def accelerators(self) -> int:
        """Devices of each that are no processor cores."""
        return self.devices if self.resource else 0


def nodes(production: Production) -> tuple[Nodes, ...]:
    """Those of each group of devices that the plan uses."""
    found = []
    for index, group in enumerate(production.cluster.groups):
        used = sum(pool.devices for pool in production.plan.pools if pool.group == index)
        if used:
            count = -(-used // group.levels[0].size)
            found.append(
                Nodes(
                    name=group.name,
                    count=count,
                    devices=used if count == 1 else group.levels[0].size,
                    resource=_resource(group.device.kind, group.device.name),
                )
            )
    return tuple(found)


def _resource(kind: str, name: str) -> str:
    if kind == "cpu":
        return ""
    return "amd.com/gpu" if name.split()[0].startswith("MI") else "nvidia.com/gpu"


def label(text: str) -> str:
    """A name of letters, digits and hyphens, as Kubernetes and Slurm take it."""
    plain = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in text.lower())
    return "-".join(part for part in plain.split("-") if part)[:40].rstrip("-") or "job"
