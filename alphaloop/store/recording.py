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
from alphaloop.store.copying import NULL, array_field, copy_lines, fields_of
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from alphaloop.store.exchange import one_exchange
from alphaloop.store.hourly_sums import add_to_hours
from alphaloop.store.partitions import KnownDays, utc_day
from alphaloop.tables import decode_runs, evidence_rows

_COUNTED: Final = (
    *("ledger_id", "recorded_in", "recorded_at", "job_id", "decoded_at"),
    *EvidenceKey.__slots__,
    *AcceptanceCounts.__slots__,
    "chances",
)
_RUN_COLUMNS: Final = (
    *_COUNTED,
    *("attempt", "is_evidence", "decode_batch_id"),
    *("purpose", "mode", "reason", "device"),
    *("num_draft_tokens", "num_prompt_tokens", "num_tokens", "is_cut", "batch_size"),
    *("queue_s", "time_to_first_token_s", "wall_s", "device_s"),
)
_EVIDENCE_COLUMNS: Final = (
    *_COUNTED,
    *("source", "is_whole", "num_draft_tokens", "num_prompt_tokens", "num_output_tokens", "is_cut"),
)
_key_values: Final[Callable[[EvidenceKey], tuple[str, ...]]] = attrgetter(*EvidenceKey.__slots__)


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
        copy_lines(connection, decode_runs, _RUN_COLUMNS, rows.runs)
    if rows.evidence:
        copy_lines(connection, evidence_rows, _EVIDENCE_COLUMNS, rows.evidence)
    return changed


def _ledger_rows(job: JobCounts) -> list[tuple[EvidenceKey, EvidenceSums] | None]:
    """The job's rows in order: its run, None unless that is evidence, then its shadows."""
    rows: list[tuple[EvidenceKey, EvidenceSums] | None] = [*job.evidence]
    if len(rows) < len(job.shadows) + (job.run is not None):
        rows.insert(0, None)
    return rows


class _Rows:
    """The rows of both tables of one transaction as lines for COPY, by `_RUN_COLUMNS` and `_EVIDENCE_COLUMNS`."""

    def __init__(self, recorded_in: int, recorded_at: datetime) -> None:
        self.runs: list[str] = []
        self.evidence: list[str] = []
        self._recorded = f"{recorded_in}\t{recorded_at}"
        # What many rows have in common is written once.
        self._text_of = cache(str)
        self._key_of = cache(lambda key: fields_of(_key_values(key)))
        self._how_of = cache(lambda *values: fields_of(values))

    def add(self, job: JobCounts, ledger_ids: Iterator[int]) -> None:
        """The rows of a job, each with the next ledger_id."""
        if (run := job.run) is not None:
            first_s = NULL if run.time_to_first_token_s is None else run.time_to_first_token_s
            self.runs.append(
                f"{self._counted(next(ledger_ids), job.job_id, run)}"
                f"\t{job.attempt}\t{job.is_run_evidence}\t{self._text_of(run.decode_batch_id)}"
                f"\t{self._how_of(run.purpose, run.mode, run.reason, run.device)}"
                f"\t{run.num_draft_tokens}\t{run.num_prompt_tokens}\t{run.num_tokens}\t{run.is_cut}\t{run.batch_size}"
                f"\t{run.queue_s}\t{first_s}\t{run.wall_s}\t{run.device_s}\n"
            )
        for shadow in job.shadows:
            is_cut = NULL if shadow.is_cut is None else shadow.is_cut
            self.evidence.append(
                f"{self._counted(next(ledger_ids), job.job_id, shadow)}"
                f"\t{job.source(shadow).value}\t{not shadow.chances}"
                f"\t{shadow.num_draft_tokens}\t{shadow.num_prompt_tokens}\t{shadow.num_output_tokens}\t{is_cut}\n"
            )

    def _counted(self, ledger_id: int, job_id: str, counted: DecodeRun | ShadowRun) -> str:
        counts = counted.counts
        return (
            f"{ledger_id}\t{self._recorded}\t{fields_of((job_id,))}\t{self._text_of(counted.decoded_at)}"
            f"\t{self._key_of(counted.key)}\t{counts.rounds}\t{counts.num_empty_rounds}\t{counts.num_cropped}"
            f"\t{array_field(counts.proposed)}\t{array_field(counts.trials)}\t{array_field(counts.accepts)}"
            f"\t{array_field(counted.chances)}"
        )
