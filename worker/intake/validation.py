"""From a message to a job that this worker can decode, or to the error for the dead-letter topic.

`Validation` reads a message. `Fetching` reads prompts that lie outside Kafka.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import lru_cache, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from alphaloop.acceptance import form_bucket
from alphaloop.claim_check.store import ContentStore
from alphaloop.engine import Engine, PreparedJob, Sampling
from alphaloop.errors import (
    AlphaloopError,
    ContentError,
    ContentStoreUnavailable,
    InvalidField,
    MalformedMessage,
    MessageError,
    UnknownTask,
    reason_of,
)
from alphaloop.messages import (
    Body,
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
from alphaloop.store.probes import ProbeStore
from worker.admission import LaneKey, Line, lane_of
from worker.background import Retry
from worker.intake.partitions import Delivery
from worker.intake.reuse_key import ReuseRule, reuse_rule
from worker.intake.target_tasks import TargetTasks

if TYPE_CHECKING:
    from worker.foundation import Foundation

log = logging.getLogger(__name__)

Found = TypeVar("Found")
Refusal: TypeAlias = tuple[Delivery, MessageError]

#: A number of Python and its place in a tuple.
_TOKEN_BYTES: Final = 40
NUM_AT_ONCE: Final = 4  #: prompts outside Kafka that a worker reads at once


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """A valid job with its prompt tokenized, and the delivery it must finish."""

    delivery: Delivery
    prepared: PreparedJob
    payload_sha256: bytes
    lane: LaneKey
    reuse: ReuseRule | None = None  #: of a job that may share the text of an equal one
    failure: Failure | None = None  #: why the job ends without being decoded: its prompt, elsewhere, could not be read
    job: Job = field(init=False, compare=False)
    line: Line = field(init=False, compare=False)
    #: About what it takes in memory: its message, the text that was read from it, and the prompt's tokens.
    num_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        text = len(self.delivery.record.value or b"")
        if (reference := self.prepared.job.body_ref) is not None:
            text += reference.num_bytes
        num_tokens = len(self.prepared.token_ids) + len(self.prepared.sampling.predicted)
        num_bytes = self.delivery.num_bytes + text + _TOKEN_BYTES * num_tokens
        object.__setattr__(self, "num_bytes", num_bytes)
        object.__setattr__(self, "job", self.prepared.job)
        object.__setattr__(self, "line", Line(self.lane, self.prepared.job.segment or ""))


@dataclass(frozen=True, slots=True)
class PromptElsewhere:
    """A valid job whose prompt has still to be read from where `reference` says it lies."""

    delivery: Delivery
    job: Job
    reference: ContentReference
    payload_sha256: bytes


def no_references(reference: ContentReference, field: str) -> None:
    """Refuse every reference, because no store is configured. Raises InvalidField."""
    raise InvalidField(
        "expected the prompt in the message, found a reference, and this worker follows none",
        field=field,
        hint="set claim_check.url for the worker",
    )


@dataclass(eq=False)
class Validation:
    """Reads deliveries. An unknown task makes it read the task list again, because the task may be new.

    `bound` has the tasks. A task that is gone from the list stays known here, because jobs of it may wait. `cluster` is
    the id of the Kafka cluster. `keeps_apart` says whether a task's segment has evidence of its own. `is_probe` says
    whether the scheduler recorded a probe or control of this job_id and payload. `check_reference` raises InvalidField
    where this worker does not follow the reference in that field.
    """

    engine: Engine
    bound: TargetTasks
    _: KW_ONLY
    limits: WorkerSettings
    cluster: str
    keeps_apart: Callable[[str, str], bool] = lambda task, segment: True
    is_probe: Callable[[str, bytes], bool] = lambda job_id, payload_sha256: True
    check_reference: Callable[[ContentReference, str], None] = no_references

    def __post_init__(self) -> None:
        #: The newest list, and all that were known. Both at once, because threads may ask.
        self._known: tuple[Mapping[str, TaskSettings], Mapping[str, TaskSettings]] = {}, {}

    @property
    def tasks(self) -> Mapping[str, TaskSettings]:
        """Every task that is or was in the list, with what the model suggests for sampling."""
        listed, (newest, known) = self.bound.bindings.tasks, self._known
        if listed is not newest:
            defaults = self.engine.sampling_defaults
            known = {**known, **{name: defaults.applied_to(task) for name, task in listed.items()}}
            self._known = listed, known
        return known

    def origin(self, delivery: Delivery) -> Origin:
        """Where a delivery came from."""
        record = delivery.record
        return Origin(self.cluster, record.topic, record.partition, record.offset, record.timestamp_ms)

    def read(self, delivery: Delivery) -> ReadyJob | PromptElsewhere | None:
        """What the message asks for; None where another target decodes its task now. Raises MessageError."""
        topic = delivery.record.topic
        task = task_of(topic) or topic
        if task not in self.tasks:
            self.bound.reread()
        if not self.bound.is_ours(task):
            return None
        settings = self._settings_of(task)
        refuse_envelope(delivery.record.headers)
        job = parse_job(
            delivery.record.value,
            self.origin(delivery),
            task=task,
            max_bytes=self.limits.max_job_bytes,
            ignored=self.limits.ignored_body_fields,
        )
        digest = payload_digest(job)
        if job.purpose is not Purpose.TRAFFIC and not self.is_probe(job.job_id, digest):
            raise InvalidField(
                f"expected a {job.purpose.value} that the scheduler recorded, found none with this job_id and payload",
                field="purpose",
                hint="leave the field out: only the scheduler sends probes and controls",
            )
        if not self.engine.identity.decodes(job.body.model):
            served = self.engine.identity.target
            bound = self.bound.bindings.target_of(task)
            which = "the model served here" if bound is None else f"the target of the task {task}"
            raise InvalidField(f"expected {served!r}, {which}, found another", field="body.model", hint="leave it out")
        if job.body_ref is not None:
            self.check_reference(job.body_ref, "body_ref")
            return PromptElsewhere(delivery, job, job.body_ref, digest)
        return self._ready(delivery, job, digest, settings)

    def with_prompt(self, waiting: PromptElsewhere, content: bytes | Failure) -> ReadyJob:
        """The job with its prompt, or with the failure to read it, which then is the job's. Raises MessageError."""
        job, digest = waiting.job, waiting.payload_sha256
        settings = self._settings_of(job.task)
        if isinstance(content, Failure):
            sampling = sampling_of(job, settings)
            prepared = PreparedJob(job, (), sampling)
            return ReadyJob(waiting.delivery, prepared, digest, lane_of(job, sampling), failure=content)
        return self._ready(waiting.delivery, with_prompt(job, content), digest, settings)

    def _ready(self, delivery: Delivery, job: Job, digest: bytes, settings: TaskSettings) -> ReadyJob:
        prepared = self.engine.prepare(job, sampling_of(job, settings))
        if job.segment and not self.keeps_apart(job.task, job.segment):
            prepared = replace(prepared, is_pooled=True)
        if settings.memory != "off" or not settings.round_counts_in_results:
            prepared = replace(
                prepared,
                is_remembered=settings.memory != "off" and job.purpose is Purpose.TRAFFIC,
                reports_round_counts=settings.round_counts_in_results,
            )
        lane = lane_of(job, prepared.sampling, self._pattern_of(job, settings))
        reuse = reuse_rule(prepared, settings, self.engine.identity)
        return ReadyJob(delivery, prepared, digest, lane, reuse)

    def _pattern_of(self, job: Job, settings: TaskSettings) -> str:
        """The first pattern that covers the job's prompt, or a message of it; empty if none does.

        Probes and control jobs keep their own mode.
        """
        body, patterns = job.body, settings.vanilla_patterns
        if not patterns or job.purpose is not Purpose.TRAFFIC:
            return ""
        given = [body.prompt] if body.prompt is not None else [message.text for message in body.messages or ()]
        texts = [text.casefold() for text in given]
        return next((pattern for pattern in patterns if any(covers(pattern, text) for text in texts)), "")

    def _settings_of(self, task: str) -> TaskSettings:
        if task not in self.tasks:
            raise UnknownTask(
                f"expected a task of configs/tasks.toml, found {task[:100]!r}",
                field="task",
                hint=f"add [tasks.{task[:100]}] there, or send to the topic of a task that is there",
            )
        return self.tasks[task]


#: Settings that a body gives under the name that they have in Sampling, and those of them that its task has too.
OF_BODY: Final = Body.model_fields.keys() & {setting.name for setting in fields(Sampling)}
_OF_TASK: Final = OF_BODY & TaskSettings.model_fields.keys()


def open_validation(
    base: Foundation, bound: TargetTasks, contents: ContentStore | None, keeps_apart: Callable[[str, str], bool]
) -> Validation:
    """What reads this worker's messages. Whether the scheduler recorded a probe, the database says."""
    probes = ProbeStore(base.database)
    return Validation(
        base.engine,
        bound,
        limits=base.settings.worker,
        cluster=base.cluster,
        keeps_apart=keeps_apart,
        is_probe=lambda job_id, digest: base.retry.until_done("probe", partial(probes.is_recorded, job_id, digest)),
        check_reference=contents.check if contents else no_references,
    )


def sampling_of(job: Job, task: TaskSettings) -> Sampling:
    """The job's own settings, and its task's settings for the others.

    Raises InvalidField for a job that contradicts what its task sets.
    """
    body, constraint = job.body, job.body.constraint
    settings: dict[str, Any] = {name: getattr(task, name) for name in _OF_TASK}
    for name in body.model_fields_set:
        if name in OF_BODY and (value := getattr(body, name)) is not None:
            settings[name] = value
    if body.n > 1 and settings["temperature"] == 0:
        raise InvalidField(
            f"expected 1 at the temperature 0, where all texts are the same, found {body.n}",
            field="body.n",
            hint="set a temperature above 0",
        )
    if body.min_tokens > (max_tokens := settings["max_tokens"]):
        raise InvalidField(
            f"expected at most {max_tokens}, the task's max_tokens, found {body.min_tokens}",
            field="body.min_tokens",
            hint="set max_tokens too",
        )
    if settings["top_k"] < 0:
        settings["top_k"] = 0
    if body.logit_bias is not None:
        settings["logit_bias"] = tuple(sorted((int(token), bias) for token, bias in body.logit_bias.items()))
    if body.logprobs is not None:
        settings["num_logprobs"] = body.num_logprobs
    kind = None if constraint is None else constraint.kind
    form = form_bucket(kind, bool(body.tools), body.num_images > 0, is_predicted=body.prediction is not None)
    if form:
        settings["form_bucket"] = form
    # A large one is kept no longer than its job.
    if constraint is not None or body.allowed_token_ids:
        return Sampling(**settings, constraint=constraint)
    return _sampling(**settings)


#: Most jobs of a task have the same settings, so these are made once.
_sampling: Final = lru_cache(maxsize=1024)(Sampling)


def _read(delivery: Delivery, read: Callable[[], Found], refused: list[Refusal]) -> Found | None:
    """What `read` makes of a delivery; a message that is no job is added to `refused`, with its field as it was sent.

    A message on which our own code raises is refused too, so that it does not stop its partition. The exception's text
    is left out of the dead letter and of the log, because it may quote the prompt.
    """
    try:
        return read()
    except MessageError as error:
        error.field = field_as_sent(error.field, fields_of(delivery.record.value) or {})
        refused.append((delivery, error))
    except AlphaloopError:
        raise
    except Exception as error:
        log.error("a message could not be read", exc_info=error, extra={"action": "validation_failed"})
        refused.append((delivery, MalformedMessage(f"could not be read: {reason_of(error)}")))
    return None


@dataclass(eq=False)
class Fetching:
    """Reads messages, and the prompts of those whose prompts lie outside Kafka. One thread owns it, the feed's.

    Each prompt is read in a thread of its own, so that a slow store holds up no other job.

    A store that is away is asked again until it answers: nothing is claimed yet, so that costs the jobs no try. A
    prompt that is missing or altered is the job's own failure.

    `wake` is called from the reading threads each time that a prompt is there.
    """

    contents: ContentStore | None
    validation: Validation
    _: KW_ONLY
    retry: Retry
    wake: Callable[[], object]

    def __post_init__(self) -> None:
        self._waiting: deque[PromptElsewhere] = deque()
        self._num_running = 0
        self._done: SimpleQueue[tuple[PromptElsewhere, bytes | Failure | None]] = SimpleQueue()

    def __len__(self) -> int:
        """Jobs whose prompts have not come."""
        return len(self._waiting) + self._num_running

    def read(self, delivery: Delivery, refused: list[Refusal]) -> ReadyJob | None:
        """The job of a message.

        None where its prompt is read later, where another target decodes its task, and where it is no job, and then in
        `refused`.
        """
        job = _read(delivery, partial(self.validation.read, delivery), refused)
        if not isinstance(job, PromptElsewhere):
            return job
        self._waiting.append(job)
        return None

    def discard(self, unwanted: Callable[[Delivery], bool]) -> None:
        """Drop the jobs for which `unwanted` holds and whose prompts are not being read yet."""
        self._waiting = deque(waiting for waiting in self._waiting if not unwanted(waiting.delivery))

    def take(self, room_bytes: int) -> tuple[list[ReadyJob], list[Refusal]]:
        """The jobs whose prompts have come, and what was refused; begins to read the next ones while there is room."""
        ready: list[ReadyJob] = []
        refused: list[Refusal] = []
        for waiting, content in self._arrived():
            job = _read(waiting.delivery, partial(self.validation.with_prompt, waiting, content), refused)
            if job is not None:
                ready.append(job)
                room_bytes -= job.num_bytes
        while self._waiting and self._num_running < NUM_AT_ONCE and room_bytes > 0:
            waiting = self._waiting.popleft()
            self._num_running += 1
            room_bytes -= waiting.reference.num_bytes
            # A daemon, because a folder on a network may never answer and must not keep the process.
            threading.Thread(target=self._fetch, args=(waiting,), name="content", daemon=True).start()
        return ready, refused

    def _arrived(self) -> list[tuple[PromptElsewhere, bytes | Failure]]:
        arrived: list[tuple[PromptElsewhere, bytes | Failure]] = []
        try:
            while True:
                waiting, content = self._done.get_nowait()
                self._num_running -= 1
                if content is not None:
                    arrived.append((waiting, content))
        except Empty:
            return arrived

    def _fetch(self, waiting: PromptElsewhere) -> None:
        """Read one prompt; of a worker that ends meanwhile there is none, and Kafka delivers the job again."""
        self._done.put((waiting, self._read(waiting.reference)))
        self.wake()

    def _read(self, reference: ContentReference) -> bytes | Failure | None:
        assert self.contents is not None  # noqa: S101 - without a store, validation refuses references
        contents = self.contents
        try:
            return self.retry.until_done("read a prompt", lambda: contents.read(reference))
        except ContentStoreUnavailable:
            return None
        except (ContentError, InvalidField) as error:
            return Failure.of(error)


def covers(pattern: str, folded: str) -> bool:
    """Whether a pattern for prompts for which an operator switched speculation off covers a whole case-folded text.

    It is literal text and `*`, for any text, and nothing else (`vanilla_patterns` of configs/tasks.toml); case does not
    matter. A regular expression would be matched against any prompt that a caller sends, and one that backtracks could
    block a worker. Here every literal is searched for once, from the end of the one before it, so a prompt is read at
    most once for each pattern (`str.find` is linear: Crochemore and Perrin, 1991, two-way matching).
    """
    first, *inner = pattern.casefold().split("*")
    if not inner:
        return folded == first
    *between, last = inner
    place, end = len(first), len(folded) - len(last)
    if place > end or not folded.startswith(first) or not folded.endswith(last):
        return False
    # The earliest place of each literal leaves the most room for those after it.
    for literal in between:
        if (at := folded.find(literal, place, end)) < 0:
            return False
        place = at + len(literal)
    return True
