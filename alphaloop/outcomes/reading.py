"""The ends of jobs, read from Kafka: results, earlier refusals, and texts while they grow.

A refused message has no row in the database. Of one that was refused before anybody listened the dead letter is looked
for, because there are few of these and many results. `follow` takes whichever comes first, the final chunk from
`tokens`, the result from `results`, or the row of the database: a job need not be streamed, and a chunk or a result may
be older than its topic keeps it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

from pydantic import ValidationError

from alphaloop.errors import BrokerUnavailable, MalformedMessage
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import RESULTS, TOKENS, ensure_topics, list_topics
from alphaloop.messages import (
    Chunk,
    Failure,
    Origin,
    Result,
    Status,
    StreamReader,
    StreamReaders,
    read_chunk,
    refused_result,
)
from alphaloop.messages.dead_letter import JOB_ID, OUTCOME, PREFIX
from alphaloop.messages.topics import dlq_topic, task_of
from alphaloop.settings import KafkaSettings
from alphaloop.store.known_jobs import KnownJob


class OutcomeReader:
    """Reads `results` from its construction on: construct it before you produce."""

    def __init__(
        self, kafka: KafkaSettings, tasks: Collection[str], *, on_text: Callable[[str, str], None] | None = None
    ) -> None:
        """Creates missing topics first, also those of `tasks`. Raises BrokerError.

        `on_text` is called with a job_id and its text so far, for streamed jobs whose outcomes are read.
        """
        self._on_text = on_text
        ensure_topics(kafka, tasks)
        self._consumer = _consumer(kafka)
        try:
            self._consumer.assign_from([RESULTS, *([TOKENS] if on_text else [])], at="latest")
        except BaseException:
            self._consumer.close()
            raise

    def outcomes(
        self, job_ids: Collection[str], *, timeout_s: float, alive: Callable[[], None] = lambda: None
    ) -> Iterator[Result]:
        """The first result of each of these jobs as they arrive; ends when all are there or time is up.

        A message that was refused because one of these job_ids is another's counts, too. `alive` is called between two
        polls and may raise to end the wait.
        """
        waiting = set(job_ids)
        texts = StreamReaders(waiting)
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            alive()
            record = self._consumer.poll(_POLL_S)
            if record is not None and record.topic == TOKENS:
                self._tell_text(record, waiting, texts)
                continue
            result = read_result(record) if record is not None else None
            if result is not None and result.sent_job_id in waiting:
                waiting.remove(result.sent_job_id)
                yield result

    def _tell_text(self, record: Record, waiting: set[str], texts: StreamReaders) -> None:
        chunk = _chunk_of(record, waiting)
        if self._on_text is not None and chunk is not None and (text := texts[chunk.job_id]).take(chunk):
            self._on_text(chunk.job_id, text.text)

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_result(record: Record) -> Result | None:
    """A record of `results`; None for one that is no result."""
    try:
        return Result.decode(record.value or b"")
    except ValidationError:
        return None


def reason_of(result: Result) -> str | None:
    """Why there is no text, in one line with the error's code, field and hint; None for one that succeeded."""
    if (error := result.error) is None:
        return None
    told = f"{error.field}: {error.message}" if error.field else error.message
    code = "" if told.startswith(error.code) else f"{error.code}: "  # not "cancelled: cancelled on request"
    return f"{code}{told}" + (f" (hint: {error.hint})" if error.hint else "")


def dead_letter_reason(record: Record) -> dict[str, str]:
    """The `__dlq.errors.*` headers of a dead letter, without their prefix."""
    return {
        name.removeprefix(PREFIX): content.decode("utf-8", "replace")
        for name, content in record.headers
        if name.startswith(PREFIX)
    }


def job_id_of(record: Record) -> str | None:
    """The job_id in a message of a job, else its key; None without both."""
    found = _fields(record).get("job_id")
    if isinstance(found, str):
        return found
    return record.key.decode("utf-8", "replace") if record.key else None


def refusals_of(kafka: KafkaSettings, job_ids: Collection[str]) -> dict[str, Result]:
    """The results of refused messages with these job_ids, from the dead letters there are now. Raises BrokerError."""
    wanted = frozenset(job_ids)
    return refusals(kafka, lambda refusal: refusal.job_id in wanted) if wanted else {}


def refusals(kafka: KafkaSettings, is_wanted: Callable[[Result], bool]) -> dict[str, Result]:
    """The newest wanted refusal of each job_id. Raises BrokerError."""
    suffix = dlq_topic("")
    topics = [name for name in list_topics(kafka) if name.endswith(suffix) and task_of(name.removesuffix(suffix))]
    found: dict[str, Result] = {}
    if not topics:
        return found
    with contextlib.closing(_consumer(kafka)) as consumer:
        ends = consumer.assign_from(topics, at="earliest")
        unread = {partition: high for partition, (low, high) in ends.items() if high > low}
        deadline = time.monotonic() + kafka.request_timeout_s
        for record in consumer.read_until(unread):
            if record is not None:
                deadline = time.monotonic() + kafka.request_timeout_s
                refusal = refusal_of(record)
                if refusal is not None and is_wanted(refusal):
                    found[refusal.job_id] = refusal
            elif time.monotonic() >= deadline:
                break
    return found


def refusal_of(letter: Record) -> Result | None:
    """The result of the message of a dead letter; None where that is a failed job, or a message without any id.

    It is the one on `results`, but for what a shortened letter does not have.
    """
    headers = dict(letter.headers)
    named = headers.get(JOB_ID, b"").decode("utf-8", "replace") or job_id_of(letter)
    if OUTCOME in headers or named is None:
        return None
    reason = dead_letter_reason(letter)
    field = reason.get("field")
    # The header holds the error as a log shows it: field, message and hint in one text.
    message, _, hint = reason.get("message", "no reason given").partition("\nhint: ")
    error = Failure(
        code=reason.get("exception", "unknown"),
        message=message.removeprefix(f"{field}: "),
        field=field,
        hint=hint or None,
    )
    sent_to = reason.get("topic", letter.topic.removesuffix(dlq_topic("")))
    partition, offset, timestamp_ms = (_number(reason.get(name)) for name in ("partition", "offset", "timestamp"))
    return refused_result(
        error, Origin("", sent_to, partition or 0, offset or 0, timestamp_ms), letter.value, job_id=named
    )


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
    with contextlib.closing(_consumer(kafka)) as consumer:
        consumer.assign_since([TOKENS, RESULTS], began - _MARGIN)
        yield from _events(consumer, waiting, find, time.monotonic() + timeout_s, is_watched)


def text_so_far(kafka: KafkaSettings, job_id: str, claimed_at: datetime, *, timeout_s: float) -> TextSoFar | None:
    """The text of a running job as far as `tokens` has it now; None where it has none, or the job is not streamed.

    Raises BrokerError, also where the topic cannot be read to its end within `timeout_s`.
    """
    reader = StreamReader()
    with contextlib.closing(_consumer(kafka)) as consumer:
        found = consumer.assign_since([TOKENS], claimed_at - _MARGIN)
        unread = {partition: end for partition, (begin, end) in found.items() if end > begin}
        deadline = time.monotonic() + timeout_s
        for record in consumer.read_until(unread):
            if record is None:
                if time.monotonic() >= deadline:
                    raise BrokerUnavailable("the text so far could not be read in time")
            elif chunk := _chunk_of(record, [job_id]):
                reader.take(chunk)
    return TextSoFar(job_id, reader.attempt, reader.text) if reader.attempt else None


def _consumer(kafka: KafkaSettings) -> Consumer:
    return Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-reader")


_POLL_S: Final = 0.2
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,19}")


def _number(digits: str | None) -> int | None:
    return int(digits) if digits and _WHOLE_NUMBER.fullmatch(digits) else None


def _fields(record: Record) -> dict[str, Any]:
    try:
        fields = json.loads(record.value or b"")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


#: Between two looks into the database, for jobs whose result cannot be read from Kafka any more.
_LOOK_EVERY_S: Final = 2.0
#: Chunks are read from so long before the job's first claim, because the clocks of worker and database may differ.
_MARGIN: Final = timedelta(minutes=1)


def _events(
    consumer: Consumer, waiting: set[str], find: Find, deadline: float, is_watched: Callable[[], bool]
) -> Iterator[Event]:
    readers = StreamReaders(waiting)
    look_due = time.monotonic()  # at once: a job may have ended before the consumer stood
    while waiting and time.monotonic() < deadline and is_watched():
        record, found = consumer.poll(_POLL_S), list[Event]()
        if record is not None:
            found = _told_by(record, waiting, readers)
        elif time.monotonic() >= look_due:
            look_due = time.monotonic() + _LOOK_EVERY_S
            ended = [job.outcome for name, job in find(waiting).items() if name in waiting and job.outcome is not None]
            found += map(_recorded, map(Result.decode, ended))
        for event in found:
            if isinstance(event, Ended):
                waiting.discard(event.job_id)
            yield event


def _told_by(record: Record, waiting: set[str], readers: StreamReaders) -> list[Event]:
    """What a result or a chunk says of a job that is waited for."""
    found: list[Event] = []
    if record.topic == RESULTS:
        result = read_result(record) if _is_of(record, waiting) else None
        return [_recorded(result)] if result is not None and result.job_id in waiting else found
    if (chunk := _chunk_of(record, waiting)) is None:
        return found
    reader = readers[chunk.job_id]
    if reader.take(chunk):
        found.append(TextSoFar(chunk.job_id, reader.attempt, reader.text))
    if (end := reader.end) is not None and end.status is not None:
        has_text = end.status is Status.SUCCEEDED and end.text_ref is None
        reason = end.error.message if end.error else None
        found.append(Ended(chunk.job_id, end.status, reader.text if has_text else None, reason, True))
    return found


def _is_of(record: Record, waiting: Collection[str]) -> bool:
    return (record.key or b"").decode("utf-8", "replace") in waiting


def _chunk_of(record: Record, waiting: Collection[str]) -> Chunk | None:
    """The chunk of a job that is waited for; None of others, and of what is none."""
    if _is_of(record, waiting):
        with contextlib.suppress(MalformedMessage):
            chunk = read_chunk(record.value, record.headers)
            return chunk if chunk.job_id in waiting else None
    return None


def _recorded(result: Result) -> Ended:
    reason = result.error.message if result.error else None
    return Ended(result.job_id, result.status, result.text, reason, result.num_chunks is not None)
