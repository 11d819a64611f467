"""What pages read from: the settings, the database, and figures that take long to read.

Such figures are shown as they were read last, with their age, and are read anew in the background.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, Self, TypeVar

from alphaloop.errors import ConfigError, reason_of
from alphaloop.explaining.explanation import tasks_now
from alphaloop.outcomes.reading import unended
from alphaloop.settings import Settings, TasksFile
from alphaloop.store.database import Database
from alphaloop.store.task_figures import TaskFigures, waits, with_targets, with_waiting
from alphaloop.store.workers import SeenWorker, WorkerStore

#: The figures of tasks are those of `alphaloop status` without options.
WINDOW: Final = timedelta(days=1)
_POOL_SIZE: Final = 6
T = TypeVar("T")
#: Between two readings of the figures of a page that is open.
REFRESH_S: Final = 5.0
_STATEMENT_S: Final = 20.0  #: longest query for a page: a person waits for it
#: A page waits this long for a first reading, and then shows that it is under way.
_PATIENCE_S: Final = 0.15
#: What takes long is read seldom: the pause is at least this multiple of the last reading.
_PAUSE_OVER_READING: Final = 5.0
_MAX_KEPT: Final = 200


@dataclass(frozen=True, slots=True)
class Sources:
    """Settings, the database, and what is remembered of it and of the broker."""

    at_start: Settings
    tasks_file: TasksFile | None
    database: Database
    remembered: Remembered

    @classmethod
    def of(cls, settings: Settings, tasks_file: TasksFile | None = None) -> Self:
        """Connects at the first use. Raises ConfigError without a database."""
        url = settings.console.database_url or settings.postgres.url
        if url is None:
            raise ConfigError("no database is configured", hint="set DATABASE_URL")
        limits = replace(settings.postgres.limits(), statement_s=_STATEMENT_S)
        return cls(settings, tasks_file, Database(url, pool_size=_POOL_SIZE, limits=limits), Remembered(REFRESH_S))

    @property
    def settings(self) -> Settings:
        """Those of the start, with the tasks as they are now."""
        return self.at_start if self.tasks_file is None else self.tasks_file.applied_to(self.at_start)

    def tasks(self) -> Reading[Sequence[TaskFigures]]:
        """Every task of the last day, by name: what `alphaloop status` shows."""
        return self.remembered.get("tasks", lambda: tasks_now(self.database, self.settings, WINDOW))

    def waiting(self) -> Reading[Mapping[str, int]]:
        """By task, the jobs that no worker has claimed: what `alphaloop status` shows."""
        unfinished = self.remembered.get("unfinished", lambda: unended(self.settings.kafka, self.database))
        tasks = self.tasks().value
        if unfinished.value is None or tasks is None:
            return Reading(None, None, unfinished.error)
        numbers = {task: backlog.num_messages for task, backlog in unfinished.value.items()}
        return Reading(waits(tasks, numbers), unfinished.read_at, unfinished.error)

    def every_task(self, workers: Sequence[SeenWorker]) -> Sequence[TaskFigures]:
        """Also the tasks whose jobs only wait, each with its target and whether one of `workers` serves that."""
        every = with_waiting(self.tasks().value or (), self.waiting().value)
        return with_targets(every, self.settings.bindings, workers)

    def workers(self) -> Sequence[SeenWorker]:
        """Every worker that was heard of in the last hour."""
        return WorkerStore(self.database).seen()

    @property
    def shows_texts(self) -> bool:
        """Whether pages show texts of jobs: only those who sign in see any page then."""
        return self.settings.console.password is not None

    def close(self) -> None:
        """Give every connection back."""
        self.remembered.close()
        self.database.close()


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A value as it was read last. `value` is None before the first reading has ended."""

    value: T | None
    read_at: datetime | None
    error: str | None  #: why the newest reading failed


def errors_of(**readings: Reading[Any] | None) -> dict[str, str]:
    """Why the newest readings of what a page shows failed, by what was read."""
    return {name: reading.error for name, reading in readings.items() if reading is not None and reading.error}


@dataclass(slots=True)
class _Kept:
    reading: Reading[Any] = Reading(None, None, None)
    due: float = 0.0
    under_way: Future[None] | None = None


class Remembered:
    """Keeps the newest reading of each key. One key is read by one thread at a time. Threads share it."""

    def __init__(
        self,
        max_age_s: float,
        *,
        num_threads: int = 3,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A reading that is older than `max_age_s` is repeated when it is asked for."""
        self._max_age_s, self._patience_s, self._clock = max_age_s, patience_s, clock
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="console-reader")

    def get(self, key: Hashable, read: Callable[[], T]) -> Reading[T]:
        """The newest reading; the first one is waited for, but not long."""
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
            if kept.under_way is None and self._clock() >= kept.due:
                kept.under_way = self._threads.submit(self._read, kept, read)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            under_way = kept.under_way
        if kept.reading.read_at is None and kept.reading.error is None and under_way is not None:
            wait([under_way], self._patience_s)
        return kept.reading

    def forget(self, key: Hashable) -> None:
        """Read this anew when it is asked for next: something changed."""
        with self._lock:
            self._kept.pop(key, None)

    def close(self) -> None:
        """Read nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, kept: _Kept, read: Callable[[], Any]) -> None:
        began = self._clock()
        try:
            newest = Reading(read(), datetime.now(UTC), None)
        except Exception as failed:
            newest = replace(kept.reading, error=reason_of(failed))
        ended = self._clock()
        with self._lock:
            kept.reading, kept.under_way = newest, None
            kept.due = ended + max(self._max_age_s, _PAUSE_OVER_READING * (ended - began))
