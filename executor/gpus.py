"""GPUs of this machine that the installed torch can use, found without loading it, and how a worker is given one.

NVIDIA's driver has a device file for each. AMD's lists them as nodes of a topology, and a container has the render
devices of those that it may use. Runtimes hide what variables leave out, AMD's in two levels: HIP_VISIBLE_DEVICES, or
CUDA_VISIBLE_DEVICES in its place, counts what ROCR_VISIBLE_DEVICES has left (ROCm documentation, "GPU isolation").
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Literal

AMD = 4098
"""Vendor id 0x1002."""

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
"""By kind, the variable that gives a process its GPUs."""

_BUILD = re.compile(r"^(cuda|hip)\b[^=]*= *['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs that a process may use."""

    kind: Literal["cuda", "rocm"]
    ids: tuple[str, ...]
    """What the variable of the kind calls each: indices, or identifiers that begin with `GPU-` or `MIG-`."""
    name: str
    """Of the first, as its driver gives it."""

    def variables(self, *devices: int) -> dict[str, str]:
        """Variables of a process that may use these of the GPUs."""
        return {VARIABLES[self.kind]: ",".join(self.ids[device] for device in devices)}


def gpus_here() -> Gpus | None:
    """Those of this machine; None where there are none, and where torch is missing or built for cores."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return find_gpus(version, Path("/"), os.environ)


def find_gpus(version: str, root: Path, environment: Mapping[str, str]) -> Gpus | None:
    """GPUs that a torch can use.

    Args:
        version: Text of its `torch/version.py`, which says what it was built for.
        root: Of the file system.
        environment: With the variables that hide GPUs.
    """
    built = _BUILD.search(version)
    if built is None:
        return None
    if built[1] == "cuda":
        names, asked = _nvidia(root), environment.get("CUDA_VISIBLE_DEVICES")
    else:
        names = list(_amd(root))
        left = _visible(environment.get("ROCR_VISIBLE_DEVICES"), len(names))
        names = [names[_index(one)] for one in left]
        asked = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    ids = _visible(asked, len(names))
    return Gpus(kind="cuda" if built[1] == "cuda" else "rocm", ids=ids, name=names[_index(ids[0])]) if ids else None


def _visible(asked: str | None, count: int) -> tuple[str, ...]:
    """What a variable leaves of so many GPUs: all where it is not set, none where it is empty, else what it names up to
    the first that is not there. An identifier is taken to be there: a worker that does not find its GPU says so."""
    if asked is None:
        return tuple(map(str, range(count)))

    def is_there(word: str) -> bool:
        return word.startswith(("GPU-", "MIG-")) or (word.isdecimal() and int(word) < count)

    words = dict.fromkeys(word.strip() for word in asked.split(","))
    return tuple(takewhile(is_there, words)) if count else ()


def _index(identifier: str) -> int:
    """Of a GPU among all; one that is not called by it is taken to be like the first."""
    return int(identifier) if identifier.isdecimal() else 0


def _nvidia(root: Path) -> list[str]:
    count = len(list((root / "dev").glob("nvidia[0-9]*")))
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    found = [re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE) for file in files]
    names = [match[1] for match in found if match]
    return names if len(names) == count else [*names[:1], "NVIDIA GPU"][:1] * count


def _amd(root: Path) -> Iterator[str]:
    """Names of nodes that compute and whose render device this process may open."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda node: int(node.name)):
        facts = _properties(node / "properties")
        device = f"renderD{facts.get('drm_render_minor', 0)}"
        usable = os.access(root / "dev/dri" / device, os.R_OK | os.W_OK)
        if facts.get("simd_count", 0) > 0 and facts.get("vendor_id") == AMD and usable:
            yield _amd_name(root / "sys/class/drm" / device / "device/product_name", facts.get("gfx_target_version", 0))


def _properties(file: Path) -> dict[str, int]:
    """Pairs of a name and a number, one a line; none where a container may not read them."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def _amd_name(file: Path, version: int) -> str:
    """The board's own name, which cards for servers have; else the instruction set: 90402 is gfx942."""
    try:
        name = file.read_text().strip()
    except OSError:
        name = ""
    return name or f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
