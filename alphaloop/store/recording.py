"""Writes the counts of jobs to the ledger, the hourly sums and acceptance_state."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Connection

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.store.acceptance_state import StateRow, add_jobs, lock_keys
from alphaloop.store.copying import copy_rows
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from alphaloop.store.exchange import one_exchange
from alphaloop.store.hourly_sums import add_to_hours, count_columns
from alphaloop.store.partitions import ensure_days, utc_day
from alphaloop.tables import decode_runs, evidence_rows

_RUN: Final = tuple(name for name in DecodeRun.__slots__ if name not in ("key", "counts", "chances"))
_run_values: Final = attrgetter(*_RUN)


def record_counts(
    connection: Connection, jobs: Sequence[JobCounts], half_life: timedelta, *, recorded_at: datetime | None = None
) -> list[StateRow]:
    """Record these jobs together, in the caller's transaction; `recorded_at` is now unless given.

    Returns the rows of acceptance_state that changed, as they are now. A missing partition is made first. All rows are
    locked before a ledger_id is drawn, so jobs are added to every sum in the order of their ledger_ids.
    """
    jobs = [job for job in jobs if job.run is not None or job.shadows]
    if not jobs:
        return []
    decoded = [job.run.decoded_at for job in jobs if job.run] + [s.decoded_at for job in jobs for s in job.shadows]
    ensure_days(connection, {utc_day(at) for at in set(decoded)})
    evidence = [row for job in jobs for row in _ledger_rows(job)]
    with one_exchange(connection) as driver:
        add_to_hours(driver, jobs)
        locked = lock_keys(driver, evidence)
    drawn, clock = locked.ledger_ids()
    ledger_ids, moment = iter(drawn), recorded_at or clock
    changed = add_jobs(driver, locked, evidence, drawn, half_life)
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for job in jobs:
        if job.run is not None:
            runs.append(_run_row(job, job.run, next(ledger_ids)))
        rows += [_evidence_row(job, shadow, next(ledger_ids)) for shadow in job.shadows]
    position = {"recorded_in": min(row["ledger_id"] for row in (*runs, *rows)), "recorded_at": moment}
    for table, its in ((decode_runs, runs), (evidence_rows, rows)):
        if its:
            copy_rows(connection, table, [row | position for row in its])
    return changed


def _ledger_rows(job: JobCounts) -> list[tuple[EvidenceKey, EvidenceSums] | None]:
    """The job's rows in order: its run, None unless that is evidence, then its shadows."""
    if job.run is None or job.is_run_evidence:
        return [*job.evidence]
    return [None, *job.evidence]


def _run_row(job: JobCounts, run: DecodeRun, ledger_id: int) -> dict[str, Any]:
    return {
        "ledger_id": ledger_id,
        "job_id": job.job_id,
        "attempt": job.attempt,
        "is_evidence": job.is_run_evidence,
        **dict(zip(_RUN, _run_values(run), strict=True)),
        **run.key.columns,
        **count_columns(run.counts),
        "chances": tuple(run.chances),
    }


def _evidence_row(job: JobCounts, shadow: ShadowRun, ledger_id: int) -> dict[str, Any]:
    return {
        "ledger_id": ledger_id,
        "job_id": job.job_id,
        "decoded_at": shadow.decoded_at,
        **shadow.key.columns,
        "source": job.source(shadow).value,
        "is_whole": not shadow.chances,
        "num_draft_tokens": shadow.num_draft_tokens,
        **count_columns(shadow.counts),
        "chances": tuple(shadow.chances),
        "num_prompt_tokens": shadow.num_prompt_tokens,
        "num_output_tokens": shadow.num_output_tokens,
    }
