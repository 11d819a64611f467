"""How a task's last jobs were decoded, and their times: sums by mode, drafter, k and reason."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import BigInteger, cast, func, select

from alphaloop.messages import Purpose
from alphaloop.store.database import Database
from alphaloop.tables import decode_runs

#: Bounds the time of the query, whatever the traffic.
MAX_JOBS: Final = 20_000


@dataclass(frozen=True, slots=True)
class WayDecoded:
    """Sums over jobs that were decoded in one way for one reason."""

    mode: str
    drafter: str  #: empty: vanilla
    num_draft_tokens: int
    reason: str
    num_jobs: int
    num_tokens: int
    device_s: float


class TrafficStore:
    """Reads decoded traffic."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ways(
        self,
        task: str,
        target_revision: str,
        engine: str,
        device: str,
        sampling_bucket: str,
        since: datetime,
        until: datetime,
        *,
        max_jobs: int = MAX_JOBS,
    ) -> list[WayDecoded]:
        """The traffic decoded in (since, until], of it the last `max_jobs`; the ways with most tokens first."""
        runs = decode_runs.c
        ways = ("mode", "drafter", "num_draft_tokens", "reason")
        last = (
            select(*(runs[name] for name in ways), runs.num_tokens, runs.device_s)
            .where(
                runs.task == task,
                runs.purpose == Purpose.TRAFFIC,
                runs.decoded_at > since,
                runs.decoded_at <= until,
                runs.target_revision == target_revision,
                runs.engine == engine,
                runs.device == device,
                runs.sampling_bucket == sampling_bucket,
            )
            .order_by(runs.decoded_at.desc())
            .limit(max_jobs)
            .subquery()
        )
        query = (
            select(
                *(last.c[name] for name in ways),
                func.count(),
                cast(func.sum(last.c.num_tokens), BigInteger),
                func.sum(last.c.device_s),
            )
            .group_by(*(last.c[name] for name in ways))
            .order_by(func.sum(last.c.num_tokens).desc())
        )
        with self._database.begin() as connection:
            return [WayDecoded(*tuple[Any, ...](row)) for row in connection.execute(query)]
