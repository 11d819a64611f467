"""Sums by hour: counts and times of runs, and counts of shadows, added to with every recorded job.

A fold of the ledger like acceptance_state (alphaloop.store.fold): jobs that are recorded together are added up first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.messages import Purpose
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun, Source
from alphaloop.store.row_set import RowSet
from alphaloop.tables import acceptance_hourly

#: `mode` of sums that took no time; the other modes are those of alphaloop.messages.Mode.
SHADOW: Final = "shadow"
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
#: Rows are locked in one order, so that two workers that share hours cannot deadlock.
_ADD: Final = f"""
    INSERT INTO acceptance_hourly AS standing ({_HOURS.columns}) SELECT {_HOURS.given} FROM {_HOURS.source}
    ORDER BY {", ".join(f"given.{name}" for name in HOUR_KEY)}
    ON CONFLICT ({", ".join(HOUR_KEY)}) DO UPDATE SET {_SUMS}
"""  # noqa: S608 - names of columns, no values


def add_to_hours(connection: Connection, jobs: Sequence[JobCounts]) -> None:
    """Add these jobs to the rows of their hours, in the caller's transaction."""
    sums = sums_by_hour(jobs)
    if not sums:
        return
    connection.exec_driver_sql(_ADD, {"rows": RowSet.parameter(sums.values())})


def sums_by_hour(jobs: Iterable[JobCounts]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The jobs as rows of acceptance_hourly, by `HOUR_KEY`. A job counts once under each of its evidence keys."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for job in jobs:
        rows = [] if job.run is None else [_run_row(job.run)]
        rows += [_shadow_row(shadow) for shadow in job.shadows if job.source(shadow) is Source.SHADOW]
        for row in rows:
            key = tuple(row[name] for name in HOUR_KEY)
            sums[key] = add_rows(sums[key], row) if key in sums else row
    return sums


def add_rows(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """The sum of two rows of one key."""
    total = dict(left)
    for name, value in right.items():
        if isinstance(value, list):
            total[name] = [a + b for a, b in zip_longest(left[name], value, fillvalue=0)]
        elif name not in HOUR_KEY:
            total[name] = left[name] + value
    return total


def _run_row(run: DecodeRun) -> dict[str, Any]:
    how = {"purpose": run.purpose, "mode": run.mode, "num_draft_tokens": run.num_draft_tokens}
    return {
        **_row(run.key, run.decoded_at, run.counts, run.num_tokens),
        **how,
        "num_prompt_tokens": run.num_prompt_tokens,
        "wall_s": run.wall_s,
        "device_s": run.device_s,
    }


def _shadow_row(shadow: ShadowRun) -> dict[str, Any]:
    how = {"purpose": Purpose.TRAFFIC.value, "mode": SHADOW, "num_draft_tokens": shadow.num_draft_tokens}
    return {
        **_row(shadow.key, shadow.decoded_at, shadow.counts, shadow.counts.num_tokens),
        **how,
        "num_prompt_tokens": shadow.num_prompt_tokens,
        "wall_s": 0.0,
        "device_s": 0.0,
    }


def _row(key: EvidenceKey, decoded_at: datetime, counts: AcceptanceCounts, num_tokens: int) -> dict[str, Any]:
    """One job as a row of sums: sums of squares and products are those of a single job."""
    return {
        "bucket": decoded_at.astimezone(UTC).replace(minute=0, second=0, microsecond=0),
        **asdict(key),
        "num_jobs": 1,
        **count_columns(counts),
        "num_tokens": num_tokens,
        "rounds_sq": counts.rounds**2,
        "tokens_sq": num_tokens**2,
        "rounds_tokens": counts.rounds * num_tokens,
        "trials_sq": [trials**2 for trials in counts.trials],
        "accepts_sq": [accepts**2 for accepts in counts.accepts],
        "accepts_trials": [a * t for a, t in zip(counts.accepts, counts.trials, strict=True)],
    }


def count_columns(counts: AcceptanceCounts) -> dict[str, Any]:
    """The counts under the names of their columns."""
    return {
        "rounds": counts.rounds,
        "num_empty_rounds": counts.num_empty_rounds,
        "num_cropped": counts.num_cropped,
        "proposed": list(counts.proposed),
        "trials": list(counts.trials),
        "accepts": list(counts.accepts),
    }
