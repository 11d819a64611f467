"""Sums by hour: counts and times of runs, and counts of shadows, added to with every recorded job.

A fold of the ledger like acceptance_state (alphaloop.store.fold): jobs that are recorded together are added up first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import zip_longest
from typing import Any, Final

import psycopg
from sqlalchemy import Column, Text
from sqlalchemy.dialects.postgresql import ARRAY

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.messages import Purpose
from alphaloop.store.decode_runs import JobCounts, Source
from alphaloop.store.row_set import RowSet
from alphaloop.tables import acceptance_hourly

#: `mode` of sums that took no time; the other modes are those of alphaloop.messages.Mode.
SHADOW: Final = "shadow"
#: Whose sums the rows of evidence are in; the others are in none.
_PURPOSES: Final = {Source.SHADOW: Purpose.TRAFFIC, Source.SCORED: Purpose.PROBE}
#: The key of a row.
HOUR_KEY: Final = tuple(column.name for column in acceptance_hourly.primary_key)
_HOURS: Final = RowSet(list(acceptance_hourly.c))
_SUMS: Final = ", ".join(
    f"{column.name} = array_add(standing.{column.name}, excluded.{column.name})"
    if isinstance(column.type, ARRAY)
    else f"{column.name} = standing.{column.name} + excluded.{column.name}"
    for column in acceptance_hourly.c
    if not column.primary_key
)


def _collation(column: Column[Any]) -> str:
    return ' COLLATE "C"' if isinstance(column.type, Text) else ""


#: A row's sums without any job; lists are replaced, never changed.
_NO_JOBS: Final[dict[str, Any]] = {
    column.name: [] if isinstance(column.type, ARRAY) else 0 for column in acceptance_hourly.c if not column.primary_key
}
#: Rows are locked in one order, whatever the collation of the database, so two workers that share hours never deadlock.
_ADD: Final = f"""
    INSERT INTO acceptance_hourly AS standing ({_HOURS.columns}) SELECT {_HOURS.given} FROM {_HOURS.source}
    ORDER BY {", ".join(f"given.{column.name}{_collation(column)}" for column in acceptance_hourly.primary_key)}
    ON CONFLICT ({", ".join(HOUR_KEY)}) DO UPDATE SET {_SUMS}
"""  # noqa: S608 - names of columns, no values


def add_to_hours(driver: psycopg.Connection, jobs: Sequence[JobCounts]) -> None:
    """Add these jobs to the rows of their hours, in the caller's transaction."""
    sums = sums_by_hour(jobs)
    if sums:
        driver.execute(_ADD, {"rows": RowSet.parameter(sums.values())})


def sums_by_hour(jobs: Iterable[JobCounts]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The jobs as rows of acceptance_hourly, by `HOUR_KEY`. A job counts once under each of its evidence keys."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    hour_of = cache(_hour_of)  # jobs that ended together have one moment
    for job in jobs:
        if (run := job.run) is not None:
            row = _row(rows, run.key, hour_of(run.decoded_at), run.purpose, run.mode, run.num_draft_tokens)
            _add(row, run.counts, run.num_tokens, run.num_prompt_tokens)
            row["num_cut"] += run.is_cut
            row["wall_s"] += run.wall_s
            row["device_s"] += run.device_s
        for shadow in job.shadows:
            purpose = _PURPOSES.get(job.source(shadow))
            if purpose is not None:
                how = purpose.value, SHADOW, shadow.num_draft_tokens
                row = _row(rows, shadow.key, hour_of(shadow.decoded_at), *how)
                _add(row, shadow.counts, shadow.counts.num_tokens, shadow.num_prompt_tokens)
    return {tuple(row[name] for name in HOUR_KEY): row for row in rows.values()}


def _hour_of(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _row(
    rows: dict[tuple[Any, ...], dict[str, Any]],
    key: EvidenceKey,
    bucket: datetime,
    purpose: str,
    mode: str,
    num_draft_tokens: int,
) -> dict[str, Any]:
    """The row to add a job to; without jobs if it is new."""
    place = (bucket, key, purpose, mode, num_draft_tokens)
    if place not in rows:
        how = {"bucket": bucket, "purpose": purpose, "mode": mode, "num_draft_tokens": num_draft_tokens}
        rows[place] = {**_NO_JOBS, **how, **key.columns}
    return rows[place]


def _add(row: dict[str, Any], counts: AcceptanceCounts, num_tokens: int, num_prompt_tokens: int) -> None:
    """Add one job. Sums of squares and products are those of single jobs."""
    row["num_jobs"] += 1
    row["rounds"] += counts.rounds
    row["num_empty_rounds"] += counts.num_empty_rounds
    row["num_cropped"] += counts.num_cropped
    row["num_prompt_tokens"] += num_prompt_tokens
    row["num_tokens"] += num_tokens
    row["rounds_sq"] += counts.rounds**2
    row["tokens_sq"] += num_tokens**2
    row["rounds_tokens"] += counts.rounds * num_tokens
    if not counts.proposed:
        return
    by_position: dict[str, Sequence[int]] = {
        "proposed": counts.proposed,
        "trials": counts.trials,
        "accepts": counts.accepts,
        "trials_sq": [trials**2 for trials in counts.trials],
        "accepts_sq": [accepts**2 for accepts in counts.accepts],
        "accepts_trials": [a * t for a, t in zip(counts.accepts, counts.trials, strict=True)],
    }
    for name, values in by_position.items():
        row[name] = [a + b for a, b in zip_longest(row[name], values, fillvalue=0)]
