"""An idempotent producer that counts every delivery report. One thread owns it."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Final

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from alphaloop.errors import BrokerError, DeliveryFailed, FatalBrokerError
from alphaloop.kafka.client import (
    REQUEST_TIMEOUT_S,
    BrokerWatch,
    bootstrap_servers,
    client_config,
    delivery_error,
    mapped,
)
from alphaloop.kafka.topics import CONTROL, ensure_topic
from alphaloop.settings import KafkaSettings

log = logging.getLogger(__name__)

OnDelivery = Callable[[BrokerError | None], None]

_SERVE_S: Final = 0.1
#: A message that is not acknowledged for so long has failed. Longer than a broker waits for its replicas (30 s).
_DELIVERY_TIMEOUT_MS: Final = 45_000
#: How long messages that are under way may still be acknowledged before the client is replaced.
_LEAVE_S: Final = 1.0
#: Messages after which delivery reports are handled. Each time, other threads may take the interpreter.
_SENT_BETWEEN_POLLS: Final = 64
#: A topic that is not seen for so long counts as missing. A new topic takes a moment to reach every broker.
_PROPAGATION_MS: Final = 10_000


class Producer:
    """Sends messages; `flush` shows whether all of them were stored.

    A retry by librdkafka is stored once (idempotence). A message that the caller sends again after an unknown outcome
    may be stored twice; readers recognise duplicate results by their key, the job_id.

    The client is replaced after a message has timed out. One that knew a topic before it was deleted and made anew
    never learns of a new leader, and sends to the old one for ever (confluentinc/librdkafka#4898).
    """

    def __init__(self, kafka: KafkaSettings, client_id: str = "alphaloop") -> None:
        self._buffer_s, self._prefix = REQUEST_TIMEOUT_S, kafka.prefix
        self._watch = BrokerWatch(bootstrap_servers(kafka))
        self._pending: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._first_failure: BrokerError | None = None
        self._num_sent = 0
        self._has_timed_out = False
        own: dict[str, Any] = {
            "client.id": client_id,
            "enable.idempotence": True,
            "acks": "all",
            "delivery.timeout.ms": _DELIVERY_TIMEOUT_MS,
            "linger.ms": 5,
            "topic.metadata.propagation.max.ms": _PROPAGATION_MS,
            "compression.type": "lz4",
        }
        self._config = client_config(kafka, own, watch=self._watch)
        self._client = self._start()

    @property
    def num_pending(self) -> int:
        """Messages sent whose delivery report has not been handled."""
        return self._pending.total()

    def send(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivery: OnDelivery | None = None,
        wait_s: float | None = None,
    ) -> None:
        """Hand one message to the client; it is stored only when `flush` returns or `on_delivery` got None.

        `on_delivery` gets a failure if it is given, otherwise the next `flush` raises it. Waits up to `wait_s`, by
        default `REQUEST_TIMEOUT_S`, while the buffer is full, and handles delivery reports now and then. Raises
        DeliveryFailed if it stays full, MessageTooLarge or TopicUnavailable if the client knows at once,
        FatalBrokerError when the client is dead.
        """
        if self._has_timed_out:
            self._replace_client()
        topic = self._prefix + topic
        report = functools.partial(self._delivered, topic, on_delivery)
        wait_s = self._buffer_s if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._client.produce(topic, value, key, on_delivery=report, headers=list(headers))
            except BufferError:
                if time.monotonic() >= deadline:
                    raise DeliveryFailed(
                        f"{topic}: the send buffer, {self.num_pending} messages, stayed full for {wait_s:g} s"
                    ) from None
                self._client.poll(_SERVE_S)
            except KafkaException as error:
                raise delivery_error(error, topic) from error
            else:
                self._pending[topic] += 1
                self._num_sent += 1
                if self._num_sent % _SENT_BETWEEN_POLLS == 0:
                    self._client.poll(0)
                return

    def poll(self, timeout_s: float = 0.0) -> None:
        """Handle delivery reports and client events."""
        self._client.poll(timeout_s)

    def serve(self, timeout_s: float) -> None:
        """Send without lingering and handle delivery reports, until none is awaited or the time is up."""
        self._client.flush(timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Wait for the delivery report of every message sent so far.

        Raises DeliveryFailed naming topics, counts and the first reason when any failed since the last flush or time
        ran out (messages still waiting may yet arrive), FatalBrokerError when the client is dead.
        """
        self._client.flush(timeout_s)
        failed, first = self._failed, self._first_failure
        self._failed, self._first_failure = Counter(), None
        if isinstance(first, FatalBrokerError):
            raise first
        waiting = +self._pending
        if not failed and not waiting:
            return
        parts = [f"{count} to {topic} refused" for topic, count in failed.items()]
        parts += [f"{count} to {topic} not acknowledged within {timeout_s:g} s" for topic, count in waiting.items()]
        reason = f"; first reason: {first.message}" if first else ""
        raise DeliveryFailed(f"messages not stored: {', '.join(parts)}{reason}", hint=first.hint if first else None)

    def close(self) -> None:
        """Drop what was not delivered, so that nothing is sent later; flush first."""
        self._client.purge()
        self._client.flush(_SERVE_S)

    def _start(self) -> ck.Producer:
        with mapped("starting a producer"):
            return ck.Producer(self._config)

    def _replace_client(self) -> None:
        """Go on with a client that knows nothing yet; messages that the old one still has fail."""
        self._client.flush(_LEAVE_S)
        self.close()
        self._client = self._start()
        self._has_timed_out = False
        log.warning("a message timed out: its client is replaced", extra={"action": "producer_replaced"})

    def _delivered(
        self, topic: str, on_delivery: OnDelivery | None, error: KafkaError | None, _message: ck.Message
    ) -> None:
        self._pending[topic] -= 1
        failure = None
        if error is None:
            self._watch.answered()
        else:
            failure = delivery_error(error, topic)
            self._has_timed_out |= error.code() == KafkaError._MSG_TIMED_OUT
        if on_delivery is not None:
            on_delivery(failure)
        elif failure is not None:
            self._failed[topic] += 1
            # A fatal error makes every later message fail with a vaguer one: it is the one to report.
            if self._first_failure is None or isinstance(failure, FatalBrokerError):
                self._first_failure = failure


#: Far fewer than a broker takes, so that many cancellations are given time.
_CANCELLED_PER_S: Final = 1000


def request_cancellation(kafka: KafkaSettings, job_ids: Sequence[str], *, until: datetime | None = None) -> None:
    """Send one request a job, in force `until` then (24 h), and wait until the broker has them. Raises BrokerError."""
    if not job_ids:
        return
    ensure_topic(kafka, CONTROL)
    ends = {} if until is None else {"until": until.isoformat()}
    with closing(Producer(kafka, client_id="alphaloop-cancel")) as producer:
        for job_id in job_ids:
            value = json.dumps({"action": "cancel", "job_id": job_id, **ends}).encode()
            producer.send(CONTROL, key=job_id.encode(), value=value)
        producer.flush(max(REQUEST_TIMEOUT_S, len(job_ids) / _CANCELLED_PER_S))
