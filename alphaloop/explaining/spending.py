"""What jobs took of the device and what that cost: the table of `alphaloop cost` and of the console's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from alphaloop.acceptance import Interval
from alphaloop.prices import NO_PRICE
from alphaloop.settings.prices import PriceSettings
from alphaloop.store.database import Database
from alphaloop.store.spending import Spending, SpendingStore, SpentBy, total
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import begin_of
from alphaloop.wording import money, money_with_interval


@dataclass(frozen=True, slots=True)
class SpendingTable:
    """The jobs that were decoded in [since, until], summed by `by`."""

    by: SpentBy
    since: datetime
    until: datetime
    rows: Sequence[Spending]  #: the most device time first
    saved: Mapping[str, Interval]  #: by task, the cost of the device seconds that speculation saved
    currency: str | None  #: of all amounts; None where no price is set

    @property
    def no_cost_because(self) -> str | None:
        """Why no money is shown; None where it is."""
        return NO_PRICE if self.currency is None else None

    @property
    def total(self) -> Spending:
        """All rows together."""
        return total(self.rows, "all")

    def cost_in_words(self, row: Spending) -> str:
        """`0.87 EUR`; empty without a price."""
        return "" if row.cost is None else money(row.cost, self.currency or "")

    def saved_in_words(self, name: str) -> str:
        """`1.60 EUR [0.069 3.82]`, below 0 a loss; empty where nothing was measured."""
        saved = self.saved.get(name)
        return "" if saved is None else money_with_interval(saved, self.currency or "")

    def as_json(self) -> dict[str, Any]:
        """The table with amounts as numbers; `saved` is null where nothing was measured."""
        saved = {name: asdict(amount) for name, amount in self.saved.items()}
        return {
            "by": self.by.value,
            "since": self.since,
            "until": self.until,
            "currency": self.currency,
            "rows": [{**asdict(row), "saved": saved.get(row.name)} for row in self.rows],
            "no_cost_because": self.no_cost_because,
        }


def spending_table(
    database: Database,
    prices: PriceSettings,
    by: SpentBy,
    *,
    since: datetime | None,
    until: datetime | None,
    now: datetime,
) -> SpendingTable:
    """The table of [since, until]; without both, of the last day to the full hour, as the report has it.

    A speed-up is measured by task over the last day, so what speculation saved is known for tasks in that time alone.
    """
    end = until or now
    begin = since or begin_of(end)
    rows = SpendingStore(database, prices).by(by, begin, end)
    is_measured = by is SpentBy.TASK and since is None and until is None
    speedups = SwitchbackStore(database).shown(now) if is_measured else {}
    saved_s = {task: measured.saved_device_s for task, measured in speedups.items()}
    saved = {row.name: amount for row in rows if (amount := row.cost_of(saved_s.get(row.name))) is not None}
    return SpendingTable(by, begin, end, rows, saved, None if prices.per_hour is None else prices.currency)
