"""The importers by the name that `tune.py import --from` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from executor.imports import areal, nemo_rl, openrlhf, trl, verl
from executor.imports.imported import Imported
from ir.documents import from_data, plain
from ir.errors import chosen
from ir.job import JobDocument
from ir.plan import Plan


class Read(Protocol):
    """Reads one framework's configuration."""

    def __call__(self, text: str, *, where: str) -> Imported:
        """The job, plan and devices of a configuration.

        Raises:
            InputError: a key that is unknown, or that no plan can express.
        """


IMPORTERS: Mapping[str, Read] = {
    "verl": verl.read,
    "openrlhf": openrlhf.read,
    "areal": areal.read,
    "nemo-rl": nemo_rl.read,
    "trl": trl.read,
}


def importer(name: str) -> Read:
    """The importer of that name, which gives only what the documents of a job and a plan may hold.

    Raises:
        InputError: there is none.
    """
    read = chosen(name, IMPORTERS, "from")

    def checked(text: str, *, where: str) -> Imported:
        found = read(text, where=where)
        for name, document, kind in (("job", found.job, JobDocument), ("plan", found.plan, Plan)):
            from_data(plain(document), kind, where=f"{where}: {name}")
        return found

    return checked
