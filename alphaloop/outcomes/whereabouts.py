"""Where jobs are: in Kafka, with a worker, ended, refused, or nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from alphaloop.kafka.backlog import Message, Search, search
from alphaloop.messages import RecordPlace, Result
from alphaloop.messages.topics import retry_delay_s
from alphaloop.outcomes.reading import reason_of, refusals_of
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import KnownJob, known_jobs
from alphaloop.store.workers import SeenWorker, WorkerStore, not_served


class JobPlace(StrEnum):
    """Where a job is."""

    WAITING = "waiting"  #: in Kafka: no worker has claimed it, or one gave it back
    HELD = "held"  #: a worker has claimed it and does not decode it yet
    RUNNING = "running"  #: a worker decodes it
    LEFT = "left"  #: its worker died or lost the lease: the next one takes it over
    ENDED = "ended"  #: its outcome is recorded
    REFUSED = "refused"  #: its message became no job
    UNKNOWN = "unknown"  #: none of these


#: A worker tells every two seconds which jobs it decodes; after this long without a word that says nothing any more.
_SILENCE: Final = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """One job: where it is, and what told so."""

    job_id: str
    place: JobPlace
    claimed: KnownJob | None = None
    message: Message | None = None
    refusal: Result | None = None
    is_search_complete: bool = True  #: whether all of Kafka's backlog was read, where that matters
    not_served: str | None = None  #: of one that waits, why nobody takes it

    @property
    def result(self) -> Result | None:
        """The recorded outcome."""
        outcome = self.claimed.outcome if self.claimed else None
        return None if outcome is None else Result.decode(outcome)

    def sentence(self) -> str:
        """Where it is, in words."""
        match self.place:
            case JobPlace.WAITING:
                why = "" if self.not_served is None else f"; {self.not_served}"
                return _waiting(self.message, self.claimed) + why
            case JobPlace.ENDED if (result := self.result) is not None and self.claimed is not None:
                when = f" at {_time(self.claimed.finished_at)}" if self.claimed.finished_at else ""
                tokens = f", {result.usage.completion_tokens} tokens" if result.usage else ""
                return f"ended {result.status.value}{when}{tokens}" + _because(reason_of(result))
            case JobPlace.REFUSED if self.refusal is not None:
                return f"refused{_because(reason_of(self.refusal))}"
            case JobPlace.UNKNOWN if self.is_search_complete:
                return "unknown: no worker has seen it, and it waits in no topic of jobs and in none of dead letters"
            case JobPlace.UNKNOWN:
                may_wait = "it may wait in Kafka, whose backlog is too long to be read through"
                return f"unknown: no worker has seen it; {may_wait}"
        assert self.claimed is not None  # noqa: S101 - every other place is a claim's
        return _with_worker(self.place, self.claimed)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        found: dict[str, Any] = {"job_id": self.job_id, "place": self.place.value, "sentence": self.sentence()}
        if (message := self.message) is not None:
            found |= {"task": message.task, "topic": message.topic, "partition": message.partition}
            found |= {"offset": message.offset, "num_before": message.num_before, "sent_at": _sent_at(message)}
        if self.not_served is not None:
            found |= {"not_served": self.not_served}
        if (claimed := self.claimed) is not None:
            found |= {"task": claimed.task, "status": claimed.status, "attempt": claimed.attempt}
            found |= {"worker": claimed.owner, "lease_expires_at": claimed.lease_expires_at}
            found |= {"claimed_at": claimed.created_at, "finished_at": claimed.finished_at}
            found |= {"num_tokens": claimed.num_tokens, "num_crashes": claimed.num_crashes}
            found |= {"num_failures": claimed.num_failures, "is_cancelling": claimed.is_cancelling}
        if (result := self.result) is not None:
            found |= {"num_tokens": result.usage.completion_tokens if result.usage else None}
        if (result := self.refusal or result) is not None:
            found |= {"status": result.status.value}
            found |= {"error": result.error.model_dump(exclude_none=True)} if result.error else {}
        return found


def find_jobs(settings: Settings, database: Database, job_ids: Sequence[str]) -> list[Whereabouts]:
    """Where each of the jobs is. Reads the backlog and the dead letters for those that no worker has claimed.

    Raises StoreError and BrokerError.
    """
    claimed = known_jobs(database, job_ids)
    left = [job_id for job_id in job_ids if job_id not in claimed or _waits_again(claimed[job_id])]
    wanted = frozenset(left)
    found = Search((), is_complete=True)
    if wanted:
        found = search(settings.kafka, lambda job_id, _: job_id in wanted, num=len(wanted))
    messages = {message.job_id: message for message in found.messages}
    missing = [job_id for job_id in left if job_id not in messages]
    if missing:  # a worker may have claimed them meanwhile
        claimed |= known_jobs(database, missing)
    refused = refusals_of(settings.kafka, [job_id for job_id in left if job_id not in claimed])
    places = [
        _place(job_id, claimed.get(job_id), messages.get(job_id), refused.get(job_id), found.is_complete)
        for job_id in job_ids
    ]
    if any(one.place is JobPlace.WAITING for one in places):
        workers = WorkerStore(database).seen()
        places = [_with_reason(one, settings, workers) for one in places]
    return places


def _with_reason(one: Whereabouts, settings: Settings, workers: Sequence[SeenWorker]) -> Whereabouts:
    task = one.message.task if one.message else one.claimed.task if one.claimed else None
    if one.place is not JobPlace.WAITING or task is None:
        return one
    return replace(one, not_served=not_served(settings.bindings, task, workers))


def _place(
    job_id: str, claimed: KnownJob | None, message: Message | None, refusal: Result | None, is_complete: bool
) -> Whereabouts:
    if claimed is not None and not _waits_again(claimed):
        return Whereabouts(job_id, _place_of(claimed), claimed)
    # A refused message waits no more, though its offset is committed a moment later.
    if message is not None and refusal is not None and refusal.origin == _lies_at(message):
        message = None
    if message is not None or claimed is not None:
        return Whereabouts(job_id, JobPlace.WAITING, claimed, message)
    if refusal is not None:
        return Whereabouts(job_id, JobPlace.REFUSED, refusal=refusal)
    return Whereabouts(job_id, JobPlace.UNKNOWN, is_search_complete=is_complete)


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
    sent = f", sent at {_time(at)}" if (at := _sent_at(message)) else ""
    place = f"{message.topic}, partition {message.partition}, offset {message.offset}"
    if delay_s := retry_delay_s(message.topic):
        return f"waits {delay_s} s to be tried again ({place}{sent}){again}"
    before = (
        f"behind {message.num_before} messages of its partition" if message.num_before else "first in its partition"
    )
    return f"waits in Kafka, {before} ({place}{sent}){again}"


def _with_worker(place: JobPlace, claimed: KnownJob) -> str:
    until = f"its lease runs until {_time(claimed.lease_expires_at)}" if claimed.lease_expires_at else "without a lease"
    cancelling = "; its cancellation was asked for" if claimed.is_cancelling else ""
    attempt = f", attempt {claimed.attempt}" if claimed.attempt > 1 else ""
    if place is JobPlace.LEFT:
        return f"{claimed.owner} had it{attempt} and is gone: the next worker takes it over{cancelling}"
    if place is JobPlace.RUNNING and claimed.silence is not None:
        said = "" if claimed.silence < _SILENCE else f" {claimed.silence.total_seconds():.0f} s ago"
        return f"is decoded by {claimed.owner}{attempt}: {claimed.num_tokens} tokens so far{said}; {until}{cancelling}"
    return f"is held by {claimed.owner}{attempt} and waits there for a free slot; {until}{cancelling}"


def _because(reason: str | None) -> str:
    return "" if reason is None else f", {reason}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _sent_at(message: Message) -> datetime | None:
    ms = message.timestamp_ms
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def _time(when: datetime | None) -> str:
    return "-" if when is None else when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
