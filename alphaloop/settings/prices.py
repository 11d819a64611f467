"""The settings `[prices]`: what an hour of a device costs, by target and time of day."""

from __future__ import annotations

from datetime import time
from typing import Annotated, Final, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, model_validator

from alphaloop.settings.section import Section

#: Prices change on these minutes: every offset from UTC in use today is a multiple of them, so that a price holds for
#: whole quarters of an hour of UTC, too, whatever the zone and its summer time.
STEP_MIN: Final = 15

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


def _on_a_quarter(at: time) -> time:
    if at.tzinfo is not None or at.minute % STEP_MIN or at.second or at.microsecond:
        raise ValueError("expected a quarter of an hour without a zone: 22:00, 22:15, 22:30 or 22:45")
    return at


def _known_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("expected the name of a time zone of this system, as Europe/Berlin") from None
    return name


Quarter = Annotated[time, AfterValidator(_on_a_quarter)]


class RateSettings(Section):
    """A price that holds at certain hours, on certain days or for one target. The first rate that fits holds."""

    per_hour: float = Field(ge=0)  #: the price of an hour of one device
    target: str | None = Field(None, min_length=1)  #: its models.target.name; unset: every target
    days: tuple[Weekday, ...] = ()  #: days on which it begins; empty: every day
    begins: Quarter = time(0)  #: by the clock of prices.time_zone
    ends: Quarter = time(0)  #: not included; at or before `begins`: on the next day


class PriceSettings(Section):
    """What a device costs: what one worker holds, or one inference server. Without a price no money is shown."""

    per_hour: float | None = Field(None, ge=0)  #: of an hour for which no rate fits; unset: no money is shown
    currency: str = Field("", max_length=12)  #: written after amounts: EUR
    time_zone: Annotated[str, AfterValidator(_known_zone)] = "UTC"  #: of the hours of rates: Europe/Berlin
    rates: tuple[RateSettings, ...] = ()  #: other prices, by target and time of day

    @model_validator(mode="after")
    def _every_hour_has_a_price(self) -> Self:
        if self.rates and self.per_hour is None:
            raise ValueError("expected per_hour beside rates: the price of an hour for which no rate fits")
        return self
