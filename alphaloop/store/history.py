"""What the past says about a task's drafters: the evidence that a decision rests on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Any, Final, TypeAlias

from sqlalchemy import ColumnElement, Select, func, select, tuple_

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.messages import Mode, Purpose
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import SHADOW
from alphaloop.tables import acceptance_hourly


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the hours say about one drafter under the evidence key of a batch; decayed counts, jobs as clusters."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    num_jobs: int = 0
    tokens_per_round_se: float | None = None  #: standard error over jobs; None with fewer than two
    #: Rounds in which position i could have been proposed: accepted through i - 1, in runs with k ≥ i, prefills left
    #: out. Empty where every run had the same k: then it follows from the counts.
    chances: tuple[int, ...] = ()


_DAY: Final = timedelta(days=1)
_MEASURES: Final = (Purpose.TRAFFIC, Purpose.PROBE)
#: An hour's weight and its row.
_Hour: TypeAlias = tuple[float, Any]


class HistoryStore:
    """Reads the hourly sums. Workers write them with every outcome, so a restarted one decides from history at once."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def evidence(
        self,
        task: str,
        *,
        target_revision: str,
        engine: str,
        sampling_bucket: str,
        drafters: Mapping[str, str],
        now: datetime,
        window_days: float,
        half_life_days: float,
    ) -> dict[str, Evidence]:
        """Evidence by drafter, for those of `drafters` (name → revision) that were used.

        Adds up segments, prompt buckets, draft lengths, traffic, its shadows and probes; never target revisions, draft
        revisions, engines, sampling buckets or gated drafts. An hour weighs half as much for every `half_life_days` of
        its age, and nothing beyond `window_days`.
        """
        if not drafters:
            return {}
        query = evidence_query(
            task, target_revision, engine, sampling_bucket, drafters, since=now - window_days * _DAY, until=now
        )
        with self._database.begin() as connection:
            rows = connection.execute(query).all()
        weighted: dict[str, list[_Hour]] = {}
        for row in rows:
            weight = 0.5 ** ((now - row.bucket) / _DAY / half_life_days)
            weighted.setdefault(row.drafter, []).append((weight, row))
        return {drafter: _evidence(hours_of_it) for drafter, hours_of_it in weighted.items()}

    def expected_tokens(self, task: str, *, now: datetime, window_days: float) -> float | None:
        """Mean tokens a job of the task's traffic; None without any."""
        return self._mean(acceptance_hourly.c.num_tokens, task, now, window_days)

    def expected_prompt_tokens(self, task: str, *, now: datetime, window_days: float) -> float | None:
        """Mean tokens of a prompt of the task's traffic; None without any."""
        return self._mean(acceptance_hourly.c.num_prompt_tokens, task, now, window_days)

    def num_jobs_since(self, task: str, sampling_bucket: str, moment: datetime) -> int:
        """Jobs of the task's traffic in the hours after that of `moment`."""
        hours = acceptance_hourly.c
        query = select(func.coalesce(func.sum(hours.num_jobs), 0)).where(
            hours.task == task,
            hours.sampling_bucket == sampling_bucket,
            hours.bucket > moment,
            hours.purpose == Purpose.TRAFFIC,
            hours.mode != SHADOW,
        )
        with self._database.begin() as connection:
            return int(connection.execute(query).scalar_one())

    def _mean(self, column: ColumnElement[int], task: str, now: datetime, window_days: float) -> float | None:
        hours = acceptance_hourly.c
        query = select(func.sum(column), func.sum(hours.num_jobs)).where(
            hours.task == task,
            hours.bucket > now - window_days * _DAY,
            hours.bucket <= now,
            hours.purpose == Purpose.TRAFFIC,
            hours.mode != SHADOW,
        )
        with self._database.begin() as connection:
            total, num_jobs = connection.execute(query).one()
        return float(total / num_jobs) if num_jobs else None


def evidence_query(
    task: str, target_revision: str, engine: str, sampling_bucket: str, drafters: Mapping[str, str], *,
    since: datetime, until: datetime,
) -> Select[Any]:  # fmt: skip
    """The hours that `HistoryStore.evidence` weighs."""
    hours = acceptance_hourly.c
    return select(
        hours.bucket, hours.drafter, hours.num_draft_tokens, hours.num_jobs, hours.rounds, hours.num_empty_rounds,
        hours.num_cropped, hours.num_tokens, hours.rounds_sq, hours.tokens_sq, hours.rounds_tokens, hours.proposed,
        hours.trials, hours.accepts,
    ).where(
        hours.task == task,
        hours.bucket > since,
        hours.bucket <= until,
        hours.target_revision == target_revision,
        hours.engine == engine,
        hours.sampling_bucket == sampling_bucket,
        hours.gate == "",
        hours.mode.in_((Mode.SPECULATIVE, SHADOW)),
        hours.purpose.in_(_MEASURES),
        tuple_(hours.drafter, hours.draft_revision).in_(drafters.items()),
    )  # fmt: skip


def _evidence(hours: Sequence[_Hour]) -> Evidence:
    """The weighted sums in whole numbers.

    Rounding keeps order, so counts that were consistent stay so. The rounds with a proposal are rounded, not those
    without, because they are what the first position is compared with.
    """
    num_jobs, rounds, offered, num_cropped = _decayed(
        (weight, (row.num_jobs, row.rounds, row.rounds - row.num_empty_rounds, row.num_cropped))
        for weight, row in hours
    )
    counts = AcceptanceCounts(
        rounds=rounds,
        num_empty_rounds=rounds - offered,
        num_cropped=num_cropped,
        proposed=_decayed((weight, row.proposed) for weight, row in hours),
        trials=_decayed((weight, row.trials) for weight, row in hours),
        accepts=_decayed((weight, row.accepts) for weight, row in hours),
    )
    chances = _decayed((weight, _chances(row)) for weight, row in hours)
    return Evidence(counts, num_jobs, _tokens_per_round_se(hours), chances)


def _chances(row: Any) -> list[int]:
    """Rounds of an hour in which each position could have been proposed: prefills left out, no further than its k."""
    reached = [row.rounds - row.num_jobs, *row.accepts]
    return [reached[i] if i < len(reached) else 0 for i in range(row.num_draft_tokens)]


def _decayed(hours: Iterable[tuple[float, Sequence[int]]]) -> tuple[int, ...]:
    sums: list[float] = []
    for weight, counts in hours:
        sums = [total + weight * count for total, count in zip_longest(sums, counts, fillvalue=0)]
    return tuple(round(total) for total in sums)


def _tokens_per_round_se(hours: Sequence[_Hour]) -> float | None:
    """Standard error over jobs of Σ tokens / Σ rounds, each job's prefill (one round, one token) left out of both.

    A ratio estimator's linearised variance, n/(n-1) · Σ w²(t - R·r)² / (Σ w·r)² (Cochran 1977, §6.4), expanded into
    the sums that are stored. None with fewer than two jobs, or when nothing followed the prefills.
    """
    num_jobs: int = sum(row.num_jobs for _, row in hours)
    rounds: float = sum(weight * (row.rounds - row.num_jobs) for weight, row in hours)
    if num_jobs < 2 or rounds <= 0:
        return None
    ratio = sum(weight * (row.num_tokens - row.num_jobs) for weight, row in hours) / rounds
    residual = 0.0
    for weight, row in hours:
        tokens_sq = row.tokens_sq - 2 * row.num_tokens + row.num_jobs
        rounds_sq = row.rounds_sq - 2 * row.rounds + row.num_jobs
        product = row.rounds_tokens - row.rounds - row.num_tokens + row.num_jobs
        residual += weight**2 * (tokens_sq - 2 * ratio * product + ratio**2 * rounds_sq)
    return math.sqrt(max(0.0, residual) * num_jobs / (num_jobs - 1)) / rounds
