"""Publishes results and streamed text on Kafka, from one thread; dead letters have their own.

A result counts as published when the broker has acknowledged it. Only then is it deleted from the outbox, and only then
is its delivery finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

from alphaloop.errors import BrokerError, MessageRefused, StoreValueRefused, TopicUnavailable
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages.headers import encoded_result_headers
from alphaloop.store.outbox import Outbox, OutboxMessage
from worker.intake.partitions import Delivery
from worker.intake.polling import Intake
from worker.jobs.chunks import ChunkSender
from worker.jobs.forwarding import Forwarder
from worker.jobs.letters import DeadMessage, failed_job
from worker.jobs.publications import AnswerAgain, Publication, PublishingQueue, Recorded
from worker.jobs.refusals import OnRefusal, Outgoing, RefusedResults
from worker.jobs.sending import Message, Sender, deliver
from worker.jobs.streaming import ChunkMessage, final_message
from worker.jobs.unavailable_topics import UnavailableTopics
from worker.metrics import WorkerMetrics
from worker.retry import Retry

log = logging.getLogger(__name__)

RELAY_LIMIT: Final = 4  #: groups of results recorded earlier that are published in one go
_IDLE_WAIT_S: Final = 0.2
#: Between two looks for the acknowledgements of chunks, because the outcome of their job waits for these.
_LOOK_S: Final = 0.005


class Publisher:
    """The thread that owns the producer of results. Raises FatalBrokerError when the producer is dead."""

    def __init__(
        self,
        queue: PublishingQueue,
        sender: Sender,
        outbox: Outbox,
        refused: RefusedResults,
        topics: UnavailableTopics,
        forwarder: Forwarder,
        metrics: WorkerMetrics,
        *,
        model: str,
        retry: Retry,
        is_hurried: Callable[[], bool],
        relay_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._sender = sender
        self._outbox = outbox
        self._refused = refused
        self._topics = topics
        self._forwarder = forwarder
        self._metrics = metrics
        self._chunks = ChunkSender(sender, count_dropped=metrics.chunk_dropped, retry=retry, is_hurried=is_hurried)
        self._model = model
        self._retry = retry
        self._is_hurried = is_hurried
        self._relay_after_s = relay_after_s
        self._clock = clock
        self._relay_due = clock()

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> int:
        """Publish what waits, then clear the outbox and finish deliveries; returns how many publications."""
        self._relay_overdue()
        publications = self._take(timeout_s)
        self._chunks.send([one for one in publications if isinstance(one, ChunkMessage)])
        awaited = [one for one in publications if not isinstance(one, ChunkMessage)]
        if awaited:
            replaced = self._publish([outgoing for one in awaited for outgoing in _outgoing(one)])
            self._settle(awaited, replaced)
        return len(publications)

    def _take(self, timeout_s: float) -> list[Publication]:
        """What waits. While chunks are under way, their delivery reports are handled every few milliseconds."""
        while self._chunks.has_under_way:
            taken = self._queue.take(min(timeout_s, _LOOK_S))
            self._sender.poll(0.0)
            timeout_s -= _LOOK_S
            if taken or timeout_s <= 0:
                return taken
        return self._queue.take(timeout_s)

    def _publish(self, results: Sequence[Outgoing]) -> Mapping[str, bytes]:
        """Until every result is acknowledged or settled because Kafka refuses it; returns the replacements by job."""
        waiting = list(results)
        replaced: dict[str, bytes] = {}
        finals: list[ChunkMessage] = []

        def once() -> None:
            messages = [_message(outgoing.message) for outgoing in waiting]
            reports = deliver(self._sender, messages, is_hurried=self._is_hurried)
            refused: list[tuple[Outgoing, MessageRefused]] = []
            failed: list[tuple[Outgoing, BrokerError]] = []
            for outgoing, report in zip(list(waiting), reports, strict=True):
                match report:
                    case None:
                        finals.extend(self._acknowledged(outgoing.message))
                    case MessageRefused():
                        refused.append((outgoing, report))
                    case _:
                        failed.append((outgoing, report))
            waiting[:] = [outgoing for outgoing, _ in (*failed, *refused)]
            instead = self._refused.settle(refused)
            replaced.update({outgoing.message.job_id: outgoing.message.value for outgoing in instead})
            waiting[:] = [*(outgoing for outgoing, _ in failed), *instead]
            if failed:
                self._not_sent(failed[0][0].message.topic, failed[0][1])

        while waiting:
            self._retry.until_done("publish", once)
        self._chunks.end(finals)
        return replaced

    def _acknowledged(self, result: OutboxMessage) -> list[ChunkMessage]:
        """The end of the job's stream, if it has one. A result that is refused ends it in another way."""
        self._topics.works(result.topic)
        final = final_message(result.value, result.headers, self._model)
        return [final] if final else []

    def _not_sent(self, topic: str, report: BrokerError) -> NoReturn:
        if isinstance(report, TopicUnavailable):
            self._topics.failed(topic, report)
            self._topics.ensure(topic)
        raise report

    def _settle(self, publications: Sequence[Recorded | AnswerAgain], replaced: Mapping[str, bytes]) -> None:
        """Everything was acknowledged or settled: clear the outbox and finish the deliveries.

        A failed job's delivery is finished by the forwarder, with its dead letter.
        """
        ids = {message.id for one in publications if isinstance(one, Recorded) for message in one.messages}
        self._retry.until_done("clear outbox", lambda: self._outbox.delete(ids))
        for one in publications:
            match one:
                case Recorded():
                    for trace in one.traces:
                        trace.published()
                    jobs = zip(one.job_ids, one.deliveries, strict=False)
                    instead = [(delivery, replaced[job_id]) for job_id, delivery in jobs if job_id in replaced]
                    found = [failed_job(delivery, result, one.intake) for delivery, result in instead]
                    failed = [*one.failed, *filter(None, found)]
                    self._finish(one.deliveries, one.intake, failed)
                case AnswerAgain():
                    self._metrics.answered_again(1)
                    self._finish([one.delivery], one.intake, one.failed)

    def _finish(self, deliveries: Sequence[Delivery], intake: Intake, failed: Sequence[DeadMessage]) -> None:
        dead = {id(one.delivery) for one in failed}
        intake.finish([delivery for delivery in deliveries if id(delivery) not in dead])
        self._forwarder.put(*failed)

    def _relay_overdue(self) -> None:
        """Publish what was recorded and, by a crash or a broken connection during the commit, never published."""
        if self._clock() < self._relay_due:
            return
        self._relay_due = self._clock() + self._relay_after_s
        try:
            rows = self._retry.until_done(
                "relay", lambda: self._outbox.take_over(older_than_s=self._relay_after_s, limit=RELAY_LIMIT)
            )
        except StoreValueRefused as error:
            log.error("not relayed: %s", error.message, extra={"action": "relay_failed"})
            return
        if rows:
            results = [Outgoing(message, OnRefusal.SET_ASIDE) for messages in rows.values() for message in messages]
            self._publish(results)
            self._retry.until_done("clear outbox", lambda: self._outbox.delete(set(rows)))
            log.info("published %d results recorded earlier", len(results), extra={"action": "outbox_relayed"})
        if len(rows) >= RELAY_LIMIT:
            self._relay_due = self._clock()  # there may be more
        self._metrics.set_aside(self._retry.until_done("relay", self._outbox.num_set_aside))


def _outgoing(publication: Recorded | AnswerAgain) -> list[Outgoing]:
    match publication:
        case Recorded():
            return [Outgoing(message, OnRefusal.REPLACE) for message in publication.messages]
        case AnswerAgain():
            key = publication.job_id.encode()
            message = OutboxMessage(0, RESULTS, key, publication.outcome, publication.headers)
            return [Outgoing(message, OnRefusal.LEAVE)]


def _message(result: OutboxMessage) -> Message:
    headers = encoded_result_headers(result.key or b"", result.headers)
    return Message(result.topic, result.key, result.value, headers)
