"""Publishes results and streamed text on Kafka, from one thread; dead letters have their own.

Other threads hand `Publication`s over through a queue. A result counts as published when the broker has acknowledged
it. Only then is it deleted from the outbox, and only then is its delivery finished. What Kafka refuses,
`RefusedResults` settles, so that the recorded outcome and what is published agree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from alphaloop.claim_check.store import ContentStore, text_by_reference
from alphaloop.errors import (
    BrokerError,
    ContentStoreUnavailable,
    MessageRefused,
    MessageTooLarge,
    StoreValueRefused,
    TopicUnavailable,
)
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS
from alphaloop.liveness import beat
from alphaloop.messages import Failure, Result, Status
from alphaloop.messages.headers import encoded_result_headers
from alphaloop.store.outcomes import Outbox, OutboxMessage, RefusedResultStore
from worker.background import BoundedQueue, Retry
from worker.dead_letters import DeadMessage, Forwarder, failed_job
from worker.intake.partitions import Delivery
from worker.intake.polling import Intake
from worker.metrics import WorkerMetrics
from worker.sending import ChunkSender, KafkaMessage, deliver, final_message

if TYPE_CHECKING:
    from worker.foundation import Foundation
    from worker.tracing import JobTrace

log = logging.getLogger(__name__)

MOST_AT_ONCE: Final = 1024
MOST_QUEUED: Final = 8192  #: publications that wait before the recorder waits
RELAY_LIMIT: Final = 4  #: groups of results recorded earlier that are published in one go
_IDLE_WAIT_S: Final = 0.2
#: Between two looks for the acknowledgements of chunks, because the outcome of their job waits for these.
_LOOK_S: Final = 0.005
TOO_LARGE: Final = "result_too_large"
REFUSED: Final = "result_refused"
#: What else was done with a result that is too large, beside OnRefusal.
BY_REFERENCE: Final = "by_reference"  #: its text lies in the store of contents
POSTPONED: Final = "postponed"  #: that store is away


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """Outcomes of one transaction: the messages to publish, and the deliveries that are finished afterwards."""

    messages: tuple[OutboxMessage, ...]
    deliveries: tuple[Delivery, ...]
    intake: Intake
    job_ids: tuple[str, ...] = ()  #: of the deliveries
    failed: tuple[DeadMessage, ...] = ()  #: those that become dead letters, too
    traces: tuple[JobTrace, ...] = ()  #: of sampled jobs; they end when the results are acknowledged
    is_repeated: bool = False  #: the recorded outcome of a job that was delivered again, byte for byte

    @property
    def num_bytes(self) -> int:
        """Size of the results."""
        return sum(len(message.value) for message in self.messages)


def answer_again(
    delivery: Delivery, job_id: str, outcome: bytes, headers: Mapping[str, str], intake: Intake
) -> RecordedGroup:
    """What to publish for a job that was delivered again: its recorded outcome, with the headers handed on to it."""
    failed = failed_job(delivery, outcome, intake)
    message = OutboxMessage(0, RESULTS, job_id.encode(), outcome, headers)
    return RecordedGroup((message,), (delivery,), intake, failed=(failed,) if failed else (), is_repeated=True)


#: Chunks with text are not waited for, because the result that follows holds the whole text.
Publication = RecordedGroup | KafkaMessage


@dataclass(eq=False)
class Publisher:
    """The thread that owns the producer of results. Raises FatalBrokerError when the producer is dead."""

    queue: BoundedQueue[Publication]
    producer: Producer
    outbox: Outbox
    refused: RefusedResults
    forwarder: Forwarder
    metrics: WorkerMetrics
    _: KW_ONLY
    model: str
    retry: Retry
    relay_after_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._chunks = ChunkSender(self.producer, count_dropped=self.metrics.chunk_dropped, retry=self.retry)
        self._relay_due = self.clock()

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> int:
        """Publish what waits, then clear the outbox and finish deliveries; returns how many publications."""
        self._relay_overdue()
        publications = self._take(timeout_s)
        self._chunks.send([chunk for chunk in publications if isinstance(chunk, KafkaMessage)])
        if awaited := [group for group in publications if isinstance(group, RecordedGroup)]:
            results = [
                Outgoing(message, OnRefusal.LEAVE if group.is_repeated else OnRefusal.REPLACE)
                for group in awaited
                for message in group.messages
            ]
            self._settle(awaited, self._publish(results))
        return len(publications)

    def _take(self, timeout_s: float) -> list[Publication]:
        """What waits. While chunks are under way, their delivery reports are handled every few milliseconds."""
        while self._chunks.has_under_way:
            taken = self.queue.take(MOST_AT_ONCE, min(timeout_s, _LOOK_S))
            self.producer.poll(0.0)
            timeout_s -= _LOOK_S
            if taken or timeout_s <= 0:
                return taken
        return self.queue.take(MOST_AT_ONCE, timeout_s)

    def _publish(self, results: Sequence[Outgoing]) -> Mapping[str, bytes]:
        """Until every result is acknowledged or settled because Kafka refuses it; returns the replacements by job."""
        waiting = list(results)
        replaced: dict[str, bytes] = {}
        finals: list[KafkaMessage] = []

        def once() -> None:
            messages = [_message(outgoing.message) for outgoing in waiting]
            reports = deliver(self.producer, messages, is_hurried=self.retry.hurry.is_set)
            refused: list[tuple[Outgoing, MessageRefused]] = []
            failed: list[tuple[Outgoing, BrokerError]] = []
            for outgoing, report in zip(list(waiting), reports, strict=True):
                match report:
                    case None:  # one that is refused ends its job's stream in another way
                        result = outgoing.message
                        self.forwarder.topics.works(result.topic)
                        if final := final_message(result.value, result.headers, self.model):
                            finals.append(final)
                    case MessageRefused():
                        refused.append((outgoing, report))
                    case _:
                        failed.append((outgoing, report))
            waiting[:] = [outgoing for outgoing, _ in (*failed, *refused)]
            instead = self.refused.settle(refused)
            replaced.update({outgoing.message.job_id: outgoing.message.value for outgoing in instead})
            waiting[:] = [*(outgoing for outgoing, _ in failed), *instead]
            for outgoing, error in failed[:1]:
                if isinstance(error, TopicUnavailable):
                    self.forwarder.topics.failed(outgoing.message.topic, error)
                    self.forwarder.topics.ensure(outgoing.message.topic)
                raise error

        while waiting:
            self.retry.until_done("publish", once)
        self._chunks.end(finals)
        return replaced

    def _settle(self, groups: Sequence[RecordedGroup], replaced: Mapping[str, bytes]) -> None:
        """Everything was acknowledged or settled: clear the outbox and finish the deliveries.

        A failed job's delivery is finished by the forwarder, with its dead letter.
        """
        ids = {message.id for group in groups if not group.is_repeated for message in group.messages}
        self.retry.until_done("clear outbox", lambda: self.outbox.delete(ids))
        self.metrics.answered_again.inc(sum(group.is_repeated for group in groups))
        for group in groups:
            for trace in group.traces:
                trace.published()
            jobs = zip(group.job_ids, group.deliveries, strict=False)
            instead = [(delivery, replaced[job_id]) for job_id, delivery in jobs if job_id in replaced]
            letters = [failed_job(delivery, result, group.intake) for delivery, result in instead]
            failed = [*group.failed, *filter(None, letters)]
            dead = {id(letter.delivery) for letter in failed}
            group.intake.finish([delivery for delivery in group.deliveries if id(delivery) not in dead])
            self.forwarder.put(*failed)

    def _relay_overdue(self) -> None:
        """Publish what was recorded and, by a crash or a broken connection during the commit, never published."""
        if self.clock() < self._relay_due:
            return
        self._relay_due = self.clock() + self.relay_after_s
        try:
            rows = self.retry.until_done(
                "relay", lambda: self.outbox.take_over(older_than_s=self.relay_after_s, limit=RELAY_LIMIT)
            )
        except StoreValueRefused as error:
            log.error("not relayed: %s", error.message, extra={"action": "relay_failed"})
            return
        if rows:
            results = [Outgoing(message, OnRefusal.SET_ASIDE) for messages in rows.values() for message in messages]
            self._publish(results)
            self.retry.until_done("clear outbox", lambda: self.outbox.delete(set(rows)))
            log.info("published %d results recorded earlier", len(results), extra={"action": "outbox_relayed"})
        if len(rows) >= RELAY_LIMIT:
            self._relay_due = self.clock()  # there may be more
        self.metrics.set_aside.set(self.retry.until_done("relay", self.outbox.num_set_aside))


def open_publisher(
    base: Foundation, producer: Producer, forwarder: Forwarder, contents: ContentStore | None
) -> Publisher:
    """What publishes this worker's results, and texts that are streamed."""
    queue: BoundedQueue[Publication] = BoundedQueue(
        max_items=MOST_QUEUED,
        max_bytes=base.max_bytes,
        num_bytes_of=lambda publication: publication.num_bytes,
        give_up=base.retry.gives_up,
    )
    return Publisher(
        queue,
        producer,
        Outbox(base.database),
        RefusedResults(RefusedResultStore(base.database), base.metrics.result_refused, contents),
        forwarder,
        base.metrics,
        model=base.engine.identity.target,
        retry=base.retry,
        relay_after_s=2 * base.settings.worker.lease_s,
    )


class OnRefusal(StrEnum):
    """What is done with a result if Kafka refuses it."""

    REPLACE = "replaced"  #: never published before: a failure is recorded and published in its place
    SET_ASIDE = "set_aside"  #: perhaps published before, or such a failure itself: an operator decides
    LEAVE = "not_repeated"  #: a repeated answer: the first one was published, or its row in the outbox is dealt with


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A result on its way to Kafka."""

    message: OutboxMessage
    on_refusal: OnRefusal


def _message(result: OutboxMessage) -> KafkaMessage:
    headers = encoded_result_headers(result.key or b"", result.headers)
    return KafkaMessage(result.topic, result.key, result.value, headers)


@dataclass(eq=False)
class RefusedResults:
    """Settles refused results; `count` is called for each, with its code and what was done.

    With `contents`, the texts of a result that is too large lie there, and the result refers to them. While that store
    is away the result waits in the outbox, and the others go on.
    """

    store: RefusedResultStore
    count: Callable[[str, str], None]
    contents: ContentStore | None = None

    def settle(self, refused: Sequence[tuple[Outgoing, MessageRefused]]) -> list[Outgoing]:
        """Record what becomes of them; returns what is to be published instead. Raises StoreError.

        May be called again for the same results after an error.
        """
        settled = [self._settle(outgoing, error) for outgoing, error in refused]
        return [outgoing for outgoing in settled if outgoing is not None]

    def _settle(self, outgoing: Outgoing, error: MessageRefused) -> Outgoing | None:
        message = outgoing.message
        job_id = message.job_id
        if outgoing.on_refusal is OnRefusal.LEAVE:
            self._tell(job_id, error, OnRefusal.LEAVE)
            return None
        try:
            result = Result.decode(message.value)
        except ValidationError:
            result = None
        has_text = result is not None and bool(result.text or result.choices)
        if self.contents is not None and result is not None and has_text and isinstance(error, MessageTooLarge):
            return self._moved(outgoing, result, self.contents)
        if result is None or outgoing.on_refusal is OnRefusal.SET_ASIDE:
            if self.store.set_aside(message.id, {job_id: error.message}):
                self._tell(job_id, error, OnRefusal.SET_ASIDE)
            return None
        failure = Failure(
            code=_code(error),
            message=f"Kafka refused the result of {len(message.value)} bytes: {error.message}",
            hint="ask for fewer tokens; an operator can read the text and raise the topic's limit",
        )
        nothing = {"text": None, "choices": (), "finish_reason": None, "decoding": None}
        instead = {**nothing, "status": Status.FAILED, "error": failure}
        value = result.model_copy(update=instead).encode()
        if not self.store.replace(message.id, {job_id: value}):
            return None
        self._tell(job_id, error, OnRefusal.REPLACE)
        return Outgoing(message._replace(value=value), OnRefusal.SET_ASIDE)

    def _moved(self, outgoing: Outgoing, result: Result, contents: ContentStore) -> Outgoing | None:
        """Move the texts that make a result too large into the store; returns the smaller result."""
        message, job_id = outgoing.message, result.job_id
        beat()  # each text may take as long as the store may
        try:
            smaller = text_by_reference(result, contents)
        except ContentStoreUnavailable as away:
            log.warning("a result waits: %s", away.message, extra={"action": "result_waits", "job_id": job_id})
            if self.store.postpone(message.id, [job_id]):
                self.count(TOO_LARGE, POSTPONED)
            return None
        reference = smaller.text_ref or smaller.choices_ref
        value, url = smaller.encode(), reference.url if reference else ""
        if not self.store.refer(message.id, {job_id: value}, {job_id: url}):
            return None
        self.count(TOO_LARGE, BY_REFERENCE)
        return replace(outgoing, message=message._replace(value=value))

    def _tell(self, job_id: str, error: MessageRefused, done: OnRefusal) -> None:
        code = _code(error)
        self.count(code, done.value)
        extra = {"action": f"result_{done.value}", "job_id": job_id, "code": code, "hint": error.hint or ""}
        log.error("a result was refused and %s: %s", done.value.replace("_", " "), error.message, extra=extra)


def _code(error: MessageRefused) -> str:
    return TOO_LARGE if isinstance(error, MessageTooLarge) else REFUSED
