"""Counts the open batches, whoever sent them, and keeps what was counted."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from alphaloop.batches.progress import Progress, count_each
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import BatchStore, ListedBatch

#: A count reads every dead letter: the pause after it is this multiple of its time at least.
PAUSE_OVER_COUNTING: Final = 5.0
#: Batches that are counted together, beside the API's.
_MOST_COUNTED: Final = 1000


class BatchCounting:
    """The counts of one process: each count goes on where the last one ended. One thread uses it."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database, self._store = settings, database, BatchStore(database)
        self._looked_at: datetime | None = None  #: when batches were looked for, by the database

    def count(self, now: datetime) -> tuple[Mapping[str, ListedBatch], Mapping[str, Progress]]:
        """The open batches with their counts, by id. `now`: by the database. Raises StoreError, BrokerError."""
        counts: Mapping[str, Progress] = {}
        if batches := self._store.open(_MOST_COUNTED, self._looked_at):
            counts = count_each(batches, self._settings, self._database)
            kept = {batch_id: counted_columns(counts[batch_id], batches[batch_id].status) for batch_id in batches}
            self._store.keep(kept)
        self._looked_at = now
        return batches, counts


def counted_columns(progress: Progress, status: str | None = "open") -> dict[str, Any]:
    """Columns of a batch of the API, or of another one, which has no `status`."""
    if status is None:
        return {"by_status": dict(progress.by_status), "is_open": progress.num_open > 0}
    return {
        "by_status": dict(progress.by_status),
        "num_completed": progress.num_completed,
        "num_failed": progress.num_failed,
    }
