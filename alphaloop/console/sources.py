"""What views read from, and the readings that several of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Self

from pydantic import SecretStr

from alphaloop.console.remembered import Reading, Remembered
from alphaloop.errors import ConfigError
from alphaloop.explaining.explanation import tasks_now
from alphaloop.kafka.backlog import unfinished
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.task_figures import TaskFigures, waits

#: The figures of tasks are those of `alphaloop status` without options.
WINDOW: Final = timedelta(days=1)
#: Between two readings of the figures of a page that somebody looks at.
REFRESH_S: Final = 5.0
_POOL_SIZE: Final = 6
_STATEMENT_S: Final = 20.0  #: longest query for a page: somebody waits for it


@dataclass(frozen=True, slots=True)
class Sources:
    """Settings, the database, and what is remembered of it and of the broker."""

    settings: Settings
    database: Database
    remembered: Remembered

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Connects at the first use. Raises ConfigError without a database."""
        url = settings.console.database_url or settings.postgres.url
        if url is None:
            raise ConfigError("no database is configured", hint="set DATABASE_URL")
        return cls(settings, _database(settings, url), Remembered(REFRESH_S))

    def tasks(self) -> Reading[Sequence[TaskFigures]]:
        """Every task of the last day, by name: what `alphaloop status` shows."""
        return self.remembered.get("tasks", lambda: tasks_now(self.database, self.settings, WINDOW))

    def waiting(self) -> Reading[Mapping[str, int]]:
        """By task, the jobs that no worker has claimed: what `alphaloop status` shows."""
        found = self.remembered.get("unfinished", lambda: unfinished(self.settings.kafka))
        tasks = self.tasks().value
        if found.value is None or tasks is None:
            return Reading(None, None, found.error)
        numbers = {task: its.num_messages for task, its in found.value.items()}
        return Reading(waits(tasks, numbers), found.read_at, found.error)

    @property
    def shows_texts(self) -> bool:
        """Whether pages show texts of jobs: only those who sign in see any page then."""
        return self.settings.console.password is not None

    def close(self) -> None:
        """Give every connection back."""
        self.remembered.close()
        self.database.close()


def _database(settings: Settings, url: SecretStr) -> Database:
    return Database(
        url,
        pool_size=_POOL_SIZE,
        limits=settings.postgres.limits().with_statements_of(_STATEMENT_S),
    )
