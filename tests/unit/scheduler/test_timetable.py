"""When runs are due and begun."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.errors import ConfigError
from alphaloop.settings import SchedulerSettings
from scheduler.timetable import EPOCH, Beginnings, by_cron, every, timetable

NOW = datetime(2026, 1, 5, 12, 34, 56, tzinfo=UTC)
moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(lambda at: at.replace(tzinfo=UTC))


@given(moments, st.integers(1, 10**6))
def test_due_times_are_multiples_of_the_interval(at: datetime, interval_s: int) -> None:
    table = every(interval_s)
    due = table.due_at(at)
    assert due <= at < table.next_due(at) == due + timedelta(seconds=interval_s)
    assert (due - EPOCH) % timedelta(seconds=interval_s) == timedelta(0)
    assert table.due_at(due) == due


@given(moments, st.sampled_from(["*/5 * * * *", "30 * * * *", "0 3 * * *", "15 2 * * mon", "0 0 1 * *"]))
def test_the_last_due_time_of_a_cron_expression(at: datetime, expression: str) -> None:
    table = by_cron(expression)
    due = table.due_at(at)
    assert due <= at < table.next_due(due)
    assert table.due_at(due) == due
    assert table.next_due(due) == table.next_due(at)


def test_a_cron_expression_is_in_utc() -> None:
    table = by_cron("30 3 * * mon")
    assert table.due_at(NOW) == datetime(2026, 1, 5, 3, 30, tzinfo=UTC)
    assert table.next_due(NOW) == datetime(2026, 1, 12, 3, 30, tzinfo=UTC)
    assert table.longest_pause_s(NOW) == 7 * 86_400


@pytest.mark.parametrize("expression", ["every hour", "61 * * * *", "* * * *", "0 0 31 2 *", "0 3 * * 1-5", ""])
def test_what_is_no_cron_expression(expression: str) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.cron"):
        timetable(SchedulerSettings(cron=expression))


@given(moments, st.integers(60, 10**5), st.floats(0, 59), st.integers(0, 10**7))
def test_beginnings_move_on_and_stay_within_the_jitter(
    at: datetime, interval_s: int, jitter_s: float, ago_us: int
) -> None:
    table = every(interval_s, jitter_s)
    for previous in (None, at, table.due_at(at), at - timedelta(microseconds=ago_us)):
        begins = Beginnings(table).get_next_fire_time(previous, at)
        assert begins >= at
        assert previous is None or begins > previous
        due = table.due_at(begins)
        assert begins == table.begins_at(due), "a run knows what it was due for"
        assert 0 <= (begins - due).total_seconds() <= jitter_s


def test_every_scheduler_draws_the_same_delay() -> None:
    first, second = every(3600, 600), every(3600, 600)
    assert first.begins_at(NOW) == second.begins_at(NOW) != NOW
    assert every(3600).begins_at(NOW) == NOW
