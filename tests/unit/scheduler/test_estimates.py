"""Estimates by hand, intervals over jobs, stretches of time, and how a task was decoded last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.as_decoded import NextJob
from alphaloop.measurements import DecodedJob, Stream
from scheduler.counts import RunCounts
from scheduler.report.build import alpha_1, alpha_over_time, pooled_alpha

AT = datetime(2026, 1, 1, tzinfo=UTC)


def job(trials: tuple[int, ...], accepts: tuple[int, ...], *, minute: int = 0) -> DecodedJob:
    return DecodedJob(AT + timedelta(minutes=minute), len(trials), "faster", trials, accepts, 48, 1.0)


def test_pooled_and_first_position() -> None:
    jobs = [job((10, 8), (8, 4)), job((10, 6), (6, 3)), job((), ())]
    first, pooled = alpha_1(jobs), pooled_alpha(jobs)
    assert first.mean == pytest.approx(14 / 20)
    assert pooled.mean == pytest.approx(21 / 34)
    untested = [job((), ()), job((0, 0), (0, 0))]
    assert alpha_1(untested) is pooled_alpha(untested) is None


def test_stretches_of_time() -> None:
    jobs = [job((10,), (9,), minute=1), job((10,), (7,), minute=4), job((10,), (2,), minute=12), job((), (), minute=22)]
    points = alpha_over_time(jobs, timedelta(minutes=5))
    assert [(p.start.minute, p.num_jobs, p.alpha_1.mean) for p in points] == [
        (0, 2, pytest.approx(0.8)),
        (10, 1, pytest.approx(0.2)),
    ]


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
    assert found.last_used("code") == NextJob("speculative", "lookup", 2, "forced", "")


def test_a_newer_vanilla_job_counts_more_than_an_older_draft() -> None:
    found = counts({FORCED: jobs(5, 2, "forced"), VANILLA: jobs(1, 0, "forced")})
    assert found.last_used("code") == NextJob("vanilla", None, 0, "forced", "")


def test_nothing_is_said_of_a_task_without_jobs() -> None:
    assert counts({FORCED: jobs(5, 2, "forced")}).last_used("sql") is None
