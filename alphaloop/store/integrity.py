"""The integrity of the record: as many outcomes as jobs, and counts that add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import text

from alphaloop.store.database import Database

# `<=` and `=` by position: accepts ≤ trials ≤ proposed ≤ rounds, and tokens = rounds + accepted - cropped.
# PostgreSQL reads no field of a JSON document with an escaped NUL in it, which a generated text may hold.
_CHECK: Final = text(r"""
    WITH runs AS (
        SELECT job_id, count(*) AS times, sum(num_tokens)::bigint AS num_tokens,
               bool_and(num_tokens = rounds + array_sum(accepts) - num_cropped
                        AND array_ge(proposed, trials) AND array_ge(trials, accepts)
                        AND coalesce(proposed[1], 0) = rounds - num_empty_rounds) AS adds_up
        FROM decode_runs GROUP BY job_id
    )
    SELECT count(*) AS num_jobs,
           count(*) FILTER (WHERE status <> 'running' AND outcome IS NOT NULL) AS num_outcomes,
           count(*) FILTER (WHERE status = 'succeeded') AS num_succeeded,
           count(*) FILTER (WHERE status = 'succeeded' AND runs.times = 1) AS num_decoded_once,
           count(*) FILTER (WHERE runs.job_id IS NOT NULL AND NOT runs.adds_up) AS num_wrong_counts,
           count(*) FILTER (WHERE status = 'succeeded'
               AND (replace(outcome::text, '\u0000', '\ufffd')::json #>> '{usage,completion_tokens}')::bigint
                   IS DISTINCT FROM runs.num_tokens)
               AS num_wrong_tokens,
           coalesce(sum(runs.num_tokens), 0)::bigint AS num_tokens,
           (SELECT coalesce(sum(cardinality(job_ids)), 0)::bigint FROM outbox) AS num_unpublished
    FROM jobs LEFT JOIN runs USING (job_id)
""")


@dataclass(frozen=True, slots=True)
class Integrity:
    """The result of one check of all jobs."""

    num_jobs: int
    num_outcomes: int
    num_succeeded: int
    num_decoded_once: int  #: of those that succeeded
    num_wrong_counts: int  #: decoded jobs whose counts by position do not add up
    num_wrong_tokens: int  #: jobs whose result says another number of tokens than was counted
    num_tokens: int
    num_unpublished: int  #: outcomes that the broker has not acknowledged yet

    @property
    def holds(self) -> bool:
        """Whether every job has one outcome and every count adds up."""
        return (
            self.num_outcomes == self.num_jobs
            and self.num_decoded_once == self.num_succeeded
            and not (self.num_wrong_counts or self.num_wrong_tokens)
        )


def check(database: Database) -> Integrity:
    """Check every stored job. Retention drops old runs; check before that."""
    with database.begin() as connection:
        return Integrity(**connection.execute(_CHECK).mappings().one())
