"""A test of each segment beside the test of all of them."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.errors import StoreError
from alphaloop.measurements import WatchedJob
from scheduler.counts import subject_of
from scheduler.drift.watching import MOST_SEGMENTS, WITHOUT_SEGMENT, SegmentedStream, State, TrafficVerdict
from tests.fixtures.drift import STREAM, watched_jobs
from tests.unit.scheduler.drift.test_fold import RUN_LENGTH, STEP


def told(stream: SegmentedStream) -> dict[str, TrafficVerdict]:
    return {verdict.segment: verdict for verdict in stream.verdicts(subject_of(STREAM))}


def mixed(rng: random.Random, levels: list[tuple[str, float]], first: int = 0) -> list[WatchedJob]:
    """Jobs of these segments and levels, in any order."""
    rng.shuffle(levels)
    return [
        job
        for number, (segment, alpha) in enumerate(levels, start=first)
        for job in watched_jobs(rng, [alpha], first=number, step=STEP, segment=segment)
    ]


def test_every_segment_falls_while_the_mean_stays(rng: random.Random) -> None:
    jobs = mixed(rng, [("hard", 0.5)] * 320 + [("", 0.85)] * 80)
    jobs += mixed(rng, [("hard", 0.3)] * 150 + [("", 0.63)] * 320, first=len(jobs))
    stream = SegmentedStream()
    stream.add(jobs, RUN_LENGTH)
    found = told(stream)
    assert found[""].state not in (State.FELL, State.ROSE)
    for name, fall in (("hard", -0.2), (WITHOUT_SEGMENT, -0.22)):
        assert found[name].state is State.FELL
        change = found[name].change
        assert change.low < fall < change.high
        assert found[name].changed_after is not None


def test_a_segment_does_not_move_against_all_without_an_alarm_of_its_own(rng: random.Random) -> None:
    jobs = mixed(rng, [("hard", 0.45)] * 80 + [("easy", 0.85)] * 320)
    jobs += mixed(rng, [("hard", 0.47)] * 300 + [("easy", 0.87)] * 150, first=len(jobs))
    stream = SegmentedStream()
    stream.add(jobs, RUN_LENGTH)
    found = told(stream)
    assert found[""].state is State.FELL
    assert State.ROSE not in {verdict.state for verdict in found.values()}


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 190), max_size=5))
def test_in_how_many_pages_and_runs_the_jobs_come_changes_nothing(seed: int, cuts: list[int]) -> None:
    rng = random.Random(seed)
    jobs = watched_jobs(rng, [0.7] * 40, step=STEP, segment="a")
    jobs += mixed(rng, [("a", 0.4)] * 75 + [("b", 0.5)] * 75, first=40)
    whole, parts = SegmentedStream(), SegmentedStream()
    whole.add(jobs, RUN_LENGTH)
    for begin, end in pairwise([0, *sorted(cuts), len(jobs)]):
        parts.add(jobs[begin:end], RUN_LENGTH)
        parts = SegmentedStream.of(json.loads(json.dumps(parts.document())))
    assert parts.document() == whole.document()


def test_a_stream_of_one_segment_is_one_test(rng: random.Random) -> None:
    stream = SegmentedStream()
    stream.add(watched_jobs(rng, [0.7] * 50, segment="only"), RUN_LENGTH)
    assert (stream.parts, stream.num_jobs, list(told(stream))) == ({}, 50, [""])


def test_later_segments_are_in_the_test_of_all_only(rng: random.Random) -> None:
    stream = SegmentedStream()
    stream.add(mixed(rng, [(f"s-{number}", 0.7) for number in range(2 * MOST_SEGMENTS)] * 3), RUN_LENGTH)
    assert len(stream.parts) == MOST_SEGMENTS
    assert stream.num_jobs == 6 * MOST_SEGMENTS


@pytest.mark.parametrize("document", [[], {}, {"parts": 3}, {"parts": {"a": {}}}])
def test_another_document_is_refused(document: object) -> None:
    with pytest.raises(StoreError):
        SegmentedStream.of(document)
