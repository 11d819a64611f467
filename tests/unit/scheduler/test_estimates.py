"""Estimates by hand, stretches of time, α_1 over time with what changed behind it, and how a task was decoded last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.as_decoded import NextJob
from alphaloop.measurements import DecodedJob, ProbeResult, Stream
from alphaloop.pages.drawing import alpha_of_tasks
from scheduler.counts import RunCounts
from scheduler.report.build import alpha_1, alpha_over_time, pooled_alpha, task_history

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


def job(trials: tuple[int, ...], accepts: tuple[int, ...], *, at: datetime = NOW) -> DecodedJob:
    return DecodedJob(at, 3, "faster", trials, accepts, 48, 1.0)


def counts(streams: dict[Stream, Sequence[DecodedJob]], probes: Sequence[ProbeResult] = ()) -> RunCounts:
    return RunCounts(NOW - 10 * HOUR, NOW, streams, probes, {})


def test_pooled_and_first_position() -> None:
    jobs = [job((10, 8), (8, 4)), job((10, 6), (6, 3)), job((), ())]
    first, pooled = alpha_1(jobs), pooled_alpha(jobs)
    assert first.mean == pytest.approx(14 / 20)
    assert pooled.mean == pytest.approx(21 / 34)
    untested = [job((), ()), job((0, 0), (0, 0))]
    assert alpha_1(untested) is pooled_alpha(untested) is None


def test_stretches_of_time() -> None:
    tested = [job((10,), (accepts,), at=NOW + minute * MINUTE) for minute, accepts in ((1, 9), (4, 7), (12, 2))]
    points = alpha_over_time([*tested, job((), (), at=NOW + 22 * MINUTE)], timedelta(minutes=5))
    assert [(p.start.minute, p.num_jobs, p.alpha_1.mean) for p in points] == [
        (0, 2, pytest.approx(0.8)),
        (10, 1, pytest.approx(0.2)),
    ]


def jobs(first: datetime, num_jobs: int, accepts: int = 8) -> list[DecodedJob]:
    return [job((10,), (accepts,), at=first + i * MINUTE) for i in range(num_jobs)]


def probe(at: datetime, *, draft: str = "draft-1", task: str = "code") -> ProbeResult:
    return ProbeResult(at, task, "v", 0, "p", "small", draft, "target-1", "engine-1", 3, (10,), (6,))


def test_every_revision_is_in_the_history_and_marked_where_it_was_new() -> None:
    streams = {
        Stream("code", "target-1", "engine-1", "greedy", "small", "draft-1"): jobs(NOW - 8 * HOUR, 5),
        Stream("code", "target-1", "engine-1", "t<=1.0", "small", "draft-1"): jobs(NOW - 7 * HOUR, 5),
        Stream("code", "target-2", "engine-1", "greedy", "small", "draft-2"): jobs(NOW - 2 * HOUR, 5, accepts=3),
        Stream("code", "target-2", "engine-2", "greedy"): jobs(NOW - HOUR, 5),
    }
    found = task_history(counts(streams), "code", "small")
    assert sum(point.num_jobs for point in found.traffic) == 15, "vanilla jobs are not among them"
    assert (found.traffic[0].alpha_1.mean, found.traffic[-1].alpha_1.mean) == (0.8, 0.3)
    (mark,) = found.revisions
    assert (mark.at, set(mark.changed)) == (NOW - 2 * HOUR, {"target", "draft"})


def test_probes_of_the_window_have_a_point_a_run() -> None:
    probes = [probe(NOW - 20 * HOUR), probe(NOW - 3 * HOUR), probe(NOW - 3 * HOUR), probe(NOW - HOUR, draft="draft-2")]
    found = task_history(counts({}, [*probes, probe(NOW - HOUR, task="sql")]), "code", "small")
    assert found.traffic == ()
    assert [(p.start, p.num_jobs, p.alpha_1.mean) for p in found.probes] == [
        (NOW - 3 * HOUR, 2, 0.6),
        (NOW - HOUR, 1, 0.6),
    ]
    assert [(mark.at, mark.changed) for mark in found.revisions] == [(NOW - HOUR, ("draft",))]
    plot = alpha_of_tasks({"code": found.model_dump(mode="json")})
    assert "probes 0.60 to 0.60, draft changed 2026-11-21 05:00 UTC" in plot


def test_nothing_tested_is_no_history() -> None:
    assert task_history(counts({}, [probe(NOW - 20 * HOUR)]), "code", "small") is None
    assert alpha_of_tasks({}) is None


FORCED = Stream("code", "target", "engine", "greedy", "lookup", "r1")
VANILLA = Stream("code", "target", "engine", "greedy")


def last_two(minutes_ago: int, num_draft_tokens: int, reason: str) -> list[DecodedJob]:
    """The last one so long ago."""
    return [
        DecodedJob(NOW - (minutes_ago + more) * MINUTE, k, reason, (3,), (2,), 24, 0.5)
        for more, k in ((1, 12), (0, num_draft_tokens))
    ]


def test_a_task_that_is_forced_to_speculate_is_told_by_its_newest_job() -> None:
    found = counts({FORCED: last_two(5, 2, "forced"), VANILLA: last_two(9, 0, "control")})
    assert found.last_used("code") == NextJob("speculative", "lookup", 2, "forced", "")
    assert found.last_used("sql") is None


def test_a_newer_vanilla_job_counts_more_than_an_older_draft() -> None:
    found = counts({FORCED: last_two(5, 2, "forced"), VANILLA: last_two(1, 0, "forced")})
    assert found.last_used("code") == NextJob("vanilla", None, 0, "forced", "")
