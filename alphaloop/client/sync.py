"""`Client`: send jobs, read their results and texts, cancel, in the calling thread."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from alphaloop.client.arrivals import Alive, Batch, Piece, SubmissionStopped, arrivals, everything_on, key_of, reader_of
from alphaloop.errors import (
    AlphaloopError,
    BrokerError,
    BrokerUnavailable,
    ContentError,
    DeliveryFailed,
    FatalBrokerError,
    InvalidField,
    MalformedMessage,
    MessageError,
    UnknownName,
    UnknownTask,
)
from alphaloop.kafka.backlog import SEARCH_S, search
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer, request_cancellation
from alphaloop.kafka.topics import RESULTS, TOKENS, ensure_topic, ensure_topics, list_topics
from alphaloop.messages import Failure, Job, Origin, RecordPlace, Result, encode_job, parse_job
from alphaloop.messages.fields import without_nulls
from alphaloop.messages.job import Label
from alphaloop.messages.topics import high_topic, is_high, jobs_topic, task_of
from alphaloop.settings import KafkaSettings, Settings, load_settings
from alphaloop.settings.load import ENV_PREFIX
from alphaloop.wording import how_many

if TYPE_CHECKING:
    from alphaloop.claim_check.store import ContentStore

#: A job in one of the forms of docs/reference/messages.md: a message's fields with its task, or a Job.
JobLike = Mapping[str, Any] | Job
_TopicOf = Callable[[str], str]
_LABEL: Final = TypeAdapter[str](Label)
#: Messages that wait for their acknowledgement; then `submit` waits before it takes the next job.
_MOST_PENDING_BYTES: Final = 16 << 20
_ACKNOWLEDGED_S: Final = 120.0
_SERVE_S: Final = 0.005


class Client:
    """Sends jobs and reads what becomes of them. Threads may share it; every open iteration has a consumer of its own.

    Nothing connects before the first call. Errors are those of alphaloop/errors.py: BrokerError where Kafka is away or
    refuses, MessageError for a job that no worker would take.
    """

    def __init__(self, kafka: str | KafkaSettings | Settings | None = None) -> None:
        """`kafka` is a broker's HOST:PORT, settings of the connection, or all settings.

        What it does not say comes from where the commands take it: the environment and configs/. Raises ConfigError.
        """
        settings = kafka if isinstance(kafka, Settings) else _of_the_environment()
        connection = settings.kafka
        if isinstance(kafka, str):
            connection = connection.model_copy(update={"bootstrap_servers": kafka})
        elif isinstance(kafka, KafkaSettings):
            connection = kafka
        # Statistics wait in a client until it is polled, and these may stand idle for days.
        extra = {**connection.extra, "statistics.interval.ms": 0}
        self._kafka = connection.model_copy(update={"extra": extra})
        self._settings = settings
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._offsets: Consumer | None = None
        self._ready = set[str]()

    def submit(
        self,
        jobs: JobLike | Iterable[JobLike],
        *,
        batch_id: str | None = None,
        high: bool = False,
        stream: bool = False,
        alive: Alive = lambda: None,
    ) -> Batch:
        """Send jobs, and return when Kafka has stored them all.

        The jobs of a sequence are all checked before one is sent. Those of an iterator are checked and sent as it gives
        them, and none is kept. A job without a `job_id` gets one, `batch_id` those without one of their own. `high`
        sends to jobs.TASK.high, `stream` asks for the texts while they are decoded.

        Raises InvalidField, MalformedMessage or UnknownTask, which name the job as `jobs[N]`, BrokerError and
        ContentError; SubmissionStopped in their place if jobs had been sent before. Whatever the iterator raises
        passes through.
        """
        if batch_id is not None:
            _check_label(batch_id)
        topic_of = high_topic if high else jobs_topic
        read = partial(self._read, topic_of=topic_of, batch_id=batch_id, stream=stream)
        several: Iterable[JobLike] = [jobs] if isinstance(jobs, Mapping | Job) else jobs
        checked = (read(number, job) for number, job in enumerate(several))
        ready = iter(list(checked)) if isinstance(several, Sequence) else checked
        if (first := next(ready, None)) is None:
            return Batch(job_ids=(), batch_id=batch_id, begins=())
        begins = self._ends([RESULTS, TOKENS] if stream else [RESULTS])
        sent = dict[str, None]()
        failure = self._send(chain([first], ready), topic_of, sent, alive)
        if isinstance(failure, FatalBrokerError):
            self.close()  # the next call begins with other connections
        batch = Batch(job_ids=tuple(sent), batch_id=batch_id, begins=begins)
        if failure is None:
            return batch
        if not sent:
            raise failure
        message = f"{how_many(len(sent), 'job')} went to Kafka, then {_named(failure)}"
        raise SubmissionStopped(message, hint=failure.hint, batch=batch) from failure

    def sent_before(self, job_ids: Iterable[str], *, since: datetime | None = None) -> Batch:
        """Jobs that any client sent, as a batch: its results are those from now on, or that were recorded `since` then.

        Raises BrokerError.
        """
        return Batch(job_ids=tuple(dict.fromkeys(job_ids)), begins=self._ends([RESULTS], since))

    def results(self, batch: Batch, *, timeout_s: float | None = None, alive: Alive = lambda: None) -> Iterator[Result]:
        """The result of each job, once, in the order in which they come.

        Every job has one: `succeeded`, `failed`, `expired`, `cancelled` or `refused`. Calling it again begins anew.
        `alive` is called between two polls and may raise to end the wait. Raises ResultsMissing after `timeout_s`,
        BrokerError.
        """
        news = chain.from_iterable(self.polled(batch, alive, timeout_s=timeout_s))
        return (arrival for arrival in news if isinstance(arrival, Result))

    def stream(self, jobs: JobLike | Batch, *, timeout_s: float | None = None) -> Iterator[Piece | Result]:
        """The pieces of a job's text while it is decoded, then its result. A job is submitted first.

        The pieces of several jobs come mixed; submit a batch with `stream=True`. Raises as `submit` and
        `results` do.
        """
        batch = jobs if isinstance(jobs, Batch) else self.submit(jobs, stream=True)
        return chain.from_iterable(self.polled(batch, lambda: None, streams=True, timeout_s=timeout_s))

    def polled(
        self, batch: Batch, alive: Alive, *, streams: bool = False, timeout_s: float | None = None
    ) -> Generator[list[Piece | Result]]:
        """What `results` and `stream` give, as each poll brings it."""
        complete = self._with_text
        return arrivals(self._kafka, batch, streams=streams, timeout_s=timeout_s, alive=alive, complete=complete)

    def cancel(self, jobs: Batch | str | Iterable[str], *, even_if_unknown_until: datetime | None = None) -> None:
        """Ask for the end of jobs; their results say what became of them. One that has ended keeps its outcome.

        `jobs` is a batch, a job_id or several. Unless `even_if_unknown_until` is given, job_ids are looked for in Kafka
        first. Raises UnknownName, and asks for nothing, where one neither waits nor has a result there;
        BrokerUnavailable where there is more than can be read through, BrokerError.
        """
        if isinstance(jobs, Batch) or even_if_unknown_until is not None:
            names = list(jobs.job_ids if isinstance(jobs, Batch) else [jobs] if isinstance(jobs, str) else jobs)
        else:
            names = self._unended({jobs} if isinstance(jobs, str) else set(jobs))
        request_cancellation(self._kafka, names, until=even_if_unknown_until)

    def close(self) -> None:
        """End the connections. What was not acknowledged is dropped, so that nothing is sent later."""
        with self._lock:
            for connection in (self._producer, self._offsets):
                if connection is not None:
                    connection.close()
            self._producer = self._offsets = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unended(self, names: set[str]) -> list[str]:
        """Those of the jobs that have not ended. Raises UnknownName, BrokerUnavailable, BrokerError."""
        unended = {message.job_id for message in search(self._kafka, lambda job_id, _: job_id in names, num=len(names))}
        left, deadline = names - unended, time.monotonic() + SEARCH_S
        self._require(RESULTS)
        for record in everything_on(self._kafka, [RESULTS]) if left else ():
            left.discard(key_of(record))
            if left and time.monotonic() >= deadline:
                raise BrokerUnavailable(f"there are more results than can be read through in {SEARCH_S:g} s")
        if left:
            raise UnknownName(f"no job {', '.join(sorted(left))[:300]}: none waits in Kafka, and `results` has none")
        return sorted(unended)

    def _read(self, number: int, given: JobLike, topic_of: _TopicOf, *, batch_id: str | None, stream: bool) -> Job:
        """The job as it is sent. Raises MessageError, which names it by its number."""
        try:
            job = given if isinstance(given, Job) else self._parsed(given)
            self._require(topic_of(job.task), job.task)
        except MessageError as error:
            error.field = f"jobs[{number}].{error.field}" if error.field else f"jobs[{number}]"
            raise
        changed: dict[str, Any] = {}
        if batch_id is not None and job.batch_id is None:
            changed["batch_id"] = batch_id
        if stream and not job.body.stream:
            changed["body"] = job.body.model_copy(update={"stream": True})
        return job.model_copy(update=changed) if changed else job

    def _parsed(self, given: Mapping[str, Any]) -> Job:
        if not isinstance(given, Mapping):
            raise MalformedMessage("expected a mapping or a Job, found another value")
        fields = without_nulls({**given})
        fields.setdefault("job_id", uuid.uuid4().hex)
        if not isinstance(task := fields.get("task"), str):
            raise InvalidField("expected the task, found none", field="task")
        try:
            value = to_json(fields, inf_nan_mode="constants")
        except ValueError:
            raise MalformedMessage("expected what JSON can hold, found another value") from None
        limits = self._settings.worker
        max_bytes = limits.max_job_bytes
        if self._contents is not None:  # what is too large for a message travels by reference
            max_bytes = max(max_bytes, self._settings.claim_check.max_bytes)
        origin = Origin("", jobs_topic(task), 0, 0)
        return parse_job(value, origin, task=task, max_bytes=max_bytes, ignored=limits.ignored_body_fields)

    def _require(self, topic: str, task: str | None = None) -> None:
        """Create a topic that is missing, those of a task if the settings name it: this user may not see all others.

        Raises UnknownTask for a task without a topic, InvalidField for one without a topic for jobs that go first,
        BrokerError.
        """
        if topic in self._ready:
            return
        if topic not in (there := list_topics(self._kafka)):
            if task is None:
                ensure_topic(self._kafka, topic)
            elif is_high(topic):
                raise no_high_topic(task)
            elif task in self._settings.tasks:
                ensure_topics(self._kafka, [task])
            else:
                known = sorted(set(filter(None, map(task_of, there))))
                hint = f"expected one of {', '.join(known)}" if known else "workers create topics when they start"
                raise UnknownTask(f"no topic {topic[:100]!r}", field="task", hint=hint)
        self._ready.add(topic)

    @cached_property
    def _contents(self) -> ContentStore | None:
        if self._settings.claim_check.url is None:
            return None
        from alphaloop.claim_check.store import ContentStore  # few need its packages

        return ContentStore.of(self._settings.claim_check)

    def _by_reference(self, job: Job) -> Job:
        if self._contents is None:
            return job
        from alphaloop.claim_check.store import by_reference

        return by_reference(job, self._settings.worker.max_job_bytes, self._contents)

    def _with_text(self, result: Result) -> Result:
        """The result with its texts. One whose texts cannot be read keeps the reference, and `error` says why."""
        if not result.is_elsewhere or self._contents is None:
            return result
        from alphaloop.claim_check.store import with_text

        try:
            return with_text(result, self._contents)
        except (ContentError, MessageError) as error:
            return result.model_copy(update={"error": Failure(code=error.code, message=error.message)})

    def _ends(self, topics: Sequence[str], since: datetime | None = None) -> tuple[RecordPlace, ...]:
        """The offsets of what comes next, or came `since` then. Raises BrokerError."""
        for topic in topics:
            self._require(topic)
        with self._lock:
            self._offsets = self._offsets or reader_of(self._kafka)
            if since is None:
                begins = {partition: end for partition, (_, end) in self._offsets.bounds(topics).items()}
            else:
                since_then = self._offsets.bounds_since(topics, since)
                begins = {partition: begin for partition, (begin, _) in since_then.items()}
        return tuple(RecordPlace(**partition._asdict(), offset=offset) for partition, offset in begins.items())

    def _send(
        self, jobs: Iterable[Job], topic_of: _TopicOf, sent: dict[str, None], alive: Alive
    ) -> MessageError | BrokerError | ContentError | None:
        """Send jobs, note them in `sent`, and wait for their acknowledgements; returns what stopped it."""
        deliveries, failure = _Deliveries(), None
        try:
            for job in jobs:
                value = encode_job(self._by_reference(job))
                self._serve(deliveries, alive, down_to_bytes=_MOST_PENDING_BYTES)
                with self._lock:
                    ended = partial(deliveries.ended, len(value))
                    self._started().send(topic_of(job.task), key=job.job_id.encode(), value=value, on_delivery=ended)
                    deliveries.add(len(value))
                sent[job.job_id] = None
        except (MessageError, BrokerError, ContentError) as error:
            failure = error
        try:
            self._serve(deliveries, alive)
        except BrokerError as error:
            failure = failure or error
        return failure

    def _started(self) -> Producer:
        self._producer = self._producer or Producer(self._kafka, client_id="alphaloop-client")
        return self._producer

    def _serve(self, deliveries: _Deliveries, alive: Alive, *, down_to_bytes: int = 0) -> None:
        """Wait until at most `down_to_bytes` lack their acknowledgement. Raises DeliveryFailed after two minutes."""
        deadline = time.monotonic() + _ACKNOWLEDGED_S
        alive()
        while deliveries.num_bytes > down_to_bytes and time.monotonic() < deadline:
            with self._lock:
                self._started().poll()
            if deliveries.num_bytes > down_to_bytes:
                time.sleep(_SERVE_S)
            alive()
        deliveries.check(is_late=deliveries.num_bytes > down_to_bytes)


class _Deliveries:
    """The messages of one submission that wait for their acknowledgement, and the first that failed."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_waiting = self._num_failed = 0
        self._first: BrokerError | None = None

    def add(self, num_bytes: int) -> None:
        """A message was handed over."""
        self.num_bytes += num_bytes
        self._num_waiting += 1

    def ended(self, num_bytes: int, error: BrokerError | None) -> None:
        """What became of one."""
        self.num_bytes -= num_bytes
        self._num_waiting -= 1
        if error is not None:
            self._num_failed += 1
            self._first = self._first or error

    def check(self, *, is_late: bool) -> None:
        """Raises the first failure with the number of all, or DeliveryFailed if a message is late."""
        if self._first is not None:
            message = f"{how_many(self._num_failed, 'job')} not stored: {self._first.message}"
            raise type(self._first)(message, hint=self._first.hint)
        if is_late:
            raise DeliveryFailed(f"{how_many(self._num_waiting, 'job')} not acknowledged within {_ACKNOWLEDGED_S:g} s")


def no_high_topic(task: str) -> InvalidField:
    """The error of a job that shall go first, where its task has no topic for such jobs."""
    create = f"`alphaloop topics create {task} --high` creates it"
    return InvalidField(f"there is no topic {high_topic(task)}", field="task", hint=create)


def _of_the_environment() -> Settings:
    configs, profile = (os.environ.get(f"{ENV_PREFIX}{name}") for name in ("CONFIGS", "PROFILE"))
    return load_settings(Path(configs) if configs else None, profile=profile or None)


def _check_label(batch_id: str) -> None:
    try:
        _LABEL.validate_python(batch_id)
    except ValidationError:
        expected = "expected a label of 1 to 100 characters without control characters, found another value"
        raise InvalidField(expected, field="batch_id") from None


def _named(error: AlphaloopError) -> str:
    field = error.field if isinstance(error, MessageError) else None
    return f"{field}: {error.message}" if field else error.message
