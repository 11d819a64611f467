"""How jobs were decoded: one row a job, added in the same transaction to the sums of its hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, Final

from sqlalchemy import Connection, func
from sqlalchemy.dialects.postgresql import insert

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.messages import Purpose
from alphaloop.store.partitions import ensure_days, utc_day
from alphaloop.tables import acceptance_hourly, decode_runs

_KEY: Final = tuple(column.name for column in acceptance_hourly.primary_key)


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """How a job was decoded and what it took; times in seconds, `decoded_at` aware."""

    key: EvidenceKey
    purpose: str
    mode: str
    num_draft_tokens: int
    reason: str
    device: str
    counts: AcceptanceCounts
    num_prompt_tokens: int
    num_tokens: int
    batch_size: int
    queue_s: float
    time_to_first_token_s: float | None
    wall_s: float
    device_s: float
    decoded_at: datetime

    @property
    def evidence(self) -> EvidenceSums:
        """What the run adds to what is remembered of its key."""
        return EvidenceSums.of_job(
            self.counts, self.num_draft_tokens, self.decoded_at, self.num_tokens, self.num_prompt_tokens
        )

    @property
    def is_evidence(self) -> bool:
        """Whether decisions may rest on it: controls only repeat what a probe measures, without a draft."""
        return self.purpose != Purpose.CONTROL


def insert_runs(connection: Connection, runs: Sequence[tuple[str, int, DecodeRun]]) -> None:
    """Store the runs (job_id, attempt, run) and add them to their hours, in the caller's transaction.

    A day without a partition gets one first: nothing is lost because nobody made it in time.
    """
    if not runs:
        return
    ensure_days(connection, {utc_day(run.decoded_at) for _, _, run in runs})
    connection.execute(insert(decode_runs), [_run_row(*run) for run in runs])
    _add_to_hours(connection, [run for _, _, run in runs])


def _run_row(job_id: str, attempt: int, run: DecodeRun) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in DecodeRun.__slots__ if name not in ("key", "counts")}
    return {"job_id": job_id, "attempt": attempt, **row, **asdict(run.key), **_counts(run.counts)}


def _add_to_hours(connection: Connection, runs: Sequence[DecodeRun]) -> None:
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        row = _hour_row(run)
        key = tuple(row[name] for name in _KEY)
        sums[key] = _add(sums[key], row) if key in sums else row
    statement = insert(acceptance_hourly)
    standing, new = acceptance_hourly.c, statement.excluded
    added = {
        name: func.array_add(standing[name], new[name]) if isinstance(value, list) else standing[name] + new[name]
        for name, value in next(iter(sums.values())).items()
        if name not in _KEY
    }
    # Row locks in one order: two workers that share hours never wait for each other in a circle.
    connection.execute(
        statement.on_conflict_do_update(index_elements=list(_KEY), set_=added), [sums[key] for key in sorted(sums)]
    )


def _hour_row(run: DecodeRun) -> dict[str, Any]:
    """One job as a row of sums: sums of squares and products are those of a single job."""
    counts = run.counts
    return {
        "bucket": run.decoded_at.astimezone(UTC).replace(minute=0, second=0, microsecond=0),
        **asdict(run.key),
        "purpose": run.purpose,
        "mode": run.mode,
        "num_draft_tokens": run.num_draft_tokens,
        "num_jobs": 1,
        **_counts(counts),
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_tokens": run.num_tokens,
        "rounds_sq": counts.rounds**2,
        "tokens_sq": run.num_tokens**2,
        "rounds_tokens": counts.rounds * run.num_tokens,
        "trials_sq": [trials**2 for trials in counts.trials],
        "accepts_sq": [accepts**2 for accepts in counts.accepts],
        "accepts_trials": [a * t for a, t in zip(counts.accepts, counts.trials, strict=True)],
        "wall_s": run.wall_s,
        "device_s": run.device_s,
    }


def _counts(counts: AcceptanceCounts) -> dict[str, Any]:
    return {
        "rounds": counts.rounds,
        "num_empty_rounds": counts.num_empty_rounds,
        "num_cropped": counts.num_cropped,
        "proposed": list(counts.proposed),
        "trials": list(counts.trials),
        "accepts": list(counts.accepts),
    }


def _add(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    total = dict(left)
    for name, value in right.items():
        if isinstance(value, list):
            total[name] = [a + b for a, b in zip_longest(left[name], value, fillvalue=0)]
        elif name not in _KEY:
            total[name] = left[name] + value
    return total
