"""Waiting for the ends of jobs that were sent before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaloop.cli.screen import note
from alphaloop.kafka.backlog import search
from alphaloop.messages import Result
from alphaloop.outcomes.reading import Outcome, OutcomeReader, standing_refusals
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import known_jobs, pages_of_batch


def jobs_named(settings: Settings, database: Database, batch_id: str) -> list[str]:
    """Every job of a batch: those that wait in Kafka, then those that a worker has claimed. Raises BrokerError."""
    found = search(settings.kafka, lambda _, batch: batch == batch_id)
    if not found.is_complete:
        note("the backlog is too long to be read through: jobs of the batch that wait in Kafka may be missing here")
    waiting = [message.job_id for message in found.messages]
    claimed = (job_id for page in pages_of_batch(database, batch_id) for job_id, _ in page)
    return list(dict.fromkeys([*claimed, *waiting]))


def ends(settings: Settings, database: Database, job_ids: Sequence[str], *, timeout_s: float) -> Iterator[Outcome]:
    """The outcome of each of the jobs, once: of those that have ended at once, of others as they end.

    Ends when all are there or the time is up. Raises BrokerError and StoreError.
    """
    left = dict.fromkeys(job_ids)
    with OutcomeReader(settings.kafka, settings.tasks) as reader:
        # Nothing is missed: what ends from here on the reader sees, and what ended before is recorded.
        yield from _recorded(database, left)
        for job_id, refusal in standing_refusals(settings.kafka, database, left).items():
            del left[job_id]
            yield refusal
        for outcome in reader.outcomes(left, timeout_s=timeout_s):
            del left[outcome.job_id]
            yield outcome
    yield from _recorded(database, left)  # a result that Kafka refused is recorded and never published


def _recorded(database: Database, left: dict[str, None]) -> Iterator[Outcome]:
    for job in known_jobs(database, list(left)).values():
        if job.outcome is not None:
            del left[job.job_id]
            yield Result.decode(job.outcome)
