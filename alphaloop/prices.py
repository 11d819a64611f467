"""What an hour of a device costs at each time: the settings `[prices]` as stretches of one price. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from alphaloop.settings.prices import STEP_MIN, PriceSettings, RateSettings, Weekday

#: Why no screen shows money.
NO_PRICE: Final = "No price is set: prices.per_hour is what an hour of a device costs."

_WEEKDAYS: Final[tuple[Weekday, ...]] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_STEP: Final = timedelta(minutes=STEP_MIN)
_DAY: Final = timedelta(days=1)
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A price that holds from `begins` to the next stretch."""

    begins: datetime
    per_s: float  #: the price of a device second


def per_hour_at(prices: PriceSettings, target: str, at: datetime) -> float | None:
    """The price of an hour of a device with `target` at the moment `at` (aware); None where no price is set."""
    local = at.astimezone(ZoneInfo(prices.time_zone))
    for rate in prices.rates:
        if rate.target in (None, target) and _holds(rate, local.date(), local.time()):
            return rate.per_hour
    return prices.per_hour


def stretches(prices: PriceSettings, target: str, since: datetime, until: datetime) -> list[Stretch]:
    """The prices of `target` from the UTC day of `since` to that of `until`, both aware, in the order of time.

    Neighbours differ in price. Empty where no price is set.
    """
    merged: list[Stretch] = []
    day, last = since.astimezone(UTC).date(), until.astimezone(UTC).date()
    while day <= last:
        merged += (part for part in _of_day(prices, target, day) if not merged or part.per_s != merged[-1].per_s)
        day += _DAY
    return merged


def named_targets(prices: PriceSettings) -> tuple[str, ...]:
    """Targets that have a rate of their own; all others have the same prices."""
    return tuple(sorted({rate.target for rate in prices.rates if rate.target is not None}))


def _holds(rate: RateSettings, day: date, at: time) -> bool:
    if rate.begins < rate.ends:
        return rate.begins <= at < rate.ends and _is_on(rate, day)
    return (at >= rate.begins and _is_on(rate, day)) or (at < rate.ends and _is_on(rate, day - _DAY))


def _is_on(rate: RateSettings, day: date) -> bool:
    return not rate.days or _WEEKDAYS[day.weekday()] in rate.days


@lru_cache(maxsize=4096)
def _of_day(prices: PriceSettings, target: str, day: date) -> tuple[Stretch, ...]:
    """The prices of a day of UTC; its first stretch may have the price of the day before."""
    return tuple(_merged(prices, target, datetime.combine(day, time(), UTC)))


def _merged(prices: PriceSettings, target: str, midnight: datetime) -> Iterator[Stretch]:
    before = None
    for number in range(_DAY // _STEP):
        at = midnight + number * _STEP
        per_hour = per_hour_at(prices, target, at)
        if per_hour is not None and per_hour != before:
            yield Stretch(at, per_hour / _HOUR_S)
        before = per_hour
