"""The API's keys, their files and batches, what of them waits, and the audit.

The database holds a key's digest: whoever reads it cannot use it. A key acts under its name, which files and batches
belong to. So a new key of the same name goes on with what the revoked one left. Everything that a key asks for is
looked up by its name too: what belongs to another is as if it were not there.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from sqlalchemy import Connection, Select, Table, delete, func, literal, or_, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.store.database import Database, Store, columns_of, of_row, values_of
from alphaloop.store.promises import PromisedEnd, newest_promises
from alphaloop.tables import api_batches, api_files, api_keys, audit, jobs

#: What a key looks like, so that programs that search for leaked secrets find it.
_SECRET: Final = re.compile(r"al-[A-Za-z0-9_-]{43}")
_NUM_SECRET_BYTES: Final = 32
_NUM_SHOWN: Final = 9
_NOTED_EVERY: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, without its secret."""

    name: str
    prefix: str  #: its first characters
    segment: str  #: of every job that is sent with it
    tasks: tuple[str, ...]  #: that it may send jobs to; empty: all
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None  #: to a minute
    revoked_at: datetime | None


class ApiKeyStore(Store):
    """The table of keys."""

    def create(
        self, name: str, *, segment: str, tasks: Collection[str], expires_at: datetime | None, deed: Deed
    ) -> str:
        """Make a key, and return its secret, which is shown this once.

        Raises ConfigError where a key of this name is valid, or an earlier one had another segment.
        """
        secret = f"al-{secrets.token_urlsafe(_NUM_SECRET_BYTES)}"
        row = {
            "name": name,
            "prefix": secret[:_NUM_SHOWN],
            "digest": _digest(secret),
            "segment": segment,
            "tasks": list(tasks),
            "expires_at": expires_at,
        }
        with self._database.begin() as connection:
            others = select(api_keys.c.segment).where(api_keys.c.name == name, api_keys.c.segment != segment).limit(1)
            if (other := connection.execute(others).scalar()) is not None:
                problem = f"{name}: expected the segment {other!r} that an earlier key of this name has"
                raise ConfigError(problem, hint="files and batches belong to the name: take another one")
            made = insert(api_keys).values(row).on_conflict_do_nothing().returning(api_keys.c.id)
            if connection.execute(made).first() is None:
                raise ConfigError(f"there is a key {name!r} already", hint=f"alphaloop keys revoke {name}")
            write_down(connection, deed)
        return secret

    def find(self, secret: str) -> ApiKey | None:
        """The valid key with this secret, by its digest alone: how long that takes reveals nothing about any key."""
        if not _SECRET.fullmatch(secret):
            return None
        digest, now = _digest(secret), func.clock_timestamp()
        is_valid = api_keys.c.revoked_at.is_(None) & or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now)
        is_noted = api_keys.c.last_used_at > now - _NOTED_EVERY
        query = select(*_COLUMNS, func.coalesce(is_noted, False).label("is_noted"))
        row = self._database.row(query.where(api_keys.c.digest == digest, is_valid))
        if row is None:
            return None
        if not row.is_noted:
            self._database.change(update(api_keys).where(api_keys.c.digest == digest).values(last_used_at=now))
        return of_row(ApiKey, row)

    def all(self) -> list[ApiKey]:
        """Every key that was ever made, in the order of names and then of time."""
        query = select(*_COLUMNS).order_by(api_keys.c.name, api_keys.c.id)
        return [of_row(ApiKey, row) for row in self._database.rows(query)]

    def revoke(self, name: str, deed: Deed) -> None:
        """Refuse the key from now on. Raises ConfigError where there is none of this name that is not revoked."""
        with self._database.begin() as connection:
            statement = update(api_keys).where(api_keys.c.name == name, api_keys.c.revoked_at.is_(None))
            if not connection.execute(statement.values(revoked_at=func.clock_timestamp())).rowcount:
                raise ConfigError(f"there is no key {name!r} that is not revoked", hint="alphaloop keys list")
            write_down(connection, deed)


_COLUMNS: Final = tuple(columns_of(api_keys, ApiKey))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


#: Statuses of a batch that a scheduler still has to do something for.
OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")


class NotThere(AlphaloopError, LookupError):
    """There is nothing with this id, or it belongs to another key."""


class NoRoom(AlphaloopError):
    """There are as many batches, bytes or waiting jobs as may be at once."""


class InUse(AlphaloopError):
    """It cannot be deleted while something needs it."""


@dataclass(frozen=True, slots=True)
class ApiFile:
    """A file. `parts` are references into the claim-check store; None of a file that lies in the data folder."""

    id: str
    key_name: str
    filename: str
    purpose: str  #: batch, or batch_output
    num_bytes: int
    parts: Sequence[Mapping[str, Any]] | None
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class ApiBatch:
    """A batch, in the words of OpenAI's API."""

    id: str
    key_name: str
    segment: str
    task: str | None  #: of lines that name none
    tasks: tuple[str, ...]  #: that lines may name; empty: all
    endpoint: str
    completion_window: str
    metadata: Mapping[str, Any] | None
    input_file_id: str
    created_at: datetime
    expires_at: datetime
    status: str = "validating"
    errors: Sequence[Mapping[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_total: int = 0
    num_sent: int = 0  #: lines that Kafka has, or that were wrong
    num_invalid: int = 0
    num_completed: int = 0
    num_failed: int = 0
    in_progress_at: datetime | None = None
    finalizing_at: datetime | None = None
    completed_at: datetime | None = None
    failed_at: datetime | None = None
    expired_at: datetime | None = None
    cancelling_at: datetime | None = None
    cancelled_at: datetime | None = None
    by_status: Mapping[str, int] = field(default_factory=dict)  #: its requests by what became of them
    output_kept_s: int | None = None  #: how long its files are kept; None: as long as any other
    used: Mapping[str, int] | None = None  #: tokens of its texts, once it has ended
    end: PromisedEnd | None = None  #: what was said last of when it ends

    @property
    def had_ended(self) -> bool:
        """Whether it has ended before: one that goes on has a dead letter that was sent again."""
        return any((self.completed_at, self.expired_at, self.cancelled_at))


def new_id(kind: str) -> str:
    """`file-…` or `batch_…`, which cannot be guessed."""
    return f"{kind}{secrets.token_hex(16)}"


class ApiFileStore(Store):
    """The table of files."""

    def add(self, file: ApiFile, *, most_bytes: int, deed: Deed) -> None:
        """Add an uploaded file whose content lies there. Raises NoRoom beyond `most_bytes` of its key's."""
        with self._database.begin() as connection:
            _one_at_a_time(connection, file.key_name)
            of_key = api_files.c.key_name == file.key_name
            query = select(func.coalesce(func.sum(api_files.c.num_bytes), 0)).where(of_key)
            total = int(connection.execute(query).scalar_one())
            if total + file.num_bytes > most_bytes:
                raise NoRoom(f"the files of this key have {total / 1e6:,.0f} MB of at most {most_bytes / 1e6:,.0f} MB")
            connection.execute(insert(api_files).values(values_of(file)))
            write_down(connection, deed)

    def find(self, key_name: str, file_id: str) -> ApiFile:
        """The key's file. Raises NotThere."""
        is_it = (api_files.c.key_name == key_name) & (api_files.c.id == file_id)
        row = self._database.row(select(*_FILE).where(is_it, api_files.c.expires_at > func.clock_timestamp()))
        if row is None:
            raise NotThere(f"no file {file_id!r}")
        return of_row(ApiFile, row)

    def page(
        self, key_name: str, limit: int, *, after: str | None, purpose: str | None, oldest_first: bool
    ) -> list[ApiFile]:
        """Files of the key, the newest first unless `oldest_first`, after the file `after`. Raises NotThere."""
        query = select(*_FILE).where(api_files.c.expires_at > func.clock_timestamp())
        if purpose is not None:
            query = query.where(api_files.c.purpose == purpose)
        page = _paged(self._database, api_files, query, key_name, limit, after, oldest_first=oldest_first)
        return [of_row(ApiFile, row) for row in page]

    def remove(self, key_name: str, file_id: str, deed: Deed) -> ApiFile:
        """Let the time of the key's file be over, so that its content is deleted. Raises NotThere, InUse."""
        file = self.find(key_name, file_id)
        with self._database.begin() as connection:
            _one_at_a_time(connection, key_name)
            is_read = (api_batches.c.input_file_id == file_id) & api_batches.c.status.in_(OPEN)
            if connection.execute(select(api_batches.c.id).where(is_read).limit(1)).first() is not None:
                raise InUse(f"{file_id} is the input of a batch that has not ended")
            now = func.clock_timestamp()
            connection.execute(update(api_files).where(api_files.c.id == file_id).values(expires_at=now))
            write_down(connection, deed)
        return file

    def expired(self, limit: int) -> list[ApiFile]:
        """Files whose time is over, but for those that an open batch reads."""
        is_read = select(api_batches.c.id).where(
            api_batches.c.input_file_id == api_files.c.id, api_batches.c.status.in_(OPEN)
        )
        query = select(*_FILE).where(api_files.c.expires_at <= func.clock_timestamp(), ~is_read.exists()).limit(limit)
        return [of_row(ApiFile, row) for row in self._database.rows(query)]

    def forget(self, file_id: str) -> None:
        """Delete the row of a file whose content is deleted."""
        self._database.change(delete(api_files).where(api_files.c.id == file_id))


class ApiBatchStore(Store):
    """The table of batches."""

    def add(self, batch: ApiBatch, *, most_open: int, deed: Deed) -> ApiBatch:
        """Add a new batch of a file. Raises NoRoom beyond `most_open` that have not ended."""
        with self._database.begin() as connection:
            _one_at_a_time(connection, batch.key_name)
            is_open = (api_batches.c.key_name == batch.key_name) & api_batches.c.status.in_(OPEN)
            num_open = connection.execute(select(func.count()).select_from(api_batches).where(is_open)).scalar_one()
            if num_open >= most_open:
                raise NoRoom(f"{num_open} batches of this key have not ended; at most {most_open} may be open at once")
            is_it = (api_files.c.key_name == batch.key_name) & (api_files.c.id == batch.input_file_id)
            if connection.execute(select(api_files.c.id).where(is_it)).first() is None:
                raise NotThere(f"no file {batch.input_file_id!r}")
            connection.execute(insert(api_batches).values(values_of(batch, "end")))
            write_down(connection, deed)
        return batch

    def find(self, key_name: str, batch_id: str) -> ApiBatch:
        """The key's batch. Raises NotThere."""
        is_it = (api_batches.c.key_name == key_name) & (api_batches.c.id == batch_id)
        row = self._database.row(select(*_BATCH).where(is_it))
        if row is None:
            raise NotThere(f"no batch {batch_id!r}")
        return of_row(ApiBatch, row, end=newest_promises(self._database, [row.id]).get(row.id))

    def page(self, key_name: str, limit: int, *, after: str | None) -> list[ApiBatch]:
        """Batches of the key, the newest first, after the batch `after`. Raises NotThere."""
        page = _paged(self._database, api_batches, select(*_BATCH), key_name, limit, after, oldest_first=False)
        ends = newest_promises(self._database, [row.id for row in page])
        return [of_row(ApiBatch, row, end=ends.get(row.id)) for row in page]

    def cancel(self, key_name: str, batch_id: str, deed: Deed | None) -> ApiBatch:
        """Ask for the end of the key's batch; one that ends or has ended stays as it is. Raises NotThere."""
        is_it = (api_batches.c.key_name == key_name) & (api_batches.c.id == batch_id)
        now = func.clock_timestamp()
        statement = update(api_batches).where(is_it, api_batches.c.status.in_(("validating", "in_progress")))
        with self._database.begin() as connection:
            asked = statement.values(status="cancelling", cancelling_at=now, look_at=now)
            if (row := connection.execute(asked.returning(*_BATCH)).first()) is not None and deed is not None:
                write_down(connection, deed)
        return self.find(key_name, batch_id) if row is None else of_row(ApiBatch, row, end=None)

    def due(self, limit: int) -> list[str]:
        """The ids of open batches that are to be looked at, the longest due first."""
        is_due = (api_batches.c.look_at <= func.clock_timestamp()) & api_batches.c.status.in_(OPEN)
        return self._database.scalars(
            select(api_batches.c.id).where(is_due).order_by(api_batches.c.look_at).limit(limit)
        )

    def with_files(self, batch_id: str) -> tuple[ApiBatch, Mapping[str, ApiFile], datetime] | None:
        """The batch of any key, its files that are there, by id, and the time by the database; None without it."""
        now = self._database.scalar(select(func.clock_timestamp()))
        row = self._database.row(select(*_BATCH).where(api_batches.c.id == batch_id))
        if row is None:
            return None
        batch = of_row(ApiBatch, row, end=None)
        ids = [
            file_id
            for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            if file_id is not None
        ]
        rows = self._database.rows(select(*_FILE).where(api_files.c.id.in_(ids)))
        return batch, {file.id: of_row(ApiFile, file) for file in rows}, now

    def change(self, batch: ApiBatch, status: str | None = None, **values: Any) -> ApiBatch | None:
        """Write what was found of a batch, with `status` the next one and its moment; returns it as it is now.

        None, and nothing is written, where its status is not the one of `batch` any more: another request has cancelled
        it, or another process goes on with it.
        """
        if status is not None:
            values |= {"status": status, f"{status}_at": func.clock_timestamp(), "look_at": func.clock_timestamp()}
        is_it = (api_batches.c.id == batch.id) & (api_batches.c.status == batch.status)
        row = self._database.row(update(api_batches).where(is_it).values(values).returning(*_BATCH))
        return None if row is None else of_row(ApiBatch, row, end=None)

    def end(self, batch: ApiBatch, status: str, files: Sequence[ApiFile], **values: Any) -> bool:
        """Write the end of a batch together with the files that it wrote; False where it is another's by now."""
        with self._database.begin() as connection:
            now = func.clock_timestamp()
            is_it = (api_batches.c.id == batch.id) & (api_batches.c.status == batch.status)
            ended = update(api_batches).where(is_it).values({**values, "status": status, f"{status}_at": now})
            if not connection.execute(ended).rowcount:
                return False
            for file in files:
                connection.execute(insert(api_files).values(values_of(file)))
        return True

    def postpone(self, batch_id: str, wait: timedelta) -> None:
        """Look at it again after so long."""
        later = func.clock_timestamp() + wait
        self._database.change(update(api_batches).where(api_batches.c.id == batch_id).values(look_at=later))


_FILE: Final = tuple(columns_of(api_files, ApiFile))
_BATCH: Final = tuple(columns_of(api_batches, ApiBatch, "end"))
_TURN: Final = text("SELECT pg_advisory_xact_lock(hashtextextended('api ' || CAST(:key_name AS text), 0))")


def _one_at_a_time(connection: Connection, key_name: str) -> None:
    """When two requests of a key count what it has, the second one sees what the first one added."""
    connection.execute(_TURN, {"key_name": key_name})


def _paged(
    database: Database,
    table: Table,
    query: Select[Any],
    key_name: str,
    limit: int,
    after: str | None,
    *,
    oldest_first: bool,
) -> list[Any]:
    """Rows of the key in the order of their creation, after the one with the id `after`. Raises NotThere."""
    place, query = tuple_(table.c.created_at, table.c.id), query.where(table.c.key_name == key_name)
    if after is not None:
        is_it = (table.c.key_name == key_name) & (table.c.id == after)
        begin = database.row(select(table.c.created_at, table.c.id).where(is_it))
        if begin is None:
            raise NotThere(f"nothing with the id {after!r}")
        query = query.where(place > tuple(begin) if oldest_first else place < tuple(begin))
    order = (table.c.created_at, table.c.id) if oldest_first else (table.c.created_at.desc(), table.c.id.desc())
    return database.rows(query.order_by(*order).limit(limit))


#: A segment's rate is that of the jobs which ended so lately.
LATELY: Final = timedelta(minutes=10)
#: The rate of a segment without such jobs is unknown.
UNKNOWN_WAIT_S: Final = 60
LONGEST_WAIT_S: Final = 3600


@dataclass(frozen=True, slots=True)
class SegmentBacklog:
    """What waits of one segment, and how fast its jobs end.

    Only requests of the batch API are counted. A message of any other producer is in no table before a worker claims
    it, and waits in Kafka after its segment's own.
    """

    num_waiting: int  #: requests of its open batches that have not ended
    num_in_kafka: int  #: of these, requests that were sent
    ended_per_s: float  #: jobs of any origin, over `LATELY`

    def retry_after_s(self, most_waiting: int) -> int:
        """Seconds after which to ask again for room for a new batch; 0 if it may come now."""
        num_over = self.num_waiting + 1 - most_waiting
        if num_over <= 0:
            return 0
        if not self.ended_per_s:
            return UNKNOWN_WAIT_S
        return min(LONGEST_WAIT_S, max(1, math.ceil(num_over / self.ended_per_s)))


def backlog_of_segment(database: Database, segment: str) -> SegmentBacklog:
    """What waits of a segment, as its batches were last counted. Raises StoreError."""
    num_ended = api_batches.c.num_completed + api_batches.c.num_failed
    is_its = (api_batches.c.segment == segment) & api_batches.c.status.in_(OPEN)
    batches = select(
        func.coalesce(func.sum(api_batches.c.num_total - num_ended), 0).label("num_waiting"),
        func.coalesce(func.sum(func.greatest(api_batches.c.num_sent - num_ended, 0)), 0).label("num_in_kafka"),
    ).where(is_its)
    lately = (
        select(func.count())
        .where(jobs.c.finished_at > func.clock_timestamp() - literal(LATELY), jobs.c.segment == segment)
        .scalar_subquery()
    )
    row = database.row(batches.add_columns(lately.label("num_lately")))
    assert row is not None  # noqa: S101 - sums have one row
    return SegmentBacklog(int(row.num_waiting), int(row.num_in_kafka), row.num_lately / LATELY.total_seconds())


_MOST_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Deed:
    """One action in the console, through its API, or on the API's keys.

    `subject` names what it was done to, and never holds a text of a job.
    """

    by_kind: Literal["login", "key", "command"]
    by: str
    action: str
    subject: str
    address: str | None = None  #: where the request came from


def write_down(where: Database | Connection, deed: Deed) -> None:
    """Add it to the audit: in the caller's transaction, or in one of its own. Raises StoreError."""
    row = {**values_of(deed), "subject": deed.subject.replace("\x00", "\ufffd")[:_MOST_CHARS]}
    statement = insert(audit).values(row)
    if isinstance(where, Database):
        where.change(statement)
    else:
        where.execute(statement)
