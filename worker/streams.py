"""Texts while they are decoded, on the `tokens` topic; what a chunk is, alphaloop.messages.result says.

The loop makes chunks (`JobStream.add`), and the thread of the publisher sends them (`ChunkSender`), so that no result
waits for a text that is still growing. A recorded result ends its stream (`final_message`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeGuard

from alphaloop.errors import BrokerError, FatalBrokerError, MessageRefused, TopicUnavailable
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import TOKENS
from alphaloop.messages import Chunk, Result, chunk_headers, final_chunk, text_chunk
from alphaloop.messages.headers import encoded
from worker.background import Retry
from worker.sending import DeliveryReport, KafkaMessage, deliver

#: Stands in the JSON of every streamed job's result and of no other: inside a string its quotes would be escaped.
_IS_STREAMED = b'"num_chunks":'


class JobStream:
    """The chunks with text of one attempt of one job, numbered from 0. The loop adds them, the publisher settles them.

    The final chunk is made from the recorded result (`final_message`), because only the claim that recorded the outcome
    may end the stream, and because a worker that died may have left that to the relay.
    """

    def __init__(self, job_id: str, attempt: int, carried: Mapping[str, str]) -> None:
        self.num_chunks = 0  #: with text, so far; only the loop changes it
        # Only the publisher's thread changes these two.
        self.num_settled = 0  #: of these, acknowledged or dropped
        self.num_acknowledged = 0  #: of these, acknowledged
        self._job_id = job_id
        self._attempt = attempt
        self._carried = carried

    @property
    def is_settled(self) -> bool:
        """Whether every chunk so far was acknowledged or dropped."""
        return self.num_settled >= self.num_chunks

    @property
    def num_unacknowledged(self) -> int:
        """Chunks so far that the broker has not acknowledged: readers may never see them."""
        return self.num_chunks - self.num_acknowledged

    def add(self, text: str, *, created: int, model: str) -> KafkaMessage:
        """The chunk with the text that one step added; `created` in seconds since 1970."""
        chunk = Chunk(self._job_id, self._attempt, self.num_chunks, text)
        self.num_chunks += 1
        return _chunk_message(chunk, text_chunk(chunk, created=created, model=model), self._carried, self)


def final_message(result: bytes, carried: Mapping[str, str], model: str) -> KafkaMessage | None:
    """The chunk that ends the stream of the job with this recorded result; None for a job that was not streamed."""
    if _IS_STREAMED not in result:
        return None
    final = final_chunk(Result.decode(result), model=model)
    return _chunk_message(*final, carried) if final else None


def _chunk_message(
    chunk: Chunk, value: bytes, carried: Mapping[str, str], stream: JobStream | None = None
) -> KafkaMessage:
    return KafkaMessage(TOKENS, chunk.job_id.encode(), value, encoded(chunk_headers(chunk, carried)), stream)


#: Chunks that an outage kept back. If there are more, the newest are dropped, because results hold the whole text.
MOST_KEPT: Final = 8192


class ChunkSender:
    """Chunks with text are not waited for; the final ones are, together with every chunk that has to be sent again.

    A chunk that was not acknowledged in time is sent again, later than its successors: readers put chunks in order. A
    chunk that Kafka refuses, or whose topic is unavailable, is dropped. Each chunk is told once when it is settled.
    """

    def __init__(self, producer: Producer, *, count_dropped: Callable[[str], None], retry: Retry) -> None:
        self._producer = producer
        self._count_dropped = count_dropped
        self._retry = retry
        self._again: deque[KafkaMessage] = deque()
        self._num_under_way = 0

    @property
    def has_under_way(self) -> bool:
        """Whether the client has chunks with text whose delivery reports have not come."""
        return self._num_under_way > 0

    def send(self, chunks: Sequence[KafkaMessage]) -> None:
        """Hand these to the client, after those that have to be sent again. Raises FatalBrokerError."""
        kept = list(self._again)
        self._again.clear()
        for chunk in (*kept, *chunks):
            told = partial(self._reported, chunk)
            self._num_under_way += 1
            try:
                self._producer.send(
                    chunk.topic, key=chunk.key, value=chunk.value, headers=chunk.headers, on_delivery=told, wait_s=0.0
                )
            except FatalBrokerError:
                raise
            except BrokerError as error:
                self._reported(chunk, error)

    def end(self, finals: Sequence[KafkaMessage]) -> None:
        """Publish these final chunks, and wait for them. Raises FatalBrokerError, in a hurry DeliveryFailed."""
        if not finals:
            return
        waiting = [*self._again, *finals]
        self._again.clear()

        def once() -> None:
            reports = deliver(self._producer, waiting, is_hurried=self._retry.hurry.is_set)
            late: list[tuple[KafkaMessage, BrokerError]] = []
            for chunk, told in zip(waiting, reports, strict=True):
                if self._may_arrive(told):
                    late.append((chunk, told))
                else:
                    chunk.settle(is_acknowledged=told is None)
            waiting[:] = [chunk for chunk, _ in late]
            for _, told in late:
                raise told

        self._retry.until_done("end streams", once)

    def _reported(self, chunk: KafkaMessage, report: DeliveryReport) -> None:
        self._num_under_way -= 1
        if isinstance(report, FatalBrokerError):
            return  # the next result meets a dead producer, too
        if report is not None and len(self._again) >= MOST_KEPT:
            self._count_dropped(report.code)
        elif self._may_arrive(report):
            self._again.append(chunk)
            return
        chunk.settle(is_acknowledged=report is None)

    def _may_arrive(self, report: DeliveryReport) -> TypeGuard[BrokerError]:
        """Whether a chunk that was not acknowledged is to be sent again; counts it if not."""
        if isinstance(report, MessageRefused | TopicUnavailable):
            self._count_dropped(report.code)
            return False
        return report is not None
