"""Streams of jobs to test for drift, and the drift events that were found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.measurements import DecodedJob, DriftSubject, Stream
from alphaloop.store.database import Database
from alphaloop.tables import decode_runs, drift_events

#: Newest jobs of a stream that are read. Bounds memory, and is far more than any configured average run length.
MAX_JOBS_PER_STREAM: Final = 20_000

_STREAM: Final = tuple(field.name for field in fields(Stream))
_JOB: Final = tuple(field.name for field in fields(DecodedJob))


@dataclass(frozen=True, slots=True)
class OpenEvent:
    """A drift event that is not over."""

    id: int
    subject: DriftSubject
    cause: str
    verdict: str
    opened_at: datetime
    evidence: Mapping[str, Any]


class DriftStore:
    """Reads decoded traffic, keeps drift events."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def streams(
        self, since: datetime, until: datetime, *, max_jobs: int = MAX_JOBS_PER_STREAM
    ) -> dict[Stream, list[DecodedJob]]:
        """Traffic decoded in (since, until], by stream, oldest job first; of each stream its newest `max_jobs`."""
        runs = decode_runs.c
        newest = (
            func.row_number()
            .over(
                partition_by=[runs[name] for name in _STREAM],
                order_by=(runs.decoded_at.desc(), runs.ledger_id.desc()),
            )
            .label("newest")
        )
        columns = [runs[name] for name in (*_STREAM, *_JOB, "ledger_id")]
        window = (
            select(*columns, newest)
            .where(runs.purpose == "traffic", runs.decoded_at > since, runs.decoded_at <= until)
            .subquery()
        )
        query = select(window).where(window.c.newest <= max_jobs).order_by(window.c.decoded_at, window.c.ledger_id)
        found: dict[Stream, list[DecodedJob]] = {}
        with self._database.begin() as connection:
            for row in connection.execute(query).mappings():
                stream = Stream(**{name: row[name] for name in _STREAM})
                found.setdefault(stream, []).append(_job(row))
        return found

    def open_events(self) -> list[OpenEvent]:
        """Events that are not over, oldest first."""
        events = drift_events.c
        query = select(drift_events).where(events.closed_at.is_(None)).order_by(events.opened_at, events.id)
        with self._database.begin() as connection:
            return [
                OpenEvent(
                    row.id,
                    DriftSubject(row.task, row.drafter, row.draft_revision, row.target_revision),
                    row.cause,
                    row.verdict,
                    row.opened_at,
                    row.evidence,
                )
                for row in connection.execute(query)
            ]

    def open(self, subject: DriftSubject, cause: str, verdict: str, evidence: Mapping[str, Any], now: datetime) -> bool:
        """Open an event; False when the same one is open already."""
        statement = (
            insert(drift_events)
            .values(
                task=subject.task,
                drafter=subject.drafter,
                draft_revision=subject.draft_revision,
                target_revision=subject.target_revision,
                cause=cause,
                verdict=verdict,
                evidence=dict(evidence),
                opened_at=now,
            )
            .on_conflict_do_nothing()
            .returning(drift_events.c.id)
        )
        with self._database.begin() as connection:
            return connection.execute(statement).first() is not None

    def close(self, event_ids: Collection[int], now: datetime) -> None:
        """Close the events."""
        if not event_ids:
            return
        statement = (
            update(drift_events)
            .where(drift_events.c.id.in_(event_ids), drift_events.c.closed_at.is_(None))
            .values(closed_at=func.greatest(now, drift_events.c.opened_at))
        )
        with self._database.begin() as connection:
            connection.execute(statement)


def _job(row: Mapping[Any, Any]) -> DecodedJob:
    values = {name: row[name] for name in _JOB}
    return DecodedJob(**{**values, "trials": tuple(values["trials"]), "accepts": tuple(values["accepts"])})
