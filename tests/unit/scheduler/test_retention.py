"""What retention deletes before when, and what keeps jobs longer than the setting says."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from alphaloop.claim_check.store import ContentStore
from alphaloop.errors import BrokerUnavailable
from alphaloop.settings import ClaimCheckSettings, SchedulerSettings
from alphaloop.store.housekeeping import TABLES, Dropped
from scheduler.loop import MessageRetention, Retention
from scheduler.report.pages import drop_reports

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
DAY = timedelta(days=1)


class Store:
    """Keeps what it was asked to delete: days before now, by table."""

    def __init__(self) -> None:
        self.asked: dict[str, timedelta] = {}

    def drop_jobs(self, before: datetime, time_is_up: Callable[[], bool]) -> Dropped:
        return self.drop("jobs", before, time_is_up)

    def drop_texts(self, before: datetime, time_is_up: Callable[[], bool], delete: Callable[[str], None]) -> Dropped:
        return self.drop("stored_texts", before, time_is_up)

    def drop(self, table: str, before: datetime, time_is_up: Callable[[], bool]) -> Dropped:
        if time_is_up():
            return Dropped(0, is_all=False)
        self.asked[table] = NOW - before
        return Dropped(1, is_all=True)


class Memory:
    """The results that look-up searches, with what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[timedelta] = []

    def forget_before(self, moment: datetime) -> int:
        self.asked.append(NOW - moment)
        return 0

    def delete_forgotten(self, moment: datetime) -> int:
        self.asked.append(NOW - moment)
        return 0


def keep(
    folder: Path, message_retention: MessageRetention, clock: Callable[[], float] = lambda: 0.0, **settings: float
) -> dict[str, timedelta]:
    store = Store()
    dials = SchedulerSettings.model_validate(settings)
    Retention(store, Memory(), dials, folder, message_retention, clock=clock).keep(NOW)  # type: ignore[arg-type]
    return store.asked


def prompt_of(folder: Path, name: str, *, days: float) -> Path:
    """A prompt that `alphaloop enqueue` wrote so long ago."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    path = folder / "bodies" / digest[:2] / f"{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}", encoding="utf-8")
    written = (NOW - days * DAY).timestamp()
    os.utime(path, (written, written))
    return path


def test_prompts_outside_kafka_are_kept_twice_as_long_as_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A dead letter is sent again with the prompt of its first message."""
    folder = tmp_path / "contents"
    old, young = prompt_of(folder, "old", days=60.1), prompt_of(folder, "young", days=59.9)
    mine = folder / "bodies" / "mine.json"
    mine.write_text("{}", encoding="utf-8")
    os.utime(mine, (0, 0))
    settings, store, memory = SchedulerSettings(jobs_retention_days=30), Store(), Memory()
    contents = ContentStore.of(ClaimCheckSettings(url=str(folder)))
    retention = Retention(store, memory, settings, tmp_path, lambda: 14 * DAY, contents)  # type: ignore[arg-type]
    retention.keep(NOW)
    assert [path.exists() for path in (old, young, mine)] == [False, True, True]
    assert store.asked["stored_texts"] == 30 * DAY
    assert memory.asked[0] == 30 * DAY
    folder.rename(tmp_path / "unmounted")
    retention.keep(NOW)
    assert "texts and prompts were not deleted: there is no file://" in caplog.text


def test_each_table_has_its_age(tmp_path: Path) -> None:
    asked = keep(tmp_path, lambda: 14 * DAY)
    assert asked.keys() == {*TABLES, "jobs"}, "none is forgotten"
    assert asked["jobs"] == asked["cancellations"] == 30 * DAY
    assert asked["decisions"] == asked["probe_runs"] == asked["schedule_runs"] == asked["reports"] == 90 * DAY
    assert asked["probe_texts"] == 90 * DAY
    assert asked["api_batches"] == asked["batches"] == 90 * DAY
    assert asked["acceptance_hourly"] == asked["audit"] == 400 * DAY
    assert asked["acceptance_daily"] == asked["drift_events"] == asked["incidents"] == 1825 * DAY


def test_jobs_outlive_the_messages_of_their_topics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "scheduler.loop"):
        asked = keep(tmp_path, lambda: 35 * DAY)
    assert asked["jobs"] == asked["cancellations"] == 36 * DAY
    assert "topics keep messages so long" in caplog.text


def test_a_topic_without_limit_keeps_every_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "scheduler.loop"):
        asked = keep(tmp_path, lambda: None)
    of_jobs = {"cancellations", "redrives", "reusable_results", "reused_results"}
    assert asked.keys() == {*TABLES} - of_jobs
    assert "without limit" in caplog.text


def test_a_broker_that_does_not_answer_keeps_every_job(tmp_path: Path) -> None:
    def away() -> timedelta:
        raise BrokerUnavailable

    assert "jobs" not in keep(tmp_path, away)


def test_a_run_deletes_for_a_bounded_time(tmp_path: Path) -> None:
    seconds = iter([0.0, 59.0, 119.0, *[120.0] * 25])
    asked = keep(tmp_path, lambda: DAY, lambda: next(seconds))
    assert list(asked) == ["decisions", "expectation_pairs"]


def test_report_files_go_by_the_time_in_their_name(tmp_path: Path) -> None:
    names = ["drift-report-20260801T000000Z", "drift-report-20261122T110000Z"]
    for name in names:
        for suffix in ("html", "json", "txt"):
            (tmp_path / f"{name}.{suffix}").write_text("x", encoding="utf-8")
    for other in ("latest.html", "drift-report-of-mine.html", "notes.txt"):
        (tmp_path / other).write_text("x", encoding="utf-8")
    assert drop_reports(tmp_path, NOW - 90 * DAY) == 3
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {
        "latest.html",
        "drift-report-of-mine.html",
        "notes.txt",
        *(f"{names[1]}.{s}" for s in ("html", "json", "txt")),
    }
    assert drop_reports(tmp_path / "missing", NOW) == 0
