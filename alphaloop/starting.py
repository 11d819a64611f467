"""What a worker and a scheduler need of both servers before they start."""

from __future__ import annotations

from typing import Final

from alphaloop.kafka.config import bootstrap_servers
from alphaloop.kafka.topics import check_reachable
from alphaloop.settings import Settings
from alphaloop.start_wait import StartWait
from alphaloop.store.database import Database

#: Longest question to the broker, so that a stop is noticed soon.
_ASK_S: Final = 3.0


def await_servers(settings: Settings, database: Database, start_wait: StartWait) -> None:
    """Wait until PostgreSQL holds a schema that this code can run on and a Kafka broker answers.

    Raises ConfigError without the address of a broker, the errors of Database.check_revision and check_reachable that
    waiting does not mend, and those of StartWait.
    """
    servers = bootstrap_servers(settings.kafka)
    start_wait.until_answered(f"PostgreSQL at {database.address}", database.check_revision)
    start_wait.until_answered(f"Kafka at {servers}", lambda: check_reachable(settings.kafka, _ASK_S))
