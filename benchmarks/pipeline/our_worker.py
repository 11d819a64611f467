"""Our worker as a contestant: a process of its own that takes jobs until its standard input ends.

The first line of standard input is a WorkerOrder. A line on standard output says that the worker consumes; the last
one is its report. This is the only file here that knows how a worker is put together.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from typing import Final

from pydantic import BaseModel, ConfigDict, SecretStr

from alphaloop import logs
from alphaloop.kafka.producer import Producer
from alphaloop.settings import KafkaSettings, PostgresSettings, Settings, TaskSettings, WorkerSettings
from alphaloop.store.database import POOL_SIZE, Database
from benchmarks.contestants.process import open_answers
from benchmarks.pipeline.instant_engine import InstantEngine
from worker.assembly import assemble
from worker.background import set_up_interpreter
from worker.foundation import lay_foundation

CLOSE_S: Final = 30.0


class WorkerOrder(BaseModel):
    """What the contestant is to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap_servers: str
    database_url: str
    group_id: str
    task: str
    num_partitions: int
    num_slots: int


def settings_of(order: WorkerOrder) -> Settings:
    """Every guarantee and default as it is shipped; only the number of slots is what was asked for."""
    return Settings(
        kafka=KafkaSettings(
            bootstrap_servers=order.bootstrap_servers, group_id=order.group_id, num_partitions=order.num_partitions
        ),
        postgres=PostgresSettings(url=SecretStr(order.database_url)),
        tasks={order.task: TaskSettings(max_tokens=1)},
        worker=WorkerSettings(batch_size=order.num_slots),
    )


def main() -> None:
    """Consume until standard input ends, drain, report."""
    say = open_answers()
    order = WorkerOrder.model_validate_json(sys.stdin.readline())
    logs.configure("WARNING", "text")
    logging.getLogger("alphaloop.kafka.librdkafka").setLevel(logging.ERROR)
    settings = settings_of(order)
    engine = InstantEngine(order.num_slots)
    stop, hurry = threading.Event(), threading.Event()
    threading.Thread(target=_stop_at_end_of_input, args=(stop,), name="input", daemon=True).start()
    database = Database(SecretStr(order.database_url), pool_size=POOL_SIZE)
    producer = Producer(settings.kafka)
    base = lay_foundation(settings, engine, database, stop=stop, hurry=hurry, rng=random.Random(1))
    worker = assemble(base, None, producer)
    set_up_interpreter()
    try:
        say({"ready": True})
        worker.run()
    finally:
        worker.close(CLOSE_S)
        producer.close()
        database.close()
    say({"moments": engine.moments, "process_cpu_s": time.process_time()})


def _stop_at_end_of_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    main()
