"""What a page of tasks shows beside their figures: the last change of each choice, and acceptance by the hour."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ARRAY, BigInteger, Text, bindparam, cast, func, select, text

from alphaloop.messages import Mode, Purpose
from alphaloop.store.database import Database
from alphaloop.store.decisions import LoggedSetting
from alphaloop.tables import acceptance_hourly

_LAST = text("""
    SELECT last.*
    FROM unnest(CAST(:tasks AS text[])) AS wanted(name), LATERAL (
        SELECT task, decided_at, from_mode, from_drafter, from_num_draft_tokens, to_mode, to_drafter,
            to_num_draft_tokens, reason, explanation
        FROM decisions WHERE task = wanted.name ORDER BY decided_at DESC, id DESC LIMIT 1
    ) AS last
""")


@dataclass(frozen=True, slots=True)
class LastChange:
    """When a task's choice changed last, from what to what, and why."""

    decided_at: datetime
    before: LoggedSetting | None
    after: LoggedSetting
    reason: str
    explanation: str


@dataclass(frozen=True, slots=True)
class AcceptanceHour:
    """First drafted tokens of a task's speculative traffic in the hour that began then: tested, and accepted."""

    begins: datetime
    trials: int
    accepts: int

    @property
    def alpha_1(self) -> float | None:
        """Accepted of what was tested."""
        return self.accepts / self.trials if self.trials else None


class TaskPages:
    """Reads what belongs to some tasks; give it those of one page."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def last_changes(self, tasks: Collection[str]) -> dict[str, LastChange]:
        """By task; a task without a logged choice is left out."""
        with self._database.begin() as connection:
            return {
                row.task: LastChange(
                    row.decided_at,
                    LoggedSetting(row.from_mode, row.from_drafter, row.from_num_draft_tokens)
                    if row.from_mode
                    else None,
                    LoggedSetting(row.to_mode, row.to_drafter, row.to_num_draft_tokens),
                    row.reason,
                    row.explanation,
                )
                for row in connection.execute(_LAST, {"tasks": list(tasks)})
            }

    def by_hour(self, tasks: Collection[str], since: datetime) -> dict[str, list[AcceptanceHour]]:
        """By task, its hours after `since` in which a first drafted token was tested, oldest first."""
        hours = acceptance_hourly.c
        trials, accepts = (cast(func.sum(column[1]), BigInteger) for column in (hours.trials, hours.accepts))
        query = (
            select(hours.task, hours.bucket, trials, accepts)
            .where(hours.task == func.any(bindparam("tasks", list(tasks), ARRAY(Text))))
            .where(hours.bucket > since, hours.purpose == Purpose.TRAFFIC, hours.mode == Mode.SPECULATIVE)
            .group_by(hours.task, hours.bucket)
            .having(trials > 0)
            .order_by(hours.task, hours.bucket)
        )
        found: dict[str, list[AcceptanceHour]] = {}
        with self._database.begin() as connection:
            for task, begins, num_trials, num_accepts in connection.execute(query):
                found.setdefault(task, []).append(AcceptanceHour(begins, num_trials, num_accepts))
        return found
