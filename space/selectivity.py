"""Which rules cut a space most: the share of combinations that each refuses, estimated by drawing some."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ir.batch import COLUMNS, ROLES, Column, PlanBatch
from ir.rules import breaches
from ir.setting import Setting
from space.axes import Space, blank_inactive


def selectivity(space: Space, setting: Setting, *, samples: int = 20_000, seed: int = 0) -> list[tuple[str, float]]:
    """Rules by the share of combinations that they refuse, largest first.

    Combinations of axis values are drawn uniformly among those that a plan can stand for: a pool is named by the
    first of its roles and has one size. A rule on layouts refuses a combination if any section breaks it. Shares
    overlap, and have a standard error of at most 0.5 / sqrt(samples).
    """
    batch = _combinations(space, setting, samples, np.random.default_rng(seed))
    broken: dict[str, NDArray[np.bool_]] = {}
    for breach in breaches(batch, setting):
        broken[breach.name] = broken.get(breach.name, np.zeros(samples, dtype=bool)) | breach.broken
    shares = [(name, float(rows.mean())) for name, rows in broken.items()]
    return sorted(shares, key=lambda share: -share[1])


def _combinations(space: Space, setting: Setting, samples: int, rng: np.random.Generator) -> PlanBatch:
    columns: dict[str, Column] = {}
    for name in COLUMNS:
        columns[name] = rng.choice(np.asarray(space[name], dtype=np.int32), size=samples)
    for role in setting.roles:
        leader = _leaders(role, space, columns, rng)
        for what in ("group", "devices"):
            of_roles = np.stack([columns[f"{what}.{other}"] for other in ROLES])
            columns[f"{what}.{role}"] = of_roles[leader, np.arange(samples)]
        columns[f"place.{role}"] = leader
    return blank_inactive(PlanBatch(samples, columns))


def _leaders(role: str, space: Space, columns: dict[str, Column], rng: np.random.Generator) -> Column:
    """A pool for a role, drawn from those that earlier roles lead and its own."""
    options = np.asarray(space[f"place.{role}"], dtype=np.int32)
    own = ROLES.index(role)
    leads = np.stack([(columns[f"place.{ROLES[i]}"] == i) | (i == own) for i in options.tolist()])
    return np.asarray(options[np.argmax(np.where(leads, rng.random(leads.shape), -1.0), axis=0)])
