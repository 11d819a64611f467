"""What other threads hand to the publisher, and the queue between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from alphaloop.store.outbox import OutboxMessage
from worker.background import BoundedQueue
from worker.intake.partitions import Delivery
from worker.intake.polling import Intake
from worker.jobs.letters import DeadMessage, failed_job
from worker.jobs.streaming import ChunkMessage
from worker.tracing import JobTrace

MOST_AT_ONCE: Final = 1024


@dataclass(frozen=True, slots=True)
class Recorded:
    """Outcomes of one transaction: the messages to publish, and the deliveries that are finished afterwards."""

    messages: tuple[OutboxMessage, ...]
    deliveries: tuple[Delivery, ...]
    intake: Intake
    job_ids: tuple[str, ...] = ()  #: of the deliveries
    failed: tuple[DeadMessage, ...] = ()  #: those that become dead letters, too
    traces: tuple[JobTrace, ...] = ()  #: of sampled jobs; they end when the results are acknowledged

    @property
    def num_bytes(self) -> int:
        """Size of the results."""
        return sum(len(message.value) for message in self.messages)


@dataclass(frozen=True, slots=True)
class AnswerAgain:
    """A job that was delivered again: its recorded outcome, byte for byte, and the headers handed on to it."""

    delivery: Delivery
    job_id: str
    outcome: bytes
    headers: Mapping[str, str]
    intake: Intake

    @property
    def failed(self) -> tuple[DeadMessage, ...]:
        """The job, if its outcome is that it failed."""
        failed = failed_job(self.delivery, self.outcome, self.intake)
        return (failed,) if failed else ()

    @property
    def num_bytes(self) -> int:
        """Size of the result."""
        return len(self.outcome)


#: Chunks with text are not waited for, because the result that follows holds the whole text.
Publication = Recorded | AnswerAgain | ChunkMessage


class PublishingQueue:
    """Messages that other threads hand over. A full queue makes these threads wait."""

    def __init__(self, *, max_items: int, max_bytes: int, is_hurried: Callable[[], bool]) -> None:
        self._queue: BoundedQueue[Publication] = BoundedQueue(
            max_items=max_items, max_bytes=max_bytes, num_bytes_of=lambda publication: publication.num_bytes
        )
        self._is_hurried = is_hurried

    def __len__(self) -> int:
        """What is not published yet, what the publisher has in hand among it."""
        return self._queue.num_unsettled

    def put(self, *publications: Publication) -> None:
        """Hand over; waits for room unless the worker is told to hurry."""
        self._queue.put(publications, give_up=self._is_hurried)

    def take(self, timeout_s: float) -> list[Publication]:
        """Take the waiting messages, in their order."""
        return self._queue.take(MOST_AT_ONCE, timeout_s)
