"""α_1 over time: traffic and probes, gaps, and the revisions behind it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from alphaloop.measurements import DecodedJob, ProbeResult, Stream
from alphaloop.pages.drawing import alpha_of_tasks
from scheduler.counts import RunCounts
from scheduler.report.build import task_history

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
OLD = Stream("code", "target-1", "engine-1", "greedy", "small", "draft-1")


def jobs(first: datetime, num_jobs: int, accepts: int = 8) -> list[DecodedJob]:
    return [DecodedJob(first + i * MINUTE, 3, "faster", (10,), (accepts,), 20, 1.0) for i in range(num_jobs)]


def probe(at: datetime, *, draft: str = "draft-1", task: str = "code") -> ProbeResult:
    return ProbeResult(at, task, "v", 0, "p", "small", draft, "target-1", "engine-1", 3, (10,), (6,))


def counts(streams: dict[Stream, list[DecodedJob]], probes: list[ProbeResult]) -> RunCounts:
    return RunCounts(NOW - 10 * HOUR, NOW, streams, probes, {})


def test_every_revision_is_in_it_and_marked_where_it_was_new() -> None:
    other_target = Stream("code", "target-2", "engine-1", "greedy", "small", "draft-2")
    other_sampling = Stream("code", "target-1", "engine-1", "t<=1.0", "small", "draft-1")
    found = task_history(
        counts(
            {
                OLD: jobs(NOW - 8 * HOUR, 5),
                other_sampling: jobs(NOW - 7 * HOUR, 5),
                other_target: jobs(NOW - 2 * HOUR, 5, accepts=3),
                Stream("code", "target-2", "engine-2", "greedy"): jobs(NOW - HOUR, 5),
            },
            [],
        ),
        "code",
        "small",
    )
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
