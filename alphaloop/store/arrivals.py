"""When decoded jobs came and what they had to do: what a fleet is planned from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text

from alphaloop.capacity.curve import DecodedJobs
from alphaloop.server_identity import SERVERS
from alphaloop.store.database import Database, of_row


@dataclass(frozen=True, slots=True)
class SeenArrivals:
    """The jobs of one target that were decoded in a time."""

    target: str
    num_jobs: int
    most_running: int  #: the most sequences that shared a step of one device
    device_s: float  #: that the jobs took
    begins_at: datetime  #: from which `arrived_s` counts: the quarter of an hour of the first arrival
    groups: tuple[DecodedJobs, ...]  #: in the order of their arrival


class ArrivalStore:
    """Reads arrivals from the ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def seen(self, since: datetime, until: datetime) -> list[SeenArrivals]:
        """The jobs, probes and controls that were decoded in [since, until], by target.

        The time of an arrival is that of the last token less the decoding and the wait before it. Jobs of a task that
        came in one minute, ran at about the same load and took about as long are one group, with their means.
        """
        given = {"since": since, "until": until, "servers": f"{SERVERS}%"}
        groups: dict[str, list[DecodedJobs]] = {}
        for row in self._database.rows(_GROUPS, given):
            groups.setdefault(row.target, []).append(of_row(DecodedJobs, row))
        return [
            of_row(SeenArrivals, row, groups=tuple(groups[row.target])) for row in self._database.rows(_TARGETS, given)
        ]

    def num_ended_without_text(self, since: datetime, until: datetime) -> int:
        """Jobs that failed, expired or were cancelled in [since, until]: what they took is in no sum."""
        return int(self._database.scalar(_WITHOUT_TEXT, {"since": since, "until": until}))


#: A request of a server is one of those in flight, however many texts it asks for. The load of a job is the harmonic
#: mean over its decoding: its device seconds are its sequences' time, each moment by the sequences there.
_JOBS: Final = """
    WITH decoded AS (
        SELECT target, task, device, mode = 'speculative' AS is_speculative, num_tokens, wall_s, device_s, batch_size,
            decoded_at - (wall_s + queue_s) * interval '1 second' AS arrived_at,
            CASE WHEN device LIKE :servers THEN 1 ELSE num_texts END AS num_texts
        FROM decode_runs
        WHERE decoded_at >= :since AND decoded_at <= :until AND wall_s > 0 AND device_s > 0 AND num_tokens > 0
    ), begun AS (
        SELECT target, to_timestamp(floor(extract(epoch FROM min(arrived_at)) / 900) * 900) AS begins_at
        FROM decoded GROUP BY target
    ), jobs AS (
        SELECT decoded.*, begins_at, extract(epoch FROM arrived_at - begins_at)::float8 AS arrived_s,
            greatest(1, least(batch_size, num_texts * wall_s / device_s)) AS load
        FROM decoded JOIN begun USING (target)
    )
"""
_GROUPS: Final = text(
    _JOBS  # noqa: S608 - no values
    + """
    SELECT target, task, device, is_speculative, avg(arrived_s) AS arrived_s, count(*) AS num_jobs, num_texts,
        sum(num_tokens)::bigint AS num_tokens, avg(wall_s) AS wall_s, avg(load) AS load
    FROM jobs
    GROUP BY target, task, device, is_speculative, num_texts, floor(arrived_s / 60), round(4 * ln(wall_s)),
        round(4 * ln(load))
    ORDER BY target, avg(arrived_s)
"""
)
_TARGETS: Final = text(
    _JOBS  # noqa: S608 - no values
    + """
    SELECT target, count(*) AS num_jobs, max(batch_size) AS most_running, sum(device_s) AS device_s,
        min(begins_at) AS begins_at
    FROM jobs
    GROUP BY target
    ORDER BY target
"""
)
_WITHOUT_TEXT: Final = text("""
    SELECT count(*) FROM jobs
    WHERE finished_at >= :since AND finished_at <= :until AND status IN ('failed', 'expired', 'cancelled')
""")
