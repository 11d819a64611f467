"""The reports of the scheduler, and the notifications that were sent of them and of what happened.

What happened is its own record: the states of drift events, the incidents, the reports, the lacks and the ended
batches. So a notification cannot be lost between the event and a list of things to send, because there is no such list.
A row of `notifications` is written before the first attempt to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, Connection, Integer, Row, Select, and_, case, func, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.measurements import DriftSubject
from alphaloop.notifying import (
    NewsKind,
    Notification,
    batch_ended_news,
    drift_news,
    incident_closed_news,
    incident_opened_news,
    lack_closed_news,
    lack_opened_news,
    report_news,
)
from alphaloop.store.database import Store, columns_of, of_row, values_of
from alphaloop.store.drift import EventState, PastState, incident_of, past_state
from alphaloop.store.lacks import EndedBatch, Lack
from alphaloop.tables import (
    drift_event_states,
    drift_events,
    ended_batches,
    incidents,
    lacks,
    notification_sinks,
    notifications,
    reports,
)


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report in all its forms; `content` is its data as JSON."""

    created_at: datetime
    covers_from: datetime
    covers_to: datetime
    summary: str
    content: Mapping[str, Any]
    text: str
    html: str


@dataclass(frozen=True, slots=True)
class ReportHeading:
    """What a list of reports says of one."""

    created_at: datetime
    summary: str
    num_flags: int  #: drift events that were open
    num_incidents: int  #: that were open


class ReportStore(Store):
    """Every report that was made."""

    def save(self, report: StoredReport) -> None:
        """Keep a report."""
        self._database.change(insert(reports).values(**values_of(report)))

    def latest(self) -> StoredReport | None:
        """The newest report; None before the first."""
        return self._newest(select(reports))

    def made_at(self, created_at: datetime) -> StoredReport | None:
        """The report that was made at this moment."""
        return self._newest(select(reports).where(reports.c.created_at == created_at))

    def headings(self, limit: int, *, before: datetime | None = None) -> list[ReportHeading]:
        """The newest `limit` reports, of those made before a moment, the newest first."""
        query = (
            select(reports.c.created_at, reports.c.summary, _length("drift"), _length("incidents"))
            .order_by(reports.c.created_at.desc(), reports.c.id.desc())
            .limit(limit)
        )
        if before is not None:
            query = query.where(reports.c.created_at < before)
        return [ReportHeading(*row) for row in self._database.rows(query)]

    def _newest(self, query: Select[Any]) -> StoredReport | None:
        row = self._database.row(query.order_by(reports.c.created_at.desc(), reports.c.id.desc()).limit(1))
        return of_row(StoredReport, row) if row else None


#: What is older is no news. Ended batches age sooner, so that whoever turns these on does not get those of a week.
_NEWS_FOR: Final = timedelta(days=7)
_NEWS_OF_BATCHES_FOR: Final = timedelta(days=1)
#: Whoever took note of an event knows it; the other states are the scheduler's.
_TOLD_STATES: Final = tuple(state for state in EventState if state is not EventState.ACKNOWLEDGED)


@dataclass(frozen=True, slots=True)
class Pending:
    """News that a sink has not taken."""

    news: Notification
    num_attempts: int
    attempted_at: datetime | None  #: None before the first attempt


@dataclass(frozen=True, slots=True)
class Attempted:
    """How far a notification came."""

    sink: str
    kind: NewsKind
    source_id: int
    num_attempts: int
    attempted_at: datetime
    sent_at: datetime | None
    failure: str | None


class NotificationStore(Store):
    """Reads what is to be sent and keeps what was."""

    def add_sinks(self, names: Iterable[str], now: datetime) -> None:
        """From `now` on these get news; for those that are known already nothing changes."""
        new = [{"name": name, "known_since": now} for name in names]
        if new:
            self._database.change(insert(notification_sinks).on_conflict_do_nothing(), new)

    def pending(self, sink: str, kinds: Sequence[NewsKind], now: datetime) -> list[Pending]:
        """What the sink has not taken, of what happened since it is known; by kind, oldest first."""
        known = select(notification_sinks.c.known_since).where(notification_sinks.c.name == sink)
        with self._database.begin() as connection:
            known_since: datetime | None = connection.execute(known).scalar()
            if known_since is None:
                return []
            pending: list[Pending] = []
            for kind in kinds:
                news_for = _NEWS_OF_BATCHES_FOR if kind is NewsKind.BATCH_ENDED else _NEWS_FOR
                pending += _READ[kind](connection, sink, max(known_since, now - news_for))
            return pending

    def begin(self, sink: str, pending: Pending, now: datetime) -> bool:
        """Count an attempt that is about to be made; False where another process has begun it."""
        columns = notifications.c
        new = {"sink": sink, "kind": pending.news.kind.value, "source_id": pending.news.source_id}
        counted = (
            insert(notifications)
            .values(**new, num_attempts=1, attempted_at=now)
            .on_conflict_do_update(
                index_elements=["sink", "kind", "source_id"],
                set_={"num_attempts": columns.num_attempts + 1, "attempted_at": now, "failure": None},
                where=and_(columns.num_attempts == pending.num_attempts, columns.sent_at.is_(None)),
            )
            .returning(columns.sink)
        )
        return self._database.row(counted) is not None

    def end(self, sink: str, news: Notification, now: datetime, failure: str | None = None) -> None:
        """Record how the attempt ended; without a failure the sink has taken it."""
        columns = notifications.c
        ended = {"failure": failure} if failure is not None else {"sent_at": now}
        statement = (
            update(notifications)
            .where(columns.sink == sink, columns.kind == news.kind.value, columns.source_id == news.source_id)
            .values(**ended)
        )
        self._database.change(statement)

    def attempted(self, limit: int) -> list[Attempted]:
        """What was tried last, the newest first."""
        columns = notifications.c
        query = (
            select(*columns_of(notifications, Attempted))
            .order_by(columns.attempted_at.desc(), columns.sink, columns.kind, columns.source_id.desc())
            .limit(limit)
        )
        return [of_row(Attempted, row, kind=NewsKind(row.kind)) for row in self._database.rows(query)]


def _length(name: str) -> ColumnElement[int]:
    """The length of an array of a report's data; 0 where the data have none."""
    part = reports.c.content[name]
    return case((func.jsonb_typeof(part) == "array", func.jsonb_array_length(part, type_=Integer)), else_=0)


def _drift(connection: Connection, sink: str, since: datetime) -> list[Pending]:
    states, events = drift_event_states.c, drift_events.c
    query = (
        select(
            states.id,
            *columns_of(drift_event_states, PastState),
            *columns_of(drift_events, DriftSubject),
            events.action,
        )
        .join(drift_events, events.id == states.event_id)
        .where(states.at >= since, states.state.in_(_TOLD_STATES))
    )

    def told(row: Row[Any]) -> Notification:
        return drift_news(row.id, of_row(DriftSubject, row), past_state(row), row.action)

    return _not_taken(connection, query, states.id, sink, NewsKind.DRIFT, told)


def _incidents(connection: Connection, sink: str, since: datetime, *, closed: bool = False) -> list[Pending]:
    at, kind, news_of = incidents.c.opened_at, NewsKind.INCIDENT_OPENED, incident_opened_news
    if closed:
        at, kind, news_of = incidents.c.closed_at, NewsKind.INCIDENT_CLOSED, incident_closed_news
    query = select(incidents).where(at >= since)
    return _not_taken(connection, query, incidents.c.id, sink, kind, lambda row: news_of(row.id, incident_of(row)))


def _reports(connection: Connection, sink: str, since: datetime) -> list[Pending]:
    columns = reports.c
    changes = columns.content["changes"]["lines"].label("changes")
    query = select(columns.id, columns.created_at, columns.summary, changes).where(columns.created_at >= since)

    def told(row: Row[Any]) -> Notification:
        return report_news(row.id, row.created_at, row.summary, [line["sentence"] for line in row.changes or ()])

    return _not_taken(connection, query, columns.id, sink, NewsKind.REPORT, told)


def _lacks(connection: Connection, sink: str, since: datetime, *, closed: bool = False) -> list[Pending]:
    at, kind, news_of = lacks.c.said_at, NewsKind.LACK_OPENED, lack_opened_news
    if closed:
        at, kind, news_of = lacks.c.closed_at, NewsKind.LACK_CLOSED, lack_closed_news
    query = select(lacks).where(at >= since)
    return _not_taken(connection, query, lacks.c.id, sink, kind, lambda row: news_of(row.id, of_row(Lack, row)))


def _ended_batches(connection: Connection, sink: str, since: datetime) -> list[Pending]:
    query = select(ended_batches).where(ended_batches.c.ended_at >= since)

    def told(row: Row[Any]) -> Notification:
        return batch_ended_news(row.id, of_row(EndedBatch, row))

    return _not_taken(connection, query, ended_batches.c.id, sink, NewsKind.BATCH_ENDED, told)


_READ: Final[Mapping[NewsKind, Callable[[Connection, str, datetime], list[Pending]]]] = {
    NewsKind.DRIFT: _drift,
    NewsKind.INCIDENT_OPENED: _incidents,
    NewsKind.INCIDENT_CLOSED: partial(_incidents, closed=True),
    NewsKind.REPORT: _reports,
    NewsKind.LACK_OPENED: _lacks,
    NewsKind.LACK_CLOSED: partial(_lacks, closed=True),
    NewsKind.BATCH_ENDED: _ended_batches,
}


def _not_taken(
    connection: Connection,
    sources: Select[Any],
    source_id: Column[int],
    sink: str,
    kind: NewsKind,
    told: Callable[[Row[Any]], Notification],
) -> list[Pending]:
    """Rows of `sources` that the sink has not taken, by their number."""
    tried = notifications.c
    query = (
        sources.add_columns(tried.num_attempts, tried.attempted_at)
        .outerjoin(notifications, and_(tried.sink == sink, tried.kind == kind.value, tried.source_id == source_id))
        .where(tried.sent_at.is_(None))
        .order_by(source_id)
    )
    rows = connection.execute(query).all()
    return [Pending(told(row), row.num_attempts or 0, row.attempted_at) for row in rows]
