"""Snapshots of decisions: written in batches by workers; read by `explain` and `replay`, with the jobs they decided."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import BigInteger, Column, ColumnElement, Connection, Row, Select, Text, cast, func, select

from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.snapshot import JobsAlike, SessionFacts, Snapshot, decode
from alphaloop.messages import Purpose
from alphaloop.store.database import Store, of_row, values_of
from alphaloop.store.exchange import RowSet
from alphaloop.store.housekeeping import ensure_days, utc_day
from alphaloop.tables import decision_snapshots, decode_runs

log = logging.getLogger(__name__)

#: No job is decoded for so long. Bounds the partitions that are read.
_LONGEST_DECODING: Final = timedelta(days=1)
# The document travels as text: as part of the parameter's own JSON it would be written twice.
_ROWS: Final = RowSet([Column(c.name, Text) if c.name == "snapshot" else c for c in decision_snapshots.c])
_INSERT: Final = (
    f"INSERT INTO decision_snapshots ({_ROWS.columns}) "  # noqa: S608
    f"SELECT {', '.join(f'CAST(given.{n} AS json)' if n == 'snapshot' else f'given.{n}' for n in _ROWS.names)} "
    f"FROM {_ROWS.source} ON CONFLICT DO NOTHING"
)


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A row of decision_snapshots; `snapshot` is JSON."""

    decided_at: datetime
    decision_id: UUID
    task: str
    sampling_bucket: str
    num_running: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot that was read, and the session that decided."""

    snapshot: Snapshot
    facts: SessionFacts


class SnapshotStore(Store):
    """The table of snapshots."""

    def add(self, rows: Sequence[SnapshotRow]) -> None:
        """Write rows in one transaction; the same rows again change nothing. A missing partition is made first."""
        given = map(values_of, rows)
        with self._database.begin() as connection:
            ensure_days(connection, {utc_day(row.decided_at) for row in rows})
            connection.exec_driver_sql(_INSERT, {"rows": RowSet.parameter(given)})

    def last(
        self, task: str, sampling_bucket: str, until: datetime, *, running: int | None = None
    ) -> StoredSnapshot | None:
        """The last decision for such jobs up to a moment; with `running`, beside about so many sequences."""
        columns = decision_snapshots.c
        query = select(decision_snapshots).where(
            columns.task == task, columns.sampling_bucket == sampling_bucket, columns.decided_at <= until
        )
        if running is not None:
            load = 1 << (max(running, 1) - 1).bit_length()  # as alphaloop.deciding.decision has it
            query = query.where(columns.num_running.between(load // 2 + 1, load))
        return self._first(query.order_by(columns.decided_at.desc()))

    def of_job(self, job_id: str) -> StoredSnapshot | None:
        """The decision that a job was decoded with; None where it is not stored."""
        runs, columns = decode_runs.c, decision_snapshots.c
        query = (
            select(decision_snapshots)
            .join_from(decode_runs, decision_snapshots, runs.decode_batch_id == columns.decision_id)
            .where(runs.job_id == job_id, columns.decided_at <= runs.decoded_at)
        )
        return self._first(query.order_by(columns.decided_at.desc()))

    def kind_of_job(self, job_id: str) -> tuple[str, str] | None:
        """The segment and the prompt bucket of a decoded job; None where its run is not stored."""
        runs = decode_runs.c
        query = select(runs.segment, runs.prompt_bucket).where(runs.job_id == job_id).limit(1)
        row = self._database.row(query)
        return None if row is None else (row.segment, row.prompt_bucket)

    def first_and_last(self, task: str | None = None) -> tuple[datetime, datetime] | None:
        """When the first and the last decision that is kept was taken; None if there is none."""
        columns = decision_snapshots.c
        query = select(func.min(columns.decided_at), func.max(columns.decided_at))
        if task is not None:
            query = query.where(columns.task == task)
        first, last = self._database.one(query)
        return None if first is None else (first, last)

    def between(
        self, since: datetime, until: datetime, *, task: str | None = None
    ) -> Iterator[tuple[StoredSnapshot, Sequence[JobsAlike]]]:
        """The decisions in [since, until), in order, each with its recorded jobs; read as they are asked for."""
        columns = decision_snapshots.c
        where = [columns.decided_at >= since, columns.decided_at < until]
        if task is not None:
            where.append(columns.task == task)
        query = select(decision_snapshots).where(*where).order_by(columns.decided_at, columns.decision_id)
        with self._database.begin() as connection:
            jobs = _jobs(connection, where, since, until)
            for row in connection.execute(query.execution_options(yield_per=500)):
                if (stored := _read(row)) is not None:
                    yield stored, jobs.get(row.decision_id, [])

    def num_without(self, since: datetime, until: datetime, *, task: str | None = None) -> int:
        """Jobs of traffic decoded in [since, until) whose decision has no snapshot."""
        runs, columns = decode_runs.c, decision_snapshots.c
        has_one = select(columns.decision_id).where(
            columns.decision_id == runs.decode_batch_id,
            columns.decided_at >= since - _LONGEST_DECODING,
            columns.decided_at < until,
        )
        query = select(func.count()).where(
            runs.decoded_at >= since, runs.decoded_at < until, runs.purpose == Purpose.TRAFFIC, ~has_one.exists()
        )
        if task is not None:
            query = query.where(runs.task == task)
        return int(self._database.scalar(query))

    def _first(self, query: Select[Any]) -> StoredSnapshot | None:
        row = self._database.row(query.limit(1))
        return None if row is None else _read(row)


def _jobs(
    connection: Connection, where: Sequence[ColumnElement[bool]], since: datetime, until: datetime
) -> dict[UUID, list[JobsAlike]]:
    """The jobs of these decisions, by decision."""
    runs, columns = decode_runs.c, decision_snapshots.c
    alike = (runs.segment, runs.prompt_bucket, runs.purpose, runs.drafter, runs.num_draft_tokens, runs.draft_revision)
    query = (
        select(
            columns.decision_id,
            *alike,
            func.count().label("num_jobs"),
            cast(func.sum(runs.num_tokens), BigInteger).label("num_tokens"),
            cast(func.sum(runs.num_prompt_tokens), BigInteger).label("num_prompt_tokens"),
            func.sum(runs.device_s).label("device_s"),
        )
        .join_from(decision_snapshots, decode_runs, runs.decode_batch_id == columns.decision_id)
        .where(*where, runs.decoded_at >= since, runs.decoded_at < until + _LONGEST_DECODING)
        .group_by(columns.decision_id, *alike)
    )
    found: dict[UUID, list[JobsAlike]] = {}
    for row in connection.execute(query):
        setting = DraftSetting(row.drafter or None, row.num_draft_tokens)
        found.setdefault(row.decision_id, []).append(of_row(JobsAlike, row, setting=setting))
    return found


def _read(row: Row[Any]) -> StoredSnapshot | None:
    """None of a release whose snapshots have another form."""
    try:
        found = decode(row.snapshot, row.decision_id, row.decided_at, row.task, row.sampling_bucket, row.num_running)
    except (KeyError, TypeError, ValueError) as error:
        log.info("the snapshot of a decision of another release is not read: %s", type(error).__name__)
        return None
    return StoredSnapshot(*found)
