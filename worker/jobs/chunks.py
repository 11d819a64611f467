"""Sends the chunks of streams from the publisher's thread, so that no result waits for a text that is still growing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeGuard

from alphaloop.errors import BrokerError, FatalBrokerError, MessageRefused, TopicUnavailable
from worker.jobs.sending import Message, Report, Sender, deliver
from worker.jobs.streaming import ChunkMessage
from worker.retry import Retry

#: Chunks that an outage kept back. If there are more, the newest are dropped, because results hold the whole text.
MOST_KEPT: Final = 8192


class ChunkSender:
    """Chunks with text are not waited for; the final ones are, together with every chunk that has to be sent again.

    A chunk that was not acknowledged in time is sent again, later than its successors: readers put chunks in order. A
    chunk that Kafka refuses, or whose topic is unavailable, is dropped. Each chunk is told once when it is settled.
    """

    def __init__(
        self, sender: Sender, *, count_dropped: Callable[[str], None], retry: Retry, is_hurried: Callable[[], bool]
    ) -> None:
        self._sender = sender
        self._count_dropped = count_dropped
        self._retry = retry
        self._is_hurried = is_hurried
        self._again: deque[ChunkMessage] = deque()
        self._num_under_way = 0

    @property
    def has_under_way(self) -> bool:
        """Whether the client has chunks with text whose delivery reports have not come."""
        return self._num_under_way > 0

    def send(self, chunks: Sequence[ChunkMessage]) -> None:
        """Hand these to the client, after those that have to be sent again. Raises FatalBrokerError."""
        kept = list(self._again)
        self._again.clear()
        for chunk in (*kept, *chunks):
            told = partial(self._reported, chunk)
            self._num_under_way += 1
            try:
                self._sender.send(
                    chunk.topic, key=chunk.key, value=chunk.value, headers=chunk.headers, on_delivery=told, wait_s=0.0
                )
            except FatalBrokerError:
                raise
            except BrokerError as error:
                self._reported(chunk, error)

    def end(self, finals: Sequence[ChunkMessage]) -> None:
        """Publish these final chunks, and wait for them. Raises FatalBrokerError, in a hurry DeliveryFailed."""
        if not finals:
            return
        waiting = [*self._again, *finals]
        self._again.clear()

        def once() -> None:
            messages = [Message(chunk.topic, chunk.key, chunk.value, chunk.headers) for chunk in waiting]
            reports = deliver(self._sender, messages, is_hurried=self._is_hurried)
            late: list[tuple[ChunkMessage, BrokerError]] = []
            for chunk, told in zip(waiting, reports, strict=True):
                if self._may_arrive(told):
                    late.append((chunk, told))
                else:
                    chunk.settle(is_acknowledged=told is None)
            waiting[:] = [chunk for chunk, _ in late]
            for _, told in late:
                raise told

        self._retry.until_done("end streams", once)

    def _reported(self, chunk: ChunkMessage, report: Report) -> None:
        self._num_under_way -= 1
        if isinstance(report, FatalBrokerError):
            return  # the next result meets a dead producer, too
        if report is not None and len(self._again) >= MOST_KEPT:
            self._count_dropped(report.code)
        elif self._may_arrive(report):
            self._again.append(chunk)
            return
        chunk.settle(is_acknowledged=report is None)

    def _may_arrive(self, report: Report) -> TypeGuard[BrokerError]:
        """Whether a chunk that was not acknowledged is to be sent again; counts it if not."""
        if isinstance(report, MessageRefused | TopicUnavailable):
            self._count_dropped(report.code)
            return False
        return report is not None
