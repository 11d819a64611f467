"""Writes the counts of jobs to the ledger, the hourly sums and acceptance_state."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, func, select

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.store.acceptance_state import StateRow, add_jobs
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from alphaloop.store.hourly_sums import add_to_hours, count_columns
from alphaloop.store.partitions import ensure_days, utc_day
from alphaloop.store.row_set import RowSet
from alphaloop.tables import decode_runs, evidence_rows

_RUNS: Final = RowSet(list(decode_runs.c))
_ROWS: Final = RowSet(list(evidence_rows.c))
_INSERT_RUNS: Final = f"INSERT INTO decode_runs ({_RUNS.columns}) SELECT {_RUNS.given} FROM {_RUNS.source}"  # noqa: S608
_INSERT_ROWS: Final = f"INSERT INTO evidence_rows ({_ROWS.columns}) SELECT {_ROWS.given} FROM {_ROWS.source}"  # noqa: S608
_RUN: Final = tuple(name for name in DecodeRun.__slots__ if name not in ("key", "counts", "chances"))


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
    ensure_days(connection, {utc_day(at) for at in decoded})
    add_to_hours(connection, jobs)
    drawn, changed = add_jobs(connection, [row for job in jobs for row in _ledger_rows(job)], half_life)
    ledger_ids = iter(drawn)
    moment = recorded_at or connection.execute(select(func.clock_timestamp())).scalar_one()
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for job in jobs:
        if job.run is not None:
            runs.append(_run_row(job, job.run, next(ledger_ids)))
        rows += [_evidence_row(job, shadow, next(ledger_ids)) for shadow in job.shadows]
    position = {"recorded_in": min(row["ledger_id"] for row in (*runs, *rows)), "recorded_at": moment}
    for statement, its in ((_INSERT_RUNS, runs), (_INSERT_ROWS, rows)):
        if its:
            connection.exec_driver_sql(statement, {"rows": RowSet.parameter(row | position for row in its)})
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
        **{name: getattr(run, name) for name in _RUN},
        **run.key.columns,
        **count_columns(run.counts),
        "chances": list(run.chances),
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
        "chances": list(shadow.chances),
        "num_prompt_tokens": shadow.num_prompt_tokens,
        "num_output_tokens": shadow.num_output_tokens,
    }
