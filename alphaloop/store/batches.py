"""Every batch, by the newest: those of the API, and those that came through Kafka, which have a table of their own.

Both tables hold what became of the requests when a scheduler counted them last, so a list of batches reads no job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import Store, of_row
from alphaloop.tables import api_batches, batches


@dataclass(frozen=True, slots=True)
class ListedBatch:
    """A batch with its counts."""

    id: str
    source: Literal["api", "command", "console", "kafka"]  #: kafka: any other producer
    by: str | None  #: key of the API, account or login that sent it
    name: str | None  #: of its file
    task: str | None  #: of lines that name none
    num_bytes: int | None  #: of its file
    num_total: int  #: lines with text of its file; 0: not known
    num_invalid: int  #: lines of these that were wrong and not sent
    by_status: Mapping[str, int]
    status: str | None  #: one of the API's; None of any other
    num_completed: int | None  #: one of the API's
    num_failed: int | None  #: one of the API's
    created_at: datetime


class BatchStore(Store):
    """Lists every batch, and keeps the counts of those that did not come through the API."""

    def page(self, limit: int, *, behind: tuple[datetime, str] | None = None) -> list[ListedBatch]:
        """The newest, after the batch that was made at this moment and has this id. Raises StoreError."""
        at, batch_id = behind or (None, None)
        rows = self._database.rows(_PAGE, {"limit": limit, "at": at, "id": batch_id})
        return [of_row(ListedBatch, row) for row in rows]

    def find(self, batch_id: str) -> ListedBatch | None:
        """The batch of this id; None where none was submitted, and no worker has claimed a job of it."""
        return self._named([batch_id]).get(batch_id)

    def note(self, told: Mapping[str, str | int], num_invalid: int) -> None:
        """Note a file that is being sent, by columns of `batches`, and how many of its lines were wrong so far."""
        grown = func.greatest(batches.c.num_invalid, num_invalid)
        made = insert(batches).values(**told, num_invalid=num_invalid)
        changed = {**told, "num_invalid": grown, "is_open": True}
        self._database.change(made.on_conflict_do_update(index_elements=["id"], set_=changed))

    def open(self, limit: int, since: datetime | None) -> dict[str, ListedBatch]:
        """Those to be counted: the API's, and of the others at most `limit`, the longest not counted first.

        Batches are among them of which a worker has claimed a job `since` then; without it, since the last count.
        """
        self._database.change(_CLAIMED, {"since": since, "margin": _MARGIN})
        longest_ago = batches.c.counted_at.nulls_first()
        others = select(batches.c.id).where(batches.c.is_open).order_by(longest_ago).limit(limit)
        of_api = select(api_batches.c.id).where(_IS_COUNTED)
        return self._named([*self._database.scalars(of_api), *self._database.scalars(others)])

    def claimed(self, batch_ids: Collection[str]) -> list[tuple[str, str, int, list[str] | None]]:
        """Their jobs that a worker has claimed: batch, status, number, and which ones have failed."""
        return [tuple(row) for row in self._database.rows(_BY_STATUS, {"ids": list(batch_ids)})]

    def keep(self, counts: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what was counted, by batch and column: with `is_open` one that is not the API's."""
        now = {"counted_at": func.clock_timestamp()}
        with self._database.begin() as connection:
            for batch_id, kept in sorted(counts.items()):
                if "is_open" in kept:
                    change = update(batches).where(batches.c.id == batch_id).values({**kept, **now})
                else:
                    change = update(api_batches).where(api_batches.c.id == batch_id, _IS_COUNTED).values(kept)
                connection.execute(change)

    def _named(self, ids: Sequence[str]) -> dict[str, ListedBatch]:
        return {row.id: of_row(ListedBatch, row) for row in self._database.rows(_NAMED, {"ids": ids})}


_LISTED: Final = """
    SELECT api_batches.id, 'api' AS source, api_batches.key_name AS by, filename AS name, task, num_bytes, num_total,
        num_invalid, by_status, status, num_completed, num_failed, api_batches.created_at
    FROM api_batches LEFT JOIN api_files ON api_files.id = input_file_id
    UNION ALL
    SELECT id, source, by, name, task, num_bytes, num_total, num_invalid, by_status, NULL, NULL, NULL, created_at
    FROM batches
"""
_PAGE: Final = text(f"""
    SELECT * FROM ({_LISTED}) AS listed
    WHERE CAST(:at AS timestamptz) IS NULL OR (created_at, id) < (CAST(:at AS timestamptz), CAST(:id AS text))
    ORDER BY created_at DESC, id DESC LIMIT :limit
""")  # noqa: S608 - no values
_NAMED: Final = text(f"SELECT * FROM ({_LISTED}) AS listed WHERE id = ANY(:ids)")  # noqa: S608 - no values
#: What the API's other batches have was counted when their files were written.
_IS_COUNTED: Final = api_batches.c.status.in_(("in_progress", "cancelling"))
_BY_STATUS: Final = text("""
    SELECT batch_id, CASE status WHEN 'running' THEN 'held' ELSE status END AS status, count(*),
        array_agg(job_id) FILTER (WHERE status = 'failed')
    FROM jobs WHERE batch_id = ANY(:ids) GROUP BY batch_id, status
""")
#: A claim is seen when it is committed, which is after it was made.
_MARGIN: Final = timedelta(seconds=10)
# The first look of a process goes on where the last one of any process ended.
_CLAIMED: Final = text("""
    INSERT INTO batches AS known (id, source, created_at)
    SELECT batch_id, 'kafka', min(created_at) FROM jobs
    WHERE batch_id IS NOT NULL AND created_at > CAST(:margin AS interval) * -1 + coalesce(
            CAST(:since AS timestamptz), (SELECT max(counted_at) FROM batches), now() - interval '1 day'
        ) AND NOT EXISTS (SELECT FROM api_batches WHERE api_batches.id = jobs.batch_id)
    GROUP BY batch_id
    ON CONFLICT (id) DO UPDATE SET is_open = true WHERE NOT known.is_open
""")
