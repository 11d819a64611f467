"""The ends of jobs, read from Kafka: results, the dead letters of refused jobs, and texts while they grow.

A refused job has no row in the database, so its dead letter is looked for. `follow` takes whichever comes first, the
final chunk from `tokens`, the result from `results`, or the row of the database: a job need not be streamed, and a
chunk or a result may be older than its topic keeps it.
"""

from __future__ import annotations

import contextlib
import json
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
from alphaloop.messages import Chunk, Result, Status, StreamReader, StreamReaders, read_chunk
from alphaloop.messages.dead_letter import OUTCOME, PREFIX
from alphaloop.messages.topics import dlq_topic, jobs_topic, task_of
from alphaloop.settings import KafkaSettings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import KnownJob, LetterKey, RedriveStore


@dataclass(frozen=True, slots=True)
class RefusedJob:
    """A job that ended in the dead-letter topic."""

    job_id: str
    code: str
    message: str
    field: str | None = None
    hint: str | None = None
    custom_id: str | None = None
    batch_id: str | None = None
    letter: LetterKey | None = None  #: where it lies

    def as_json(self) -> dict[str, Any]:
        """The same form as a failed result's."""
        error = {"code": self.code, "message": self.message, "field": self.field, "hint": self.hint}
        return {"job_id": self.job_id, "status": "refused", "error": {k: v for k, v in error.items() if v is not None}}


Outcome = Result | RefusedJob


class OutcomeReader:
    """Reads `results` and the dead letters of some tasks from its construction on: construct it before you produce."""

    def __init__(
        self, kafka: KafkaSettings, tasks: Collection[str], *, on_text: Callable[[str, str], None] | None = None
    ) -> None:
        """Creates missing topics first. Raises BrokerError.

        `on_text` is called with a job_id and its text so far, for streamed jobs whose outcomes are read.
        """
        self._on_text = on_text
        ensure_topics(kafka, tasks)
        self._consumer = _consumer(kafka)
        try:
            topics = [RESULTS, *([TOKENS] if on_text else []), *(dlq_topic(jobs_topic(task)) for task in sorted(tasks))]
            self._consumer.assign_from(topics, at="latest")
        except BaseException:
            self._consumer.close()
            raise

    def outcomes(
        self, job_ids: Collection[str], *, timeout_s: float, alive: Callable[[], None] = lambda: None
    ) -> Iterator[Outcome]:
        """The first outcome of each of these jobs as they arrive; ends when all are there or time is up.

        `alive` is called between two polls and may raise to end the wait.
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
            outcome = read_outcome(record) if record is not None else None
            if outcome is not None and outcome.job_id in waiting:
                waiting.remove(outcome.job_id)
                yield outcome

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


def read_outcome(record: Record) -> Outcome | None:
    """A record of `results` or of a dead-letter topic; None for one that names no job, or a job with a result."""
    if record.topic != RESULTS:
        return _refusal(record)
    try:
        return Result.decode(record.value or b"")
    except ValidationError:
        return None


def status_of(outcome: Outcome) -> str:
    """`succeeded`, `failed`, `expired`, `cancelled` or `refused`."""
    return outcome.status.value if isinstance(outcome, Result) else "refused"


def reason_of(outcome: Outcome) -> str | None:
    """Why there is no text, in one line with the error's code, field and hint; None for one that succeeded."""
    error = outcome.error if isinstance(outcome, Result) else outcome
    if error is None:
        return None
    told = f"{error.field}: {error.message}" if error.field else error.message
    code = "" if told.startswith(error.code) else f"{error.code}: "  # not "cancelled: cancelled on request"
    return f"{code}{told}" + (f" (hint: {error.hint})" if error.hint else "")


def is_success(outcome: Outcome | None) -> bool:
    """Whether there is a text."""
    return isinstance(outcome, Result) and outcome.status is Status.SUCCEEDED


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


def refusals_of(kafka: KafkaSettings, job_ids: Collection[str]) -> dict[str, RefusedJob]:
    """Those of the jobs that lie in a dead-letter topic now. Raises BrokerError."""
    wanted = frozenset(job_ids)
    return refusals(kafka, lambda refusal: refusal.job_id in wanted) if wanted else {}


def refusals(kafka: KafkaSettings, is_wanted: Callable[[RefusedJob], bool]) -> dict[str, RefusedJob]:
    """The newest wanted refusal of each job, by job_id. Raises BrokerError."""
    suffix = dlq_topic("")
    topics = [name for name in list_topics(kafka) if name.endswith(suffix) and task_of(name.removesuffix(suffix))]
    found: dict[str, RefusedJob] = {}
    if not topics:
        return found
    with contextlib.closing(_consumer(kafka)) as consumer:
        ends = consumer.assign_from(topics, at="earliest")
        unread = {partition: high for partition, (low, high) in ends.items() if high > low}
        deadline = time.monotonic() + kafka.request_timeout_s
        for record in consumer.read_until(unread):
            if record is not None:
                deadline = time.monotonic() + kafka.request_timeout_s
                refusal = read_outcome(record)
                if isinstance(refusal, RefusedJob) and is_wanted(refusal):
                    found[refusal.job_id] = refusal
            elif time.monotonic() >= deadline:
                break
    return found


def standing_refusals(kafka: KafkaSettings, database: Database, job_ids: Collection[str]) -> dict[str, RefusedJob]:
    """Those of them whose letter was not sent again: one that was waits like any other message.

    Raises BrokerError and StoreError.
    """
    found = refusals_of(kafka, job_ids)
    sent_again = RedriveStore(database).of([why.letter for why in found.values() if why.letter is not None])
    return {job_id: why for job_id, why in found.items() if why.letter not in sent_again}


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
_LABELS: Final = ("custom_id", "batch_id")


def _refusal(record: Record) -> RefusedJob | None:
    if any(name == OUTCOME for name, _ in record.headers):
        return None  # its result says more
    job_id = job_id_of(record)
    if job_id is None:
        return None
    reason = dead_letter_reason(record)
    field = reason.get("field")
    # The header holds the error as a log shows it: field, message and hint in one text.
    message, _, hint = reason.get("message", "no reason given").partition("\nhint: ")
    sent = _fields(record)
    custom_id, batch_id = (found if isinstance(found := sent.get(name), str) else None for name in _LABELS)
    letter = LetterKey(*record.topic_partition, record.offset, record.timestamp_ms or 0)
    code, message = reason.get("exception", "unknown"), message.removeprefix(f"{field}: ")
    return RefusedJob(job_id, code, message, field, hint or None, custom_id, batch_id, letter)


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
        outcome = read_outcome(record) if _is_of(record, waiting) else None
        return [_recorded(outcome)] if isinstance(outcome, Result) and outcome.job_id in waiting else found
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
