"""What jobs cost: stored device time at the price of a device. Pure."""

from __future__ import annotations

from typing import Final

from alphaloop.measurements import TaskSpend
from alphaloop.settings.report import ReportSettings
from scheduler.report.data import CostLine
from scheduler.report.part import Estimate

_HOUR_S: Final = 3600.0


def cost_line(spent: TaskSpend, saved_device_s: Estimate | None, prices: ReportSettings) -> CostLine:
    """The cost of a task's traffic. Amounts are null without a price, and where nothing was decoded."""
    price_per_s = None if prices.device_cost_per_hour is None else prices.device_cost_per_hour / _HOUR_S
    cost = None if price_per_s is None else spent.device_s * price_per_s
    saved = None
    if price_per_s is not None and saved_device_s is not None:
        saved = Estimate(
            mean=saved_device_s.mean * price_per_s,
            low=saved_device_s.low * price_per_s,
            high=saved_device_s.high * price_per_s,
        )
    return CostLine(
        num_jobs=spent.num_jobs,
        num_tokens=spent.num_tokens,
        device_s=round(spent.device_s, 3),
        per_1000_jobs=_per(cost, spent.num_jobs, 1_000),
        per_million_tokens=_per(cost, spent.num_tokens, 1_000_000),
        saved=saved,
    )


def _per(cost: float | None, num: int, of: int) -> float | None:
    return cost / num * of if cost is not None and num else None
