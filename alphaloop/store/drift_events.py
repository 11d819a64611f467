"""Drift events and their lives: opened, explained, confirmed, acknowledged, closed, reopened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Row, func, insert, or_, select, update

from alphaloop.measurements import AcceptedLevel, DriftSubject
from alphaloop.store.database import Database
from alphaloop.store.drift_event import DriftEvent, EventChange, EventContent, EventState, NoSuchEvent, PastState
from alphaloop.tables import drift_event_states, drift_events

__all__ = ["DriftEvent", "DriftEventStore", "EventChange", "EventContent", "EventState", "NoSuchEvent", "PastState"]

SCHEDULER: Final = "scheduler"


class DriftEventStore:
    """Keeps drift events and the history of each."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open_events(self) -> list[DriftEvent]:
        """Events that are not over, oldest first."""
        return self._events(drift_events.c.closed_at.is_(None))

    def since(self, moment: datetime) -> list[DriftEvent]:
        """Events that are open, and those that were closed after `moment`; oldest first."""
        return self._events(or_(drift_events.c.closed_at.is_(None), drift_events.c.closed_at > moment))

    def find(self, event_id: int) -> DriftEvent | None:
        """The event with this number."""
        return next(iter(self._events(drift_events.c.id == event_id)), None)

    def history(self, event_id: int) -> list[PastState]:
        """What became of an event, oldest first."""
        states = drift_event_states.c
        names = [field.name for field in fields(PastState)]
        query = select(*(states[name] for name in names)).where(states.event_id == event_id).order_by(states.id)
        with self._database.begin() as connection:
            rows = connection.execute(query).mappings().all()
        return [PastState(**{**row, "state": EventState(row["state"])}) for row in rows]

    def states_since(self, moment: datetime) -> list[tuple[DriftSubject, PastState]]:
        """What became of all events after `moment`, oldest first, each with the event's subject."""
        states, events = drift_event_states.c, drift_events.c
        names = [field.name for field in fields(PastState)]
        query = (
            select(*(events[name] for name in _SUBJECT), *(states[name] for name in names))
            .join(drift_events, events.id == states.event_id)
            .where(states.at > moment)
            .order_by(states.id)
        )
        with self._database.begin() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            (
                DriftSubject(**{name: row[name] for name in _SUBJECT}),
                PastState(**{name: row[name] for name in names} | {"state": EventState(row["state"])}),
            )
            for row in rows
        ]

    def write(self, changes: Sequence[EventChange], now: datetime) -> None:
        """Carry out the changes of a run, all or none."""
        if not changes:
            return
        with self._database.begin() as connection:
            for change in changes:
                event_id = _carry_out(connection, change, now)
                if event_id is not None and change.state is not None:
                    _note(connection, event_id, change.state, change.content, change.sentence, SCHEDULER, now)

    def acknowledge(self, event_id: int, by: str, note: str, now: datetime) -> DriftEvent:
        """Record that somebody took note of an open event; again replaces who and what. Raises NoSuchEvent."""
        events = drift_events.c
        statement = (
            update(drift_events)
            .where(events.id == event_id, events.closed_at.is_(None))
            .values(acknowledged_at=now, acknowledged_by=by, note=note)
            .returning(drift_events)
        )
        with self._database.begin() as connection:
            row = connection.execute(statement).first()
            if row is None:
                raise NoSuchEvent(f"no open drift event {event_id}", hint="`alphaloop drift list` shows the open ones")
            event = _event(row)
            _note(connection, event_id, EventState.ACKNOWLEDGED, event.content, note, by, now)
        return event

    def accept(self, event_id: int, by: str, note: str) -> list[DriftEvent]:
        """Close an open event, and all others of its drafter in its task: their new level is the norm from now on.

        Returns them; raises NoSuchEvent. By the clock of the database, because jobs and probes are compared with it.
        """
        events = drift_events.c
        about = select(events.task, events.drafter).where(events.id == event_id, events.closed_at.is_(None)).subquery()
        because = f"accepted as the new level{': ' + note if note else '.'}"
        statement = (
            update(drift_events)
            .where(events.task == about.c.task, events.drafter == about.c.drafter, events.closed_at.is_(None))
            .values(
                acknowledged_at=func.now(),
                acknowledged_by=by,
                note=note,
                closed_at=func.greatest(func.now(), events.opened_at),
                closed_because=because,
                accepted_at=func.now(),
            )
            .returning(drift_events)
        )
        with self._database.begin() as connection:
            closed = sorted((_event(row) for row in connection.execute(statement)), key=lambda event: event.id)
            if not closed:
                raise NoSuchEvent(f"no open drift event {event_id}", hint="`alphaloop drift list` shows the open ones")
            for event in closed:
                assert event.accepted_at is not None  # noqa: S101 - it was set just now
                _note(connection, event.id, EventState.CLOSED, event.content, because, by, event.accepted_at)
        return closed

    def accepted_levels(self, until: datetime) -> dict[tuple[str, str], AcceptedLevel]:
        """By task and drafter, the newest level that was accepted until then."""
        events = drift_events.c
        query = (
            select(events.task, events.drafter, events.accepted_at, func.max(events.began_before))
            .where(events.accepted_at <= until)
            .group_by(events.task, events.drafter, events.accepted_at)
            .order_by(events.accepted_at)
        )
        with self._database.begin() as connection:
            return {
                (task, drafter): AcceptedLevel(at, before) for task, drafter, at, before in connection.execute(query)
            }

    def _events(self, condition: Any) -> list[DriftEvent]:
        query = select(drift_events).where(condition).order_by(drift_events.c.opened_at, drift_events.c.id)
        with self._database.begin() as connection:
            return [_event(row) for row in connection.execute(query)]


_SUBJECT: Final = tuple(field.name for field in fields(DriftSubject))
_CONTENT: Final = tuple(field.name for field in fields(EventContent) if field.name != "subject")
_LIFE: Final = tuple(field.name for field in fields(DriftEvent) if field.name != "content")


def _event(row: Row[Any]) -> DriftEvent:
    subject = DriftSubject(**{name: getattr(row, name) for name in _SUBJECT})
    content = EventContent(subject, **{name: getattr(row, name) for name in _CONTENT})
    return DriftEvent(content=content, **{name: getattr(row, name) for name in _LIFE})


def _carry_out(connection: Connection, change: EventChange, now: datetime) -> int | None:
    """The event's number; None where its level was accepted since the run read it."""
    values: dict[str, Any] = {
        **asdict(change.content.subject),
        **{name: getattr(change.content, name) for name in _CONTENT},
        "evidence": dict(change.content.evidence),
    }
    events = drift_events.c
    if change.event_id is None:
        statement = insert(drift_events).values(**values, opened_at=now, raised_at=now).returning(events.id)
        return int(connection.execute(statement).scalar_one())
    if change.state is EventState.CLOSED:
        values = {"closed_at": func.greatest(now, events.opened_at), "closed_because": change.sentence}
    elif change.state is EventState.CONFIRMED:
        values["confirmed_at"] = now
    elif change.state is EventState.EXPLAINED:
        values |= {"raised_at": now, "confirmed_at": None}
    elif change.state is EventState.REOPENED:
        values |= {"closed_at": None, "closed_because": None, "raised_at": now, "confirmed_at": None}
        # Whoever took note of it took it for over.
        values |= {"acknowledged_at": None, "num_reopened": events.num_reopened + 1}
    changed = update(drift_events).where(events.id == change.event_id, events.accepted_at.is_(None)).values(**values)
    return connection.execute(changed.returning(events.id)).scalar()


def _note(
    connection: Connection,
    event_id: int,
    state: EventState,
    content: EventContent,
    sentence: str,
    actor: str,
    now: datetime,
) -> None:
    connection.execute(
        insert(drift_event_states).values(
            event_id=event_id,
            at=now,
            state=state,
            cause=content.cause,
            sentence=sentence,
            actor=actor,
            evidence=None if state is EventState.ACKNOWLEDGED else dict(content.evidence),
        )
    )
