"""Evidence estimated from hourly sums, for moments before the oldest row of a single job.

An hourly row has the exact first-order sums of its jobs, and the exact sums of squares of trials, accepts and lengths.
Three things are missing, and each is replaced by an assumption: every job ended in the middle of the hour; the jobs of
an hour came in no particular order; a job with more chances at a position had proportionally more accepts there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from alphaloop.deciding.evidence import SUMS, EvidenceSums
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.store.hourly_sums import SHADOW

#: Hours older than so many half-lives weigh less than half a percent.
NUM_HALF_LIVES: Final = 8
#: The last jobs of a key are added a few at a time, by hour, so that older jobs leave the recent window.
NUM_RECENT, NUM_AT_ONCE = 96, 4
_HOUR: Final = timedelta(hours=1)


def evidence_of(hours: Sequence[EvidenceSums], half_life: timedelta) -> KeyEvidence:
    """The evidence of a key from its hours, earliest first."""
    left = float(NUM_RECENT)
    recent: list[EvidenceSums] = []
    older = EvidenceSums(hours[0].as_of)
    for hour in reversed(hours):
        taken = min(hour.jobs, left)
        left -= taken
        recent += list(_parts(hour, taken))
        if taken < hour.jobs:
            rest = _part(hour, (hour.jobs - taken) / hour.jobs)
            until = max(older.as_of, rest.as_of)
            older = older.faded(until, half_life) + rest.faded(until, half_life)
    evidence = KeyEvidence(older, EvidenceSums(older.as_of))
    for part in reversed(recent):
        evidence = evidence.with_job(part, half_life)
    return evidence


def sums_of_hour(row: Any, *, until: datetime) -> EvidenceSums:
    """The jobs of a row of acceptance_hourly, each with weight 1, as of mid-hour, or `until` if earlier."""
    rounds, is_own = row.rounds - row.num_jobs, row.mode != SHADOW
    k = max(row.num_draft_tokens, len(row.trials))
    chances = [float(c) for c in (rounds, *row.accepts)[:k]] if rounds else []
    # A job's chances are its rounds behind the prefill, then what it accepted at the position before.
    chances_w2 = [float(c) for c in (row.rounds_sq - 2 * row.rounds + row.num_jobs, *row.accepts_sq)[: len(chances)]]
    length = max(len(chances), len(row.trials))
    accepts, accepts_sq = _padded(row.accepts, length), _padded(row.accepts_sq, length)
    chances, chances_w2 = list(_padded(chances, length)), list(_padded(chances_w2, length))
    return EvidenceSums(
        as_of=min(row.bucket + _HOUR / 2, until),
        jobs=float(row.num_jobs),
        jobs_w2=float(row.num_jobs),
        rounds=float(rounds),
        offered=float(row.rounds - row.num_empty_rounds),
        tokens=float(row.num_tokens - row.num_jobs),
        # Each job has one row that is no shadow's: that one counts for its length.
        output_tokens=float(row.num_tokens) * is_own,
        output_tokens_sq=float(row.tokens_sq) * is_own,
        prompt_tokens=float(row.num_prompt_tokens) * is_own,
        texts=float(row.num_jobs) * is_own,
        ends=float(row.num_jobs - row.num_cut) * is_own,
        proposed=_padded(row.proposed, length),
        chances=tuple(chances),
        trials=_padded(row.trials, length),
        accepts=accepts,
        trials_w2=_padded(row.trials_sq, length),
        accepts_w2=accepts_sq,
        accepts_trials_w2=_padded(row.accepts_trials, length),
        chances_w2=tuple(chances_w2),
        accepts_chances_w2=tuple(map(_product, accepts, chances, accepts_sq, chances_w2)),
    )


def _product(accepts: float, chances: float, accepts_sq: float, chances_sq: float) -> float:
    """Σ a·c over jobs, if accepts are proportional to chances; at most what the squares allow (Cauchy–Schwarz)."""
    return min(accepts / chances * chances_sq, math.sqrt(accepts_sq * chances_sq)) if chances else 0.0


def _parts(hour: EvidenceSums, num_jobs: float) -> Iterator[EvidenceSums]:
    while num_jobs > 0:
        yield _part(hour, min(NUM_AT_ONCE, num_jobs) / hour.jobs)
        num_jobs -= NUM_AT_ONCE


def _part(hour: EvidenceSums, share: float) -> EvidenceSums:
    """A share of the hour's jobs: sums of both orders are scaled by it, because single jobs are not known."""
    sums: dict[str, Any] = {}
    for name in SUMS:
        value = getattr(hour, name)
        sums[name] = tuple(v * share for v in value) if isinstance(value, tuple) else value * share
    return EvidenceSums(hour.as_of, **sums)


def _padded(values: Any, length: int) -> tuple[float, ...]:
    return (*map(float, values), *(0.0,) * (length - len(values)))
