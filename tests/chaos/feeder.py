"""The sender of a run's jobs: at an even pace, from a thread of its own, through every outage."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, Message, Producer

from alphaloop.kafka.topics import CONTROL
from tests.chaos.ledger import Place
from tests.chaos.work import Fate, PlannedJob

_TICK_S: Final = 0.1
_REPEATED_SHARE: Final = 0.01
_FLUSH_S: Final = 120.0


class Feeder:
    """Sends jobs to the topics of their lanes; one in a hundred twice, as a client does that saw no acknowledgement.

    Behind a job that is to be cancelled it sends the cancellation.
    """

    def __init__(self, addresses: str, jobs: Iterable[PlannedJob], *, jobs_per_s: float, rng: random.Random) -> None:
        self.sent: list[PlannedJob] = []
        self.refused: dict[Place, str] = {}  #: the records of messages that are no jobs, and their keys
        self.refused_before_anew: set[Place] = set()  #: of these, records of topics that were made anew
        self.may_be_gone: set[Place] = set()  #: of these, records that went with a topic, or whose results may have
        self._jobs = iter(jobs)
        self.jobs_per_s: Final = jobs_per_s
        self._rng = rng
        self._config: Final[dict[str, Any]] = {
            "bootstrap.servers": addresses,
            "enable.idempotence": True,
            "acks": "all",
            "delivery.timeout.ms": 0,  # for ever
            "linger.ms": 20,
            "log_level": 0,
        }
        self._producer = Producer(self._config)
        self._sending = threading.Lock()
        self._repeats: list[PlannedJob] = []
        self._errors: list[KafkaError] = []
        self._hurry = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    @property
    def num_sent(self) -> int:
        """Jobs handed to the client so far, repetitions not counted."""
        return len(self.sent)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def finish(self) -> None:
        """Send the rest without a pace, and wait until the brokers have everything. Raises RuntimeError if not."""
        self._hurry.set()
        self._thread.join()
        left = self._producer.flush(_FLUSH_S)
        if left or self._errors:
            raise RuntimeError(f"{left} jobs not sent, {len(self._errors)} refused: {self._errors[:1]}")

    def close(self) -> None:
        """Give up."""
        self._closing.set()
        self._hurry.set()
        if self._thread.is_alive():
            self._thread.join()
        self._producer.purge()

    def send_again(self, jobs: Iterable[PlannedJob]) -> None:
        """The same messages once more, as a client that wants to be answered again."""
        for job in jobs:
            self._produce(job)
        self._producer.flush(_FLUSH_S)

    def make_anew(self, topics_anew: Callable[[], object]) -> int:
        """Let the topics be made anew while nothing is sent; returns how many jobs had been sent before.

        Goes on with another client, because one that knew the old topics may never find the new leaders
        (confluentinc/librdkafka#4898). Raises RuntimeError if the brokers do not take what was sent before.
        """
        with self._sending:
            if left := self._producer.flush(_FLUSH_S):
                raise RuntimeError(f"{left} jobs not sent before the topics are made anew")
            self.refused_before_anew = set(self.refused)
            topics_anew()
            self._producer = Producer(self._config)
            return self.num_sent

    def _run(self) -> None:
        began, num_due = time.monotonic(), 0.0
        for job in self._jobs:
            while self.num_sent >= num_due and not self._hurry.is_set():
                self._producer.poll(0)
                self._hurry.wait(_TICK_S)
                num_due = (time.monotonic() - began) * self.jobs_per_s
            if self._closing.is_set():
                return
            with self._sending:
                self._send(job)

    def _send(self, job: PlannedJob) -> None:
        self._produce(job)
        self.sent.append(job)
        if self._rng.random() < _REPEATED_SHARE:
            self._repeats.append(job)
        if self._repeats and self._rng.random() < _REPEATED_SHARE:
            self._produce(self._repeats.pop(0))

    def _produce(self, job: PlannedJob) -> None:
        on_delivery = partial(self._refused_at, job) if job.fate is Fate.REFUSED else self._delivered
        self._publish(job.topic, job.job_id, job.value, on_delivery)
        if job.fate is Fate.IS_CANCELLED:
            cancellation = json.dumps({"action": "cancel", "job_id": job.job_id}).encode()
            self._publish(CONTROL, job.job_id, cancellation, self._delivered)

    def _publish(
        self, topic: str, key: str, value: bytes, on_delivery: Callable[[KafkaError | None, Message], None]
    ) -> None:
        while True:
            try:
                self._producer.produce(topic, key=key, value=value, on_delivery=on_delivery)
            except BufferError:
                self._producer.poll(_TICK_S)
            else:
                return

    def _refused_at(self, job: PlannedJob, error: KafkaError | None, message: Message) -> None:
        self._delivered(error, message)
        if error is None:
            place = Place(job.topic, message.partition() or 0, message.offset() or 0, message.timestamp()[1])
            self.refused[place] = job.job_id

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._errors.append(error)
