"""The life of an event: a further change inside it, a turn to the other side, and its end."""

from __future__ import annotations

import random

import pytest

from scheduler.counts import subject_of
from scheduler.drift.memory import CHANGED_AFTER, CHANGED_BEFORE, JOBS, MOVED_AFTER, MOVED_BEFORE, NUM_ALARMS, is_open
from scheduler.drift.phases import learn_anew, raise_alarm
from scheduler.drift.watching import State, verdicts
from tests.fixtures.drift import START, STREAM, watched_jobs
from tests.unit.scheduler.drift.test_fold import RUN_LENGTH, STEP, watched


def test_a_deeper_fall_is_found_in_an_open_event(rng: random.Random) -> None:
    stream = watched(watched_jobs(rng, [0.85] * 300 + [0.7] * 200, step=STEP))
    assert (is_open(stream.memory), stream.memory.clock[NUM_ALARMS]) == (True, 1)
    began = stream.memory.alarm[[CHANGED_AFTER, CHANGED_BEFORE]].tolist()
    stream.add(watched_jobs(rng, [0.45] * 120, first=500, step=STEP), RUN_LENGTH)
    assert stream.memory.clock[NUM_ALARMS] == 2
    assert stream.memory.alarm[[CHANGED_AFTER, CHANGED_BEFORE]].tolist() == began, "it is the same event"
    (verdict,) = verdicts(subject_of(STREAM), stream)
    assert verdict.state is State.FELL
    assert verdict.change.low < -0.4 < verdict.change.high


@pytest.mark.parametrize("wait", [0, 16])
def test_a_death_while_the_level_after_an_alarm_is_learned_is_found(rng: random.Random, wait: int) -> None:
    stream = watched(watched_jobs(rng, [0.85] * 300, step=STEP))
    num_jobs = 300
    while not is_open(stream.memory):
        stream.add(watched_jobs(rng, [0.7], first=num_jobs, step=STEP), RUN_LENGTH)
        num_jobs += 1
    alarm = num_jobs
    while stream.memory.clock[NUM_ALARMS] == 1 and num_jobs < alarm + 60:
        stream.add(watched_jobs(rng, [0.7 if num_jobs < alarm + wait else 0.2], first=num_jobs, step=STEP), RUN_LENGTH)
        num_jobs += 1
    assert wait < num_jobs - alarm <= wait + 20
    after, before = stream.memory.alarm[[MOVED_AFTER, MOVED_BEFORE]]
    assert after <= (START + (alarm + wait) * STEP).timestamp() <= before
    (verdict,) = verdicts(subject_of(STREAM), stream)
    assert verdict.state is State.FELL


def test_a_level_that_is_learned_and_stays_raises_no_alarm(rng: random.Random) -> None:
    for number in range(12):
        stream = watched(watched_jobs(rng, [0.9] * 200 + [0.5] * 90, step=STEP))
        assert stream.memory.clock[NUM_ALARMS] == 1, number


def test_a_change_to_the_other_side_begins_where_it_turned(rng: random.Random) -> None:
    stream = watched(watched_jobs(rng, [0.6] * 300 + [0.4] * 100 + [0.85] * 120, step=STEP))
    (verdict,) = verdicts(subject_of(STREAM), stream)
    assert verdict.state is State.ROSE
    assert verdict.changed_after > START + 380 * STEP


@pytest.mark.parametrize("num_before", [300, 900])
def test_a_false_alarm_ends_soon_and_nothing_is_forgotten(rng: random.Random, num_before: int) -> None:
    stream = watched(watched_jobs(rng, [0.7] * num_before, step=STEP))
    raise_alarm(stream.memory, (START + num_before * STEP).timestamp())
    learn_anew(stream.memory)
    norm = stream.memory.norm.first[JOBS]
    stream.add(watched_jobs(rng, [0.7] * 400, first=num_before, step=STEP), RUN_LENGTH)
    assert not is_open(stream.memory)
    assert stream.memory.reference.first[JOBS] >= norm
