"""The short chaos run: a fixed plan of faults against real worker processes; the ledger has to be sound after it.

`make chaos` is the long one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from alphaloop.messages import Status
from tests.chaos.plan import draw_plan
from tests.chaos.report import show
from tests.chaos.run import run
from tests.chaos.size import SHORT

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(1200)]

#: Its poison comes early, so that the workers that it kills die among the other faults and not after them.
SEED: Final = 14


def test_every_promise_is_kept_while_workers_database_and_network_fail(
    kafka_home: Path, tmp_path: Path, postgres_server: str
) -> None:
    """`postgres_server` is asked for because it skips where there is no PostgreSQL; the run starts its own."""
    report = run(draw_plan(SEED, SHORT), kafka_home, tmp_path, print)
    show(report, Console(width=200))
    assert report.violations == ()
    assert report.num_jobs == SHORT.num_null_jobs
    assert {phase.faults for phase in report.phases} == set(SHORT.phases)
    hurt = {name: phase for phase in report.phases for name in phase.faults}
    assert hurt["workers killed"].num_started > 0
    assert hurt["rebalance storm"].num_started >= SHORT.num_workers * SHORT.num_storm_restarts - SHORT.num_workers
    assert report.num_cut_connections > 0
    assert report.num_by_status.keys() == set(Status) - {Status.REFUSED}, "a refused message has no row"
    assert report.num_failures > 0, "some jobs waited on a retry topic"
    assert report.num_ended_streams > 0
    assert report.num_measured > 0, "the scheduler worked too"
    assert report.num_repeated_results > 0, "jobs that were delivered again were answered again"
    assert report.num_commits > 0
    assert report.num_log_bytes > 0
