"""What the console reads from the store: what runs, pages of jobs, tasks and reports."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, event

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.messages import Mode
from alphaloop.store import known_jobs
from alphaloop.store.database import Database
from alphaloop.store.decisions import BudgetSubject, DecisionLog, LoggedSetting
from alphaloop.store.known_jobs import JobPages, PageStart, Wanted
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.reports import ReportStore
from alphaloop.store.task_figures import TaskPages
from alphaloop.store.traffic import decoded_lately
from benchmarks import ended_jobs as ended_jobs
from tests.fixtures.history import decoded, drawn_counts, record_runs
from tests.fixtures.postgres import as_member
from tests.fixtures.runs import claim, outcome

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC)


def test_what_was_decoded_lately(database: Database) -> None:
    counts = drawn_counts(random.Random(1), 0.5, num_tokens=48, num_draft_tokens=3)
    moments = {"new-1": timedelta(0), "new-2": timedelta(seconds=30), "old": timedelta(minutes=5)}
    record_runs(database, {name: decoded(counts, datetime.now(UTC) - ago) for name, ago in moments.items()})
    probe = decoded(counts, datetime.now(UTC), purpose="probe")
    record_runs(database, {"probe": probe})
    found = [(one.task, one.purpose, one.num_jobs, one.num_tokens) for one in decoded_lately(database)]
    assert found == [("code", "probe", 1, 48), ("code", "traffic", 2, 96)]


def test_pages_of_a_task_a_status_and_a_time_leave_none_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few rows a statement walks, and however little time there is: the next page goes on where it stopped."""
    monkeypatch.setattr(known_jobs, "_FIRST_ROWS", 2)
    monkeypatch.setattr(known_jobs, "_MORE_ROWS", 3)
    for number in range(12):
        task = ("code", "sql", "sql")[number % 3]
        claim(database, f"j-{number:02d}", task=task)
    OutcomeStore(database).record([outcome(f"j-0{number}") for number in (3, 6, 7)], owner="w")
    claim(database, "j-12", "j-13", "j-14", task="chat")  # of one moment
    middle = JobPages(database).find("j-05")
    for wanted, expected in (
        (Wanted(), ["j-14", "j-13", "j-12", *(f"j-{number:02d}" for number in range(11, -1, -1))]),
        (Wanted(task="code"), ["j-09", "j-06", "j-03", "j-00"]),
        (Wanted(task="code", status="succeeded"), ["j-06", "j-03"]),
        (Wanted(status="succeeded"), ["j-07", "j-06", "j-03"]),
        (Wanted(task="code", since=middle.created_at), ["j-09", "j-06"]),
        (Wanted(until=middle.created_at), ["j-05", "j-04", "j-03", "j-02", "j-01", "j-00"]),
        (Wanted(task="sql", since=middle.created_at, until=middle.created_at), ["j-05"]),
        (Wanted(task="nowhere"), []),
        (Wanted(status="cancelled", until=middle.created_at), []),
    ):
        for limit in (1, 2, 50):
            for clock in (lambda: 0.0, itertools.count(0, 2 * known_jobs.LOOK_S).__next__):
                pages, seen = JobPages(database, clock), []
                page = pages.newest(limit, wanted)
                while page.next_page is not None:
                    assert len(page.jobs) <= limit
                    seen += page.jobs
                    page = pages.newest(limit, wanted, after=page.next_page)
                assert [job.job_id for job in seen + page.jobs] == expected, (wanted, limit)


def test_a_page_of_jobs_walks_an_index_however_many_there_are(database: Database, database_url: SecretStr) -> None:
    """Every statement of a page, as the server plans it over a table that is too large to be read."""
    with psycopg.connect(database_url.get_secret_value(), autocommit=True) as connection:
        ended_jobs.fill(connection, 40_000, lambda _: None)
    at = NOW - timedelta(days=20)
    for wanted in (
        Wanted(),
        Wanted(task="task-7"),
        Wanted(task="task-0", status="failed"),
        Wanted(since=at, until=at + timedelta(days=1)),
        Wanted(status="expired", until=at),
    ):
        with said_of(database) as statements:
            page = JobPages(database).newest(50, wanted, after=PageStart(NOW, "x"))
        assert (len(page.jobs) == 50) == (wanted.status != "expired")
        for statement, parameters in statements:
            with database.begin() as connection:
                plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars())
            assert "Seq Scan on jobs" not in plan, plan
            assert "ix_jobs_created_at" in plan or "ix_decode_runs_job_id" in plan or "job_id = " in plan, plan


@contextmanager
def said_of(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """The queries that are sent to the server meanwhile."""
    said = list[tuple[str, Any]]()

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "WITH")):
            said.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_pages_of_a_batch(database: Database) -> None:
    claim(database, "b-2", "b-1", "b-3", batch_id="monday")
    claim(database, "b-0")
    pages = JobPages(database)
    assert [job.job_id for job in pages.of_batch("monday", 2)] == ["b-1", "b-2"]
    assert [job.job_id for job in pages.of_batch("monday", 2, after="b-2")] == ["b-3"]
    found = pages.find("b-3")
    assert (found.batch_id, found.status, found.owner) == ("monday", "running", "w")
    assert pages.find("b-4") is None


def test_the_last_change_of_each_task(database: Database) -> None:
    log = DecisionLog(database)
    vanilla = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, "not faster")
    drafted = Decision(Mode.SPECULATIVE, "lookup", "r", 5, Reason.FASTER, "faster")
    for task, choices in (("code", (vanilla, drafted)), ("sql", (drafted,)), ("other", (vanilla,))):
        for choice in choices:
            log.record_change(BudgetSubject(task, "t", "cpu", "greedy"), 4, choice, "w1")
    found = TaskPages(database).last_changes(["code", "sql", "unknown"])
    assert found.keys() == {"code", "sql"}
    assert found["code"].before == LoggedSetting("vanilla", None, 0)
    assert found["code"].after == LoggedSetting("speculative", "lookup", 5)
    assert found["sql"].before is None


def test_acceptance_by_the_hour_is_that_of_traffic(database: Database) -> None:
    counts = drawn_counts(random.Random(1), 0.5, num_tokens=48, num_draft_tokens=3)
    begin = NOW.replace(minute=0, second=0, microsecond=0)
    runs = {
        "one": decoded(counts, begin - timedelta(minutes=90)),
        "two": decoded(counts, begin - timedelta(minutes=70)),
        "three": decoded(counts, begin - timedelta(minutes=1)),
        "probe": decoded(counts, begin - timedelta(minutes=1), purpose="probe"),
        "elsewhere": decoded(counts, begin - timedelta(minutes=1), task="sql"),
        "long ago": decoded(counts, begin - timedelta(hours=30)),
    }
    record_runs(database, runs)
    found = TaskPages(database).by_hour(["code"], NOW - timedelta(hours=24))
    tested, accepted = counts.trials[0], counts.accepts[0]
    assert [(one.begins, one.trials, one.accepts) for one in found.pop("code")] == [
        (begin - timedelta(hours=2), 2 * tested, 2 * accepted),
        (begin - timedelta(hours=1), tested, accepted),
    ]
    assert not found


def test_those_who_may_not_read_texts_may_read_this(
    database: Database, database_url: SecretStr, postgres_server: str
) -> None:
    claim(database, "a", batch_id="monday")
    for role in ("alphaloop_scheduler", "alphaloop_reader"):
        with Database(as_member(postgres_server, database_url, role)) as seen_by_role:
            assert decoded_lately(seen_by_role) == []
            assert len(JobPages(seen_by_role).newest(5).jobs) == len(JobPages(seen_by_role).of_batch("monday", 5)) == 1
            assert TaskPages(seen_by_role).last_changes(["code"]) == {}
            assert TaskPages(seen_by_role).by_hour(["code"], NOW) == {}
            assert ReportStore(seen_by_role).headings(5) == []
