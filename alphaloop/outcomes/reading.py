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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from alphaloop.client.arrivals import Piece, chunk_of, key_of, read_result, reader_of
from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import RESULTS, TOKENS, ensure_topics, list_topics
from alphaloop.messages import (
    AnswerMessage,
    Failure,
    Origin,
    Result,
    Status,
    StreamReader,
    StreamReaders,
    refused_result,
)
from alphaloop.messages.dead_letter import JOB_ID, OUTCOME, PREFIX
from alphaloop.messages.topics import dlq_topic, task_of
from alphaloop.settings import KafkaSettings
from alphaloop.store.known_jobs import KnownJob


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
    with contextlib.closing(reader_of(kafka)) as consumer:
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

    While the first one grows the result does too, and the others come behind it.
    """
    told = list[str]()
    for number, message in enumerate(messages, 1):
        named = f"[text {number}]\n" if number > 1 else ""
        parts = list[str]()
        if message.reasoning is not None:
            parts.append(_REASONING + message.reasoning)
        if message.content or (message.content is not None and not message.tool_calls):
            parts.append(_ANSWER + message.content if message.reasoning is not None else message.content)
        parts += [_heading_of(call.function.name) + call.function.arguments for call in message.tool_calls]
        told.append(named + _BETWEEN.join(parts))
    return _BETWEEN.join(told)


class GrowingText:
    """The first text of an answer as `as_one_text` shows it, told by what each piece adds."""

    def __init__(self) -> None:
        #: The part that was told last: its heading, and which call it is.
        self._part: tuple[str, int] | None = None
        self._has_reasoning = False

    def added(self, piece: Piece) -> str:
        """What stands behind all that was told before; a piece of another text adds nothing."""
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
    with contextlib.closing(reader_of(kafka)) as consumer:
        consumer.assign_since([TOKENS, RESULTS], began - _MARGIN)
        yield from _events(consumer, waiting, find, time.monotonic() + timeout_s, is_watched)


def text_so_far(kafka: KafkaSettings, job_id: str, claimed_at: datetime, *, timeout_s: float) -> TextSoFar | None:
    """The text of a running job as far as `tokens` has it now; None where it has none, or the job is not streamed.

    Raises BrokerError, also where the topic cannot be read to its end within `timeout_s`.
    """
    reader = StreamReader()
    with contextlib.closing(reader_of(kafka)) as consumer:
        found = consumer.assign_since([TOKENS], claimed_at - _MARGIN)
        unread = {partition: end for partition, (begin, end) in found.items() if end > begin}
        deadline = time.monotonic() + timeout_s
        for record in consumer.read_until(unread):
            if record is None:
                if time.monotonic() >= deadline:
                    raise BrokerUnavailable("the text so far could not be read in time")
            elif chunk := chunk_of(record, [job_id]):
                reader.take(chunk)
    return _so_far(job_id, reader) if reader.attempt else None


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
        result = read_result(record) if key_of(record) in waiting else None
        return [_recorded(result)] if result is not None and result.job_id in waiting else found
    if (chunk := chunk_of(record, waiting)) is None:
        return found
    reader = readers[chunk.job_id]
    if reader.take(chunk) or any(not one.is_final for one in reader.news):
        found.append(_so_far(chunk.job_id, reader))
    if (end := reader.end) is not None and end.status is not None:
        has_text = end.status is Status.SUCCEEDED and not end.is_elsewhere
        reason = end.error.message if end.error else None
        messages = _more_than_text(reader.answer.messages) if has_text else ()
        text = reader.text if has_text and not (messages and messages[0].content is None) else None
        found.append(Ended(chunk.job_id, end.status, text, reason, True, messages))
    return found


def _so_far(job_id: str, reader: StreamReader) -> TextSoFar:
    return TextSoFar(job_id, reader.attempt, reader.text, _more_than_text(reader.answer.messages))


def _recorded(result: Result) -> Ended:
    reason, messages = result.error.message if result.error else None, _more_than_text(result.messages)
    return Ended(result.job_id, result.status, result.text, reason, result.num_chunks is not None, messages)


def _more_than_text(messages: tuple[AnswerMessage, ...]) -> tuple[AnswerMessage, ...]:
    match messages:
        case () | (AnswerMessage(reasoning=None, tool_calls=()),):
            return ()
    return messages
