"""Notifications from a real Postgres to a real HTTP service: each once, none lost, and no failure stops anything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from alphaloop.errors import LeadershipLost, StoreUnavailable
from alphaloop.measurements import DriftSubject
from alphaloop.notifying import NewsKind, open_sinks
from alphaloop.settings import SchedulerSettings
from alphaloop.store.coordination import LeaderLease
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventState, Incident, IncidentKind, IncidentStore
from alphaloop.store.reports import NotificationStore, ReportStore, StoredReport
from alphaloop.tables import notifications
from scheduler.beside import Beside
from scheduler.metrics import SchedulerMetrics
from scheduler.notifying import Notifier
from tests.fixtures.drift import content
from tests.fixtures.hook import Hook, running_hook

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
SUBJECT = DriftSubject("code", "tiny", "draft-1", "target-1")
SAID = content(SUBJECT, "fault", verdict="α_1 fell.")
WRONG = Incident(IncidentKind.WRONG_TEXT, "code", "tiny", "d", "t", "cpu", ("job-1",), "It is not its own text.", {})


@pytest.fixture
def hook() -> Iterator[Hook]:
    with running_hook() as running:
        yield running


@pytest.fixture
def metrics() -> SchedulerMetrics:
    return SchedulerMetrics()


def notifier(
    database: Database,
    *hooks: Hook,
    metrics: SchedulerMetrics | None = None,
    known_since: datetime = NOW - HOUR,
    **settings: object,
) -> Notifier:
    """Of a process that knows its sinks for an hour."""
    dials = SchedulerSettings.model_validate(settings)
    made = Notifier(
        database, open_sinks([hook.url for hook in hooks]), dials, metrics or SchedulerMetrics(), delays_s=(60, 300)
    )
    made.add_sinks(known_since)
    return made


def drift(database: Database, state: EventState, at: datetime = NOW) -> int:
    """Give the newest event a state, or open one; returns its number."""
    store = DriftEventStore(database)
    known = None if state is EventState.OPENED else store.since(NOW - DAY)[-1].id
    store.write([EventChange(known, state, SAID, f"It was {state.value}.")], at)
    return store.since(NOW - DAY)[-1].id


def test_everything_that_happened_is_told_once_in_its_order(database: Database, hook: Hook) -> None:
    telling = notifier(database, hook)
    drift(database, EventState.OPENED)
    drift(database, EventState.CONFIRMED)
    incidents = IncidentStore(database)
    incidents.open([WRONG], NOW)
    assert telling.send_due(NOW + SECOND) == 3
    number = drift(database, EventState.CLOSED, NOW + MINUTE)
    incidents.close([incidents.open_incidents()[0].id], NOW + MINUTE)
    assert telling.send_due(NOW + MINUTE) == 2
    assert hook.titles == [
        "alphaloop: code, tiny: drift opened (fault)",
        "alphaloop: code, tiny: drift confirmed (fault)",
        "alphaloop: code: incident opened (wrong text)",
        "alphaloop: code, tiny: drift closed (fault)",
        "alphaloop: code: incident closed (wrong text)",
    ]
    assert hook.taken[0]["message"] == f"It was opened.\nTrain it.\nalphaloop drift show {number}"
    assert [message["type"] for message in hook.taken] == ["warning", "warning", "failure", "success", "success"]
    assert notifier(database, hook).send_due(NOW + 2 * MINUTE) == 0, "another process knows what was told"


def test_whoever_took_note_of_an_event_is_not_told_so(database: Database, hook: Hook) -> None:
    telling = notifier(database, hook)
    number = drift(database, EventState.OPENED)
    DriftEventStore(database).acknowledge(number, "Ada", "a secret plan", NOW)
    assert telling.send_due(NOW) == 1
    assert "secret plan" not in str(hook.taken)


def test_a_new_address_is_not_told_of_the_past(database: Database, hook: Hook) -> None:
    drift(database, EventState.OPENED, NOW - 2 * HOUR)
    telling = notifier(database, hook)
    assert telling.send_due(NOW) == 0
    drift(database, EventState.CONFIRMED)
    assert telling.send_due(NOW) == 1
    with running_hook() as later:
        late = Notifier(database, open_sinks([later.url]), SchedulerSettings(), SchedulerMetrics())
        assert late.send_due(NOW + SECOND) == 0
        drift(database, EventState.CLOSED, NOW + MINUTE)
        assert late.send_due(NOW + MINUTE) == 1


def test_news_of_last_week_is_none(database: Database, hook: Hook) -> None:
    telling = notifier(database, hook)
    drift(database, EventState.OPENED)
    assert telling.send_due(NOW + 8 * DAY) == 0


@pytest.mark.parametrize(("wanted", "titles"), [("never", []), ("changed", ["06:01"]), ("always", ["06:00", "06:01"])])
def test_reports_are_told_if_asked_for(database: Database, hook: Hook, wanted: str, titles: list[str]) -> None:
    at = NOW.replace(hour=6, minute=0, second=0) - DAY
    telling = notifier(database, hook, known_since=at - HOUR, notify_reports=wanted)
    for minute, changes in enumerate(([], [{"kind": "flag", "about": "code", "sentence": "It was opened."}])):
        data = {"changes": {"since": None, "lines": changes}}
        made = at + minute * MINUTE
        ReportStore(database).save(StoredReport(made, made - DAY, made, "2 jobs of 1 task.", data, "", ""))
    telling.send_due(NOW)
    assert [title.split()[-2] for title in hook.titles] == titles
    if titles:
        assert hook.taken[-1]["message"] == "2 jobs of 1 task.\n- It was opened."


def test_a_service_that_was_away_gets_what_it_missed(
    database: Database, hook: Hook, metrics: SchedulerMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    telling = notifier(database, hook, metrics=metrics)
    drift(database, EventState.OPENED)
    hook.status = 503
    with caplog.at_level(logging.WARNING, logger="scheduler"):
        assert telling.send_due(NOW) == 0
    (sink,) = (sink.name for sink in open_sinks([hook.url]))
    assert [record.getMessage() for record in caplog.records if record.name == "scheduler.notifying"] == [
        f"{sink}: HTTP status 503"
    ]
    found = metrics.registry.get_sample_value
    assert found("alphaloop_scheduler_notification_failures", {"sink": sink}) == 1
    assert found("alphaloop_scheduler_notifications_total", {"sink": sink, "outcome": "failed"}) == 1
    assert telling.send_due(NOW + 59 * SECOND) == 0
    assert hook.num_asked == 1, "the first delay is a minute"
    hook.status = 200
    assert telling.send_due(NOW + 61 * SECOND) == 1
    assert found("alphaloop_scheduler_notification_failures", {"sink": sink}) == 0
    (attempt,) = NotificationStore(database).attempted(10)
    assert (attempt.num_attempts, attempt.sent_at) == (2, NOW + 61 * SECOND)


def test_retries_end(database: Database, hook: Hook, metrics: SchedulerMetrics) -> None:
    telling = notifier(database, hook, metrics=metrics)
    drift(database, EventState.OPENED)
    hook.status = 404
    for minute in range(60):
        telling.send_due(NOW + minute * MINUTE)
    assert hook.num_asked == 3, "at once, after 1 and after 5 minutes"
    (attempt,) = NotificationStore(database).attempted(10)
    assert str(attempt.failure).endswith("HTTP status 404")
    (sink,) = (sink.name for sink in open_sinks([hook.url]))
    labels = {"sink": sink, "outcome": "given_up"}
    assert metrics.registry.get_sample_value("alphaloop_scheduler_notifications_total", labels) == 1


def test_what_one_service_refuses_holds_up_nothing_else(database: Database, hook: Hook) -> None:
    with running_hook() as other:
        hook.refuses = "opened"
        telling = notifier(database, hook, other)
        drift(database, EventState.OPENED)
        drift(database, EventState.CONFIRMED)
        assert telling.send_due(NOW) == 2, "all to the other one"
        assert telling.send_due(NOW + SECOND) == 1
    assert hook.titles == ["alphaloop: code, tiny: drift confirmed (fault)"]


def test_a_process_that_died_while_it_sent_leaves_it_to_the_next(database: Database, hook: Hook) -> None:
    """At least once: the service may have taken it, and gets it again."""
    notifier(database, hook)
    drift(database, EventState.OPENED)
    store = NotificationStore(database)
    (sink,) = (sink.name for sink in open_sinks([hook.url]))
    (pending,) = store.pending(sink, [NewsKind.DRIFT], NOW)
    assert store.begin(sink, pending, NOW)
    next_leader = notifier(database, hook)
    assert next_leader.send_due(NOW + SECOND) == 0
    assert next_leader.send_due(NOW + MINUTE) == 1


def test_two_processes_do_not_begin_the_same_attempt(database: Database, hook: Hook) -> None:
    notifier(database, hook)
    drift(database, EventState.OPENED)
    (sink,) = (sink.name for sink in open_sinks([hook.url]))
    one, two = NotificationStore(database), NotificationStore(database)
    (seen,), (same,) = (store.pending(sink, [NewsKind.DRIFT], NOW) for store in (one, two))
    assert (one.begin(sink, seen, NOW), two.begin(sink, same, NOW)) == (True, False)
    (again,) = one.pending(sink, [NewsKind.DRIFT], NOW)
    one.end(sink, again.news, NOW)
    assert not two.begin(sink, again, NOW), "it was taken meanwhile"


def test_a_process_that_leads_no_more_sends_nothing(database: Database, hook: Hook) -> None:
    lease = LeaderLease(database, "test", lease_s=600.0)
    term = lease.begin_term()
    lease.begin_term()
    drift(database, EventState.OPENED)
    notifier(database, hook)
    former = Notifier(database.guarded(term.check), open_sinks([hook.url]), SchedulerSettings(), SchedulerMetrics())
    with pytest.raises(LeadershipLost):
        former.send_due(NOW)
    assert hook.num_asked == 0


def test_no_failure_ends_the_thread(database: Database, hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    """The clock fails, as it does while the database is away; then everything works."""
    telling = notifier(database, hook)
    drift(database, EventState.OPENED)
    failures: list[Exception] = [StoreUnavailable("away"), StoreUnavailable("away"), ZeroDivisionError("by zero")]
    told = threading.Event()

    def clock() -> datetime:
        if failures:
            raise failures.pop()
        if hook.taken:
            told.set()
        return NOW

    thread = Beside("notifying", lambda: telling.send_due(clock()), 0.01, first=lambda: telling.add_sinks(clock()))
    with caplog.at_level(logging.WARNING, logger="scheduler"):
        thread.start()
        assert told.wait(30)
        thread.stop(wait=True)
    assert hook.titles == ["alphaloop: code, tiny: drift opened (fault)"]
    codes = [vars(record)["code"] for record in caplog.records if record.name == "scheduler.beside"]
    assert codes == ["ZeroDivisionError", "store_unavailable", "store_unavailable"]


def test_the_database_keeps_no_secret(database: Database, hook: Hook) -> None:
    telling = notifier(database, hook)
    drift(database, EventState.OPENED)
    hook.status = 500
    telling.send_due(NOW)
    with database.begin() as connection:
        rows = [
            *connection.execute(select(notifications)),
            *connection.exec_driver_sql("SELECT * FROM notification_sinks"),
        ]
    assert not [word for word in ("PASSWORD", "TOKEN", "ada", str(hook.port)) if word in str(rows)]
