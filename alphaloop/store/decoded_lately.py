"""What was decoded in the last minute. Bounded by time, however much was decoded before."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import BigInteger, cast, func, select

from alphaloop.store.database import Database
from alphaloop.tables import decode_runs

#: What the sums are over.
WINDOW: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class DecodedLately:
    """Jobs of a task and a purpose that were decoded in the window, and their tokens."""

    task: str
    purpose: str
    num_jobs: int
    num_tokens: int


def decoded_lately(database: Database, window: timedelta = WINDOW) -> list[DecodedLately]:
    """Jobs and tokens by task and purpose, in the order of names; by the clock of the database."""
    runs = decode_runs.c
    query = (
        select(runs.task, runs.purpose, func.count(), cast(func.sum(runs.num_tokens), BigInteger))
        .where(runs.decoded_at > func.now() - window)
        .group_by(runs.task, runs.purpose)
        .order_by(runs.task, runs.purpose)
    )
    with database.begin() as connection:
        return [DecodedLately(*row) for row in connection.execute(query)]
