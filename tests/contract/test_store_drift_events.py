"""Drift events in a real Postgres: their states, their history, and what one may not do."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import pytest
from sqlalchemy import text

from alphaloop.errors import StoreError, UnknownName
from alphaloop.measurements import AcceptedLevel, DriftSubject, UnansweredAlarm
from alphaloop.messages import Purpose
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventContent, EventState
from alphaloop.store.housekeeping import RetentionStore
from scheduler.causes import Cause
from tests.fixtures.drift import content, register_probe_set
from tests.fixtures.runs import decode_run, record, vanilla_counts

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
SUBJECT = DriftSubject("code", "small", "draft-1", "target-1")
THIN = content(SUBJECT, "too_little_evidence", began=(NOW - DAY, NOW), lost_tokens_per_s=3.5)


@pytest.fixture
def store(database: Database) -> DriftEventStore:
    return DriftEventStore(database)


def change(store: DriftEventStore, state: EventState | None, said: EventContent, at: datetime) -> None:
    (event,) = store.since(NOW - DAY)
    store.write([EventChange(event.id, state, said, said.verdict)], at)


@pytest.mark.parametrize(
    ("constraint", "words"), [("ck_drift_events_cause", Cause), ("ck_drift_event_states_state", EventState)]
)
def test_the_words_of_the_database_are_those_of_the_code(
    database: Database, constraint: str, words: type[StrEnum]
) -> None:
    query = text("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = :name")
    assert set(re.findall(r"'(\w+)'", database.scalar(query, {"name": constraint}))) == {word.value for word in words}


def fell(subject: DriftSubject = SUBJECT, state: str = "fell", flagged_by: str = "traffic") -> EventContent:
    """A move that a test has just found."""
    evidence = {"flagged_by": flagged_by, "probes": None, "traffic": {"state": state}}
    return replace(THIN, subject=subject, evidence=evidence)


def decoded(database: Database, subject: DriftSubject, purpose: Purpose, at: datetime) -> None:
    counts = vanilla_counts(8)
    of = {"task": subject.task, "drafter": subject.drafter, "revision": subject.draft_revision}
    record(database, decode_run(counts, **of, target=subject.target_revision, purpose=purpose, at=at))


def test_an_alarm_is_unanswered_until_a_probe_is_decoded(database: Database, store: DriftEventStore) -> None:
    def alarms(target: str = "target-1") -> list[UnansweredAlarm]:
        return store.unanswered(target, HOUR)

    store.write([EventChange(None, EventState.OPENED, fell(), "It fell.")], NOW)
    assert alarms() == [], "a task without a probe set has nothing that could answer"
    register_probe_set(database, "code", [{"prompt": "one"}], NOW)
    assert alarms() == [UnansweredAlarm(NOW, SUBJECT)]
    assert alarms("target-2") == []
    second = timedelta(seconds=1)
    for other, purpose, at in (
        (SUBJECT, Purpose.TRAFFIC, NOW + second),
        (replace(SUBJECT, task="chat"), Purpose.PROBE, NOW + second),
        (replace(SUBJECT, draft_revision="draft-0"), Purpose.PROBE, NOW + second),
        (SUBJECT, Purpose.PROBE, NOW - second),
    ):
        decoded(database, other, purpose, at)
        assert len(alarms()) == 1
    decoded(database, SUBJECT, Purpose.PROBE, NOW + second)
    assert alarms() == []


@pytest.mark.parametrize(
    "said", [fell(state="rose"), fell(flagged_by="probes"), THIN], ids=["a rise", "probes have fallen", "no traffic"]
)
def test_other_events_wait_for_no_probe(database: Database, store: DriftEventStore, said: EventContent) -> None:
    register_probe_set(database, "code", [{"prompt": "one"}], NOW)
    store.write([EventChange(None, EventState.OPENED, said, "It moved.")], NOW)
    assert store.unanswered("target-1", HOUR) == []


def test_no_alarm_waits_longer_than_a_probe_may_take_or_a_person_wants(
    database: Database, store: DriftEventStore
) -> None:
    register_probe_set(database, "code", [{"prompt": "one"}], NOW)
    store.write([EventChange(None, EventState.OPENED, fell(), "It fell.")], NOW - HOUR)
    assert store.unanswered("target-1", HOUR) == []
    (alarm,) = store.unanswered("target-1", 2 * HOUR)
    assert alarm.what_waits.startswith("jobs until a probe of code answers the alarm of 20")
    (event,) = store.open_events()
    store.acknowledge(event.id, "Ada", "we know", NOW)
    assert store.unanswered("target-1", 2 * HOUR) == []


def test_a_life(store: DriftEventStore) -> None:
    store.write([EventChange(None, EventState.OPENED, THIN, "It fell.")], NOW)
    (event,) = store.open_events()
    assert (event.content, event.state, event.raised_at) == (THIN, EventState.OPENED, NOW)
    fault = replace(THIN, cause="fault", verdict="It is the engine.", subject=replace(SUBJECT, target_revision="t2"))
    change(store, EventState.EXPLAINED, fault, NOW + HOUR)
    change(store, None, replace(fault, lost_tokens_per_s=None), NOW + 2 * HOUR)
    change(store, EventState.CONFIRMED, fault, NOW + 3 * HOUR)
    (event,) = store.open_events()
    assert (event.state, event.confirmed_at, event.subject) == (EventState.CONFIRMED, NOW + 3 * HOUR, fault.subject)
    assert store.acknowledge(event.id, "Ada", "on it", NOW + 4 * HOUR).state is EventState.ACKNOWLEDGED
    change(store, EventState.CLOSED, replace(fault, verdict="It is back."), NOW + 5 * HOUR)
    assert store.open_events() == []
    (closed,) = store.since(NOW)
    assert (closed.state, closed.closed_because) == (EventState.CLOSED, "It is back.")
    assert store.since(NOW + 6 * HOUR) == []
    change(store, EventState.REOPENED, fault, NOW + 7 * HOUR)
    (again,) = store.open_events()
    assert (again.state, again.num_reopened, again.raised_at) == (EventState.REOPENED, 1, NOW + 7 * HOUR)
    assert (again.opened_at, again.acknowledged_at, again.closed_because) == (NOW, None, None)
    history = store.history(again.id)
    assert [(past.state, past.cause, past.actor) for past in history] == [
        ("opened", "too_little_evidence", "scheduler"),
        ("explained", "fault", "scheduler"),
        ("confirmed", "fault", "scheduler"),
        ("acknowledged", "fault", "Ada"),
        ("closed", "fault", "scheduler"),
        ("reopened", "fault", "scheduler"),
    ]
    assert history[0].evidence == THIN.evidence
    assert (history[3].sentence, history[3].evidence) == ("on it", None)


def test_what_became_of_all_events_since_a_moment(store: DriftEventStore) -> None:
    store.write([EventChange(None, EventState.OPENED, THIN, "It fell.")], NOW)
    change(store, EventState.CONFIRMED, THIN, NOW + HOUR)
    other = replace(THIN, subject=replace(SUBJECT, task="sql"))
    store.write([EventChange(None, EventState.OPENED, other, "It fell too.")], NOW + 2 * HOUR)
    found = store.states_since(NOW)
    assert [(subject.task, state.state, state.sentence) for subject, state in found] == [
        ("code", EventState.CONFIRMED, THIN.verdict),
        ("sql", EventState.OPENED, "It fell too."),
    ]
    assert store.states_since(NOW + 2 * HOUR) == []


def test_one_open_event_a_cause_and_none_of_a_run_that_failed(store: DriftEventStore) -> None:
    opened = EventChange(None, EventState.OPENED, THIN, "It fell.")
    other = EventChange(None, EventState.OPENED, content(SUBJECT, "fault"), "It fell.")
    store.write([opened], NOW)
    with pytest.raises(StoreError):
        store.write([other, opened], NOW)
    assert [event.cause for event in store.open_events()] == ["too_little_evidence"]
    store.write([], NOW)


def test_what_is_over_or_unknown_is_not_acknowledged(store: DriftEventStore) -> None:
    with pytest.raises(UnknownName):
        store.acknowledge(1, "Ada", "", NOW)
    store.write([EventChange(None, EventState.OPENED, THIN, "It fell.")], NOW)
    change(store, EventState.CLOSED, THIN, NOW + HOUR)
    (event,) = store.since(NOW)
    with pytest.raises(UnknownName):
        store.acknowledge(event.id, "Ada", "", NOW)
    assert store.find(event.id) == event
    assert store.find(event.id + 1) is None


def test_an_accepted_level_closes_every_open_event_of_its_drafter_in_its_task(store: DriftEventStore) -> None:
    fault, elsewhere = replace(THIN, cause="fault"), replace(THIN, subject=replace(SUBJECT, task="sql"))
    later = replace(fault, began_before=NOW - HOUR)
    store.write([EventChange(None, EventState.OPENED, one, "It fell.") for one in (THIN, later, elsewhere)], NOW - HOUR)
    first, second, other = store.open_events()
    closed = store.accept(first.id, "Ada", "longer reviews")
    assert [event.id for event in closed] == [first.id, second.id]
    assert {(event.closed_because, event.acknowledged_by) for event in closed} == {
        ("accepted as the new level: longer reviews", "Ada")
    }
    assert [event.id for event in store.open_events()] == [other.id]
    (_, past) = store.history(first.id)
    assert (past.state, past.actor, past.at) == (EventState.CLOSED, "Ada", closed[0].accepted_at)
    at = past.at
    assert store.accepted_levels(at) == {("code", "small"): AcceptedLevel(at, NOW)}
    assert store.accepted_levels(at - timedelta(microseconds=1)) == {}
    with pytest.raises(UnknownName):
        store.accept(first.id, "Ada", "")


def test_a_run_that_read_an_event_before_it_was_accepted_changes_it_no_more(store: DriftEventStore) -> None:
    store.write([EventChange(None, EventState.OPENED, THIN, "It fell.")], NOW - HOUR)
    (event,) = store.open_events()
    (accepted,) = store.accept(event.id, "Ada", "")
    for state in (EventState.CONFIRMED, EventState.CLOSED, None):
        store.write([EventChange(event.id, state, replace(THIN, verdict="Other."), "Other.")], NOW)
    assert store.find(event.id) == accepted
    assert [past.state for past in store.history(event.id)] == ["opened", "closed"]


def test_of_accepted_levels_the_newest_is_kept_for_ever(store: DriftEventStore, database: Database) -> None:
    for _ in range(2):
        store.write([EventChange(None, EventState.OPENED, THIN, "It fell.")], NOW - HOUR)
        (event,) = store.open_events()
        (newest,) = store.accept(event.id, "Ada", "")
    (oldest, _) = sorted(one.id for one in store.since(NOW - DAY))
    assert store.history(oldest)
    assert RetentionStore(database).drop("drift_events", NOW + DAY, lambda: False).num_rows == 1
    assert newest.accepted_at is not None
    assert set(store.accepted_levels(newest.accepted_at)) == {("code", "small")}
    assert store.history(oldest) == [], "deleted with its event"
