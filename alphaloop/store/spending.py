"""What jobs took of the device, and what that cost: sums by task, segment, target, batch, key or job.

Every screen and every JSON reads device seconds and money here. Both are sums over `decode_runs`: a job's device
seconds are its shares of the rounds it was part of, and they are spread evenly over the time in which it was decoded,
so that a job which ran across a change of price pays both prices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import TextClause, text

from alphaloop.acceptance import Interval
from alphaloop.messages import Purpose
from alphaloop.prices import named_targets, stretches
from alphaloop.settings.prices import PriceSettings
from alphaloop.store.database import Database, of_row
from alphaloop.wording import spent


class SpentBy(StrEnum):
    """What device time is summed by."""

    TASK = "task"
    SEGMENT = "segment"
    TARGET = "target"
    BATCH = "batch"
    KEY = "key"
    PURPOSE = "purpose"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Spending:
    """What some decoded jobs took."""

    name: str  #: of the task, segment …; empty for jobs without
    num_jobs: int
    num_prompt_tokens: int
    num_tokens: int  #: generated
    device_s: float
    cost: float | None  #: in prices.currency; None where no price is set
    #: Target passes that drafts saved: vanilla decoding takes one pass of a single sequence for each token that is not
    #: forced.
    num_saved_passes: int

    def per(self, number: int, num_units: int) -> float | None:
        """The cost of `num_units` where `number` of them cost all; None without a price, or where `number` is 0."""
        return None if self.cost is None or not number else self.cost / number * num_units

    def cost_of(self, device_s: Interval | None) -> Interval | None:
        """The cost of other device seconds at the mean price of these; None without both."""
        if self.cost is None or device_s is None or not self.device_s:
            return None
        per_s = self.cost / self.device_s
        return Interval(*(seconds * per_s for seconds in (device_s.mean, device_s.low, device_s.high)))

    def in_words(self, currency: str) -> str:
        """`12.5 device seconds, 0.0087 EUR`."""
        return spent(self.device_s, self.cost, currency)


class SpendingStore:
    """Reads device time, and prices it as the settings say now."""

    def __init__(self, database: Database, prices: PriceSettings) -> None:
        self._database, self._prices = database, prices

    def by(self, what: SpentBy, since: datetime, until: datetime) -> list[Spending]:
        """What the jobs that were decoded in [since, until] took, the most device time first.

        Jobs of traffic; by purpose also probes and controls.
        """
        purposes = list(Purpose) if what is SpentBy.PURPOSE else [Purpose.TRAFFIC]
        given = {"since": since, "until": until, "purposes": [purpose.value for purpose in purposes]}
        return self._sums(_WITHIN[what], given, since, until)

    def of_batches(self, batch_ids: Collection[str]) -> dict[str, Spending]:
        """What the decoded jobs of each batch took so far, by batch; a batch without one is left out."""
        return self._found(_OF_BATCHES, _SPAN_OF_BATCHES, batch_ids)

    def of_jobs(self, job_ids: Collection[str]) -> dict[str, Spending]:
        """What each of the decoded jobs took, by job."""
        return self._found(_OF_JOBS, _SPAN_OF_JOBS, job_ids)

    def _found(self, query: TextClause, span: TextClause, names: Collection[str]) -> dict[str, Spending]:
        if not names:
            return {}
        given: dict[str, Any] = {"names": list(names)}
        first, last = self._database.one(span, given)
        return {} if first is None else {row.name: row for row in self._sums(query, given, first, last)}

    def _sums(self, query: TextClause, given: Mapping[str, Any], since: datetime, until: datetime) -> list[Spending]:
        tariff = _tariff(self._prices, since - _LONGEST_JOB, until)
        return [of_row(Spending, row) for row in self._database.rows(query, {**given, **tariff})]


#: Prices are looked up so long before the first job ended. A job that took longer has the first price before.
_LONGEST_JOB: Final = timedelta(days=1)


def _tariff(prices: PriceSettings, since: datetime, until: datetime) -> dict[str, Any]:
    """The prices as columns of equal length; `paid` is what a device has cost up to the beginning of a stretch.

    Targets without a rate of their own stand under the empty name.
    """
    named = named_targets(prices)
    columns: dict[str, list[Any]] = {"targets": [], "begins": [], "per_s": [], "paid": []}
    for target in ("", *named):
        paid, before = 0.0, None
        for stretch in stretches(prices, target, since, until):
            if before is not None:
                paid += before.per_s * (stretch.begins - before.begins).total_seconds()
            for name, value in zip(columns, (target, stretch.begins, stretch.per_s, paid), strict=True):
                columns[name].append(value)
            before = stretch
    return {**columns, "named": list(named)}


def _query(name: str, where: str) -> TextClause:
    """The sums by `name`, an expression over `runs` and `batch`, of the rows `where`.

    A device that ran from the beginning of the tariff to a moment t would have cost
    paid[i] + per_s[i] · (t - begins[i]), with i the stretch that holds t. The mean price of a job is the difference of
    this between its two ends, by the time between them.
    """
    return text(f"""
        WITH tariff AS MATERIALIZED (
            SELECT target, array_agg(begins ORDER BY begins) AS begins, array_agg(per_s ORDER BY begins) AS per_s,
                array_agg(paid ORDER BY begins) AS paid
            FROM unnest(CAST(:targets AS text[]), CAST(:begins AS timestamptz[]), CAST(:per_s AS float8[]),
                CAST(:paid AS float8[])) AS stretch(target, begins, per_s, paid)
            GROUP BY target
        )
        SELECT {name} AS name, count(*) AS num_jobs, sum(runs.num_prompt_tokens)::bigint AS num_prompt_tokens,
            sum(runs.num_tokens)::bigint AS num_tokens, sum(runs.device_s) AS device_s,
            sum(runs.device_s * CASE
                WHEN ends.i = starts.i THEN tariff.per_s[ends.i]
                ELSE (tariff.paid[ends.i] - tariff.paid[starts.i]
                    + tariff.per_s[ends.i] * extract(epoch FROM runs.decoded_at - tariff.begins[ends.i])::float8
                    - tariff.per_s[starts.i] * extract(epoch FROM starts.at - tariff.begins[starts.i])::float8
                ) / extract(epoch FROM runs.decoded_at - starts.at)::float8
            END) AS cost,
            coalesce(sum(runs.num_tokens - runs.num_forced - runs.rounds) FILTER (WHERE runs.mode = 'speculative'), 0)
                ::bigint AS num_saved_passes
        FROM decode_runs AS runs
            LEFT JOIN tariff ON tariff.target = CASE WHEN runs.target = ANY(CAST(:named AS text[]))
                THEN runs.target ELSE '' END
            LEFT JOIN api_batches AS batch ON batch.id = runs.batch_id
            CROSS JOIN LATERAL (
                SELECT at, greatest(1, width_bucket(at, tariff.begins)) AS i
                FROM (SELECT runs.decoded_at - runs.wall_s * interval '1 second') AS began(at)
            ) AS starts
            CROSS JOIN LATERAL (SELECT greatest(1, width_bucket(runs.decoded_at, tariff.begins)) AS i) AS ends
        WHERE {where}
        GROUP BY 1
        ORDER BY sum(runs.device_s) DESC, 1
    """)  # noqa: S608 - expressions of this module, no values


_NAMES: Final = {
    SpentBy.TASK: "runs.task",
    SpentBy.SEGMENT: "runs.segment",
    SpentBy.TARGET: "runs.target",
    SpentBy.BATCH: "coalesce(runs.batch_id, '')",
    SpentBy.KEY: "coalesce(batch.key_name, '')",
    SpentBy.PURPOSE: "runs.purpose",
    SpentBy.JOB: "runs.job_id",
}
_IN_TIME: Final = (
    "runs.decoded_at >= :since AND runs.decoded_at <= :until AND runs.purpose = ANY(CAST(:purposes AS text[]))"
)
_WITHIN: Final = {what: _query(name, _IN_TIME) for what, name in _NAMES.items()}
_BATCHES, _JOBS = "runs.batch_id = ANY(:names)", "runs.job_id = ANY(:names)"
_OF_BATCHES: Final = _query("runs.batch_id", _BATCHES)
_OF_JOBS: Final = _query("runs.job_id", _JOBS)
# Materialized: for a plain min() PostgreSQL may walk through the whole index of times instead.
_SPAN_OF_BATCHES, _SPAN_OF_JOBS = (
    text(f"""
        WITH decoded AS MATERIALIZED (SELECT decoded_at FROM decode_runs AS runs WHERE {where})
        SELECT min(decoded_at), max(decoded_at) FROM decoded
    """)  # noqa: S608
    for where in (_BATCHES, _JOBS)
)


def total(parts: Sequence[Spending], name: str = "") -> Spending:
    """Several together."""
    costs = [part.cost for part in parts]
    return Spending(
        name=name,
        num_jobs=sum(part.num_jobs for part in parts),
        num_prompt_tokens=sum(part.num_prompt_tokens for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        device_s=sum(part.device_s for part in parts),
        cost=None if None in costs else sum(cost for cost in costs if cost is not None),
        num_saved_passes=sum(part.num_saved_passes for part in parts),
    )


def spent_as_json(spending: Spending | None, currency: str) -> dict[str, Any] | None:
    """Device seconds, cost and its currency, the last two null where no price is set; None before anything was decoded.

    The same object in the JSON of jobs and batches on every screen.
    """
    if spending is None:
        return None
    return {
        "device_s": spending.device_s,
        "cost": spending.cost,
        "currency": None if spending.cost is None else currency,
    }
