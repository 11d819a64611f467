"""A real Kafka and a durable PostgreSQL for the whole benchmark; fresh topics and a fresh database for each run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka.admin import AdminClient
from psycopg import sql

from alphaloop.embedded.brokers import EmbeddedKafka
from alphaloop.embedded.install import find_kafka_home
from alphaloop.embedded.postgres import EmbeddedPostgres
from alphaloop.errors import StartFailed
from alphaloop.kafka.client import client_config
from alphaloop.kafka.topics import ensure_topics, list_topics
from alphaloop.settings import KafkaSettings, load_settings
from benchmarks.whole.product import PROFILE

_DELETE_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Servers:
    """Both servers run. `kafka` has the number of partitions of the profile that the workers run with."""

    kafka: KafkaSettings
    database_url: str

    @property
    def broker(self) -> str:
        """HOST:PORT."""
        return str(self.kafka.bootstrap_servers)

    def renew_topics(self, tasks: Sequence[str]) -> None:
        """Delete every topic of the run before, offsets of groups with them, and create those of these tasks."""
        old = [name for name in list_topics(self.kafka) if not name.startswith("__")]
        if old:
            admin = AdminClient(client_config(self.kafka))
            for answer in admin.delete_topics(old, request_timeout=_DELETE_TIMEOUT_S).values():
                answer.result()
        deadline = time.monotonic() + _DELETE_TIMEOUT_S
        while set(old) & set(list_topics(self.kafka)):
            if time.monotonic() > deadline:
                raise StartFailed(f"the broker did not delete its topics within {_DELETE_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        ensure_topics(self.kafka, tasks)

    @contextmanager
    def fresh_database(self) -> Iterator[str]:
        """The URL of an empty database, dropped afterwards."""
        name = f"whole_{uuid.uuid4().hex}"
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield f"{self.database_url.rsplit('/', 1)[0]}/{name}"
        finally:
            with psycopg.connect(self.database_url, autocommit=True) as connection:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def running_servers(folder: Path, configs: Path) -> Iterator[Servers]:
    """Start both under `folder`, which should lie on a real disk: commits are forced to it.

    Raises StartFailed where there is no Apache Kafka, or a server does not come up.
    """
    settings = load_settings(configs, profile=PROFILE)
    home = find_kafka_home(settings)
    if home is None:
        raise StartFailed("expected an Apache Kafka, found none", hint="`alphaloop kafka install` fetches one")
    with ExitStack() as stack:
        postgres = EmbeddedPostgres(folder / "postgres", log_dir=folder / "logs", durable=True)
        stack.callback(postgres.stop)
        url = postgres.start()
        broker = EmbeddedKafka(home, folder / "kafka", log_dir=folder / "logs")
        stack.callback(broker.stop)
        kafka = settings.kafka.model_copy(update={"bootstrap_servers": broker.start()})
        yield Servers(kafka, url)
