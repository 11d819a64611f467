"""How jobs were decoded: one row a job, added in the same transaction to the sums of its hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import Connection, func
from sqlalchemy.dialects.postgresql import insert

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.messages import Purpose
from alphaloop.store.partitions import ensure_days, utc_day
from alphaloop.tables import acceptance_hourly, decode_runs

#: `mode` of sums that cost no time: beside vanilla and speculative, which are alphaloop.messages.Mode.
SHADOW: Final = "shadow"
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
    #: By position, rounds that allowed it: k may change within a job. Empty: k never changed.
    chances: tuple[int, ...] = ()
    #: The same for jobs that were decided together; a job that was decided alone has its own.
    decode_batch_id: UUID = field(default_factory=uuid4)

    @property
    def evidence(self) -> EvidenceSums:
        """What the run adds to what is remembered of its key."""
        return EvidenceSums.of_job(
            self.counts,
            self.num_draft_tokens,
            self.decoded_at,
            self.num_tokens,
            self.num_prompt_tokens,
            self.chances or None,
        )

    @property
    def is_evidence(self) -> bool:
        """Whether decisions may rest on it: controls only repeat what a probe measures, without a draft."""
        return self.purpose != Purpose.CONTROL


@dataclass(frozen=True, slots=True)
class ShadowRun:
    """What a drafter would have been counted with on traffic that it did not decode, under its own key.

    Evidence of acceptance like a run's (docs/concepts/drafters.md says why), and of nothing else: it took no time.
    It enters what is remembered of its key, and the hours with the mode `shadow`; it is no row of decode_runs. One with
    chances of its own is of parts of rounds: hours could not say of which, so it does not enter them.
    """

    key: EvidenceKey
    num_draft_tokens: int
    counts: AcceptanceCounts  #: of the text's beginning, where it is long
    num_prompt_tokens: int
    num_output_tokens: int  #: of the whole text
    decoded_at: datetime
    chances: tuple[int, ...] = ()  #: as a run's; empty: `num_draft_tokens` was allowed in every round

    @property
    def evidence(self) -> EvidenceSums:
        """What it adds to what is remembered of its key."""
        sums = EvidenceSums.of_job(
            self.counts,
            self.num_draft_tokens,
            self.decoded_at,
            self.counts.num_tokens,
            self.num_prompt_tokens,
            self.chances or None,
        )
        whole = self.num_output_tokens
        return replace(sums, output_tokens=float(whole), output_tokens_sq=float(whole**2))


def insert_runs(
    connection: Connection, runs: Sequence[tuple[str, int, DecodeRun]], shadows: Sequence[ShadowRun] = ()
) -> None:
    """Store the runs (job_id, attempt, run) and add them and the shadows to their hours, in the caller's transaction.

    A day without a partition gets one first: nothing is lost because nobody made it in time.
    """
    if runs:
        ensure_days(connection, {utc_day(run.decoded_at) for _, _, run in runs})
        connection.execute(insert(decode_runs), [_run_row(*run) for run in runs])
    if rows := [*(_run_hour(run) for _, _, run in runs), *map(_shadow_hour, shadows)]:
        _add_to_hours(connection, rows)


def _run_row(job_id: str, attempt: int, run: DecodeRun) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in DecodeRun.__slots__ if name not in ("key", "counts", "chances")}
    return {
        "job_id": job_id,
        "attempt": attempt,
        **row,
        **asdict(run.key),
        **_counts(run.counts),
        "chances": list(run.chances),
    }


def _add_to_hours(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
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


def _run_hour(run: DecodeRun) -> dict[str, Any]:
    how = {"purpose": run.purpose, "mode": run.mode, "num_draft_tokens": run.num_draft_tokens}
    return {
        **_hour(run.key, run.decoded_at, run.counts, run.num_tokens),
        **how,
        "num_prompt_tokens": run.num_prompt_tokens,
        "wall_s": run.wall_s,
        "device_s": run.device_s,
    }


def _shadow_hour(shadow: ShadowRun) -> dict[str, Any]:
    how = {"purpose": Purpose.TRAFFIC.value, "mode": SHADOW, "num_draft_tokens": shadow.num_draft_tokens}
    return {
        **_hour(shadow.key, shadow.decoded_at, shadow.counts, shadow.counts.num_tokens),
        **how,
        "num_prompt_tokens": shadow.num_prompt_tokens,
        "wall_s": 0.0,
        "device_s": 0.0,
    }


def _hour(key: EvidenceKey, decoded_at: datetime, counts: AcceptanceCounts, num_tokens: int) -> dict[str, Any]:
    """One job as a row of sums: sums of squares and products are those of a single job."""
    return {
        "bucket": decoded_at.astimezone(UTC).replace(minute=0, second=0, microsecond=0),
        **asdict(key),
        "num_jobs": 1,
        **_counts(counts),
        "num_tokens": num_tokens,
        "rounds_sq": counts.rounds**2,
        "tokens_sq": num_tokens**2,
        "rounds_tokens": counts.rounds * num_tokens,
        "trials_sq": [trials**2 for trials in counts.trials],
        "accepts_sq": [accepts**2 for accepts in counts.accepts],
        "accepts_trials": [a * t for a, t in zip(counts.accepts, counts.trials, strict=True)],
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
