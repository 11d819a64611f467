"""The outcomes of jobs just sent: their results, and the dead letters of those that were refused."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from pydantic import ValidationError

from alphaloop.errors import MalformedMessage
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import RESULTS, TOKENS, ensure_topics
from alphaloop.messages import Result, Status, StreamReaders, read_chunk
from alphaloop.messages.dead_letter import OUTCOME, PREFIX
from alphaloop.messages.topics import dlq_topic, jobs_topic
from alphaloop.settings import KafkaSettings
from alphaloop.store.redrives import LetterKey

_POLL_S: Final = 0.2
_LABELS: Final = ("custom_id", "batch_id")


@dataclass(frozen=True, slots=True)
class Refusal:
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


Outcome = Result | Refusal


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
        self._consumer = Consumer(kafka, group_id=f"alphaloop-reader-{uuid.uuid4().hex}", client_id="alphaloop-reader")
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
        if self._on_text is None or (record.key or b"").decode("utf-8", "replace") not in waiting:
            return
        with contextlib.suppress(MalformedMessage):
            chunk = read_chunk(record.value, record.headers)
            if chunk.job_id in waiting and (text := texts[chunk.job_id]).take(chunk):
                self._on_text(chunk.job_id, text.text)

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def _refusal(record: Record) -> Refusal | None:
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
    return Refusal(job_id, code, message, field, hint or None, custom_id, batch_id, letter)


def job_id_of(record: Record) -> str | None:
    """The job_id in a message of a job, else its key; None without both."""
    found = _fields(record).get("job_id")
    if isinstance(found, str):
        return found
    return record.key.decode("utf-8", "replace") if record.key else None


def _fields(record: Record) -> dict[str, Any]:
    try:
        fields = json.loads(record.value or b"")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
