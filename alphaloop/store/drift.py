"""Drift events and their lives, what the drift test remembers between two runs, and incidents: proofs that an engine
did not do what it promises.

An event is opened, explained, confirmed, acknowledged, closed, and reopened if the change comes back soon.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, Insert, Row, Update, delete, exists, func, insert, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert as upsert

from alphaloop.errors import StoreBusy, UnknownName
from alphaloop.measurements import AcceptedLevel, DriftSubject, Stream, UnansweredAlarm, WatchedJob
from alphaloop.messages import Purpose
from alphaloop.store.database import Store, columns_of, of_row, values_of
from alphaloop.store.job_counts import SHADOW, sums_between
from alphaloop.tables import (
    decode_runs,
    drift_event_states,
    drift_events,
    drift_memories,
    drift_positions,
    incidents,
    probe_sets,
)

SCHEDULER: Final = "scheduler"


class EventState(StrEnum):
    """What became of an event. The values are those of `drift_event_states.state`."""

    OPENED = "opened"
    EXPLAINED = "explained"  #: a cause was found for it, or another one
    CONFIRMED = "confirmed"  #: later evidence agreed
    ACKNOWLEDGED = "acknowledged"  #: a person took note of it
    CLOSED = "closed"  #: evidence showed that it was over
    REOPENED = "reopened"  #: it came back soon


@dataclass(frozen=True, slots=True)
class EventContent:
    """What a run says of an event."""

    subject: DriftSubject
    cause: str
    verdict: str
    action: str
    evidence: Mapping[str, Any]
    lost_tokens_per_s: float | None  #: None: not known
    began_after: datetime | None
    began_before: datetime | None


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """A stored event."""

    id: int
    content: EventContent
    opened_at: datetime
    raised_at: datetime  #: opened or reopened
    confirmed_at: datetime | None
    acknowledged_at: datetime | None
    acknowledged_by: str | None
    note: str | None
    closed_at: datetime | None
    closed_because: str | None
    num_reopened: int
    accepted_at: datetime | None = None  #: when its owner took the new level for the norm

    @property
    def subject(self) -> DriftSubject:
        """What it is about."""
        return self.content.subject

    @property
    def cause(self) -> str:
        """Its cause as far as known."""
        return self.content.cause

    @property
    def state(self) -> EventState:
        """The last thing that became of it, as the view open_drift has it."""
        if self.closed_at is not None:
            return EventState.CLOSED
        if self.acknowledged_at is not None:
            return EventState.ACKNOWLEDGED
        if self.confirmed_at is not None:
            return EventState.CONFIRMED
        return EventState.REOPENED if self.num_reopened else EventState.OPENED


@dataclass(frozen=True, slots=True)
class EventChange:
    """What a run does to an event: a new state with its sentence, or only newer content (`state` None)."""

    event_id: int | None  #: None: a new event
    state: EventState | None
    content: EventContent
    sentence: str


@dataclass(frozen=True, slots=True)
class PastState:
    """One row of an event's history."""

    event_id: int
    at: datetime
    state: EventState
    cause: str
    sentence: str
    actor: str
    evidence: Mapping[str, Any] | None


class DriftEventStore(Store):
    """Keeps drift events and the history of each."""

    def open_events(self) -> list[DriftEvent]:
        """Events that are not over, oldest first."""
        return self._events(drift_events.c.closed_at.is_(None))

    def since(self, moment: datetime) -> list[DriftEvent]:
        """Events that are open, and those that were closed after `moment`; oldest first."""
        return self._events(or_(drift_events.c.closed_at.is_(None), drift_events.c.closed_at > moment))

    def unanswered(self, target_revision: str, within: timedelta) -> list[UnansweredAlarm]:
        """Falls of traffic, raised in the last `within` and not taken note of, that no probe has been decoded after.

        Of tasks with a probe set alone: in the others nothing could answer.
        """
        event, run, sets = drift_events.c, decode_runs.c, probe_sets.c
        evidence, traffic = event.evidence, event.evidence["traffic"]
        query = select(event.raised_at, *columns_of(drift_events, DriftSubject)).where(
            event.target_revision == target_revision,
            event.closed_at.is_(None),
            event.acknowledged_at.is_(None),
            event.raised_at > func.now() - within,
            evidence["flagged_by"].astext == "traffic",
            traffic["state"].astext == "fell",
            exists().where(sets.task == event.task, sets.is_active),
            ~exists().where(
                run.decoded_at > event.raised_at,
                run.purpose == Purpose.PROBE,
                *(run[name] == event[name] for name in ("task", "drafter", "draft_revision", "target_revision")),
            ),
        )
        return [UnansweredAlarm(row.raised_at, of_row(DriftSubject, row)) for row in self._database.rows(query)]

    def find(self, event_id: int) -> DriftEvent | None:
        """The event with this number."""
        return next(iter(self._events(drift_events.c.id == event_id)), None)

    def history(self, event_id: int) -> list[PastState]:
        """What became of an event, oldest first."""
        states = drift_event_states.c
        query = (
            select(*columns_of(drift_event_states, PastState)).where(states.event_id == event_id).order_by(states.id)
        )
        return [past_state(row) for row in self._database.rows(query)]

    def states_since(self, moment: datetime) -> list[tuple[DriftSubject, PastState]]:
        """What became of all events after `moment`, oldest first, each with the event's subject."""
        states, events = drift_event_states.c, drift_events.c
        query = (
            select(*columns_of(drift_events, DriftSubject), *columns_of(drift_event_states, PastState))
            .join(drift_events, events.id == states.event_id)
            .where(states.at > moment)
            .order_by(states.id)
        )
        return [(of_row(DriftSubject, row), past_state(row)) for row in self._database.rows(query)]

    def write(self, changes: Sequence[EventChange], now: datetime) -> None:
        """Carry out the changes of a run, all or none."""
        if not changes:
            return
        with self._database.begin() as connection:
            for change in changes:
                event_id = _carry_out(connection, change, now)
                if event_id is not None and change.state is not None:
                    state, content = change.state, change.content
                    _note(connection, event_id, state, content, sentence=change.sentence, actor=SCHEDULER, now=now)

    def acknowledge(self, event_id: int, by: str, note: str, now: datetime) -> DriftEvent:
        """Record that a person took note of an open event; again replaces who and what. Raises UnknownName."""
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
                raise _none_open(event_id)
            event = _event(row)
            _note(connection, event_id, EventState.ACKNOWLEDGED, event.content, sentence=note, actor=by, now=now)
        return event

    def accept(self, event_id: int, by: str, note: str) -> list[DriftEvent]:
        """Close an open event, and all others of its drafter in its task: their new level is the norm from now on.

        Returns them; raises UnknownName. By the clock of the database, because jobs and probes are compared with it.
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
                raise _none_open(event_id)
            for event in closed:
                assert event.accepted_at is not None  # noqa: S101 - it was set just now
                _note(
                    connection,
                    event.id,
                    EventState.CLOSED,
                    event.content,
                    sentence=because,
                    actor=by,
                    now=event.accepted_at,
                )
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
        return {(task, drafter): AcceptedLevel(at, before) for task, drafter, at, before in self._database.rows(query)}

    def _events(self, condition: Any) -> list[DriftEvent]:
        query = select(drift_events).where(condition).order_by(drift_events.c.opened_at, drift_events.c.id)
        return [_event(row) for row in self._database.rows(query)]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the order in which jobs were decoded."""

    decoded_at: datetime
    ledger_id: int


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """A stream's memory as JSON."""

    version: int
    document: Mapping[str, Any]
    last_decoded_at: datetime
    norm_since: datetime | None = None  #: jobs decoded until then are not in it


@dataclass(frozen=True, slots=True)
class TaskMemory:
    """Everything remembered of a task; `position` is None before its first job was read."""

    position: Position | None
    memories: Mapping[Stream, StoredMemory]


class DriftMemoryStore(Store):
    """Reads new jobs and keeps what the test made of them."""

    def tasks(self, since: datetime, until: datetime) -> list[str]:
        """Tasks with traffic that was drafted in these hours, sorted."""
        with self._database.begin() as connection:
            sums = sums_between(connection, since - _HOUR, until).c
            query = select(sums.task).distinct().where(*_drafted(sums)).order_by(sums.task)
            return list(connection.execute(query).scalars())

    def jobs_a_month(self, now: datetime, month: timedelta) -> float:
        """Drafted jobs of traffic in the last month, of all tasks.

        A shorter history counts in proportion; a day is the shortest.
        """
        with self._database.begin() as connection:
            sums = sums_between(connection, now - month, now).c
            query = select(func.sum(sums.num_jobs), func.min(sums.bucket)).where(*_drafted(sums))
            num_jobs, first = connection.execute(query).one()
        if not num_jobs:
            return 0.0
        return float(num_jobs) * float(month / min(month, max(now - first, _DAY)))

    def page(self, task: str, after: Position, until: datetime, limit: int) -> list[WatchedJob]:
        """The oldest `limit` drafted jobs of traffic after `after`, decoded until `until`, in their order."""
        runs = decode_runs.c
        query = (
            select(*columns_of(decode_runs, Stream), *columns_of(decode_runs, WatchedJob, "stream"))
            .where(runs.task == task, runs.purpose == Purpose.TRAFFIC, runs.drafter != "")
            # The first condition follows from the second; partitions are left out by it.
            .where(runs.decoded_at >= after.decoded_at, runs.decoded_at <= until)
            .where(tuple_(runs.decoded_at, runs.ledger_id) > tuple_(after.decoded_at, after.ledger_id))
            .order_by(runs.decoded_at, runs.ledger_id)
            .limit(limit)
        )
        return [of_row(WatchedJob, row, stream=of_row(Stream, row)) for row in self._database.rows(query)]

    def load(self, task: str) -> TaskMemory:
        """What the last run stored."""
        with self._database.begin() as connection:
            position = connection.execute(select(drift_positions).where(drift_positions.c.task == task)).first()
            rows = connection.execute(select(drift_memories).where(drift_memories.c.task == task)).all()
        memories = {of_row(Stream, row): of_row(StoredMemory, row) for row in rows}
        return TaskMemory(None if position is None else of_row(Position, position), memories)

    def save(
        self, task: str, read_from: Position | None, position: Position, memories: Mapping[Stream, StoredMemory]
    ) -> None:
        """Store the memories and the position up to which they have read, together.

        `read_from` is the position that the run began from. Raises StoreBusy where another run has gone on from there
        meanwhile; nothing is stored then.
        """
        with self._database.begin() as connection:
            if not _move(connection, task, read_from, position):
                raise StoreBusy(f"drift test of task {task}: another run has read its jobs meanwhile")
            connection.execute(delete(drift_memories).where(drift_memories.c.task == task))
            rows = [values_of(stream) | values_of(memory) for stream, memory in memories.items()]
            connection.execute(insert(drift_memories), rows)

    def forget(self, before: datetime) -> None:
        """Delete the memories of streams that had no job since `before`."""
        self._database.change(delete(drift_memories).where(drift_memories.c.last_decoded_at < before))


def past_state(row: Any) -> PastState:
    """From a row of the history."""
    return of_row(PastState, row, state=EventState(row.state))


def _event(row: Row[Any]) -> DriftEvent:
    return of_row(DriftEvent, row, content=of_row(EventContent, row, subject=of_row(DriftSubject, row)))


def _none_open(event_id: int) -> UnknownName:
    return UnknownName(f"no open drift event {event_id}", hint="`alphaloop drift list` shows the open ones")


def _carry_out(connection: Connection, change: EventChange, now: datetime) -> int | None:
    """The event's number; None where its level was accepted since the run read it."""
    values = values_of(change.content, "subject") | values_of(change.content.subject)
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
    *,
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


_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)


def _drafted(sums: Any) -> tuple[Any, ...]:
    return sums.purpose == Purpose.TRAFFIC, sums.mode != SHADOW, sums.drafter != ""


def _move(connection: Connection, task: str, read_from: Position | None, to: Position) -> bool:
    """Whether the stored position was `read_from`, and is `to` now."""
    columns = drift_positions.c
    moved: Insert | Update
    if read_from is None:
        moved = upsert(drift_positions).values(task=task, **values_of(to)).on_conflict_do_nothing()
    else:
        stood = columns.decoded_at == read_from.decoded_at, columns.ledger_id == read_from.ledger_id
        moved = update(drift_positions).where(columns.task == task, *stood).values(**values_of(to))
    return connection.execute(moved.returning(columns.task)).first() is not None


class IncidentKind(StrEnum):
    """What is wrong."""

    WRONG_TEXT = "wrong_text"  #: a text differs from the vanilla one by more than a near-tie
    CUT_SHORT = "cut_short"  #: a text ended before its limit, and no reason was given
    WRONG_COUNTS = "wrong_counts"  #: the counts speak of another number of tokens than the text has


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident as it is found; vanilla has an empty drafter."""

    kind: IncidentKind
    task: str
    drafter: str
    draft_revision: str
    target_revision: str
    engine: str
    job_ids: tuple[str, ...]
    sentence: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """That a person took note of an incident, and what they do about it."""

    by: str
    note: str
    at: datetime


@dataclass(frozen=True, slots=True)
class KnownIncident:
    """A stored incident. It is closed when later probes were right."""

    id: int
    found: Incident
    opened_at: datetime
    acknowledged: Acknowledgement | None = None
    closed_at: datetime | None = None


class IncidentStore(Store):
    """The table of incidents."""

    def open(self, found: Sequence[Incident], now: datetime) -> int:
        """Open incidents; returns how many are new. One that is open already gets the further jobs."""
        num_new = 0
        with self._database.begin() as connection:
            for incident in found:
                statement = upsert(incidents).values(**values_of(incident), opened_at=now)
                again = statement.on_conflict_do_update(
                    index_elements=["kind", "task", "drafter", "draft_revision", "target_revision", "engine"],
                    index_where=incidents.c.closed_at.is_(None),
                    set_={"job_ids": func.array_cat(incidents.c.job_ids, statement.excluded.job_ids)},
                )
                opened_at = connection.execute(again.returning(incidents.c.opened_at)).scalar_one()
                num_new += opened_at == now
        return num_new

    def open_incidents(self) -> list[KnownIncident]:
        """Incidents that are not over, oldest first."""
        open_ones = select(incidents).where(incidents.c.closed_at.is_(None))
        return [_known(row) for row in self._database.rows(open_ones.order_by(incidents.c.opened_at, incidents.c.id))]

    def closed_since(self, moment: datetime) -> list[KnownIncident]:
        """Incidents that were closed after `moment`, oldest first."""
        query = select(incidents).where(incidents.c.closed_at > moment).order_by(incidents.c.closed_at, incidents.c.id)
        return [_known(row) for row in self._database.rows(query)]

    def acknowledge(self, incident_id: int, by: str, note: str, now: datetime) -> KnownIncident:
        """Record that a person took note of an open incident; again replaces who and what. Raises UnknownName."""
        statement = (
            update(incidents)
            .where(incidents.c.id == incident_id, incidents.c.closed_at.is_(None))
            .values(acknowledged_at=now, acknowledged_by=by, note=note)
            .returning(incidents)
        )
        row = self._database.row(statement)
        if row is None:
            raise UnknownName(f"no open incident {incident_id}", hint="the console shows the open ones under Drift")
        return _known(row)

    def close(self, incident_ids: Collection[int], now: datetime) -> None:
        """Close incidents."""
        if incident_ids:
            statement = (
                update(incidents)
                .where(incidents.c.id.in_(incident_ids), incidents.c.closed_at.is_(None))
                .values(closed_at=func.greatest(now, incidents.c.opened_at))
            )
            self._database.change(statement)


def _known(row: Row[Any]) -> KnownIncident:
    by = Acknowledgement(row.acknowledged_by, row.note, row.acknowledged_at) if row.acknowledged_at else None
    return KnownIncident(row.id, incident_of(row), row.opened_at, by, row.closed_at)


def incident_of(row: Row[Any]) -> Incident:
    """What a row of the table says."""
    return of_row(Incident, row, kind=IncidentKind(row.kind))
