"""Everything that a fault can hit: brokers, database, the network between, workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlsplit

import psycopg

from alphaloop.embedded.servers import EmbeddedPostgres
from alphaloop.settings import KafkaSettings
from tests.chaos.brokers import Brokers
from tests.chaos.feeder import Feeder
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import ResultRecord
from tests.chaos.proxy import Proxy
from tests.chaos.size import Size
from tests.chaos.small_disk import SmallDisk
from tests.chaos.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Servers:
    """What runs beside the workers."""

    brokers: Brokers
    kafka: KafkaSettings  #: for the topics
    postgres: EmbeddedPostgres
    database_url: str  #: without the proxy, for whoever looks on
    proxy: Proxy
    disk: SmallDisk | None  #: of Postgres's tables; None where none could be mounted


@dataclass(slots=True)
class World:
    """The servers and the fleet of a run."""

    size: Size
    servers: Servers
    watcher: Watcher
    fleet: Fleet
    feeder: Feeder
    num_ended_before: int = 0  #: jobs that had ended before the feeder began
    kept_results: list[ResultRecord] = field(default_factory=list)  #: read before their topic was deleted
    deleted_at: datetime | None = None  #: when the last broker had let go of it, last
    num_sent_before_anew: int = 0  #: jobs that had been sent when the topics of jobs were made anew, last
    num_sent_again: int = 0  #: of these, jobs that were sent again soon after
    is_ending: threading.Event = field(default_factory=threading.Event)

    @property
    def backlog(self) -> int:
        """Jobs that were sent and had not ended at the watcher's last look; refused messages count for ever."""
        return self.feeder.num_sent - (self.watcher.num_ended - self.num_ended_before)

    def wait(self, seconds: float) -> None:
        """Let the world go on for so long, or until the run is interrupted."""
        self.is_ending.wait(seconds)

    @contextmanager
    def administrator(self) -> Iterator[psycopg.Connection]:
        """A connection that may write also while the database is read-only, each statement by itself."""
        writes = "-c default_transaction_read_only=off -c lock_timeout=2s"
        with psycopg.connect(self.servers.database_url, autocommit=True, options=writes) as connection:
            yield connection


def proxied(url: str, port: int) -> str:
    """The URL of the same database behind another port."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{port}")).geturl()
