"""Prices by target, day and hour, over changes of the clock: stretches against the wall clock, instant by instant."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from alphaloop.errors import ConfigError
from alphaloop.prices import named_targets, per_hour_at, stretches
from alphaloop.settings import PriceSettings, RateSettings, load_settings

NIGHT = RateSettings(per_hour=1.0, begins=time(22), ends=time(6, 30))
DAY = timedelta(days=1)


def price_at(prices: PriceSettings, at: datetime, target: str = "any") -> float | None:
    return per_hour_at(prices, target, at)


def test_the_first_rate_that_fits_holds_and_else_the_price_of_every_hour() -> None:
    big = RateSettings(per_hour=8.0, target="big")
    prices = PriceSettings(per_hour=2.5, rates=(big, NIGHT))
    noon, night = datetime(2026, 3, 2, 12, tzinfo=UTC), datetime(2026, 3, 2, 23, tzinfo=UTC)
    assert [price_at(prices, at) for at in (noon, night)] == [2.5, 1.0]
    assert [price_at(prices, at, "big") for at in (noon, night)] == [8.0, 8.0]
    assert named_targets(prices) == ("big",)
    assert price_at(PriceSettings(), noon) is None
    assert stretches(PriceSettings(), "any", noon, night) == []


def test_a_night_belongs_to_the_day_on_which_it_begins() -> None:
    weekend = NIGHT.model_copy(update={"days": ("sat",)})
    prices = PriceSettings(per_hour=2.5, rates=(weekend,))
    saturday = datetime(2026, 3, 7, tzinfo=UTC)
    hours = {21: 2.5, 22: 1.0, 24: 1.0, 30: 1.0, 31: 2.5, 46: 2.5}
    assert {hour: price_at(prices, saturday + timedelta(hours=hour)) for hour in hours} == hours
    assert price_at(prices, saturday) == 2.5, "the night of Friday"


def test_the_end_is_not_included_and_the_whole_day_may_have_a_rate() -> None:
    at = datetime(2026, 3, 7, 6, 30, tzinfo=UTC)
    prices = PriceSettings(per_hour=2.5, rates=(NIGHT,))
    assert [price_at(prices, at - timedelta(seconds=1)), price_at(prices, at)] == [1.0, 2.5]
    sunday = PriceSettings(per_hour=2.5, rates=(RateSettings(per_hour=0.5, days=("sun",)),))
    midnight = datetime(2026, 3, 8, tzinfo=UTC)
    assert [price_at(sunday, midnight + DAY * part) for part in (-0.01, 0, 0.99, 1)] == [2.5, 0.5, 0.5, 2.5]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe"])
def test_stretches_have_the_price_of_the_wall_clock_also_when_the_clock_is_changed(zone: str) -> None:
    rng = random.Random(47)
    days = RateSettings(per_hour=0.7, begins=time(2, 15), ends=time(2, 45), days=("sun",))
    prices = PriceSettings(per_hour=2.5, time_zone=zone, rates=(days, NIGHT))
    for since in (
        datetime(2026, 3, 27, tzinfo=UTC),
        datetime(2026, 10, 2, tzinfo=UTC),
        datetime(2026, 10, 23, tzinfo=UTC),
    ):
        found = stretches(prices, "any", since, since + 4 * DAY)
        assert all(one.begins < other.begins for one, other in itertools.pairwise(found))
        assert all(one.per_s != other.per_s for one, other in itertools.pairwise(found))
        for _ in range(300):
            at = since + rng.random() * 4 * DAY
            holds = [part for part in found if part.begins <= at][-1]
            local = at.astimezone(ZoneInfo(zone))
            is_early = local.weekday() == 6 and time(2, 15) <= local.time() < time(2, 45)
            is_night = local.time() >= time(22) or local.time() < time(6, 30)
            assert holds.per_s * 3600 == pytest.approx(0.7 if is_early else 1.0 if is_night else 2.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rates": [{"per_hour": 1.0}]}, "per_hour beside rates"),
        ({"per_hour": 1.0, "time_zone": "Europe/Nowhere"}, "as Europe/Berlin"),
        ({"per_hour": 1.0, "time_zone": "../etc"}, "as Europe/Berlin"),
        ({"per_hour": 1.0, "rates": [{"per_hour": 1.0, "begins": "22:10"}]}, "quarter of an hour"),
        ({"per_hour": 1.0, "rates": [{"per_hour": 1.0, "ends": "06:00+02:00"}]}, "without a zone"),
        ({"per_hour": 1.0, "rates": [{"per_hour": 1.0, "days": ["someday"]}]}, "'mon'"),
        ({"per_hour": -1.0}, "greater than or equal to 0"),
        ({"per_hour": "inf"}, "finite"),
    ],
)
def test_prices_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PriceSettings.model_validate(wrong)


def test_prices_are_written_in_toml_as_times_or_texts(tmp_path: Path) -> None:
    written = """
        [prices]
        per_hour = 2.5
        time_zone = "Europe/Berlin"
        [[prices.rates]]
        begins = 22:00:00
        ends = "06:30"
        per_hour = 1.0
    """
    (tmp_path / "tasks.toml").touch()
    (tmp_path / "scheduler.toml").write_text(written, encoding="utf-8")
    assert load_settings(tmp_path).prices == PriceSettings(per_hour=2.5, time_zone="Europe/Berlin", rates=(NIGHT,))
    (tmp_path / "scheduler.toml").write_text(written.replace("begins", "begin"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prices\.rates.*begin: no such setting") as refused:
        load_settings(tmp_path)
    assert refused.value.hint == "did you mean begins?"
