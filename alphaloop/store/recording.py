"""Writes the counts of jobs to the ledger, the hourly sums and acceptance_state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache
from operator import attrgetter
from typing import Final

from sqlalchemy import Connection

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.store.acceptance_state import StateRow, add_jobs, lock_keys
from alphaloop.store.copying import array_text, copy_rows
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from alphaloop.store.exchange import one_exchange
from alphaloop.store.hourly_sums import add_to_hours
from alphaloop.store.partitions import KnownDays, utc_day
from alphaloop.tables import decode_runs, evidence_rows

_KEY: Final = EvidenceKey.__slots__
_COUNTS: Final = AcceptanceCounts.__slots__
#: Of a run, as COPY takes them. Moments and ids, which repeat, and arrays are written as text by `_Written`.
_PLAIN: Final = tuple(
    name
    for name in DecodeRun.__slots__
    if name not in ("key", "counts", "chances", "decoded_at", "decode_batch_id", "is_counted")
)
_POSITION: Final = ("ledger_id", "recorded_in", "recorded_at", "job_id", "decoded_at")
_COUNTED: Final = (*_KEY, *_COUNTS, "chances")
_RUN_COLUMNS: Final = (*_POSITION, *_COUNTED, "attempt", "is_evidence", "decode_batch_id", *_PLAIN)
_EVIDENCE_COLUMNS: Final = (
    *_POSITION,
    *_COUNTED,
    "source",
    "is_whole",
    "num_draft_tokens",
    "num_prompt_tokens",
    "num_output_tokens",
)
_key_values: Final[Callable[[EvidenceKey], tuple[object, ...]]] = attrgetter(*_KEY)
_plain_values: Final[Callable[[DecodeRun], tuple[object, ...]]] = attrgetter(*_PLAIN)


def record_counts(
    connection: Connection,
    jobs: Sequence[JobCounts],
    half_life: timedelta,
    *,
    recorded_at: datetime | None = None,
    days: KnownDays | None = None,
) -> list[StateRow]:
    """Record these jobs together, in the caller's transaction; `recorded_at` is now unless given.

    Returns the rows of acceptance_state that changed, as they are now. A missing partition is made first; those of
    `days` are not looked for. All rows are locked before a ledger_id is drawn, so jobs are added to every sum in the
    order of their ledger_ids.
    """
    jobs = [job for job in jobs if job.run is not None or job.shadows]
    if not jobs:
        return []
    decoded = {job.run.decoded_at for job in jobs if job.run} | {s.decoded_at for job in jobs for s in job.shadows}
    (days or KnownDays()).ensure(connection, {utc_day(at) for at in decoded})
    evidence = [row for job in jobs for row in _ledger_rows(job)]
    with one_exchange(connection) as driver:
        add_to_hours(driver, jobs)
        locked = lock_keys(driver, evidence)
    drawn, clock = locked.ledger_ids()
    changed = add_jobs(driver, locked, evidence, drawn, half_life)
    rows = _Rows(min(drawn), recorded_at or clock)
    ledger_ids = iter(drawn)
    for job in jobs:
        rows.add(job, ledger_ids)
    if rows.runs:
        copy_rows(connection, decode_runs, _RUN_COLUMNS, rows.runs)
    if rows.evidence:
        copy_rows(connection, evidence_rows, _EVIDENCE_COLUMNS, rows.evidence)
    return changed


def _ledger_rows(job: JobCounts) -> list[tuple[EvidenceKey, EvidenceSums] | None]:
    """The job's rows in order: its run, None unless that is evidence, then its shadows."""
    rows: list[tuple[EvidenceKey, EvidenceSums] | None] = [*job.evidence]
    if len(rows) < len(job.shadows) + (job.run is not None):
        rows.insert(0, None)
    return rows


class _Rows:
    """The rows of both tables of one transaction, in the order of `_RUN_COLUMNS` and `_EVIDENCE_COLUMNS`."""

    def __init__(self, recorded_in: int, recorded_at: datetime) -> None:
        self.runs: list[tuple[object, ...]] = []
        self.evidence: list[tuple[object, ...]] = []
        self._text_of = cache(str)
        self._recorded = recorded_in, str(recorded_at)

    def add(self, job: JobCounts, ledger_ids: Iterator[int]) -> None:
        """The rows of a job, each with the next ledger_id."""
        if (run := job.run) is not None:
            self.runs.append(
                (
                    *self._counted(next(ledger_ids), job.job_id, run),
                    job.attempt,
                    job.is_run_evidence,
                    self._text_of(run.decode_batch_id),
                    *_plain_values(run),
                )
            )
        for shadow in job.shadows:
            self.evidence.append(
                (
                    *self._counted(next(ledger_ids), job.job_id, shadow),
                    job.source(shadow).value,
                    not shadow.chances,
                    shadow.num_draft_tokens,
                    shadow.num_prompt_tokens,
                    shadow.num_output_tokens,
                )
            )

    def _counted(self, ledger_id: int, job_id: str, counted: DecodeRun | ShadowRun) -> tuple[object, ...]:
        counts = counted.counts
        return (
            ledger_id,
            *self._recorded,
            job_id,
            self._text_of(counted.decoded_at),
            *_key_values(counted.key),
            counts.rounds,
            counts.num_empty_rounds,
            counts.num_cropped,
            array_text(counts.proposed),
            array_text(counts.trials),
            array_text(counts.accepts),
            array_text(counted.chances),
        )
