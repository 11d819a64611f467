"""When runs are due, and ticks: at once, at every interval, never two at a time, and what failures lead to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.errors import ConfigError, FatalBrokerError, StoreUnavailable
from alphaloop.liveness import Pulse
from alphaloop.settings import SchedulerSettings
from scheduler.metrics import SchedulerMetrics
from scheduler.timetable import EPOCH, DueTimes, Ticker, by_cron, every, timetable

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


@given(moments, st.integers(60, 10**5), st.integers(0, 10**7))
def test_due_times_move_on(at: datetime, interval_s: int, ago_us: int) -> None:
    table = every(interval_s)
    for previous in (None, at, table.due_at(at), at - timedelta(microseconds=ago_us)):
        due = DueTimes(table).get_next_fire_time(previous, at)
        assert due >= at
        assert previous is None or due > previous
        assert due == table.due_at(due), "a run knows what it was due for"


WAIT_S = 10.0


def ticker(
    run: Callable[[datetime, datetime], object],
    *,
    interval_s: float = 3600.0,
    fatal: Callable[[], None] = lambda: None,
    clock: Callable[[], datetime] = lambda: NOW,
    **pulses: Pulse,
) -> Ticker:
    return Ticker(run, table=every(interval_s), clock=clock, metrics=SchedulerMetrics(), fatal=fatal, **pulses)


def test_the_first_run_comes_at_once_and_knows_what_it_was_due_for() -> None:
    ran, seen = threading.Event(), []

    def run(now: datetime, due: datetime) -> None:
        seen.append((now, due))
        ran.set()

    ticking = ticker(run)
    ticking.start()
    ticking.start()
    assert ran.wait(WAIT_S)
    ticking.stop(wait=True)
    assert seen == [(NOW, NOW.replace(minute=0, second=0))]
    assert not ticking.is_running


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), ZeroDivisionError()])
def test_a_run_that_fails_or_crashes_is_logged_and_does_not_end_the_ticks(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    enough, calls = threading.Event(), []

    def run(now: datetime, due: datetime) -> None:
        calls.append(now)
        if len(calls) >= 3:
            enough.set()
        raise error

    ticking = ticker(run, interval_s=0.2)
    ticking.start()
    assert enough.wait(WAIT_S)
    ticking.stop(wait=True)
    assert "gone" in caplog.text or "ZeroDivisionError" in caplog.text


def test_runs_never_overlap() -> None:
    inside, most, enough = 0, 0, threading.Event()
    lock, hold = threading.Lock(), threading.Event()
    calls = []

    def run(now: datetime, due: datetime) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        hold.wait(0.15)
        with lock:
            inside -= 1
        calls.append(now)
        if len(calls) >= 4:
            enough.set()

    ticking = ticker(run, interval_s=0.05)
    ticking.start()
    assert enough.wait(WAIT_S)
    ticking.stop(wait=True)
    assert most == 1


def test_a_dead_client_ends_the_process() -> None:
    died = threading.Event()

    def run(now: datetime, due: datetime) -> None:
        raise FatalBrokerError("dead")

    ticking = ticker(run, fatal=died.set)
    ticking.start()
    assert died.wait(WAIT_S)
    ticking.stop(wait=True)


def test_a_run_that_hangs_and_a_timer_that_stands_still_are_seen_while_this_process_leads() -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def run(now: datetime, due: datetime) -> None:
        began.set()
        assert may_end.wait(WAIT_S)
        ended.set()

    seconds = [0.0]
    runs, ticks = (Pulse(name, lambda: seconds[0]) for name in ("run", "ticks"))
    ticking = ticker(run, run_pulse=runs, tick_pulse=ticks)
    assert (runs.silence_s, ticks.silence_s) == (0.0, 0.0)
    ticking.start()
    assert began.wait(WAIT_S)
    seconds[0] = 5.0
    assert (runs.silence_s, ticks.silence_s) == (5.0, 5.0)
    may_end.set()
    assert ended.wait(WAIT_S)
    ticking.stop(wait=True)
    assert (runs.silence_s, ticks.silence_s) == (0.0, 0.0), "a standby runs nothing"


def test_what_came_due_during_a_long_run_is_caught_up_once() -> None:
    """The run at noon takes three hours: the one due at three follows, those of one and two are left out."""
    moments = iter([NOW, NOW + timedelta(hours=3), NOW + timedelta(hours=3), NOW + timedelta(hours=9)])
    ran: list[datetime] = []
    ticker(lambda now, due: ran.append(due), clock=lambda: next(moments)).tick()
    assert [due.hour for due in ran] == [12, 15]
