"""What the first decision of a task needs from the database, read before: when a job of the task is claimed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from alphaloop.errors import StoreError
from worker.deciding.context import DecisionKey

log = logging.getLogger(__name__)


class FirstReads:
    """Reads once for each task and sampling bucket, so that the thread that decides never waits for it.

    `reads` are called with a task and a sampling bucket. One thread owns it, the one that claims jobs.
    """

    def __init__(self, *reads: Callable[[str, str], None]) -> None:
        self._reads = reads
        self._done: set[tuple[str, str]] = set()

    def prepare(self, keys: Iterable[DecisionKey]) -> None:
        """Read for tasks and buckets that are new.

        While the database is away, nothing is read: the first decision reads then, and waits for the database.
        """
        for subject in {(key.task, key.sampling_bucket) for key in keys} - self._done:
            try:
                for read in self._reads:
                    read(*subject)
            except StoreError as error:
                log.warning("not read before it is needed: %s", error.message, extra={"action": "first_read_failed"})
                return
            self._done.add(subject)
