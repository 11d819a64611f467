"""The ends of jobs, read from Kafka: results, earlier refusals, and texts while they grow.

A refused message has no row in the database. If it was refused before this reader began, its dead letter is read,
because there are few of these and many results. `follow` takes whichever comes first, the final chunk from
`tokens`, the result from `results`, or the row of the database: a job need not be streamed, and a chunk or a result may
be older than its topic keeps it.

`find_jobs` says where jobs are: in Kafka, with a worker, ended, refused, or nowhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from alphaloop.client.arrivals import Piece, chunk_of, key_of, read_result, reader_of
from alphaloop.dead_letters.reading import refusals_of
from alphaloop.kafka.backlog import Message, Unfinished, search, unfinished
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import RESULTS, TOKENS, ensure_topics
from alphaloop.messages import (
    AnswerMessage,
    RecordPlace,
    Result,
    Status,
    StreamReader,
    StreamReaders,
)
from alphaloop.messages.codec import moment_of
from alphaloop.messages.topics import retry_delay_s
from alphaloop.settings import KafkaSettings, Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import KnownJob, ended_among, known_jobs
from alphaloop.store.promises import PromisedEnd, newest_promises
from alphaloop.store.workers import SILENT_AFTER, SeenWorker, WorkerStore, not_served
from alphaloop.wording import second


def reason_of(result: Result) -> str | None:
    """Why there is no text, in one line with the error's code, field and hint; None for one that succeeded."""
    if (error := result.error) is None:
        return None
    words = f"{error.field}: {error.message}" if error.field else error.message
    code = "" if words.startswith(error.code) else f"{error.code}: "  # not "cancelled: cancelled on request"
    return f"{code}{words}" + (f" (hint: {error.hint})" if error.hint else "")


@dataclass(frozen=True, slots=True)
class Waits:
    """A job that has not ended. One that is not claimed may not exist."""

    job_id: str
    is_claimed: bool


@dataclass(frozen=True, slots=True)
class TextSoFar:
    """The texts of a job's latest attempt, as far as they are certain; `text` is the content of the first."""

    job_id: str
    attempt: int
    text: str
    messages: tuple[AnswerMessage, ...] = ()  #: where they say more than `text`

    @property
    def shown(self) -> str:
        """What a person reads: of several texts the first, because they grow together."""
        return as_one_text(self.messages[:1]) if self.messages else self.text


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's end. `reason` says why there is no text."""

    job_id: str
    status: Status
    text: str | None
    reason: str | None
    is_streamed: bool
    messages: tuple[AnswerMessage, ...] = ()  #: where they say more than `text`

    @property
    def shown(self) -> str | None:
        """What a person reads; None where there is no text, or where it lies elsewhere."""
        return as_one_text(self.messages) if self.messages else self.text


def as_one_text(messages: Sequence[AnswerMessage]) -> str:
    """Texts for a person to read: one that is content alone as it is, all else below headings.

    While the first one grows the result does too, and the others come after it.
    """
    texts = list[str]()
    for number, message in enumerate(messages, 1):
        named = f"[text {number}]\n" if number > 1 else ""
        parts = list[str]()
        if message.reasoning is not None:
            parts.append(_REASONING + message.reasoning)
        if message.content or (message.content is not None and not message.tool_calls):
            parts.append(_ANSWER + message.content if message.reasoning is not None else message.content)
        parts += [_heading_of(call.function.name) + call.function.arguments for call in message.tool_calls]
        texts.append(named + _BETWEEN.join(parts))
    return _BETWEEN.join(texts)


class GrowingText:
    """The first text of an answer as `as_one_text` shows it, piece by piece."""

    def __init__(self) -> None:
        #: The part of the last piece: its heading, and which call it is.
        self._part: tuple[str, int] | None = None
        self._has_reasoning = False

    def added(self, piece: Piece) -> str:
        """What the piece adds to the text so far; a piece of another text adds nothing."""
        if piece.begins_again:
            self._part, self._has_reasoning = None, False
        if piece.choice:
            return ""
        if (call := piece.tool_call) is not None:
            part, text = (_heading_of(call.name), call.index), call.arguments
        elif piece.reasoning:
            part, text = (_REASONING, 0), piece.reasoning
            self._has_reasoning = True
        elif piece.text:
            part, text = (_ANSWER if self._has_reasoning else "", 0), piece.text
        else:
            return ""
        before, self._part = self._part, part
        return text if part == before else (_BETWEEN if before else "") + part[0] + text


_REASONING: Final = "[reasoning]\n"
_ANSWER: Final = "[answer]\n"
_BETWEEN: Final = "\n\n"


def _heading_of(function: str) -> str:
    return f"[call of {function}]\n"


Event = Waits | TextSoFar | Ended


def follow(
    kafka: KafkaSettings,
    database: Database,
    job_ids: Collection[str],
    *,
    timeout_s: float,
    is_watched: Callable[[], bool] = lambda: True,
) -> Iterator[Event]:
    """What happens to the jobs, until each has ended or the time is up; the end of each comes once.

    `is_watched` is asked several times a second: nothing more is read once it says no. Creates missing topics. Raises
    BrokerError and StoreError.
    """
    known = known_jobs(database, job_ids)
    for job in known.values():
        if job.outcome is not None:
            yield recorded(Result.decode(job.outcome))
    waiting = {job_id for job_id in job_ids if job_id not in known or known[job_id].outcome is None}
    if not waiting:
        return
    for job_id in sorted(waiting):
        yield Waits(job_id, job_id in known)
    began = min((known[job_id].created_at for job_id in waiting if job_id in known), default=datetime.now(UTC))
    ensure_topics(kafka, ())
    with contextlib.closing(reader_of(kafka)) as consumer:
        consumer.assign_since([TOKENS, RESULTS], began - _MARGIN)
        yield from _events(consumer, waiting, database, time.monotonic() + timeout_s, is_watched)


def text_so_far(kafka: KafkaSettings, job_id: str, claimed_at: datetime) -> TextSoFar | None:
    """The text of a running job as far as `tokens` has it now; None where it has none, or the job is not streamed.

    Raises BrokerError, also where the topic cannot be read to its end.
    """
    reader = StreamReader()
    with contextlib.closing(reader_of(kafka)) as consumer:
        bounds = consumer.assign_since([TOKENS], claimed_at - _MARGIN)
        for record in consumer.read_through({place: end for place, (begin, end) in bounds.items() if end > begin}):
            if chunk := chunk_of(record, [job_id]):
                reader.take(chunk)
    return _so_far(job_id, reader) if reader.attempt else None


_POLL_S: Final = 0.2
#: Between two looks into the database, for jobs whose result cannot be read from Kafka any more.
_LOOK_EVERY_S: Final = 2.0
#: Chunks are read from so long before the job's first claim, because the clocks of worker and database may differ.
_MARGIN: Final = timedelta(minutes=1)


def _events(
    consumer: Consumer, waiting: set[str], database: Database, deadline: float, is_watched: Callable[[], bool]
) -> Iterator[Event]:
    readers = StreamReaders(waiting)
    look_due = time.monotonic()  # at once: a job may have ended before the consumer stood
    while waiting and time.monotonic() < deadline and is_watched():
        record, events = consumer.poll(_POLL_S), list[Event]()
        if record is not None:
            events = _events_in(record, waiting, readers)
        elif time.monotonic() >= look_due:
            look_due = time.monotonic() + _LOOK_EVERY_S
            ended = [
                job.outcome
                for name, job in known_jobs(database, waiting).items()
                if name in waiting and job.outcome is not None
            ]
            events += map(recorded, map(Result.decode, ended))
        for event in events:
            if isinstance(event, Ended):
                waiting.discard(event.job_id)
            yield event


def _events_in(record: Record, waiting: set[str], readers: StreamReaders) -> list[Event]:
    """What a result or a chunk says about a job that is waited for."""
    if record.topic == RESULTS:
        result = read_result(record) if key_of(record) in waiting else None
        return [recorded(result)] if result is not None and result.job_id in waiting else []
    if (chunk := chunk_of(record, waiting)) is None:
        return []
    events: list[Event] = []
    reader = readers[chunk.job_id]
    if reader.take(chunk) or any(not news.is_final for news in reader.news):
        events.append(_so_far(chunk.job_id, reader))
    if (end := reader.end) is not None and end.status is not None:
        has_text = end.status is Status.SUCCEEDED and not end.is_elsewhere
        reason = end.error.message if end.error else None
        messages = _more_than_text(reader.answer.messages) if has_text else ()
        text = reader.text if has_text and not (messages and messages[0].content is None) else None
        events.append(Ended(chunk.job_id, end.status, text, reason, True, messages))
    return events


def _so_far(job_id: str, reader: StreamReader) -> TextSoFar:
    return TextSoFar(job_id, reader.attempt, reader.text, _more_than_text(reader.answer.messages))


def recorded(result: Result) -> Ended:
    """The end of its job."""
    reason, messages = result.error.message if result.error else None, _more_than_text(result.messages)
    return Ended(result.job_id, result.status, result.text, reason, result.num_chunks is not None, messages)


def _more_than_text(messages: tuple[AnswerMessage, ...]) -> tuple[AnswerMessage, ...]:
    match messages:
        case () | (AnswerMessage(reasoning=None, tool_calls=()),):
            return ()
    return messages


class JobPlace(StrEnum):
    """Where a job is."""

    WAITING = "waiting"  #: in Kafka: no worker has claimed it, or one gave it back
    HELD = "held"  #: a worker has claimed it and does not decode it yet
    RUNNING = "running"  #: a worker decodes it
    LEFT = "left"  #: its worker died or lost the lease: the next one takes it over
    ENDED = "ended"  #: its outcome is recorded
    REFUSED = "refused"  #: its message became no job
    UNKNOWN = "unknown"  #: none of these


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """One job: where it is, and what shows it."""

    job_id: str
    place: JobPlace
    claimed: KnownJob | None = None
    message: Message | None = None
    refusal: Result | None = None
    not_served: str | None = None  #: why no worker takes a job that waits
    batch_end: PromisedEnd | None = None  #: when its batch is expected to end, while both are open

    @property
    def is_open(self) -> bool:
        """Whether it is known and has not ended."""
        return self.place not in (JobPlace.ENDED, JobPlace.REFUSED, JobPlace.UNKNOWN)

    @property
    def result(self) -> Result | None:
        """The recorded outcome."""
        outcome = self.claimed.outcome if self.claimed else None
        return None if outcome is None else Result.decode(outcome)

    def sentence(self) -> str:
        """Where it is, and when its batch ends, in words."""
        end = f"; batch {self.batch_end.batch_id}: {self.batch_end.sentence()}" if self.batch_end else ""
        return self._where() + end

    def _where(self) -> str:
        match self.place:
            case JobPlace.WAITING:
                why = "" if self.not_served is None else f"; {self.not_served}"
                return _waiting(self.message, self.claimed) + why
            case JobPlace.ENDED if (result := self.result) is not None and self.claimed is not None:
                when = f" at {second(self.claimed.finished_at)}" if self.claimed.finished_at else ""
                tokens = f", {result.usage.completion_tokens} tokens" if result.usage else ""
                reused = f", answered with the text of job {result.reused_from}" if result.reused_from else ""
                return f"ended {result.status.value}{when}{tokens}{reused}" + _because(reason_of(result))
            case JobPlace.REFUSED if self.refusal is not None:
                return f"refused{_because(reason_of(self.refusal))}"
            case JobPlace.UNKNOWN:
                return "unknown: no worker has seen it, and it waits in no topic of jobs and in none of dead letters"
        assert self.claimed is not None  # noqa: S101 - every other place is a claim's
        return _with_worker(self.place, self.claimed)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        facts: dict[str, Any] = {"job_id": self.job_id, "place": self.place.value, "sentence": self.sentence()}
        if (message := self.message) is not None:
            facts |= {name: getattr(message, name) for name in ("task", "topic", "partition", "offset", "num_before")}
            facts["sent_at"] = moment_of(message.timestamp_ms)
        if self.not_served is not None:
            facts["not_served"] = self.not_served
        if self.batch_end is not None:
            facts["batch"] = {"id": self.batch_end.batch_id, "end": self.batch_end.as_json()}
        if (claimed := self.claimed) is not None:
            facts |= {name: getattr(claimed, name) for name in ("task", "status", "attempt")}
            facts |= {"worker": claimed.owner, "lease_expires_at": claimed.lease_expires_at}
            facts |= {"claimed_at": claimed.created_at, "finished_at": claimed.finished_at}
            counts = ("num_tokens", "num_crashes", "num_failures", "is_cancelling")
            facts |= {name: getattr(claimed, name) for name in counts}
        if (result := self.result) is not None:
            facts["num_tokens"] = result.usage.completion_tokens if result.usage else None
            facts["reused_from"] = result.reused_from
        if (result := self.refusal or result) is not None:
            facts["status"] = result.status.value
            facts |= {"error": result.error.model_dump(exclude_none=True)} if result.error else {}
        return facts


def unended(kafka: KafkaSettings, database: Database) -> dict[str, Unfinished]:
    """By task, the messages whose job has not ended: waiting, held or being decoded, or a refused one.

    A job may end before an earlier one of its partition, and is unfinished for Kafka until then. Raises BrokerError.
    """
    by_task = unfinished(kafka)
    ended = ended_among(database, [job_id for messages in by_task.values() for job_id in messages.job_ids])
    for messages in by_task.values():
        messages.num_messages -= sum(job_id in ended for job_id in messages.job_ids)
    return by_task


def find_jobs(settings: Settings, database: Database, job_ids: Sequence[str]) -> list[Whereabouts]:
    """Where each of the jobs is. Reads the backlog and the dead letters for those that no worker has claimed.

    Raises StoreError and BrokerError, and BrokerUnavailable where a job may wait in what was not read.
    """
    claimed = known_jobs(database, job_ids)
    left = [job_id for job_id in job_ids if job_id not in claimed or _waits_again(claimed[job_id])]
    wanted = frozenset(left)
    waiting = search(settings.kafka, lambda job_id, _: job_id in wanted, num=len(wanted)) if wanted else []
    messages = {message.job_id: message for message in waiting}
    missing = [job_id for job_id in left if job_id not in messages]
    if missing:  # a worker may have claimed them meanwhile
        claimed |= known_jobs(database, missing)
    refused = refusals_of(settings.kafka, [job_id for job_id in left if job_id not in claimed])
    places = [_place(job_id, claimed.get(job_id), messages.get(job_id), refused.get(job_id)) for job_id in job_ids]
    if any(job.place is JobPlace.WAITING for job in places):
        workers = WorkerStore(database).seen()
        places = [_with_reason(job, settings, workers) for job in places]
    batches = {job.job_id: batch_id for job in places if job.is_open and (batch_id := _batch_of(job))}
    ends = newest_promises(database, set(batches.values()))
    open_ends = {batch_id: end for batch_id, end in ends.items() if end.ended_at is None}
    return [replace(job, batch_end=open_ends.get(batches.get(job.job_id, ""))) for job in places]


def _batch_of(job: Whereabouts) -> str | None:
    source = job.claimed or job.message
    return None if source is None else source.batch_id


def _with_reason(job: Whereabouts, settings: Settings, workers: Sequence[SeenWorker]) -> Whereabouts:
    source = job.message or job.claimed
    if job.place is not JobPlace.WAITING or source is None:
        return job
    return replace(job, not_served=not_served(settings.bindings, source.task, workers))


def _place(job_id: str, claimed: KnownJob | None, message: Message | None, refusal: Result | None) -> Whereabouts:
    if claimed is not None and not _waits_again(claimed):
        return Whereabouts(job_id, _place_of(claimed), claimed)
    # A refused message waits no more, though its offset is committed a moment later.
    if message is not None and refusal is not None and refusal.origin == _lies_at(message):
        message = None
    if message is not None or claimed is not None:
        return Whereabouts(job_id, JobPlace.WAITING, claimed, message)
    if refusal is not None:
        return Whereabouts(job_id, JobPlace.REFUSED, refusal=refusal)
    return Whereabouts(job_id, JobPlace.UNKNOWN)


def _lies_at(message: Message) -> RecordPlace:
    return RecordPlace(topic=message.topic, partition=message.partition, offset=message.offset)


def _waits_again(claimed: KnownJob) -> bool:
    """Whether the claim was given back, so that the message waits in Kafka for another one."""
    return claimed.outcome is None and claimed.owner is None


def _place_of(claimed: KnownJob) -> JobPlace:
    if claimed.outcome is not None:
        return JobPlace.ENDED
    if not claimed.is_held:
        return JobPlace.LEFT
    return JobPlace.RUNNING if claimed.num_tokens is not None else JobPlace.HELD


def _waiting(message: Message | None, claimed: KnownJob | None) -> str:
    again = f"; it has failed {_times(claimed.num_failures)}" if claimed and claimed.num_failures else ""
    if message is None:
        return f"waits in Kafka: a worker gave it back{again}"
    sent = f", sent at {second(at)}" if (at := moment_of(message.timestamp_ms)) else ""
    place = f"{message.topic}, partition {message.partition}, offset {message.offset}"
    if delay_s := retry_delay_s(message.topic):
        return f"waits {delay_s} s to be tried again ({place}{sent}){again}"
    before = f"after {message.num_before} messages of its partition" if message.num_before else "first in its partition"
    return f"waits in Kafka, {before} ({place}{sent}){again}"


def _with_worker(place: JobPlace, claimed: KnownJob) -> str:
    until = (
        f"its lease runs until {second(claimed.lease_expires_at)}" if claimed.lease_expires_at else "without a lease"
    )
    cancelling = "; its cancellation was asked for" if claimed.is_cancelling else ""
    attempt = f", attempt {claimed.attempt}" if claimed.attempt > 1 else ""
    if place is JobPlace.LEFT:
        return f"{claimed.owner} had it{attempt} and is gone: the next worker takes it over{cancelling}"
    if place is JobPlace.RUNNING and claimed.silence is not None:
        said = "" if claimed.silence < SILENT_AFTER else f" {claimed.silence.total_seconds():.0f} s ago"
        return f"is decoded by {claimed.owner}{attempt}: {claimed.num_tokens} tokens so far{said}; {until}{cancelling}"
    return f"is held by {claimed.owner}{attempt} and waits there for a free slot; {until}{cancelling}"


def _because(reason: str | None) -> str:
    return "" if reason is None else f", {reason}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
