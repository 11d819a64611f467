"""How a task was decoded last, where no choice is on record."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from alphaloop.measurements import DecodedJob, Stream
from scheduler.counts import RunCounts, SettingInForce

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
FORCED = Stream("code", "target", "engine", "greedy", "lookup", "r1")
VANILLA = Stream("code", "target", "engine", "greedy")


def jobs(minutes_ago: int, num_draft_tokens: int, reason: str) -> list[DecodedJob]:
    """Two jobs, the last one so long ago."""
    return [
        DecodedJob(NOW - timedelta(minutes=minutes_ago + more), k, reason, (3,), (2,), 24, 0.5)
        for more, k in ((1, 12), (0, num_draft_tokens))
    ]


def counts(streams: dict[Stream, Sequence[DecodedJob]]) -> RunCounts:
    return RunCounts(NOW - timedelta(days=14), NOW, streams, [], {})


def test_a_task_that_is_forced_to_speculate_is_told_by_its_newest_job() -> None:
    found = counts({FORCED: jobs(5, 2, "forced"), VANILLA: jobs(9, 0, "control")})
    assert found.last_used("code") == SettingInForce("speculative", "lookup", 2, "forced", "")


def test_a_newer_vanilla_job_counts_more_than_an_older_draft() -> None:
    found = counts({FORCED: jobs(5, 2, "forced"), VANILLA: jobs(1, 0, "forced")})
    assert found.last_used("code") == SettingInForce("vanilla", None, 0, "forced", "")


def test_nothing_is_said_of_a_task_without_jobs() -> None:
    assert counts({FORCED: jobs(5, 2, "forced")}).last_used("sql") is None
