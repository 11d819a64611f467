"""What the report says was saved, spent and not measured."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.acceptance import Interval
from alphaloop.experiment.estimate import Verdict
from alphaloop.measurements import TaskSpend
from alphaloop.settings import ReportSettings
from scheduler.report.build import cost_line, gaps, saved_device_s
from scheduler.report.pages import render_page, render_text
from scheduler.report.wording import MAX_GAPS, cost_of_all, cost_of_jobs, gap_lines, money, probe_spend, saved
from tests.fixtures.reports import empty, full, task_line
from tests.fixtures.runs import task_speedup

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
HOUR = timedelta(hours=1)
SPEEDUP = task_speedup(Interval(1.5, 1.2, 1.8), NOW - HOUR)


def test_a_hundred_device_seconds_at_half_as_fast_again_saved_fifty() -> None:
    found = saved_device_s(SPEEDUP)
    assert (found.mean, found.low, found.high) == pytest.approx((50.0, 20.0, 80.0))
    lost = saved_device_s(replace(SPEEDUP, speedup=Interval(0.8, 0.7, 0.9), verdict=Verdict.SLOWER))
    assert (lost.mean, lost.low, lost.high) == pytest.approx((-20.0, -30.0, -10.0))


def test_without_a_verdict_nothing_is_known() -> None:
    assert saved_device_s(None) is None
    assert saved_device_s(replace(SPEEDUP, speedup=None, verdict=Verdict.NO_VERDICT_YET)) is None
    assert saved_device_s(replace(SPEEDUP, verdict=Verdict.NO_VERDICT_YET)) is None
    line = task_line("code").model_copy(update={"saved_device_s": None})
    assert saved(line) == "device time not known, 123,456 target passes in the last day"


def test_a_pause_that_is_too_long_is_a_gap_also_before_now() -> None:
    runs = [NOW - 9 * HOUR, NOW - 8 * HOUR, NOW - 4 * HOUR, NOW - 3 * HOUR]
    found = gaps(runs, NOW, 2 * HOUR)
    assert [(gap.begins, gap.ends) for gap in found] == [(runs[1], runs[2]), (runs[3], NOW)]
    assert gaps([], NOW, HOUR) == ()
    assert gaps([*runs[2:], NOW], NOW, 4 * HOUR) == ()


def test_the_newest_gaps_are_named() -> None:
    runs = [NOW - hours * HOUR for hours in range(60, -1, -3)]
    report = empty().model_copy(update={"gaps": gaps(runs, NOW, HOUR)})
    assert len(report.gaps) == 20
    assert len(gap_lines(report)) == MAX_GAPS
    assert gap_lines(report)[0] == "2026-11-21 03:00 UTC to 2026-11-21 06:00 UTC"


def test_the_spend_of_probes() -> None:
    assert probe_spend(full()) == "In the last day probes took 40 of 5,000 device seconds (0.8%)."
    assert probe_spend(empty()) == "In the last day probes took 0 of 0 device seconds."


def test_the_cost_of_jobs_is_their_device_time_at_the_price_of_a_device() -> None:
    prices = ReportSettings(device_cost_per_hour=3.6, currency="EUR")
    found = cost_line(TaskSpend(200, 50_000, 1000.0), Interval(mean=500.0, low=-100.0, high=900.0), prices)
    assert (found.num_jobs, found.num_tokens, found.device_s) == (200, 50_000, 1000.0)
    assert found.per_1000_jobs == pytest.approx(5.0), "1,000 s cost 1 EUR, and are 200 jobs"
    assert found.per_million_tokens == pytest.approx(20.0)
    assert (found.saved.mean, found.saved.low, found.saved.high) == pytest.approx((0.5, -0.1, 0.9))


def test_without_a_price_a_job_or_a_verdict_there_is_no_amount() -> None:
    prices, saved_s = ReportSettings(device_cost_per_hour=3.6), Interval(mean=1.0, low=0.0, high=2.0)
    unpriced = cost_line(TaskSpend(200, 50_000, 1000.0), saved_s, ReportSettings())
    assert (unpriced.device_s, unpriced.per_1000_jobs, unpriced.per_million_tokens, unpriced.saved) == (
        1000.0, None, None, None,
    )  # fmt: skip
    empty_handed = cost_line(TaskSpend(1, 0, 2.0), None, prices)
    assert empty_handed.per_1000_jobs == pytest.approx(2.0)
    assert (empty_handed.per_million_tokens, empty_handed.saved) == (None, None)


def test_amounts_are_readable_and_carry_their_currency() -> None:
    shown = [money(amount, "EUR") for amount in (1234.5, 0.0, 0.00123, -0.25, -12.0)]
    assert shown == ["1,234.50 EUR", "0.00 EUR", "0.0012 EUR", "-0.25 EUR", "-12.00 EUR"]
    assert money(1.0, "") == "1.00"


def test_text_and_page_tell_the_same() -> None:
    report = full(tasks=("code",))
    told = "0.93 EUR per 1,000 jobs, 3.62 EUR per million tokens; saved 1.60 EUR [0.069 3.82] in the last day"
    assert cost_of_jobs(report.tasks[0], "EUR") == told
    text, page = (" ".join(shown.split()) for shown in (render_text(report), render_page(report)))
    assert told in text
    for its in (saved(report.tasks[0]), probe_spend(report), *gap_lines(report)):
        assert its in text
        assert its in page
    for part in ("0.93 EUR", "3.62 EUR", "saved 1.60 EUR [0.069 3.82] in the last day", cost_of_all(report)):
        assert part in page
    assert "5,000 device seconds, at 2.50 EUR an hour 3.47 EUR, of which probes 0.028 EUR." in cost_of_all(report)


def test_without_a_price_text_and_page_say_which_setting_is_missing() -> None:
    report = full().model_copy(update={"device_cost_per_hour": None})
    for told in (render_text(report), render_page(report)):
        assert "Not set: report.device_cost_per_hour" in told
        assert "per million tokens" not in told.lower()
