"""Exploration budgets: one a task for all workers, kept over restarts."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.store.database import Store
from alphaloop.tables import exploration_budgets


class BudgetSums(NamedTuple):
    """What the database holds of a budget, or a change of it."""

    balance: float = 0.0
    accrued: float = 0.0
    spent: float = 0.0

    @classmethod
    def of(cls, budget: ExplorationBudget) -> BudgetSums:
        """Those of a budget."""
        return cls(budget.balance, budget.accrued, budget.spent)

    def plus(self, other: BudgetSums) -> BudgetSums:
        """Both together."""
        return BudgetSums(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: BudgetSums) -> BudgetSums:
        """What is more than in `other`."""
        return BudgetSums(*(mine - its for mine, its in zip(self, other, strict=True)))


class BudgetSubject(NamedTuple):
    """Whose choice is logged, and whose exploration has a budget."""

    task: str
    target_revision: str
    device: str
    sampling_bucket: str


class BudgetStore(Store):
    """The table of budgets. It does not hold how long a drafter was not used: history shows that."""

    def read(self, subject: BudgetSubject) -> BudgetSums | None:
        """What is left; None where there was no credit so far."""
        columns = exploration_budgets.c
        query = select(*(columns[name] for name in BudgetSums._fields)).where(
            *(columns[name] == value for name, value in subject._asdict().items())
        )
        row = self._database.row(query)
        return None if row is None else BudgetSums(*row)

    def add(self, subject: BudgetSubject, change: BudgetSums) -> BudgetSums:
        """Add a change; returns what there is with the changes of other workers.

        Workers add differences, so that none of them overwrites what another spent.
        """
        statement = insert(exploration_budgets).values(**subject._asdict(), **change._asdict())
        columns = exploration_budgets.c
        added = {name: columns[name] + statement.excluded[name] for name in BudgetSums._fields}
        statement = statement.on_conflict_do_update(
            index_elements=list(BudgetSubject._fields), set_={**added, "changed_at": func.now()}
        )
        return BudgetSums(*self._database.one(statement.returning(*(columns[name] for name in BudgetSums._fields))))
