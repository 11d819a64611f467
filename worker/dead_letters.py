"""What becomes of messages that lead to no text: dead letters, refused results, and jobs that are tried again.

A dead letter is of a message that is no job, or of a job that failed. Both have a result and a dead letter: the result
answers the sender, and the letter keeps the message for an operator. A job whose outcome was recorded earlier gets its
letter, too, because a worker may die after recording it. So there is at least one letter, and perhaps two.

The result of a failed job is an outcome, which others publish. That of a refused message follows from the message
alone, so nothing is recorded: it is sent when its letter is acknowledged, and a copy of it is the same, byte for byte.

A job that failed and has a try left goes to a retry topic instead:

1. count     the failure, and give the claim back, in one statement
2. publish   the message on the retry topic of its delay; the broker acknowledges it
3. finish    the delivery that failed

A worker that dies after 1 or 2 leaves the delivery unfinished. So it is delivered again, and perhaps decoded before its
delay is over, but each failure is counted once, and the job ends once.

The `Forwarder` publishes both. It has a thread and a producer of its own, so neither a slow message nor a missing topic
holds up the result of a job. A delivery is finished only when all that it becomes on other topics is acknowledged.
Messages whose topic is unavailable wait in memory. When many wait, the intake reads no more of the topic that they came
from, and every other topic goes on.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from alphaloop.errors import BrokerError, BrokerUnavailable, FatalBrokerError, MessageError, MessageRefused
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS, ensure_topic
from alphaloop.messages import (
    DeadLetter,
    Failure,
    Purpose,
    Result,
    Status,
    carried_headers,
    dead_letter,
    derived_job_id,
    refused_result,
)
from alphaloop.messages.dead_letter import shortened
from alphaloop.messages.headers import RetryHeaders, encoded_result_headers
from alphaloop.messages.topics import dlq_topic, jobs_topic, retry_topic, task_read_from
from alphaloop.store.jobs import JobStore
from worker.background import BoundedQueue, Retry
from worker.claims import ClaimedJob, LeaseKeeper
from worker.intake.partitions import JITTER, Delivery
from worker.intake.polling import Intake
from worker.intake.validation import Validation
from worker.metrics import WorkerMetrics
from worker.sending import KafkaMessage, UnavailableTopics, deliver

if TYPE_CHECKING:
    from worker.foundation import Foundation

log = logging.getLogger(__name__)

RETRY_S: Final = 10.0  #: between two tries to publish on an unavailable topic
#: Waiting messages of one topic from which on no more of it is read.
MOST_WAITING: Final = 256
MOST_WAITING_BYTES: Final = 8 << 20
MOST_AT_ONCE: Final = 256
_IDLE_WAIT_S: Final = 0.2
#: In the bytes of every result that says so. Within a text the quotes are escaped.
_IS_FAILED: Final = b'"status":"failed"'


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that becomes a dead letter: it is no job, or its job failed, which then has a `job_id`."""

    delivery: Delivery
    reason: MessageError | Failure
    intake: Intake
    job_id: str | None = None
    attempt: int = 1


def failed_job(delivery: Delivery, outcome: bytes, intake: Intake) -> DeadMessage | None:
    """The message of a recorded Result's job, if it failed."""
    if _IS_FAILED not in outcome:
        return None  # most are not, and need not be read
    result = Result.decode(outcome)
    if result.status is not Status.FAILED:
        return None
    failure = result.error or Failure(code="unknown", message="no reason recorded")
    return DeadMessage(delivery, failure, intake, result.job_id, result.attempt)


def letter_of(dead: DeadMessage, validation: Validation, group: str) -> Forwarded:
    """A message as dead letter, with the result that follows it; `group` is the consumer group that refuses it.

    A failed job has its result already, and a message of `control` is no job's.
    """
    record, origin = dead.delivery.record, validation.origin(dead.delivery)
    job_id, answer = dead.job_id, None
    if job_id is None and task_read_from(record.topic) is not None:
        result = refused_result(dead.reason, origin, record.value)
        job_id, key = result.job_id, result.job_id.encode()
        event_id = derived_job_id(origin, record.value or b"").encode()
        headers = encoded_result_headers(key, carried_headers(record.headers), event_id=event_id)
        answer = KafkaMessage(RESULTS, key, result.encode(), headers)
    letter = dead_letter(
        dead.reason,
        origin,
        group=group,
        num_deliveries=dead.attempt,
        key=record.key,
        value=record.value,
        headers=record.headers,
        job_id=job_id,
    )
    return Forwarded(dead.delivery, dead.intake, dead.reason.code, letter, answer)


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A job that failed, and what it waits for."""

    claimed: ClaimedJob
    failure: Failure
    failed_at: datetime
    delay_s: int
    not_before: datetime


@dataclass(eq=False)
class JobRetries:
    """Decides in the loop which failed jobs are tried again, and sends them from a thread of its own.

    `delays_s`: the delay before each try after the first; without any, no job is tried again. `count` counts failures
    in the database and gives the claims back, attempts by job_id. `ensure_topics` makes the topics of a task's failures
    where they are missing, and raises BrokerError where it may not; `fail` then ends the job, and for a while every
    other of the task that fails.
    """

    delays_s: Sequence[int]
    leases: LeaseKeeper
    forwarder: Forwarder
    intake: Intake
    _: KW_ONLY
    count: Callable[[Mapping[str, int]], object]
    fail: Callable[[FailedTry], object]
    ensure_topics: Callable[[str], object]
    retry: Retry
    rng: random.Random
    max_bytes: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._has_topics: set[str] = set()  #: tasks
        self._ask_again: dict[str, float] = {}  #: tasks without, and when the broker may be asked again
        self._waiting: BoundedQueue[FailedTry] = BoundedQueue(
            max_items=MOST_AT_ONCE,
            max_bytes=self.max_bytes,
            num_bytes_of=lambda failed: failed.claimed.ready.num_bytes,
            give_up=self.retry.gives_up,
        )

    def __len__(self) -> int:
        """Failed jobs that were not handed to the forwarder yet."""
        return self._waiting.num_unsettled

    def put(self, claimed: ClaimedJob, failure: Failure, now: datetime) -> bool:
        """Have the job tried again; False if it has no try left, and then it has failed for good.

        Probes and controls are measured now or never. A job whose deadline comes first would only expire.
        """
        job = claimed.ready.job
        if job.purpose is not Purpose.TRAFFIC or claimed.num_failures >= len(self.delays_s):
            return False
        delay_s = self.delays_s[claimed.num_failures]
        not_before = now + timedelta(seconds=delay_s * (1 + JITTER * self.rng.random()))
        if job.is_expired(not_before):
            return False
        self._waiting.put([FailedTry(claimed, failure, now, delay_s, not_before)])
        return True

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> int:
        """Count what waits as failed and hand it to the forwarder; returns how many jobs.

        A job whose claim was lost is sent too: whoever took it over records its outcome, and its retry is answered from
        the record. Whether it was lost is not certain, because the answer to a first statement may have been.
        """
        tries = [failed for failed in self._waiting.take(MOST_AT_ONCE, timeout_s) if self._can_wait(failed)]
        if not tries:
            return 0
        attempts = {failed.claimed.job_id: failed.claimed.attempt for failed in tries}
        self.retry.until_done("count failures", lambda: self.count(attempts))
        self.leases.let_go(attempts)
        self.forwarder.put(*(self._message(failed) for failed in tries))
        return len(tries)

    def _can_wait(self, failed: FailedTry) -> bool:
        """Whether the job's retry topics are there; if they cannot be, it has failed for good."""
        task = failed.claimed.ready.job.task
        if task not in self._has_topics and self._ask_again.get(task, 0.0) <= self.clock():
            try:
                self.retry.until_done("retry topics", lambda: self.ensure_topics(task))
                self._has_topics.add(task)
            except BrokerUnavailable:
                raise
            except BrokerError as error:
                if task not in self._ask_again:
                    extra = {"action": "no_retry_topics", "hint": "`alphaloop topics create --all` by a user who may"}
                    log.error("no retries of task %s: %s", task, error.message, extra=extra)
                self._ask_again[task] = self.clock() + RETRY_S
        if task not in self._has_topics:
            self.fail(failed)
        return task in self._has_topics

    def _message(self, failed: FailedTry) -> Forwarded:
        delivery = failed.claimed.ready.delivery
        record, job = delivery.record, failed.claimed.ready.job
        num_failures = failed.claimed.num_failures + 1
        headers = RetryHeaders(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            timestamp_ms=record.timestamp_ms,
            not_before_ms=int(failed.not_before.timestamp() * 1000),
            num_failures=num_failures,
            reason=failed.failure.code,
        ).headers(record.headers)
        where = {"job_id": job.job_id, "code": failed.failure.code, "delay_s": failed.delay_s}
        log.warning(
            "a job failed for the %d. time, tried again", num_failures, extra={"action": "job_retried", **where}
        )
        message = KafkaMessage(retry_topic(job.task, failed.delay_s), record.key, record.value, tuple(headers))
        return Forwarded(delivery, self.intake, failed.failure.code, message)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A message on its way to another topic: as a dead letter, as a result, or as it was, to be tried again."""

    delivery: Delivery
    intake: Intake
    code: str  #: of what was wrong
    letter: DeadLetter | KafkaMessage  #: as it is to be sent
    answer: KafkaMessage | None = None  #: the result that is sent after it


@dataclass(eq=False)
class Forwarder:
    """`put` never waits, so a message that goes on to another topic holds up no job.

    `open_producer` is called for the first message, and again after a fatal error of the producer it opened.
    """

    open_producer: Callable[[], Producer]
    topics: UnavailableTopics
    metrics: WorkerMetrics
    _: KW_ONLY
    letter_of: Callable[[DeadMessage], Forwarded]
    is_hurried: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._producer: Producer | None = None
        self._queue: BoundedQueue[Forwarded] = BoundedQueue(
            max_items=1, max_bytes=1, num_bytes_of=lambda message: 1, give_up=lambda: True
        )
        self._ensured: set[str] = set()
        self._retry_due: dict[str, float] = {}  #: topics that are unavailable
        self._waiting: dict[str, list[Forwarded]] = {}  #: by the topic that they go to

    def __len__(self) -> int:
        """Messages that are not published yet, without those whose topic is unavailable."""
        return self._queue.num_unsettled

    def put(self, *messages: DeadMessage | Forwarded) -> None:
        """Hand over; never waits."""
        self._queue.put(
            [self.letter_of(message) if isinstance(message, DeadMessage) else message for message in messages]
        )

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> None:
        """Publish what came, and what waits for a topic that is due to be tried again."""
        new: dict[str, list[Forwarded]] = defaultdict(list)
        for message in self._queue.take(MOST_AT_ONCE, timeout_s):
            new[message.letter.topic].append(message)
        due = {topic for topic, at in self._retry_due.items() if at <= self.clock()}
        for topic in new.keys() | due:
            messages = [*self._waiting.pop(topic, []), *new[topic]]
            if topic in self._retry_due and topic not in due:
                self._waiting[topic] = messages
            else:
                self._publish(topic, messages)
            self._balance(messages)

    def close(self) -> None:
        """Close the producer. Messages that wait are dropped here, and are delivered again."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _publish(self, topic: str, messages: list[Forwarded]) -> None:
        # A message of a partition that went to another worker is that worker's.
        messages = [message for message in messages if message.intake.is_current(message.delivery)]
        failure = None if topic in self._ensured else self.topics.ensure(topic)
        while messages and failure is None:
            messages, failure = self._send(messages)
        if failure is None:
            self._ensured.add(topic)
            self._retry_due.pop(topic, None)
            self.topics.works(topic)
            return
        self.topics.failed(topic, failure)
        self._ensured.discard(topic)
        self._retry_due[topic] = self.clock() + RETRY_S
        self._waiting[topic] = messages

    def _send(self, messages: Sequence[Forwarded]) -> tuple[list[Forwarded], BrokerError | None]:
        """Send each once. Returns what is not published, shortened where that may help, and why it cannot be now."""
        if self._producer is None:
            self._producer = self.open_producer()
        letters = [message.letter for message in messages]
        sent = [KafkaMessage(letter.topic, letter.key, letter.value, tuple(letter.headers)) for letter in letters]
        try:
            reports = deliver(self._producer, sent, is_hurried=self.is_hurried)
        except FatalBrokerError as error:
            self.close()  # the next try has a new producer
            return list(messages), error
        left: list[Forwarded] = []
        failure: BrokerError | None = None
        for message, report in zip(messages, reports, strict=True):
            if report is None:
                self._published(message)
            elif isinstance(report, MessageRefused) and (less := _shortened(message)) is not None:
                self.metrics.letters_shortened.inc()
                left.append(less)
            else:
                left.append(message)
                failure = report
        return left, failure

    def _published(self, message: Forwarded) -> None:
        if isinstance(message.letter, DeadLetter):
            self.metrics.dead_letters.labels(message.code).inc()
            record = message.delivery.record
            where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            log.warning("dead letter: %s", message.code, extra={"action": "dead_letter", **where})
        elif message.letter.topic != RESULTS:
            self.metrics.retried.labels(message.code).inc()
        if message.answer is not None:
            self._queue.put([replace(message, letter=message.answer, answer=None)])
        else:
            message.intake.finish([message.delivery])

    def _balance(self, moved: Iterable[Forwarded]) -> None:
        """Have the intake read no more of the topics that these came from and many that wait, or go on with them."""
        num_waiting, num_bytes = Counter[str](), Counter[str]()
        for message in (message for waiting in self._waiting.values() for message in waiting):
            num_waiting[message.delivery.record.topic] += 1
            num_bytes[message.delivery.record.topic] += message.delivery.num_bytes
        for intake, topic in {(message.intake, message.delivery.record.topic) for message in moved}:
            is_full = num_waiting[topic] >= MOST_WAITING or num_bytes[topic] >= MOST_WAITING_BYTES
            (intake.hold if is_full else intake.release)(topic)


def open_forwarder(base: Foundation, validation: Validation) -> Forwarder:
    """What publishes dead letters and retries, with a producer of its own."""
    kafka = base.settings.kafka
    topics = UnavailableTopics(
        lambda topic: ensure_topic(kafka, topic, validation.tasks), base.metrics.topic_unavailable
    )
    return Forwarder(
        lambda: Producer(kafka, client_id="alphaloop-forwarding"),
        topics,
        base.metrics,
        letter_of=partial(letter_of, validation=validation, group=kafka.named(kafka.group_id)),
        is_hurried=base.retry.hurry.is_set,
    )


def open_retries(
    base: Foundation, leases: LeaseKeeper, forwarder: Forwarder, intake: Intake, fail: Callable[[FailedTry], object]
) -> JobRetries:
    """What sends failed jobs to their retry topics; `fail` ends those that cannot wait there."""
    kafka = base.settings.kafka
    return JobRetries(
        kafka.retry_delays_s,
        leases,
        forwarder,
        intake,
        count=partial(JobStore(base.database).fail, owner=base.owner),
        fail=fail,
        ensure_topics=lambda task: ensure_topic(kafka, dlq_topic(jobs_topic(task)), [task]),
        retry=base.retry,
        rng=base.rng,
        max_bytes=base.max_bytes,
    )


def _shortened(message: Forwarded) -> Forwarded | None:
    """A dead letter with less of its message. A job that is tried again needs its whole message."""
    less = shortened(message.letter) if isinstance(message.letter, DeadLetter) else None
    return None if less is None else replace(message, letter=less)
