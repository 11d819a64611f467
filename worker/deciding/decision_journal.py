"""Keeps a snapshot of every decision, in the background: the thread that decides hands over a reference only."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from alphaloop.deciding.snapshot import SessionFacts, Snapshot, SnapshotEncoder
from alphaloop.store.snapshots import SnapshotRow, SnapshotStore

log = logging.getLogger(__name__)

#: Snapshots are written so often at most: many decisions share a transaction.
WRITE_EVERY_S: Final = 1.0
#: Snapshots that wait while the database is away. The oldest are dropped first.
MOST_WAITING: Final = 10_000


class SnapshotJournal:
    """Snapshots that wait to be written, and those in the database.

    `note` is called by the thread that decides, and `write` by one other thread at a time. A snapshot may be lost: when
    the process is killed, those of the last second; and while the database is away, the oldest.
    """

    def __init__(
        self, store: SnapshotStore, facts: SessionFacts, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._encoder, self._clock = store, SnapshotEncoder(facts), clock
        self._noted: deque[Snapshot] = deque()
        self._rows: list[SnapshotRow] = []
        self._due = clock()

    def note(self, snapshot: Snapshot) -> None:
        """Take down a decision that was just taken."""
        self._noted.append(snapshot)

    @property
    def is_due(self) -> bool:
        """Whether snapshots wait to be written, and the last write is a second ago."""
        return bool(self._noted or self._rows) and self._clock() >= self._due

    def write(self) -> None:
        """Write the snapshots that wait. Raises StoreError, and then writes them next time."""
        self._due = self._clock() + WRITE_EVERY_S
        # Encoded at once, because what was noted holds whole cost tables.
        while self._noted:
            self._rows.append(self._row(self._noted.popleft()))
        num_dropped = len(self._rows) - MOST_WAITING
        if num_dropped > 0:
            log.warning("%d decisions not recorded", num_dropped, extra={"action": "decisions_not_recorded"})
            del self._rows[:num_dropped]
        if self._rows:
            self._store.add(self._rows)
            self._rows = []

    def _row(self, one: Snapshot) -> SnapshotRow:
        return SnapshotRow(
            one.decided_at,
            one.decision_id,
            one.subject.task,
            one.subject.sampling_bucket,
            one.context.num_running,
            self._encoder.encode(one),
        )
