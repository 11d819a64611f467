"""Jobs as they go on: their texts from `tokens`; their ends from the final chunk, from `results`, or from the database.

Whichever is first: a job need not be streamed, and a chunk or a result may be older than its topic keeps it.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.errors import BrokerUnavailable, MalformedMessage
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import RESULTS, TOKENS, ensure_topics
from alphaloop.messages import Chunk, Result, Status, StreamReader, StreamReaders, read_chunk
from alphaloop.outcomes.reading import read_outcome
from alphaloop.settings import KafkaSettings
from alphaloop.store.known_jobs import KnownJob

_POLL_S: Final = 0.2
#: Between two looks into the database, for jobs whose result cannot be read from Kafka any more.
_LOOK_EVERY_S: Final = 2.0
#: Chunks are read from so long before the job's first claim, because the clocks of worker and database may differ.
_MARGIN: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Waits:
    """A job that has not ended. Of one that is not claimed nobody knows whether it exists."""

    job_id: str
    is_claimed: bool


@dataclass(frozen=True, slots=True)
class TextSoFar:
    """The text of a job's latest attempt, as far as it is certain."""

    job_id: str
    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's end. `reason` says why there is no text."""

    job_id: str
    status: Status
    text: str | None
    reason: str | None
    is_streamed: bool


Event = Waits | TextSoFar | Ended
Find = Callable[[Collection[str]], Mapping[str, KnownJob]]


def follow(
    kafka: KafkaSettings,
    find: Find,
    job_ids: Collection[str],
    *,
    timeout_s: float,
    is_watched: Callable[[], bool] = lambda: True,
) -> Iterator[Event]:
    """What happens to the jobs, until each has ended or the time is up; the end of each comes once.

    `find` asks the database. `is_watched` is asked several times a second: nothing more is read once it says no.
    Creates missing topics. Raises BrokerError and StoreError.
    """
    known = find(job_ids)
    for job in known.values():
        if job.outcome is not None:
            yield _recorded(Result.decode(job.outcome))
    waiting = {job_id for job_id in job_ids if job_id not in known or known[job_id].outcome is None}
    if not waiting:
        return
    for job_id in sorted(waiting):
        yield Waits(job_id, job_id in known)
    began = min((known[job_id].created_at for job_id in waiting if job_id in known), default=datetime.now(UTC))
    ensure_topics(kafka, ())
    consumer = Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-tail")
    with contextlib.closing(consumer):
        consumer.assign_since([TOKENS, RESULTS], began - _MARGIN)
        yield from _Following(waiting, find).events(consumer, time.monotonic() + timeout_s, is_watched)


def text_so_far(kafka: KafkaSettings, job: KnownJob, *, timeout_s: float) -> TextSoFar | None:
    """The text of a running job as far as `tokens` has it now; None where it has none, or the job is not streamed.

    Raises BrokerError, also where the topic cannot be read to its end within `timeout_s`.
    """
    reader = StreamReader()
    consumer = Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-tail")
    with contextlib.closing(consumer):
        found = consumer.assign_since([TOKENS], job.created_at - _MARGIN)
        unread = {partition: end for partition, (begin, end) in found.items() if end > begin}
        deadline = time.monotonic() + timeout_s
        for record in consumer.read_until(unread):
            if record is None:
                if time.monotonic() >= deadline:
                    raise BrokerUnavailable("the text so far could not be read in time")
            elif (record.key or b"").decode("utf-8", "replace") == job.job_id:
                with contextlib.suppress(MalformedMessage):
                    reader.take(read_chunk(record.value, record.headers))
    return TextSoFar(job.job_id, reader.attempt, reader.text) if reader.attempt else None


class _Following:
    def __init__(self, waiting: set[str], find: Find) -> None:
        self._waiting = waiting
        self._find = find
        self._readers = StreamReaders(waiting)

    def events(self, consumer: Consumer, deadline: float, is_watched: Callable[[], bool]) -> Iterator[Event]:
        look_due = time.monotonic()  # at once: a job may have ended before the consumer stood
        while self._waiting and time.monotonic() < deadline and is_watched():
            record = consumer.poll(_POLL_S)
            if record is not None:
                yield from self._read(record)
            elif time.monotonic() >= look_due:
                look_due = time.monotonic() + _LOOK_EVERY_S
                yield from self._look()

    def _read(self, record: Record) -> Iterator[Event]:
        if (record.key or b"").decode("utf-8", "replace") not in self._waiting:
            return
        if record.topic == RESULTS:
            outcome = read_outcome(record)
            if isinstance(outcome, Result):
                yield from self._end(_recorded(outcome))
            return
        with contextlib.suppress(MalformedMessage):
            yield from self._take(read_chunk(record.value, record.headers))

    def _take(self, chunk: Chunk) -> Iterator[Event]:
        if chunk.job_id not in self._waiting:
            return
        reader = self._readers[chunk.job_id]
        if reader.take(chunk):
            yield TextSoFar(chunk.job_id, reader.attempt, reader.text)
        if reader.end is not None and reader.end.status is not None:
            error = reader.end.error
            has_text = reader.end.status is Status.SUCCEEDED and reader.end.text_ref is None
            text = reader.text if has_text else None
            yield from self._end(Ended(chunk.job_id, reader.end.status, text, error.message if error else None, True))

    def _look(self) -> Iterator[Event]:
        for job in self._find(self._waiting).values():
            if job.outcome is not None:
                yield from self._end(_recorded(Result.decode(job.outcome)))

    def _end(self, ended: Ended) -> Iterator[Event]:
        if ended.job_id in self._waiting:
            self._waiting.remove(ended.job_id)
            yield ended


def _recorded(result: Result) -> Ended:
    reason = result.error.message if result.error else None
    return Ended(result.job_id, result.status, result.text, reason, result.num_chunks is not None)
