"""Two loops as contestants: consume and produce, without and with one committed row a message.

    python -m benchmarks.pipeline.loops BOOTSTRAP_SERVERS TOPIC RESULTS_TOPIC NUM_JOBS GROUP [< database URL]

A line on standard input is the URL of a database; then every message becomes a row, committed before its result is
sent. The last line of standard output is a report.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import psycopg
from confluent_kafka import Consumer, Producer

TABLE: Final = (
    "CREATE TABLE outcomes (job_id text PRIMARY KEY, status text NOT NULL, result jsonb NOT NULL, "
    "at timestamptz NOT NULL DEFAULT now())"
)
INSERT: Final = (
    "INSERT INTO outcomes (job_id, status, result) VALUES (%s, 'succeeded', '{\"text\": \"ok\"}') "
    "ON CONFLICT DO NOTHING"
)
_AT_ONCE: Final = 500
_WAIT_S: Final = 0.05  #: for that many, before fewer are taken


def main() -> None:
    """Take `num_jobs` messages, answer each, commit the offsets."""
    servers, topic, results, num_jobs, group = sys.argv[1:]
    url = sys.stdin.readline().strip()
    connection = psycopg.connect(url, autocommit=True) if url else None
    if connection is not None:
        connection.execute(TABLE)
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "acks": "all"})
    num_done, first_s = 0, None
    while num_done < int(num_jobs):
        for message in consumer.consume(_AT_ONCE, _WAIT_S):
            if message.error() is not None:
                raise RuntimeError(str(message.error()))
            first_s = first_s or time.perf_counter()
            key, value = message.key() or b"", message.value()
            if connection is not None:
                connection.execute(INSERT, (key.decode(),))
            _send(producer, results, key, value)
            num_done += 1
    producer.flush()
    consumer.commit(asynchronous=False)
    seconds = time.perf_counter() - (first_s or 0.0)
    consumer.close()
    print(json.dumps({"jobs_per_s_from_first": num_done / seconds}), flush=True)


def _send(producer: Any, topic: str, key: bytes, value: bytes | None) -> None:
    while True:
        try:
            producer.produce(topic, key=key, value=value)
        except BufferError:
            producer.poll(0.05)
        else:
            producer.poll(0)
            return


if __name__ == "__main__":
    main()
