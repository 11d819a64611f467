"""Act on drift reports as they are published: python own_drift_alert.py [--once]

Every run of the scheduler publishes its report on the topic `drift-reports` (docs/reference/report.md). This program
prints a line for every event that a report opens or closes; put your pager's call in its place. Its consumer group
remembers what was read, so nothing is missed while it is down.
"""

from __future__ import annotations

import json
import os
import sys

from confluent_kafka import Consumer

consumer = Consumer(
    {
        "bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
        "group.id": os.environ.get("GROUP_ID", "my-drift-alert"),
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
)
consumer.subscribe(["drift-reports"])


def alert(line: str) -> None:
    print(line, flush=True)


has_read = False
while not (has_read and "--once" in sys.argv):
    message = consumer.poll(1.0)
    if message is None or message.error() is not None:
        continue
    report = json.loads(message.value())
    has_read = True
    for kind in ("opened", "closed"):
        for event in report[kind]:
            alert(f"{kind}: {event['task']}, {event['drafter']}: {event['cause']}. {event['action']}")
    if not report["opened"] and not report["closed"]:
        alert(f"nothing opened or closed: {report['headline']}")
    # After the alert, so that one that fails is tried again.
    consumer.commit(message=message, asynchronous=False)
consumer.close()
