"""Deadlines that will be missed with the workers that run, and batches that have ended: what people are told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import Store, columns_of, of_row, values_of
from alphaloop.tables import ended_batches, lacks
from alphaloop.wording import expected_end, minute

#: Figures of an open lack that are older than this are shown with their age: no scheduler leads, or it fails.
FRESH_FOR: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Lack:
    """Requests of a segment's batches that will miss their deadlines, because a target has too few workers."""

    target: str
    segment: str  #: empty: of jobs without one
    opened_at: datetime
    said_at: datetime  #: when it was notified last
    said_late: float  #: late share then
    foreseen_at: datetime  #: when the numbers were computed last
    num_due: int
    num_late: int
    num_workers: int
    num_enough: int | None  #: None where that is not known
    until_at: datetime  #: the last of the deadlines
    sentence: str
    closed_at: datetime | None = None
    closed_because: str | None = None
    id: int = 0  #: given by the database

    @property
    def key(self) -> tuple[str, str]:
        """Target and segment, of which one may be open."""
        return self.target, self.segment

    def shown(self, now: datetime) -> str:
        """The sentence, with the moment of its figures where they are old."""
        is_old = now - self.foreseen_at > FRESH_FOR
        return f"{self.sentence} (as of {minute(self.foreseen_at.astimezone(UTC))})" if is_old else self.sentence

    def as_json(self) -> dict[str, Any]:
        """The same on every screen; moments in UTC."""
        known = values_of(self, "said_at", "said_late", "closed_at", "closed_because", "id")
        return {name: v.astimezone(UTC).isoformat() if isinstance(v, datetime) else v for name, v in known.items()}


class LackStore(Store):
    """The table of lacks."""

    def open(self) -> list[Lack]:
        """Those that are not over, by target and segment."""
        query = select(*_COLUMNS).where(lacks.c.closed_at.is_(None)).order_by(lacks.c.target, lacks.c.segment)
        return [of_row(Lack, row) for row in self._database.rows(query)]

    def begin(self, new: Lack) -> None:
        """Keep one that has opened. Raises StoreError where one of its target and segment is open."""
        self._database.change(insert(lacks).values(**values_of(new, "id")))

    def change(self, lack: Lack, *, is_said_anew: bool = False) -> None:
        """Keep what is known of it now, its end among that; said anew it gets a new number."""
        statement = update(lacks).where(lacks.c.id == lack.id).values(**values_of(lack, "id"))
        with self._database.begin() as connection:
            connection.execute(statement)
            if is_said_anew:
                connection.execute(_NEW_NUMBER, {"id": lack.id})


@dataclass(frozen=True, slots=True)
class EndedBatch:
    """A batch that has ended, and when that was promised."""

    batch_id: str
    created_at: datetime
    ended_at: datetime
    state: str  #: completed, failed, expired or cancelled
    by_status: Mapping[str, int]
    num_failed: int = 0
    promised_at: datetime | None = None  #: the first promise; None without one
    ends_at: datetime | None = None
    earliest_at: datetime | None = None
    latest_at: datetime | None = None

    def promise_in_words(self) -> str:
        """`promised 2026-11-29 22:01 UTC: ends 02:40, 02:31 to 02:55 UTC`."""
        if self.promised_at is None or self.ends_at is None or self.earliest_at is None or self.latest_at is None:
            return "its end was not promised"
        said = expected_end(self.ends_at, self.earliest_at, self.latest_at, self.promised_at)
        return f"promised {minute(self.promised_at.astimezone(UTC))}: {said}"


class EndedBatchStore(Store):
    """The table of ended batches."""

    def missing(self, since: datetime) -> list[EndedBatch]:
        """Batches that have ended since then and are not in it; `state` is empty where the batch is not the API's."""
        return [of_row(EndedBatch, row) for row in self._database.rows(_MISSING, {"since": since})]

    def keep(self, ended: Sequence[EndedBatch]) -> None:
        """Write them down; what another process has written stays."""
        if ended:
            rows = [values_of(each) for each in ended]
            self._database.change(insert(ended_batches).on_conflict_do_nothing(), rows)

    def since(self, since: datetime) -> list[EndedBatch]:
        """Those that ended since then, oldest first."""
        query = select(*_ENDED_COLUMNS).where(ended_batches.c.ended_at >= since).order_by(ended_batches.c.id)
        return [of_row(EndedBatch, row) for row in self._database.rows(query)]


_COLUMNS: Final = tuple(columns_of(lacks, Lack))
_ENDED_COLUMNS: Final = tuple(columns_of(ended_batches, EndedBatch))
_NEW_NUMBER: Final = text("UPDATE lacks SET id = DEFAULT WHERE id = :id")
# The end of a batch of jobs is that of its last job: two processes that count it see the same one.
_MISSING: Final = text("""
    WITH ended AS (
        SELECT id AS batch_id, created_at, by_status, '' AS state,
            coalesce((SELECT max(finished_at) FROM jobs WHERE batch_id = batches.id), created_at) AS ended_at
        FROM batches WHERE NOT is_open AND counted_at >= :since
        UNION ALL
        SELECT id, created_at, by_status, status, greatest(completed_at, failed_at, expired_at, cancelled_at)
        FROM api_batches
        WHERE status IN ('completed','failed','expired','cancelled')
            AND greatest(completed_at, failed_at, expired_at, cancelled_at) >= :since
    )
    SELECT ended.*, 0 AS num_failed, first.promised_at, first.ends_at, first.earliest_at, first.latest_at
    FROM ended LEFT JOIN LATERAL (
        SELECT promised_at, ends_at, earliest_at, latest_at FROM promised_ends
        WHERE batch_id = ended.batch_id AND why IS NULL ORDER BY promised_at LIMIT 1
    ) AS first ON true
    WHERE NOT EXISTS (
        SELECT FROM ended_batches AS known WHERE known.batch_id = ended.batch_id AND known.ended_at = ended.ended_at
    )
    ORDER BY ended.ended_at
""")
