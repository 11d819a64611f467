"""The figures that every screen shows: few rows are read of a long day, and the same is shown."""

from __future__ import annotations

import random
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.acceptance import share_interval
from alphaloop.store.database import Database
from alphaloop.store.task_figures import begin_of, figures_of, task_figures
from tests.fixtures.history import decoded, drawn_counts, record_runs

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_scheduler", "alphaloop_worker")]

HOUR = timedelta(hours=1)


@pytest.fixture
def long_day(database: Database, rng: random.Random) -> Database:
    """Six jobs in each hour of the last day, α drawn anew by the hour; and three jobs of another task.

    The first hour has none: the day of the figures begins an hour later if an hour begins before they are read.
    """
    begin = begin_of(datetime.now(UTC))
    jobs = {}
    for hour in range(1, 24):
        alpha = rng.uniform(0.5, 0.9)
        for number in range(6):
            counts = drawn_counts(rng, alpha, num_tokens=48, num_draft_tokens=3)
            jobs[f"{hour}-{number}"] = decoded(counts, begin + hour * HOUR + number * timedelta(minutes=5))
    for number in range(3):
        counts = drawn_counts(rng, 0.7, num_tokens=48, num_draft_tokens=2)
        at = begin + 20 * HOUR
        jobs[f"few-{number}"] = decoded(counts, at, task="few", num_draft_tokens=2, revision="llama_cpp-b11549-sums")
    record_runs(database, jobs)
    return database


@pytest.mark.roles  # others may not write what this fixture writes
def test_hours_are_the_clusters_of_a_long_day(long_day: Database) -> None:
    found = task_figures(long_day)
    assert set(found) == {"code", "few"}
    by_hour = long_day.rows(
        text("""SELECT sum(accepts[1])::int, sum(trials[1])::int FROM decode_runs WHERE task = 'code'
                GROUP BY date_trunc('hour', decoded_at, 'UTC')""")
    )
    views = long_day.rows(text("SELECT task, num_jobs, alpha_1, alpha FROM task_alpha_now"))
    expected, shown = share_interval([(accepts, trials) for accepts, trials in by_hour]), found["code"].alpha_1
    # Neither query has an order, which the last bits of sums depend on.
    assert shown is not None
    assert asdict(shown) == pytest.approx(asdict(expected), rel=1e-9)
    for view in views:
        its = found[view.task]
        assert its.num_alpha_jobs == view.num_jobs
        assert (its.alpha_1.mean, its.alpha.mean) == pytest.approx((view.alpha_1, view.alpha))
    assert (found["code"].alpha_num_draft_tokens, found["few"].alpha_num_draft_tokens) == ((3, 3), (2, 2))
    assert (found["code"].alpha_of, found["few"].alpha_of) == ("", "positions estimated")


@pytest.mark.roles
def test_of_one_task_and_of_a_past_moment_the_same_is_read(long_day: Database) -> None:
    assert figures_of(long_day, "code") == task_figures(long_day)["code"]
    assert figures_of(long_day, "nobody").num_jobs == 0
    first = long_day.scalar(text("SELECT min(decoded_at) FROM decode_runs"))
    assert figures_of(long_day, "few", first + 24 * HOUR).alpha_of == "positions estimated", "by runs as by hours"
    past = figures_of(long_day, "code", first + 11 * HOUR + timedelta(minutes=12))
    assert past.num_alpha_jobs == 11 * 6 + 3, "the jobs of that hour that came later are not among them"


def test_a_worker_and_a_scheduler_may_read_them(database: Database) -> None:
    assert task_figures(database) == {}
