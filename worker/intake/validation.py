"""From a delivery to a job that this worker can decode, or to the error for the dead-letter topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, TypeVar

from alphaloop.errors import InvalidField, MessageError, UnknownTask
from alphaloop.messages import (
    ContentReference,
    Failure,
    Job,
    Origin,
    Purpose,
    field_as_sent,
    fields_of,
    parse_job,
    payload_digest,
    with_prompt,
)
from alphaloop.messages.headers import refuse_envelope
from alphaloop.messages.topics import task_of
from alphaloop.settings import TaskSettings, WorkerSettings
from worker.engine import Engine, PreparedJob, Sampling
from worker.intake.polling import Delivery
from worker.intake.prompt_patterns import PromptPatterns
from worker.jobs.lanes import LaneKey, lane_of

Value = TypeVar("Value", int, float)

#: A number of Python and its place in a tuple.
_TOKEN_BYTES: Final = 40


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """A valid job with its prompt tokenized, and the delivery it must finish."""

    delivery: Delivery
    prepared: PreparedJob
    payload_sha256: bytes
    lane: LaneKey
    failure: Failure | None = None  #: why the job ends without being decoded: its prompt, elsewhere, could not be read
    job: Job = field(init=False, compare=False)
    #: About what it takes in memory: its message, the text that was read from it, and the prompt's tokens.
    num_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        text = len(self.delivery.record.value or b"")
        if (reference := self.prepared.job.body_ref) is not None:
            text += reference.num_bytes
        num_bytes = self.delivery.num_bytes + text + _TOKEN_BYTES * len(self.prepared.token_ids)
        object.__setattr__(self, "num_bytes", num_bytes)
        object.__setattr__(self, "job", self.prepared.job)

    @property
    def is_high(self) -> bool:
        """Whether it goes before others of its task."""
        return self.delivery.is_high


@dataclass(frozen=True, slots=True)
class PromptElsewhere:
    """A valid job whose prompt has still to be read from where `reference` says it lies."""

    delivery: Delivery
    job: Job
    reference: ContentReference
    payload_sha256: bytes


@contextmanager
def _fields_as_sent(delivery: Delivery) -> Iterator[None]:
    """An error that is raised within names its field as the message does."""
    try:
        yield
    except MessageError as error:
        error.field = field_as_sent(error.field, fields_of(delivery.record.value) or {})
        raise


def no_references(reference: ContentReference, field: str) -> None:
    """Refuse every reference, because no store is configured. Raises InvalidField."""
    raise InvalidField(
        "expected the prompt in the message, found a reference, and this worker follows none",
        field=field,
        hint="set claim_check.url for the worker",
    )


class Validation:
    """Reads deliveries. An unknown task makes it read the task list again, because the task may be new."""

    def __init__(
        self,
        engine: Engine,
        tasks: Mapping[str, TaskSettings],
        *,
        reread_tasks: Callable[[], Mapping[str, TaskSettings]],
        limits: WorkerSettings,
        cluster: str,
        keeps_apart: Callable[[str, str], bool] = lambda task, segment: True,
        is_probe: Callable[[str, bytes], bool] = lambda job_id, payload_sha256: True,
        check_reference: Callable[[ContentReference, str], None] = no_references,
    ) -> None:
        """What reads messages.

        Args:
            engine: what prepares the prompts.
            tasks: the tasks known at first.
            reread_tasks: the tasks known now.
            limits: bounds of a message.
            cluster: the id of the Kafka cluster.
            keeps_apart: whether a task's segment has evidence of its own.
            is_probe: whether the scheduler recorded a probe or control of this job_id and payload.
            check_reference: raises InvalidField where this worker does not follow the reference in that field.
        """
        self._engine = engine
        self._tasks = self._with_defaults(tasks)
        self._switched_off: dict[str, PromptPatterns] = {}
        self._reread_tasks = reread_tasks
        self._limits = limits
        self._cluster = cluster
        self._keeps_apart = keeps_apart
        self._is_probe = is_probe
        self._check_reference = check_reference

    def origin(self, delivery: Delivery) -> Origin:
        """Where a delivery came from."""
        record = delivery.record
        return Origin(self._cluster, record.topic, record.partition, record.offset, record.timestamp_ms)

    def read(self, delivery: Delivery) -> ReadyJob | PromptElsewhere:
        """Raises the MessageError that goes into the dead letter."""
        with _fields_as_sent(delivery):
            return self._read(delivery)

    def _read(self, delivery: Delivery) -> ReadyJob | PromptElsewhere:
        topic = delivery.record.topic
        task = task_of(topic) or topic
        settings = self._settings_of(task)
        refuse_envelope(delivery.record.headers)
        job = parse_job(
            delivery.record.value,
            self.origin(delivery),
            task=task,
            max_bytes=self._limits.max_job_bytes,
            max_depth=self._limits.max_json_depth,
            ignored=self._limits.ignored_body_fields,
        )
        digest = payload_digest(job)
        if job.purpose is not Purpose.TRAFFIC and not self._is_probe(job.job_id, digest):
            raise InvalidField(
                f"expected a {job.purpose.value} that the scheduler recorded, found none with this job_id and payload",
                field="purpose",
                hint="leave the field out: only the scheduler sends probes and controls",
            )
        served = self._engine.identity.target
        if job.body.model not in (None, served):
            raise InvalidField(
                f"expected {served!r}, the model served here, found another", field="body.model", hint="leave it out"
            )
        if job.body_ref is not None:
            self._check_reference(job.body_ref, "body_ref")
            return PromptElsewhere(delivery, job, job.body_ref, digest)
        return self._ready(delivery, job, digest, settings)

    def with_prompt(self, waiting: PromptElsewhere, content: bytes | Failure) -> ReadyJob:
        """The job with its prompt, or with the failure to read it, which then is the job's. Raises MessageError."""
        job, digest = waiting.job, waiting.payload_sha256
        settings = self._settings_of(job.task)
        if isinstance(content, Failure):
            sampling = sampling_of(job, settings)
            prepared = PreparedJob(job, (), sampling)
            return ReadyJob(waiting.delivery, prepared, digest, lane_of(job, sampling), content)
        with _fields_as_sent(waiting.delivery):
            job = with_prompt(job, content, max_depth=self._limits.max_json_depth)
            return self._ready(waiting.delivery, job, digest, settings)

    def _ready(self, delivery: Delivery, job: Job, digest: bytes, settings: TaskSettings) -> ReadyJob:
        prepared = self._engine.prepare(job, sampling_of(job, settings))
        if job.segment and not self._keeps_apart(job.task, job.segment):
            prepared = replace(prepared, is_pooled=True)
        lane = lane_of(job, prepared.sampling, self._pattern_of(job, settings))
        return ReadyJob(delivery, prepared, digest, lane)

    def task(self, name: str) -> TaskSettings:
        """The settings of a task that a job was read for."""
        return self._tasks[name]

    def _with_defaults(self, tasks: Mapping[str, TaskSettings]) -> dict[str, TaskSettings]:
        defaults = self._engine.sampling_defaults
        return {name: defaults.applied_to(task) for name, task in tasks.items()}

    def _pattern_of(self, job: Job, settings: TaskSettings) -> str:
        """The pattern that covers the job's prompt; empty for probes and control jobs, which keep their own mode."""
        if job.purpose is not Purpose.TRAFFIC:
            return ""
        if job.task not in self._switched_off:
            self._switched_off[job.task] = PromptPatterns(settings.vanilla_patterns)
        return self._switched_off[job.task].pattern_of(job.body)

    def _settings_of(self, task: str) -> TaskSettings:
        if task not in self._tasks:
            self._tasks.update(self._with_defaults(self._reread_tasks()))
            self._switched_off.clear()
        if task not in self._tasks:
            raise UnknownTask(
                f"expected a task of configs/tasks.toml, found {task[:100]!r}",
                field="task",
                hint=f"add [tasks.{task[:100]}] there, or send to one of: {', '.join(sorted(self._tasks))}",
            )
        return self._tasks[task]


def sampling_of(job: Job, task: TaskSettings) -> Sampling:
    """The job's own settings, and its task's settings for the others."""
    body = job.body
    return _sampling(
        _given(body.max_tokens, task.max_tokens),
        _given(body.temperature, task.temperature),
        _given(body.top_p, task.top_p),
        max(0, _given(body.top_k, task.top_k)),
        _given(body.min_p, task.min_p),
        _given(body.repetition_penalty, task.repetition_penalty),
        body.frequency_penalty or 0.0,
        body.presence_penalty or 0.0,
        tuple(sorted((int(token), bias) for token, bias in body.logit_bias.items())) if body.logit_bias else (),
        body.seed,
        body.stop,
        body.stop_token_ids,
    )


#: Most jobs of a task have the same settings, so these are made once.
_sampling: Final = lru_cache(maxsize=1024)(Sampling)


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value
