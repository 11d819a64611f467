"""Exploration budgets: one a task for all workers, kept over restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.store.database import Database
from alphaloop.tables import exploration_budgets

_SUMS: Final = ("balance", "accrued", "spent")


class BudgetSubject(NamedTuple):
    """The key of a budget."""

    task: str
    target_revision: str
    device: str
    sampling_bucket: str


class BudgetStore:
    """The table of budgets. It does not hold how long a drafter was not used: history shows that."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, subject: BudgetSubject) -> ExplorationBudget | None:
        """What is left; None where there was no credit so far."""
        columns = exploration_budgets.c
        query = select(*(columns[name] for name in _SUMS)).where(
            *(columns[name] == value for name, value in subject._asdict().items())
        )
        row = self._database.row(query)
        return None if row is None else ExplorationBudget(**row._mapping)

    def add(self, subject: BudgetSubject, before: ExplorationBudget, after: ExplorationBudget) -> ExplorationBudget:
        """Add the difference between `before` and `after`; returns `after` with the changes of other workers.

        Workers add differences, so that none of them overwrites what another spent.
        """
        changes = {name: getattr(after, name) - getattr(before, name) for name in _SUMS}
        statement = insert(exploration_budgets).values(**subject._asdict(), **changes)
        columns = exploration_budgets.c
        added = {name: columns[name] + statement.excluded[name] for name in _SUMS}
        statement = statement.on_conflict_do_update(
            index_elements=list(BudgetSubject._fields), set_={**added, "changed_at": func.now()}
        )
        row = self._database.one(statement.returning(*(columns[name] for name in _SUMS)))
        return replace(after, **row._mapping)
