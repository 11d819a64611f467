"""Dead letters as they lie in Kafka: read one by one, filtered, and the newest listed.

A command holds few of them, however many there are.
"""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

from alphaloop.client.arrivals import everything_on, reader_of
from alphaloop.errors import JobConflict, UnknownName, UnknownTask
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.topics import list_topics
from alphaloop.messages import Failure, Origin, Result, fields_of, refused_result
from alphaloop.messages.codec import moment_of
from alphaloop.messages.dead_letter import JOB_ID, OUTCOME, PREFIX
from alphaloop.messages.topics import dlq_topic, jobs_topic, task_of
from alphaloop.settings import KafkaSettings, Settings
from alphaloop.store.known_jobs import LetterKey

_SUFFIX: Final = dlq_topic("")


@dataclass(frozen=True)
class DeadLetterRecord:
    """A record of a dead-letter topic."""

    record: Record

    @property
    def place(self) -> str:
        """Where it lies, as options take it."""
        return f"{self.record.topic}:{self.record.partition}:{self.record.offset}"

    @property
    def key(self) -> LetterKey:
        """Its name in the table of redrives."""
        return LetterKey(*self.record.topic_partition, self.record.offset, self.record.timestamp_ms or 0)

    @cached_property
    def reason(self) -> Mapping[str, str]:
        """Its `__dlq.errors.*` headers, without their prefix."""
        return {
            name.removeprefix(PREFIX): content.decode("utf-8", "replace")
            for name, content in self.record.headers
            if name.startswith(PREFIX)
        }

    @property
    def code(self) -> str:
        """Why it was refused, or why its job failed."""
        return self.reason.get("exception", "unknown")

    @cached_property
    def error(self) -> Failure:
        """The same in words. One header holds field, message and hint, as a log shows them."""
        field = self.reason.get("field")
        message, _, hint = self.reason.get("message", "no reason given").partition("\nhint: ")
        return Failure(code=self.code, message=message.removeprefix(f"{field}: "), field=field, hint=hint or None)

    @property
    def sent_to(self) -> str:
        """The topic of the message."""
        return self.reason.get("topic", self.record.topic.removesuffix(_SUFFIX))

    @property
    def written_at(self) -> datetime | None:
        """When it was written."""
        return moment_of(self.record.timestamp_ms)

    @property
    def is_failed_job(self) -> bool:
        """Whether its job has a recorded outcome."""
        return any(name == OUTCOME for name, _ in self.record.headers)

    def is_refused_by(self, workers_since: datetime | None) -> bool:
        """Whether workers that have all run since before then would refuse the message as it stands, as they did."""
        is_same = not self.is_failed_job and self.code not in (UnknownTask.code, JobConflict.code)
        return is_same and workers_since is not None and self.written_at is not None and workers_since < self.written_at

    @cached_property
    def job_id(self) -> str | None:
        """The job_id of the result that answers the message."""
        content = next((content for name, content in self.record.headers if name == JOB_ID), None)
        return None if content is None else content.decode("utf-8", "replace")

    @cached_property
    def sent_job_id(self) -> str | None:
        """What the message or its key names: of a conflict and of a forged probe the job_id of another."""
        job_id = (fields_of(self.record.value) or {}).get("job_id")
        if isinstance(job_id, str):
            return job_id
        return self.record.key.decode("utf-8", "replace") if self.record.key else None

    def refusal(self) -> Result | None:
        """The result of a refused message; None where its job failed, or where it is no job's.

        It is the one on `results`, but for what a shortened letter does not have.
        """
        if self.is_failed_job or self.job_id is None:
            return None
        numbers = (_number(self.reason.get(name)) for name in ("partition", "offset", "timestamp"))
        partition, offset, timestamp_ms = numbers
        origin = Origin("", self.sent_to, partition or 0, offset or 0, timestamp_ms)
        return refused_result(self.error, origin, self.record.value, job_id=self.job_id)

    @property
    def names(self) -> frozenset[str | None]:
        """The job_ids by which it is found; of a redriven job also the first one, and the one that it was made of."""
        before = (fields_of(self.record.value) or {}).get("redrive_of")
        redriven = {before, (self.job_id or "").rpartition("~")[0]} if isinstance(before, str) else set()
        return frozenset({self.job_id, self.sent_job_id, *redriven})

    def as_json(self, *, show_value: bool = False) -> dict[str, Any]:
        """For machines; with its size and, with `show_value`, the start of its value."""
        value = self.record.value or b""
        letter: dict[str, Any] = {
            "at": self.place,
            "when": self.written_at.strftime("%Y-%m-%d %H:%M:%S") if self.written_at else None,
            "topic": self.sent_to,
            "partition": self.reason.get("partition", "?"),
            "offset": self.reason.get("offset", "?"),
            "job_id": self.job_id,
            "sent_job_id": self.sent_job_id,
            "code": self.code,
            "field": self.error.field,
            "message": self.error.message,
            "hint": self.error.hint,
            "size_bytes": len(value),
        }
        if show_value:
            letter["value"] = value[: 4 * _SHOWN_CHARS].decode("utf-8", "replace")[:_SHOWN_CHARS]
        return letter


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """What is asked for; everything where nothing is."""

    task: str | None = None
    codes: frozenset[str] = frozenset()
    job_ids: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()
    since: datetime | None = None
    until: datetime | None = None

    @property
    def is_by_task_only(self) -> bool:
        """Whether every letter of the topics is chosen."""
        return not (self.codes or self.job_ids or self.places or self.since or self.until)

    def holds(self, letter: DeadLetterRecord) -> bool:
        """Whether this letter is chosen. One without a time is of no time."""
        written_at = letter.written_at
        return (
            (not self.codes or letter.code in self.codes)
            and (not self.job_ids or not self.job_ids.isdisjoint(letter.names))
            and (not self.places or letter.place in self.places)
            and (self.since is None or (written_at is not None and written_at >= self.since))
            and (self.until is None or (written_at is not None and written_at < self.until))
        )

    def letters(
        self, kafka: KafkaSettings, *, newest: int | None = None, depth: int | None = None
    ) -> Iterator[DeadLetterRecord]:
        """The chosen letters. Raises BrokerError.

        Reads at most the `newest` of each partition where all of them are chosen, and at most `depth` otherwise.
        """
        topics = _dlq_topics(kafka, self.task)
        if self.places:
            return filter(self.holds, _read_places(kafka, topics, self.places))
        newest = newest if self.is_by_task_only else depth
        return filter(self.holds, map(DeadLetterRecord, everything_on(kafka, topics, newest=newest)))


@dataclass(frozen=True, slots=True)
class ListedDeadLetter:
    """A letter without its message: its name in the table of redrives, and its `DeadLetterRecord.as_json`."""

    key: LetterKey
    shown: Mapping[str, Any]

    def with_redrive(self, redriven: Mapping[LetterKey, str] | None) -> dict[str, Any]:
        """What is shown, and whether it was sent again; None where that is not known."""
        return {**self.shown, "redriven": None if redriven is None else self.key in redriven}


def require_dead_letters(settings: Settings, choice: DeadLetterFilter) -> None:
    """Raises UnknownName for each name that no letter of any time has, and for an unknown task; BrokerError."""
    tasks = frozenset({choice.task or ""} - {"", *settings.tasks})
    left = {"task": tasks, "job_id": choice.job_ids, "code": choice.codes, "place": choice.places}
    letters = replace(choice, since=None, until=None).letters(settings.kafka) if any(left.values()) else iter(())
    for letter in letters:
        left = {
            "task": frozenset[str](),
            "job_id": left["job_id"] - letter.names,
            "code": left["code"] - {letter.code},
            "place": left["place"] - {letter.place},
        }
        if not any(left.values()):
            break
    if unknown := [f"{what} {', '.join(sorted(names))}"[:300] for what, names in left.items() if names]:
        of_task = f" of {choice.task}"[:120] if choice.task and not left["task"] else ""
        raise UnknownName(f"no dead letter{of_task} of any time has the {' and the '.join(unknown)}")


def newest_dead_letters(
    kafka: KafkaSettings, choice: DeadLetterFilter, limit: int, *, show_value: bool = False, depth: int | None = None
) -> Sequence[ListedDeadLetter]:
    """The newest `limit` of the chosen letters, oldest first. No more are ever held, and none of their values.

    With `show_value` the start of each message is shown, too, which may hold a prompt. Where not all letters are
    chosen, the newest `depth` of each partition are looked through, without it all. Raises BrokerError.
    """
    newest: list[tuple[tuple[int, LetterKey], Mapping[str, Any]]] = []  # a heap, its oldest letter first
    for letter in choice.letters(kafka, newest=limit, depth=depth):
        key = letter.key
        keep = heapq.heappush if len(newest) < limit else heapq.heappushpop
        keep(newest, ((letter.record.timestamp_ms or 0, key), letter.as_json(show_value=show_value)))
    return [ListedDeadLetter(key, shown) for (_, key), shown in sorted(newest, key=itemgetter(0))]


def refusals_of(kafka: KafkaSettings, job_ids: Collection[str]) -> dict[str, Result]:
    """The results of refused messages with these job_ids, from the dead letters there are now. Raises BrokerError."""
    wanted = frozenset(job_ids)
    return refusals(kafka, lambda refusal: refusal.job_id in wanted) if wanted else {}


def refusals(kafka: KafkaSettings, is_wanted: Callable[[Result], bool]) -> dict[str, Result]:
    """The newest wanted refusal of each job_id. Raises BrokerError."""
    every = filter(None, (letter.refusal() for letter in DeadLetterFilter().letters(kafka)))
    return {refusal.job_id: refusal for refusal in every if is_wanted(refusal)}


def _read_places(kafka: KafkaSettings, topics: Collection[str], places: Collection[str]) -> Iterator[DeadLetterRecord]:
    """The letters at these places of the topics, in their order; a place where none lies is passed over.

    Raises BrokerError.
    """
    named = (match for place in places if (match := _PLACE.fullmatch(place)) and match[1] in topics)
    wanted = sorted({(TopicPartition(match[1], int(match[2])), int(match[3])) for match in named})
    if not wanted:
        return
    with contextlib.closing(reader_of(kafka)) as consumer:
        bounds = consumer.bounds(list(dict.fromkeys(partition.topic for partition, _ in wanted)))
        for partition, offset in wanted:
            low, high = bounds.get(partition, (0, 0))
            if low <= offset < high:
                consumer.assign_at({partition: offset})
                records = consumer.read_through({partition: offset + 1})
                record = next((record for record in records if record.topic_partition == partition), None)
                if record is not None and record.offset == offset:
                    yield DeadLetterRecord(record)


def _dlq_topics(kafka: KafkaSettings, task: str | None) -> list[str]:
    """The dead-letter topics of jobs, of one task or of all. Raises BrokerUnavailable."""
    wanted = None if task is None else jobs_topic(task)
    sources = {topic: topic.removesuffix(_SUFFIX) for topic in list_topics(kafka) if topic.endswith(_SUFFIX)}
    return [topic for topic, source in sources.items() if task_of(source) and wanted in (None, source)]


#: TOPIC:PARTITION:OFFSET.
_PLACE: Final = re.compile(r"([a-zA-Z0-9._-]{1,249}):([0-9]{1,9}):([0-9]{1,18})")
_SHOWN_CHARS: Final = 200
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,19}")


def _number(digits: str | None) -> int | None:
    return int(digits) if digits and _WHOLE_NUMBER.fullmatch(digits) else None
