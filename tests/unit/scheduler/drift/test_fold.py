"""The drift test, a job at a time: what raises an alarm, what does not, and what ends it."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.measurements import WatchedJob
from scheduler.drift.memory import DIRECTION, NUM_ALARMS, PHASE, WATCHING, is_open
from scheduler.drift.watching import WatchedStream
from tests.fixtures.drift import START, STREAM, watched_jobs

STEP = timedelta(minutes=10)  # 300 jobs are two days
RUN_LENGTH = 50_000.0


def watched(jobs: list[WatchedJob]) -> WatchedStream:
    stream = WatchedStream()
    stream.add(jobs, RUN_LENGTH)
    return stream


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_a_fall_and_its_mirror_image_are_found_alike(seed: int) -> None:
    jobs = watched_jobs(random.Random(seed), [0.5] * 100 + [0.3] * 60, num_draft_tokens=1)
    mirrored = [replace(job, accepts=(job.trials[0] - job.accepts[0],)) for job in jobs]
    one, other = watched(jobs).memory, watched(mirrored).memory
    assert one.clock.tolist() == other.clock.tolist()
    assert one.alarm[DIRECTION] == -other.alarm[DIRECTION]
    np.testing.assert_allclose(one.alarm[1:], other.alarm[1:])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4).flatmap(
        lambda trials: st.tuples(
            st.just(sorted(trials, reverse=True)), st.lists(st.floats(0, 1), min_size=len(trials), max_size=len(trials))
        )
    ),
    st.integers(1, 90_000),
)
def test_a_stream_of_equal_jobs_never_alarms(counts: tuple[list[int], list[float]], step_s: int) -> None:
    trials, shares = counts
    accepts = tuple(int(n * share) for n, share in zip(trials, shares, strict=True))
    jobs = [
        WatchedJob(STREAM, "", START + number * timedelta(seconds=step_s), number, 4, tuple(trials), accepts, 100)
        for number in range(300)
    ]
    assert watched(jobs).memory.clock[NUM_ALARMS] == 0


@pytest.mark.parametrize(("before", "after", "direction"), [(0.7, 0.45, -1), (0.45, 0.7, 1)])
def test_a_change_is_found_and_the_moment_is_right(
    rng: random.Random, before: float, after: float, direction: int
) -> None:
    memory = watched(watched_jobs(rng, [before] * 300 + [after] * 60, step=STEP)).memory
    assert is_open(memory)
    _, raised, earliest, latest, _, _ = memory.alarm
    assert memory.alarm[DIRECTION] == direction
    changed = (START + 300 * STEP).timestamp()
    margin = 10 * STEP.total_seconds()
    assert earliest - margin <= changed <= latest + margin
    assert changed < raised <= changed + 4 * margin


def test_a_lasting_fall_is_one_event(rng: random.Random) -> None:
    memory = watched(watched_jobs(rng, [0.7] * 300 + [0.6] * 700, step=STEP)).memory
    assert is_open(memory)
    assert memory.clock[NUM_ALARMS] == 1


def test_the_old_level_ends_the_alarm(rng: random.Random) -> None:
    stream = watched(watched_jobs(rng, [0.7] * 300 + [0.5] * 100, step=STEP))
    assert is_open(stream.memory)
    stream.add(watched_jobs(rng, [0.7] * 600, first=400, step=STEP), RUN_LENGTH)
    assert not is_open(stream.memory)
    assert stream.memory.clock[PHASE] == WATCHING


def test_another_draft_length_is_not_a_change(rng: random.Random) -> None:
    # α_1 as measured of look-up on 700 texts: .465 at k = 1 and .419 at k = 12.
    num_alarms = 0
    for _ in range(3):
        stream = watched(watched_jobs(rng, [0.465] * 300, num_draft_tokens=1))
        for first in range(300, 700, 200):
            stream.add(watched_jobs(rng, [0.419] * 100, num_draft_tokens=12, first=first), RUN_LENGTH)
            stream.add(watched_jobs(rng, [0.465] * 100, num_draft_tokens=1, first=first + 100), RUN_LENGTH)
        num_alarms += int(stream.memory.clock[NUM_ALARMS])
    assert num_alarms == 0


def test_jobs_that_tested_nothing_say_nothing(rng: random.Random) -> None:
    jobs = watched_jobs(rng, [0.7] * 100)
    idle = replace(jobs[-1], trials=(0, 0, 0), accepts=(0, 0, 0))
    assert watched([*jobs, idle]).document() == watched(jobs).document()


def test_more_draft_lengths_and_segments_than_rows_share_the_last(rng: random.Random) -> None:
    jobs = watched_jobs(rng, [0.6] * 120)
    many = [replace(job, num_draft_tokens=1 + n % 40, segment=f"customer {n % 50}") for n, job in enumerate(jobs)]
    stream = watched(many)
    assert (len(stream.draft_lengths), len(stream.segments)) == (15, 31)
    assert stream.memory.clock[PHASE] == WATCHING
