"""Lines that a person reads of a search."""

from __future__ import annotations

from datetime import UTC, datetime

import build
import pytest

from ir.backends import backend
from search.report import busy_text, trial_text
from search.survey import survey
from search.tuning import conclude
from search.view import Identity
from space.axes import VERSION
from traces.schema import Trial, TrialState

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SURVEY = survey(build.job(), build.cluster(), backend=backend("local"))
IDENTITY = Identity(study="j", hardware="h", software="s", model_version="")


def trial(row: int, seconds: float, others_share: float | None) -> Trial:
    """A run of a plan."""
    return Trial(
        run_id=str(row),
        study="j",
        plan_id=SURVEY.candidates.plan(row).identity,
        params=SURVEY.candidates.params(row),
        space_version=VERSION,
        model_version="",
        hardware="h",
        software="s",
        state=TrialState.COMPLETE,
        step_seconds=(seconds, seconds),
        stage_seconds={"generate": seconds / 2},
        peak_bytes=1 << 30,
        others_share=others_share,
        started_at=NOON,
        ended_at=NOON,
    )


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, ""),
        (0.0, ""),
        (0.099, ""),
        (0.1, "other processes took 10% of the cores"),
        (0.354, "other processes took 35% of the cores"),
    ],
)
def test_other_processes_are_told_of_where_they_matter(share: float | None, text: str) -> None:
    assert busy_text(share) == text


def test_a_run_beside_other_processes_says_so() -> None:
    quiet, busy = (trial_text(SURVEY, trial(0, 1.0, share), 1, 0.9).splitlines()[-1] for share in (0.02, 0.3))
    assert quiet.endswith("; best so far 0.900 s")
    assert busy.endswith("; best so far 0.900 s; other processes took 30% of the cores")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_end_of_a_search_counts_such_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shares = (0.25, None, 0.4, 0.01)
    conclude(SURVEY, IDENTITY, [trial(row, 1.0 + row, share) for row, share in enumerate(shares)], "trials")
    said = "beside 2 of 4 runs other processes took up to 40% of the cores: search anew where nothing else runs"
    assert said in capsys.readouterr().out
    conclude(SURVEY, IDENTITY, [trial(row, 1.0 + row, 0.01) for row in range(4)], "trials")
    assert "other processes" not in capsys.readouterr().out
