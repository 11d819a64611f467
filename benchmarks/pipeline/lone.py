"""What one job alone waits for: from its arrival to its first step, from its last token to its result."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Producer, TopicPartition

from benchmarks.pipeline.contestants import RESULTS, Race, running_worker
from benchmarks.pipeline.report import Overhead
from benchmarks.pipeline.topics import jobs

#: Jobs that are sent first and not counted: connections, statements and first decisions.
NUM_WARM_UP: Final = 20
_ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoneJob:
    """Seconds since the epoch. The broker's clock and the worker's are those of the same machine."""

    job_id: str
    appended_s: float  #: the broker's, in whole milliseconds, rounded down
    read_s: float  #: when a reader of the results had it


def overheads(sent: list[LoneJob], moments: Mapping[str, tuple[float, float]]) -> dict[str, Overhead]:
    """`arrival to first step` and `last token to result` of these jobs; `moments` are the engine's by job_id."""
    return {
        "arrival to first step": Overhead.of([moments[job.job_id][0] - job.appended_s for job in sent]),
        "last token to result": Overhead.of([job.read_s - moments[job.job_id][1] for job in sent]),
    }


def run_alone(race: Race, num_slots: int, *, seed: int) -> tuple[dict[str, Overhead], list[str]]:
    """Send jobs one at a time to a worker that has nothing else to do; also the results' keys, in order.

    The pause before each job is drawn, so that jobs do not fall in step with the worker's polling.
    """
    rng, sent, keys = random.Random(seed), list[LoneJob](), list[str]()
    reader = race.topics.reader()
    ends = race.topics.ends(RESULTS)
    reader.assign([TopicPartition(RESULTS, partition, offset) for partition, offset in ends.items()])
    producer = Producer({"bootstrap.servers": race.topics.servers, "linger.ms": 0, "acks": "all"})
    with running_worker(race, num_slots) as worker:
        for number, (job_id, value) in enumerate(jobs(race.num_jobs, prefix=race.task, seed=seed)):
            time.sleep(rng.uniform(0.005, 0.055))
            appended_s = _send(producer, race.topic, job_id, value)
            worker.check()
            key, read_s = _next(reader)
            keys.append(key)
            if number >= NUM_WARM_UP:
                sent.append(LoneJob(job_id, appended_s, read_s))
        moments = worker.finish()["moments"]
    reader.close()
    return overheads(sent, moments), keys


def _send(producer: Any, topic: str, key: str, value: bytes) -> float:
    """Seconds since the epoch at which the broker appended the message."""
    appended_ms: list[int] = []

    def delivered(error: Any, message: Any) -> None:
        if error is None:
            appended_ms.append(message.timestamp()[1])

    producer.produce(topic, key=key, value=value, on_delivery=delivered)
    producer.flush(_ANSWER_S)
    if not appended_ms:
        raise RuntimeError(f"{key} was not taken by the broker")
    return appended_ms[0] / 1000


def _next(reader: Any) -> tuple[str, float]:
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        message = reader.poll(1.0)
        now = time.time()
        if message is not None:
            if message.error() is not None:
                raise RuntimeError(f"reading {RESULTS}: {message.error()}")
            return (message.key() or b"").decode(), now
    raise TimeoutError(f"no result within {_ANSWER_S:.0f} s")
