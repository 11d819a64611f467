"""Terms of leadership: each leader has a number, and writes nothing once there is a later one.

The lease alone does not do this: a leader that stood still finds out that it ran out only when it looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from sqlalchemy import Connection, text

from alphaloop.errors import LeadershipLost

SCHEDULER: Final = "scheduler"
_BEGIN: Final = """
    INSERT INTO leader_terms AS led (role, term) VALUES (%s, 1)
    ON CONFLICT (role) DO UPDATE SET term = led.term + 1, began_at = now() RETURNING term
"""
# Locked until the transaction ends: the next term begins before or after it, never in between.
_CURRENT: Final = text("SELECT term FROM leader_terms WHERE role = :role FOR SHARE")


@dataclass(frozen=True, slots=True)
class Term:
    """The time of one leader."""

    number: int
    role: str = SCHEDULER

    def check(self, connection: Connection) -> None:
        """Keep the term from ending before the caller's transaction does. Raises LeadershipLost if it has ended."""
        current = connection.execute(_CURRENT, {"role": self.role}).scalar()
        if current != self.number:
            raise LeadershipLost(f"term {self.number} of the {self.role} has ended, term {current} has begun")


def begin_term(driver: psycopg.Connection[Any], role: str = SCHEDULER) -> Term:
    """Begin the next term, on the connection of the one that holds the leader's lease. Raises psycopg.Error.

    Waits for transactions of the term before, at most as long as the connection's `lock_timeout`.
    """
    row = driver.execute(_BEGIN, (role,)).fetchone()
    assert row is not None  # noqa: S101 - an upsert without a condition returns its row
    return Term(int(row[0]), role)
