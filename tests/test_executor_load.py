"""What other processes take of the cores is told apart from what this one and its own take."""

from __future__ import annotations

import subprocess
import sys

import pytest

from executor.load import CoreSeconds, core_seconds, others_share

SPIN = "import time\nwhile time.process_time() < 0.5:\n    pass\n"
ORPHAN = f"import os\nif os.fork():\n    os._exit(0)\nos.setsid()\n{SPIN}"
"""A process that nobody here started, once the one that did has gone."""


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    [(18.0, 10.0, 0.4), (10.0, 10.0, 0.0), (20.0, 0.0, 1.0), (9.8, 10.0, 0.0), (21.0, 0.0, 1.0)],
)
def test_others_have_what_is_busy_and_not_our_own(busy: float, own: float, share: float) -> None:
    since = CoreSeconds(available=100.0, busy=7.0, own=3.0)
    until = CoreSeconds(available=120.0, busy=7.0 + busy, own=3.0 + own)
    assert others_share(since, until) == pytest.approx(share)


def test_a_process_that_was_started_here_and_has_ended_is_our_own() -> None:
    before = core_seconds()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    after = core_seconds()
    assert after.own - before.own > 0.45
    assert after.busy - before.busy > 0.4
    assert after.available > before.available


def test_a_process_of_someone_else_is_busy_and_not_our_own() -> None:
    before = core_seconds()
    subprocess.run([sys.executable, "-c", ORPHAN], check=True, stdout=subprocess.PIPE)
    after = core_seconds()
    assert after.busy - before.busy > 0.4
    assert (after.busy - before.busy) - (after.own - before.own) > 0.4
