"""What is remembered, made from the hourly sums of before: for an installation that is older than acceptance_state.

Sums of first order, and squares of trials, accepts and lengths, are those of the jobs themselves. Three things an hour
does not know, and they are taken to be likely: every job ended in the middle of it; its jobs came in no particular
order; and a job with more chances at a position had as many more accepts there, which gives the one product that was
never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, Final

from sqlalchemy import Connection, insert, literal, select, text

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import SUMS, EvidenceSums
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.messages import Purpose
from alphaloop.store.acceptance_state import THIS_TRANSACTION
from alphaloop.store.database import Database
from alphaloop.store.packed_evidence import pack
from alphaloop.tables import acceptance_hourly, acceptance_state

#: Hours older than so many half-lives weigh less than half a percent.
NUM_HALF_LIVES: Final = 8
#: The last jobs of a key are added a few at a time, in the order of their hours: older ones do not count as recent.
NUM_RECENT, NUM_AT_ONCE = 96, 4
_HOUR: Final = timedelta(hours=1)
_KEY: Final = EvidenceKey.__slots__
_LOCK: Final = text("LOCK TABLE acceptance_state IN SHARE ROW EXCLUSIVE MODE")


def fill_from_hours(database: Database, half_life: timedelta, now: datetime) -> int:
    """Make the rows of an empty acceptance_state from acceptance_hourly; returns how many. Does nothing otherwise.

    Safe to run from several processes at once, and cheap where there is nothing to do: every worker begins with it.
    """
    hours = acceptance_hourly.c
    query = (
        select(acceptance_hourly)
        .where(hours.bucket > now - NUM_HALF_LIVES * half_life, hours.purpose != Purpose.CONTROL)
        .order_by(*(hours[name] for name in _KEY), hours.bucket)
    )
    with database.begin() as connection:
        if not _is_needed(connection):
            return 0
        connection.execute(_LOCK)
        if not _is_needed(connection):
            return 0
        found = connection.execute(query.execution_options(yield_per=2000))
        rows = [
            _row(key, [sums_of_hour(hour, until=now) for hour in of_it], half_life)
            for key, of_it in groupby(found, lambda hour: tuple(getattr(hour, name) for name in _KEY))
        ]
        if rows:
            connection.execute(insert(acceptance_state).values(changed_in=THIS_TRANSACTION), rows)
        return len(rows)


def evidence_of(hours: Sequence[EvidenceSums], half_life: timedelta) -> KeyEvidence:
    """What would be remembered of the jobs of these hours, earliest first."""
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
    """The jobs of a row of acceptance_hourly, each weighing 1, as of the middle of its hour, or `until` if earlier."""
    rounds = row.rounds - row.num_jobs
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
        output_tokens=float(row.num_tokens),
        output_tokens_sq=float(row.tokens_sq),
        prompt_tokens=float(row.num_prompt_tokens),
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


def _is_needed(connection: Connection) -> bool:
    some = select(literal(1))
    empty = ~some.select_from(acceptance_state).exists()
    return bool(connection.execute(select(empty & some.select_from(acceptance_hourly).exists())).scalar_one())


def _product(accepts: float, chances: float, accepts_sq: float, chances_sq: float) -> float:
    """Σ a·c over jobs, if accepts go with chances; never more than their squares allow."""
    return min(accepts / chances * chances_sq, math.sqrt(accepts_sq * chances_sq)) if chances else 0.0


def _row(key: tuple[str, ...], hours: Sequence[EvidenceSums], half_life: timedelta) -> dict[str, Any]:
    evidence = evidence_of(hours, half_life)
    num_jobs = round(sum(hour.jobs for hour in hours))
    return {
        **dict(zip(_KEY, key, strict=True)),
        "as_of": evidence.all.as_of,
        "num_jobs": num_jobs,
        "evidence": pack(evidence),
    }


def _parts(hour: EvidenceSums, num_jobs: float) -> Iterator[EvidenceSums]:
    while num_jobs > 0:
        yield _part(hour, min(NUM_AT_ONCE, num_jobs) / hour.jobs)
        num_jobs -= NUM_AT_ONCE


def _part(hour: EvidenceSums, share: float) -> EvidenceSums:
    """A share of its jobs, nobody knows which: sums of both orders are as many times smaller."""
    sums: dict[str, Any] = {}
    for name in SUMS:
        value = getattr(hour, name)
        sums[name] = tuple(v * share for v in value) if isinstance(value, tuple) else value * share
    return EvidenceSums(hour.as_of, **sums)


def _padded(values: Any, length: int) -> tuple[float, ...]:
    return (*map(float, values), *(0.0,) * (length - len(values)))
