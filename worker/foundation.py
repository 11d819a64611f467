"""What every part of a worker stands on: its settings, engine and database, how it waits for servers, what it counts.

A part is opened beside its class, by an `open_…` function that takes the foundation and the parts that it works with.
`worker/assembly.py` calls these in order.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import uuid
from dataclasses import dataclass
from datetime import datetime

from alphaloop.engine import Engine
from alphaloop.kafka.topics import cluster_id
from alphaloop.liveness import Liveness
from alphaloop.settings import Settings
from alphaloop.store.coordination import InstallationStore
from alphaloop.store.database import Database, DatabaseClock
from worker.background import BackgroundWrites, Retry
from worker.intake.polling import make_topics
from worker.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class Foundation:
    """Shared by all parts of one worker."""

    settings: Settings
    engine: Engine
    database: Database
    database_id: str
    cluster: str  #: the id of the Kafka cluster
    clock: DatabaseClock
    owner: str  #: this process among all workers, past and present
    stop: threading.Event  #: take nothing new, finish what runs
    died: threading.Event  #: a thread ended by itself
    retry: Retry  #: its `hurry`: give back what runs, between two rounds
    metrics: WorkerMetrics
    background: BackgroundWrites
    liveness: Liveness
    rng: random.Random

    def now(self) -> datetime:
        """The time of day by the database."""
        return self.clock.now()

    @property
    def max_bytes(self) -> int:
        """Bytes that each buffer may hold."""
        return self.settings.worker.max_buffered_bytes


def lay_foundation(
    settings: Settings,
    engine: Engine,
    database: Database,
    *,
    stop: threading.Event,
    hurry: threading.Event,
    rng: random.Random,
    metrics: WorkerMetrics | None = None,
) -> Foundation:
    """What all parts of a worker share; topics that are missing are created.

    Raises ConfigError where database and Kafka do not belong together.
    """
    cluster = cluster_id(settings.kafka)
    database_id = InstallationStore(database).belong(cluster, settings.kafka.prefix)
    make_topics(settings)
    clock = DatabaseClock(database)
    clock.measure()
    metrics = metrics or WorkerMetrics()
    metrics.watch_engine(engine)
    died = threading.Event()
    return Foundation(
        settings=settings,
        engine=engine,
        database=database,
        database_id=database_id,
        cluster=cluster,
        clock=clock,
        owner=f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        stop=stop,
        died=died,
        retry=Retry(hurry, died),
        metrics=metrics,
        background=BackgroundWrites(hurry.wait),
        liveness=Liveness(),
        rng=rng,
    )
