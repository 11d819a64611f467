"""Recording outcomes: result, counts, evidence, status and the message, in one transaction or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import ARRAY, Column, Connection, Text, bindparam, delete, func

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.store.acceptance_state import StateRow
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from alphaloop.store.jobs import lock_held
from alphaloop.store.outbox import OutboxMessage
from alphaloop.store.recording import record_counts
from alphaloop.store.row_set import RowSet
from alphaloop.tables import cancellations, jobs, outbox

__all__ = ["DecodeRun", "Outcome", "OutcomeStore", "ShadowRun"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a claimed job ended. `result` is the Result message's JSON; `run` is None when nothing was decoded."""

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
        """The counts of the job."""
        return JobCounts(self.job_id, self.attempt, self.run, self.shadows)

    @property
    def evidence(self) -> list[tuple[EvidenceKey, EvidenceSums]]:
        """What the job adds to the evidence, by key."""
        return self.counted.evidence


def _ignore(rows: Sequence[StateRow]) -> None:
    """Nobody keeps a copy of the evidence."""


class OutcomeStore:
    """Records outcomes. The evidence that they add to fades by `half_life`.

    After each commit `changed` is called with the rows of acceptance_state that changed, as they are then.
    """

    def __init__(
        self,
        database: Database,
        *,
        half_life: timedelta = timedelta(days=3),
        changed: Callable[[Sequence[StateRow]], None] = _ignore,
    ) -> None:
        self._database = database
        self._half_life = half_life
        self._changed = changed

    def record(self, outcomes: Sequence[Outcome], *, owner: str) -> list[OutboxMessage]:
        """Record what this owner still holds; returns the messages to publish, in order.

        An outcome whose claim was lost (another attempt, another owner, or an outcome already recorded) is dropped: it
        overwrites, counts and publishes nothing.
        """
        if not outcomes:
            return []
        with self._database.begin() as connection:
            held = lock_held(connection, [(outcome.job_id, outcome.attempt) for outcome in outcomes], owner)
            winners = _winners(outcomes, held)
            if winners:
                _end_jobs(connection, winners)
                rows = record_counts(connection, [won.counted for won in winners], self._half_life)
                messages = _enqueue(connection, winners, owner)
        if not winners:
            return []
        self._changed(rows)
        return messages


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
    rows = ({"job_id": won.job_id, "status": won.status, "result": won.result.decode()} for won in winners)
    connection.exec_driver_sql(_END_JOBS, {"rows": RowSet.parameter(rows)})
    # A later request finds a job that ended.
    job_ids = bindparam("job_ids", [won.job_id for won in winners], ARRAY(Text))
    connection.execute(delete(cancellations).where(cancellations.c.job_id == func.any(job_ids)))


def _enqueue(connection: Connection, winners: Sequence[Outcome], owner: str) -> list[OutboxMessage]:
    rows = (
        {
            "topic": won.topic,
            "key": won.job_id.encode(),
            "value": won.result,
            "headers": json.dumps(dict(won.headers)),
            "owner": owner,
        }
        for won in winners
    )
    found = connection.exec_driver_sql(_ENQUEUE, {"rows": RowSet.parameter(rows)})
    ids = {bytes(key): row_id for row_id, key in found}
    return [
        OutboxMessage(ids[won.job_id.encode()], won.topic, won.job_id.encode(), won.result, dict(won.headers))
        for won in winners
    ]


_ENDED: Final = RowSet([jobs.c.job_id, jobs.c.status, Column("result", Text)])
_END_JOBS: Final = f"""
    UPDATE jobs SET status = given.status, outcome = CAST(given.result AS json), owner = NULL, lease_expires_at = NULL,
        finished_at = now()
    FROM {_ENDED.source} WHERE jobs.job_id = given.job_id
"""  # noqa: S608 - names of columns, no values
#: Headers as text: inside the rows' own JSON Postgres would refuse the character NUL.
_MESSAGES: Final = RowSet([outbox.c.topic, outbox.c.key, outbox.c.value, outbox.c.owner, Column("headers", Text)])
_ENQUEUE: Final = f"""
    INSERT INTO outbox (topic, key, value, owner, headers)
    SELECT given.topic, given.key, given.value, given.owner, CAST(given.headers AS json) FROM {_MESSAGES.source}
    RETURNING id, key
"""  # noqa: S608 - names of columns, no values
