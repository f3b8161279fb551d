"""How predictions are compared with published measurements: one line of figures per data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau, spearmanr

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Predicted against measured, arrays of one length."""

    predicted: Float
    measured: Float
    groups: Sequence[str]
    """What one scalar may be fitted for, such as a device and framework; errors after it are leave-one-out."""
    baseline: Float
    """What a constant rate (work over time) per group predicts, its rate the median of the group's other rows."""
    left_out: int = 0
    """Rows of the files that could not be priced."""
    why_left_out: str = ""

    @property
    def errors(self) -> Float:
        """Relative errors."""
        return np.abs(self.predicted / self.measured - 1.0)

    def after_scalar(self) -> Float:
        """Relative errors once each group's predictions are multiplied by the median ratio of its other rows; rows that
        are alone in their group are left out."""
        ratio = self.measured / self.predicted
        scales = _median_of_others(ratio, self.groups)
        good = np.isfinite(scales)
        return np.asarray(np.abs(self.predicted * scales / self.measured - 1.0)[good])

    def figures(self) -> dict[str, float | int | str]:
        """As `make bench-model` prints them."""
        errors, after = self.errors, self.after_scalar()
        base = np.abs(self.baseline / self.measured - 1.0)
        base = base[np.isfinite(base)]
        several = len(self.measured) > 1
        figures: dict[str, float | int | str] = {
            "rows": len(errors),
            "mean": _round(errors.mean()),
            "median": _round(np.median(errors)),
            "p90": _round(np.quantile(errors, 0.9)),
            "bias": _round(np.median(self.predicted / self.measured) - 1.0),
            "tau": _round(kendalltau(self.predicted, self.measured).statistic if several else np.nan),
            "spearman": _round(spearmanr(self.predicted, self.measured).statistic if several else np.nan),
            "baseline_mean": _round(base.mean() if len(base) else np.nan),
            "mean_after_scalar": _round(after.mean() if len(after) else np.nan),
            "median_after_scalar": _round(np.median(after) if len(after) else np.nan),
        }
        return figures | ({"left_out": self.left_out, "why": self.why_left_out} if self.left_out else {})


def constant_rate(work: Float, measured: Float, groups: Sequence[str]) -> Float:
    """Seconds by the group's median rate of the other rows; NaN for a row that is alone in its group."""
    return np.asarray(work * _median_of_others(measured / work, groups))


def _median_of_others(values: Float, groups: Sequence[str]) -> Float:
    names = np.asarray(groups)
    result = np.full(len(values), np.nan)
    for name in np.unique(names):
        rows = np.flatnonzero(names == name)
        for row in rows if len(rows) > 1 else ():
            result[row] = np.median(values[rows[rows != row]])
    return result


def find(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder or its `measured`; None if there is none."""
    return next((path for path in (folder / name, folder / "measured" / name) if path.exists()), None)


def _round(value: float) -> float:
    return round(float(value), 4)
