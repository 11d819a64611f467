"""Recording outcomes: result, counts, evidence, status and the message, in one transaction or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ARRAY, Connection, Text, bindparam, cast, delete, func, insert, update
from sqlalchemy.dialects.postgresql import JSON

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from alphaloop.store.jobs import lock_held
from alphaloop.store.outbox import OutboxMessage
from alphaloop.store.recording import record_counts
from alphaloop.tables import cancellations, jobs, outbox

__all__ = ["DecodeRun", "Outcome", "OutcomeStore", "ShadowRun"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a claimed job. `result` is the Result message's JSON; `run` is None when nothing was decoded."""

    job_id: str
    attempt: int
    status: str
    result: bytes
    topic: str
    headers: Mapping[str, str]
    run: DecodeRun | None = None
    shadows: tuple[ShadowRun, ...] = ()  #: of drafters that did not decode it as far as they could, each at most once

    @property
    def counted(self) -> JobCounts:
        """What the job counted."""
        return JobCounts(self.job_id, self.attempt, self.run, self.shadows)

    @property
    def evidence(self) -> list[tuple[EvidenceKey, EvidenceSums]]:
        """What it adds to the evidence, by key."""
        return self.counted.evidence


class OutcomeStore:
    """Records outcomes. The evidence that they add to fades by `half_life`."""

    def __init__(self, database: Database, *, half_life: timedelta = timedelta(days=3)) -> None:
        self._database = database
        self._half_life = half_life

    def record(self, outcomes: Sequence[Outcome], *, owner: str) -> list[OutboxMessage]:
        """Record what this owner still holds; returns the messages to publish, in order.

        An outcome whose claim was lost (another attempt, another owner, or an end already recorded) is dropped whole:
        it overwrites nothing, counts nothing and publishes nothing.
        """
        if not outcomes:
            return []
        with self._database.begin() as connection:
            held = lock_held(connection, [(outcome.job_id, outcome.attempt) for outcome in outcomes], owner)
            winners = _winners(outcomes, held)
            if winners:
                _end_jobs(connection, winners)
                record_counts(connection, [won.counted for won in winners], self._half_life)
                return _enqueue(connection, winners, owner)
        return []


def _winners(outcomes: Sequence[Outcome], held: dict[str, int]) -> list[Outcome]:
    """The outcomes whose claim is held, each job once."""
    open_claims = dict(held)
    return [
        outcome
        for outcome in outcomes
        if open_claims.get(outcome.job_id) == outcome.attempt and open_claims.pop(outcome.job_id)
    ]


def _end_jobs(connection: Connection, winners: Sequence[Outcome]) -> None:
    """Write status and outcome into rows that `lock_held` locked."""
    ended = (
        func.unnest(
            bindparam("job_ids", [won.job_id for won in winners], ARRAY(Text)),
            bindparam("statuses", [won.status for won in winners], ARRAY(Text)),
            bindparam("results", [won.result.decode() for won in winners], ARRAY(Text)),
        )
        .table_valued("job_id", "status", "result")
        .render_derived(name="ended")
    )
    connection.execute(
        update(jobs)
        .where(jobs.c.job_id == ended.c.job_id)
        .values(
            status=ended.c.status,
            outcome=cast(ended.c.result, JSON),
            owner=None,
            lease_expires_at=None,
            finished_at=func.now(),
        )
    )
    # Done with: a request that comes later finds a job that ended.
    connection.execute(delete(cancellations).where(cancellations.c.job_id.in_([won.job_id for won in winners])))


def _enqueue(connection: Connection, winners: Sequence[Outcome], owner: str) -> list[OutboxMessage]:
    rows = [
        {
            "topic": won.topic,
            "key": won.job_id.encode(),
            "value": won.result,
            "headers": dict(won.headers),
            "owner": owner,
        }
        for won in winners
    ]
    ids = connection.execute(insert(outbox).returning(outbox.c.id, sort_by_parameter_order=True), rows).scalars()
    return [
        OutboxMessage(row_id, won.topic, won.job_id.encode(), won.result, dict(won.headers))
        for row_id, won in zip(ids, winners, strict=True)
    ]
