"""Which events open and close, and which drafts change their status."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.measurements import DecodedJob, DriftSubject, ProbeResult, Stream
from alphaloop.settings import SchedulerSettings
from alphaloop.store.drift import OpenEvent
from scheduler.counts import Counts
from scheduler.flags import events_to_close, judge, status_changes
from tests.fixtures.history import drawn_counts

AT = datetime(2026, 1, 1, tzinfo=UTC)
NOW = AT + timedelta(days=10)
SETTINGS = SchedulerSettings()
STREAM = Stream("code", "target-1", "engine-1", "greedy", "lookup", "draft-1")
SUBJECT = DriftSubject("code", "lookup", "draft-1", "target-1")


def jobs(rng: random.Random, *parts: tuple[float, int], start: datetime = AT) -> list[DecodedJob]:
    found = []
    for alpha, number in parts:
        for _ in range(number):
            counts = drawn_counts(rng, alpha, num_tokens=48, num_draft_tokens=3)
            at = start + len(found) * timedelta(minutes=5)
            found.append(DecodedJob(at, 3, "faster", counts.trials, counts.accepts, 48, counts.rounds * 0.04))
    return found


def probes(day: int, accepts: int, *, task: str = "code", draft: str = "draft-1") -> list[ProbeResult]:
    return [
        ProbeResult(
            AT + timedelta(days=day),
            task,
            "set-1",
            position,
            f"prompt-{position}",
            "lookup",
            draft,
            "target-1",
            "engine-1",
            3,
            (20,),
            (accepts,),
            48,
            1.0,
        )
        for position in range(6)
    ]


def counts(streams: dict[Stream, Sequence[DecodedJob]], found: Sequence[ProbeResult] = ()) -> Counts:
    return Counts(AT, NOW, streams, found)


def event(cause: str, flagged_by: str, subject: DriftSubject = SUBJECT) -> OpenEvent:
    return OpenEvent(1, subject, cause, "It fell.", AT, {"flagged_by": flagged_by})


def test_several_streams_of_a_subject_are_one_finding(rng: random.Random) -> None:
    fallen = jobs(rng, (0.85, 150), (0.45, 60))
    steady = jobs(rng, (0.85, 210))
    sampled = replace(STREAM, sampling_bucket="t<=1.0")
    verdicts = judge(counts({STREAM: fallen, sampled: steady}), [], SETTINGS)
    (finding,) = verdicts.findings
    assert finding.subject == SUBJECT


def test_a_former_revision_is_not_judged(rng: random.Random) -> None:
    fallen = jobs(rng, (0.85, 150), (0.45, 60))
    later = replace(STREAM, draft_revision="draft-2")
    verdicts = judge(counts({STREAM: fallen, later: jobs(rng, (0.85, 5), start=NOW)}), [], SETTINGS)
    assert verdicts.findings == ()
    assert events_to_close([event("unexplained", "traffic")], verdicts) == [event("unexplained", "traffic")]


def test_an_event_that_cannot_be_tested_stays_open(rng: random.Random) -> None:
    few = judge(counts({STREAM: jobs(rng, (0.85, 3))}), [], SETTINGS)
    assert events_to_close([event("traffic_changed", "traffic")], few) == []
    steady = judge(counts({STREAM: jobs(rng, (0.85, 60))}), [], SETTINGS)
    assert events_to_close([event("traffic_changed", "traffic")], steady) != []
    assert events_to_close([event("draft_stale", "probes")], steady) == [], "steady traffic says nothing about probes"


def test_between_the_thresholds_the_flag_stays(rng: random.Random) -> None:
    middle = [*probes(0, 16), *probes(1, 15)]  # a fall of .05: less than stale_drop, more than stale_recover
    assert judge(counts({}, middle), [], SETTINGS).findings == ()
    flagged = event("unexplained", "probes")
    verdicts = judge(counts({}, middle), [flagged], SETTINGS)
    assert [finding.cause for finding in verdicts.findings] == ["unexplained"]
    assert events_to_close([flagged], verdicts) == []


@pytest.mark.parametrize(
    ("status", "accepts", "becomes"),
    [("active", 8, "stale"), ("active", 15, None), ("stale", 15, None), ("stale", 16, "active"), ("retired", 8, None)],
)
def test_a_status_changes_at_two_thresholds(status: str, accepts: int, becomes: str | None) -> None:
    verdicts = judge(counts({}, [*probes(0, 16), *probes(1, accepts)]), [], SETTINGS)
    changes = status_changes(verdicts.comparisons, {("lookup", "draft-1", "target-1"): status}, SETTINGS)
    assert [change.status for change in changes] == ([becomes] if becomes else [])


def test_a_status_is_judged_over_all_tasks() -> None:
    found = [*probes(0, 16), *probes(1, 11)]
    for task in ("sql", "rag", "math", "chat"):
        found += [*probes(0, 16, task=task), *probes(1, 16, task=task)]
    verdicts = judge(counts({}, found), [], SETTINGS)
    assert [finding.subject.task for finding in verdicts.findings] == ["code"]
    assert status_changes(verdicts.comparisons, {("lookup", "draft-1", "target-1"): "active"}, SETTINGS) == []
