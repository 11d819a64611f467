"""What is remembered of every evidence key: added to with every outcome, read by whoever decides.

One row a key, however many jobs it has seen. The arithmetic is alphaloop.deciding.evidence's, here as in a worker's own
memory. Numbers are packed, because arrays take Postgres three times as long to send.

A changed half-life spoils nothing: it holds from then on, and what faded before has faded by the old one. Weights of
first and second order fade together, so every row stays a weighing of its jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, cast

import psycopg
from sqlalchemy import BigInteger, Connection, Text, bindparam, delete, false, func, select, text, tuple_, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import insert

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums, together
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.store.database import Database
from alphaloop.store.packed_evidence import pack, unpack
from alphaloop.tables import acceptance_state
from alphaloop.tables.state import KEY

THIS_TRANSACTION: Final = sql_cast(sql_cast(func.pg_current_xact_id(), Text), BigInteger)
#: Every transaction below it has ended: what cannot be seen yet will be changed in this one or a later one.
_OLDEST_RUNNING: Final = text("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")


class Pair(NamedTuple):
    """A drafter under a target, on an engine; no drafter is vanilla decoding."""

    target_revision: str
    engine: str
    drafter: str
    draft_revision: str


class StateRow(NamedTuple):
    """One key and what is remembered of it, unpacked when asked for: a worker reads far more rows than it needs."""

    pair: Pair
    task: str
    segment: str
    sampling_bucket: str
    prompt_bucket: str
    num_jobs: int
    as_of: datetime
    packed: bytes

    @property
    def key(self) -> EvidenceKey:
        """What the row is about."""
        return EvidenceKey(
            self.task,
            self.pair.target_revision,
            self.pair.engine,
            self.sampling_bucket,
            self.prompt_bucket,
            self.segment,
            self.pair.drafter,
            self.pair.draft_revision,
        )

    @property
    def evidence(self) -> KeyEvidence:
        """What is remembered, as of `as_of`."""
        return unpack(self.packed, self.as_of)


#: One drafter at a time: an index finds its rows, and what they share is not sent with each of them.
_OF_PAIR: Final = """
    SELECT task, segment, sampling_bucket, prompt_bucket, num_jobs, as_of, evidence FROM acceptance_state
    WHERE target_revision = %s AND engine = %s AND drafter = %s AND draft_revision = %s
"""
_OF_TASK: Final = """
    SELECT target_revision, engine, drafter, draft_revision,
           task, segment, sampling_bucket, prompt_bucket, num_jobs, as_of, evidence
    FROM acceptance_state WHERE task = %s
    ORDER BY target_revision, engine, drafter, draft_revision, segment, sampling_bucket, prompt_bucket
"""


@dataclass(frozen=True, slots=True)
class Look:
    """Rows read at one moment. Where `is_all` is False, only those changed since an earlier look."""

    rows: Sequence[StateRow]
    seen: int  #: for the next look: transactions below it are in this one or an earlier one
    is_all: bool


class AcceptanceStateStore:
    """Reads the state; `add_jobs` writes it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def look(self, target_revision: str, engine: str, drafters: Mapping[str, str], *, since: int | None = None) -> Look:
        """The rows of a target, an engine and `drafters` (name → revision), and those of vanilla decoding.

        With `since`, an earlier look's `seen`, only those that changed meanwhile; but all of them, where the database
        was put back to a time before that look.
        """
        pairs = [Pair(target_revision, engine, *drafter) for drafter in (("", ""), *drafters.items())]
        with self._database.begin() as connection:
            # Before the rows are read: what commits in between is then read twice, never missed.
            seen: int = connection.execute(_OLDEST_RUNNING).scalar_one()
            is_all = since is None or seen < since
            changed, more = ("", ()) if is_all else (" AND changed_in >= %s", (since,))
            rows = [
                StateRow(pair, *row) for pair in pairs for row in _read(connection, _OF_PAIR + changed, (*pair, *more))
            ]
        return Look(rows, seen, is_all)

    def of_task(self, task: str) -> list[StateRow]:
        """Every row of a task, whatever its target, engine and draft: for people."""
        with self._database.begin() as connection:
            return [StateRow(Pair(*row[:4]), *row[4:]) for row in _read(connection, _OF_TASK, (task,))]

    def drop_before(self, at: datetime) -> int:
        """Delete what nobody added to since `at`; returns how many rows. Of drafts and tasks that are gone."""
        with self._database.begin() as connection:
            return connection.execute(delete(acceptance_state).where(acceptance_state.c.as_of < at)).rowcount


def _read(connection: Connection, query: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
    """Rows in Postgres's binary form, past SQLAlchemy: packed memories come as they are, not spelt out in hex."""
    driver = cast(psycopg.Connection, connection.connection.driver_connection)
    with driver.cursor(binary=True) as cursor:
        return cursor.execute(query.encode(), parameters).fetchall()


def add_jobs(connection: Connection, jobs: Iterable[tuple[EvidenceKey, EvidenceSums]], half_life: timedelta) -> None:
    """Fade the rows of these keys and add jobs, one `EvidenceSums` each, in the caller's transaction.

    Jobs of one key are added together. Keys are locked in one order, so that two workers never wait for each other in
    a circle, and read only then: what another worker adds meanwhile is not lost.
    """
    by_key: dict[EvidenceKey, list[EvidenceSums]] = {}
    for key, job in jobs:
        by_key.setdefault(key, []).append(job)
    keys = sorted(by_key, key=_place)
    if not keys:
        return
    _lock(connection, keys, {key: by_key[key][0].as_of for key in keys})
    standing = _standing(connection, keys)
    changed = []
    for key in keys:
        evidence = standing[key].with_job(together(by_key[key], half_life), half_life)
        where = {f"at_{name}": getattr(key, name) for name in KEY}
        changed.append(
            {**where, "until": evidence.all.as_of, "num_more": len(by_key[key]), "new_evidence": pack(evidence)}
        )
    connection.execute(_CHANGE, changed)


_state: Final = acceptance_state.c
_CHANGE: Final = (
    update(acceptance_state)
    .where(*(_state[name] == bindparam(f"at_{name}") for name in KEY))
    .values(
        as_of=bindparam("until"),
        num_jobs=_state.num_jobs + bindparam("num_more"),
        evidence=bindparam("new_evidence"),
        changed_in=THIS_TRANSACTION,
    )
)


def _lock(connection: Connection, keys: Sequence[EvidenceKey], as_of: Mapping[EvidenceKey, datetime]) -> None:
    """Lock the rows of `keys` in their order, making those that are missing. A row that stands is not written."""
    missing = insert(acceptance_state).values(changed_in=THIS_TRANSACTION)
    statement = missing.on_conflict_do_update(
        index_elements=list(KEY), set_={"num_jobs": _state.num_jobs}, where=false()
    )
    rows = [{**asdict(key), "as_of": as_of[key], "num_jobs": 0, "evidence": b""} for key in keys]
    connection.execute(statement, rows)


def _standing(connection: Connection, keys: Sequence[EvidenceKey]) -> dict[EvidenceKey, KeyEvidence]:
    columns = [_state[name] for name in KEY]
    query = select(*columns, _state.as_of, _state.evidence).where(tuple_(*columns).in_([_place(key) for key in keys]))
    return {
        EvidenceKey(**{name: getattr(row, name) for name in KEY}): unpack(row.evidence, row.as_of)
        for row in connection.execute(query)
    }


def _place(key: EvidenceKey) -> tuple[str, ...]:
    return tuple(getattr(key, name) for name in KEY)
