"""Dead letters sent again as new messages, and old ones deleted.

Why a message that was answered gets a new job_id: docs/decisions/0014-retries.md.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final

from alphaloop.dead_letters.reading import DeadLetterFilter, DeadLetterRecord
from alphaloop.errors import ConfigError, InvalidField, MalformedMessage, MessageError, UnknownTask
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import delete_before
from alphaloop.messages import Origin, fields_of, parse_job
from alphaloop.messages.body import SHORTHAND
from alphaloop.messages.dead_letter import JOB_ID, SHORTENED, is_reason
from alphaloop.messages.headers import refuse_envelope
from alphaloop.messages.topics import jobs_topic, task_of
from alphaloop.settings import KafkaSettings, Settings
from alphaloop.store.known_jobs import RedriveStore
from alphaloop.wording import how_many


@dataclass(eq=False)
class Redrive:
    """One run of the command.

    A run that dies between acknowledgement and mark leaves letters that are sent twice. Their job_ids are the same both
    times, so the jobs are decoded once.
    """

    settings: Settings
    store: RedriveStore
    corrections: Mapping[str, Any]
    _: KW_ONLY
    again: bool
    dry_run: bool
    num_sent: int = field(default=0, init=False)
    num_already_sent: int = field(default=0, init=False)  #: letters left out, because they were sent before
    num_wrong: int = field(default=0, init=False)
    problems: list[dict[str, Any]] = field(default_factory=list, init=False)  #: the first of the wrong ones

    def run(self, choice: DeadLetterFilter, limit: int | None) -> None:
        """Send the chosen letters, at most `limit`. Raises BrokerError, StoreError."""
        kafka, workers_since = self.settings.kafka, self.store.newest_worker()
        with contextlib.closing(Producer(kafka, client_id="alphaloop-dlq")) as producer:
            letters = choice.letters(kafka)
            while portion := list(islice(letters, _PORTION)):
                room = None if limit is None else limit - self.num_sent
                if room is not None and room <= 0:
                    return
                messages = list(self._messages(self._wanted(portion), workers_since))[:room]
                self.num_sent += len(messages)
                if self.dry_run:
                    continue
                for letter, message in messages:
                    producer.send(message.topic, key=letter.record.key, value=message.value, headers=message.headers)
                producer.flush(_FLUSH_S)
                batch_ids = [message.batch_id for _, message in messages if message.batch_id is not None]
                self.store.mark({letter.key: message.job_id for letter, message in messages}, batch_ids)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "dry_run": self.dry_run,
            "sent": self.num_sent,
            "sent_before": self.num_already_sent,
            "wrong": self.num_wrong,
            "problems": self.problems,
        }

    def _wanted(self, letters: Sequence[DeadLetterRecord]) -> Sequence[DeadLetterRecord]:
        if self.again:
            return letters
        before = self.store.of([letter.key for letter in letters])
        self.num_already_sent += len(before)
        return [letter for letter in letters if letter.key not in before]

    def _messages(
        self, letters: Iterable[DeadLetterRecord], workers_since: datetime | None
    ) -> Iterator[tuple[DeadLetterRecord, Redriven]]:
        for letter in letters:
            try:
                message = redriven(letter, self.corrections, self.settings)
                if not self.corrections and letter.is_refused_by(workers_since):
                    raise MessageError(f"{letter.reason.get('message')}\nno worker has started since it was refused")
                yield letter, message
            except MessageError as error:
                self.num_wrong += 1
                if len(self.problems) < _MOST_PROBLEMS:
                    code = letter.code if type(error) is MessageError else error.code
                    self.problems.append({"at": letter.place, "code": code, "message": str(error)})


class Purge:
    """What would be deleted: of each partition the records below an offset."""

    def __init__(self, kafka: KafkaSettings, store: RedriveStore) -> None:
        self._kafka = kafka
        self._store = store
        self._codes: dict[TopicPartition, Counter[str]] = {}
        self._offsets: dict[TopicPartition, int] = {}

    @property
    def num_letters(self) -> int:
        """Letters below the offsets."""
        return sum(codes.total() for codes in self._codes.values())

    def read(self, choice: DeadLetterFilter) -> None:
        """Find the offsets: below them lie only letters of the chosen time. Raises BrokerError."""
        ended: set[TopicPartition] = set()
        everything = DeadLetterFilter(choice.task)
        for letter in everything.letters(self._kafka):
            partition = letter.record.topic_partition
            if partition in ended or not choice.holds(letter):
                ended.add(partition)  # from the first letter that stays, the whole partition stays
                continue
            self._codes.setdefault(partition, Counter())[letter.code] += 1
            self._offsets[partition] = letter.record.offset + 1

    def carry_out(self) -> None:
        """Delete them, and forget which of them were sent again. Raises BrokerError, StoreError."""
        delete_before(self._kafka, self._offsets)
        for partition, offset in self._offsets.items():
            self._store.forget_before(partition.topic, partition.partition, offset)

    def rows(self) -> list[str]:
        """For people, a line a partition."""
        if not self._offsets:
            return ["no dead letters are that old"]
        rows = []
        for partition, codes in sorted(self._codes.items()):
            where = f"{partition.topic}[{partition.partition}] below offset {self._offsets[partition]}"
            by_code = ", ".join(f"{number} {code}" for code, number in codes.most_common())
            rows.append(f"{where}: {how_many(codes.total(), 'letter')} ({by_code})")
        return rows

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "letters": self.num_letters,
            "partitions": [
                {
                    "topic": partition.topic,
                    "partition": partition.partition,
                    "below_offset": self._offsets[partition],
                    "codes": dict(codes),
                }
                for partition, codes in sorted(self._codes.items())
            ],
        }


@dataclass(frozen=True, slots=True)
class Redriven:
    """The message to send."""

    job_id: str
    batch_id: str | None
    topic: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


def redriven(letter: DeadLetterRecord, corrections: Mapping[str, Any], settings: Settings) -> Redriven:
    """The letter's message, corrected, to the topic it was sent to.

    It is a new job: its id goes on with ~1, then ~2, and `redrive_of` names the one before. So a letter that is
    redriven twice is one job. Raises MessageError if it would be refused again.
    """
    record = letter.record
    if any(name == SHORTENED for name, _ in record.headers):
        place = ":".join(letter.reason.get(name, "?") for name in ("topic", "partition", "offset"))
        hint = f"the whole message is at {place}, as long as that topic keeps it"
        raise MalformedMessage("the letter does not have its whole message", hint=hint)
    task = task_of(letter.sent_to) or task_of(record.topic.removesuffix(".dlq")) or ""
    topic = letter.sent_to if task_of(letter.sent_to) else jobs_topic(task)
    fields = _fields(record.value)
    if letter.job_id is None:
        raise MalformedMessage(f"expected the job_id of its result in the header {JOB_ID}, found none")
    fields |= {
        "job_id": next_job_id(letter.job_id, is_redriven="redrive_of" in fields),
        "redrive_of": letter.job_id,
    }
    for path, value in corrections.items():
        _set(fields, path, value)
    value = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    headers = tuple((name, content) for name, content in record.headers if not is_reason(name))
    if letter.code == UnknownTask.code and task not in (settings.tasks or [task]):
        raise UnknownTask(f"no task {task[:100]!r} in configs/tasks.toml", field="task")
    refuse_envelope(headers)
    limits, origin = settings.worker, Origin("redrive", topic, 0, 0)
    job = parse_job(value, origin, task=task, max_bytes=limits.max_job_bytes, ignored=limits.ignored_body_fields)
    return Redriven(job.job_id, job.batch_id, topic, value, headers)


def corrections_of(settings: Sequence[str], option: str) -> dict[str, Any]:
    """From `body.temperature=0.5` to a path and a value: JSON, or text where it is none.

    Raises ConfigError naming `option`.
    """
    corrections: dict[str, Any] = {}
    for setting in settings:
        path, is_set, text = setting.partition("=")
        if not is_set or not all(path.split(".")):
            raise ConfigError(
                f"{option}: expected FIELD=VALUE, found {path[:60]!r}", hint="such as body.temperature=0.5"
            )
        try:
            corrections[path] = json.loads(text)
        except ValueError:
            corrections[path] = text
    return corrections


def next_job_id(job_id: str, *, is_redriven: bool) -> str:
    """The job_id of the redriven job; `is_redriven`: `job_id` is one already."""
    match = _AGAIN.fullmatch(job_id) if is_redriven else None
    following = f"{match[1]}~{int(match[2]) + 1}" if match else f"{job_id}~1"
    return following if len(following) <= _MAX_ID_CHARS else f"{uuid.uuid5(uuid.NAMESPACE_OID, job_id)}~1"


_AGAIN: Final = re.compile(r"(.*)~([1-9][0-9]{0,8})")
_MAX_ID_CHARS: Final = 200


def _fields(value: bytes | None) -> dict[str, Any]:
    fields = fields_of(value)
    if fields is None:
        raise MalformedMessage("not a JSON object, so nothing in it can be corrected", hint="send a new job instead")
    return fields


def _set(fields: dict[str, Any], path: str, value: Any) -> None:
    """Set a field; one of the body stands inside `body` or at the top level, as the sender has it."""
    body = fields.get("body")
    if body is None and path.startswith("body."):
        path = path.removeprefix("body.")
    elif isinstance(body, dict) and path.split(".")[0] in SHORTHAND - fields.keys():
        path = f"body.{path}"
    inner: Any = fields
    while True:
        name, _, path = (path, "", "") if isinstance(inner, dict) and path in inner else path.partition(".")
        if isinstance(inner, list) and name.isdigit() and int(name) < len(inner):
            key: Any = int(name)
        elif isinstance(inner, dict) and (not path or isinstance(inner.get(name), dict | list)):
            key = name
        else:
            raise InvalidField(f"no such {'object' if path else 'place'} in this message", field=name)
        if not path:
            inner[key] = value
            return
        inner = inner[key]


_PORTION: Final = 100
_FLUSH_S: Final = 120.0
_MOST_PROBLEMS: Final = 20
