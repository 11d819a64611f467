"""Lanes: what must not share a decision is in another one; measured ones run alone, in turn, and never for ever."""

from __future__ import annotations

from itertools import groupby
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.messages import Body, Decoding, Job, Purpose
from tests.fixtures.simulated import SimulatedDevice, lane
from worker.admission import AdmissionQueue, LaneKey, lane_of
from worker.engine import Sampling

PROBE, CONTROL = lane(purpose="probe"), lane(purpose="control")


def queue_of(lanes: dict[LaneKey, int], batch: int) -> AdmissionQueue[int]:
    """Jobs that came lane by lane."""
    queue: AdmissionQueue[int] = AdmissionQueue(num_slots=batch)
    for when, (key, num_jobs) in enumerate(lanes.items()):
        for number in range(num_jobs):
            queue.add(key, number, priority=0, num_bytes=1, now=float(when))
    return queue


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 5))
def test_a_measured_lane_runs_alone_and_every_job_ends(seed: int, num_slots: int, batch: int) -> None:
    rng, queue = Random(seed), AdmissionQueue[int](num_slots=batch)
    device = SimulatedDevice(queue, num_slots, lambda *_: rng.uniform(0.1, 3.0))
    for number in range(100):
        key = lane(rng.choice(["code", "sql"]), rng.choice(["traffic", "probe", "control"]), rng.choice(["a", "b"]))
        is_high = rng.random() < 0.3
        queue.add(key, number, priority=rng.randint(-1, 1), num_bytes=1, now=float(number), is_high=is_high)
        for _ in range(rng.choice([0, 1, 2])):
            before = set(device.running)
            lanes = before | {key for key, _ in device.step(0.5)}
            assert len(lanes) == 1 or not any(key.is_measured for key in lanes)
    device.run_empty(0.5)
    assert len(device.admitted) == 100
    assert queue.load(is_high=True) == queue.load(is_high=False) == (0, 0)


def test_the_engine_drains_before_a_measured_lane_and_after_it() -> None:
    queue = queue_of({lane(): 2, PROBE: 3, lane("sql"): 2}, batch=2)
    assert queue.next(2, running={}) == [(lane(), 0), (lane(), 1)]
    queue.charge({"code": 0.1})
    assert queue.next(9, running={lane(): 1}) == []
    assert queue.next(9, running={}) == [(PROBE, 0), (PROBE, 1)]
    queue.charge({"code": 0.1})
    assert queue.next(9, running={PROBE: 1}) == []
    assert queue.next(1, running={}) == [(lane("sql"), 0)]
    assert queue.next(9, running={lane("sql"): 1}) == [(lane("sql"), 1)]
    assert queue.next(9, running={lane("sql"): 1}) == []
    assert queue.next(9, running={}) == [(PROBE, 2)]


def test_a_flood_of_probes_leaves_others_their_share() -> None:
    queue = queue_of({lane(purpose="probe", drafter="lookup"): 50, lane(purpose="probe", drafter="draft"): 50}, batch=4)
    for number in range(40):
        queue.add(lane("sql"), number, priority=0, num_bytes=1, now=9.0)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0)
    for _ in range(60):
        device.step(1.0)
    assert device.device_s["sql"] == pytest.approx(30, abs=9)


def test_a_tasks_own_traffic_goes_between_its_probes() -> None:
    queue = queue_of({PROBE: 12, lane(): 12}, batch=4)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0)
    device.run_empty(0.5)
    runs = [(purpose, len(list(run))) for purpose, run in groupby(key.purpose for key, _ in device.admitted)]
    assert runs == [("probe", 4), ("traffic", 4)] * 3


def test_discarded_jobs_end_their_lanes_turn() -> None:
    queue = queue_of({PROBE: 2, lane(): 1}, batch=4)
    assert queue.next(4, running={lane("sql"): 1}) == []
    queue.add(lane("sql"), 9, priority=0, num_bytes=1, now=0.0)
    queue.discard(lambda number: number < 9)
    assert queue.next(4, running={}) == [(lane("sql"), 9)]


def lane_with(temperature: float = 0.0, switched_off: str = "", **fields: Any) -> LaneKey:
    """The lane of a job that differs from a plain one in these fields."""
    job = Job.model_construct(**{"job_id": "j", "task": "code", "body": Body(prompt="x"), **fields})
    return lane_of(job, Sampling(max_tokens=8, temperature=temperature), switched_off)


def test_what_does_not_change_the_decision_does_not_change_the_lane() -> None:
    assert lane_with() == lane_with(custom_id="other", priority=3, segment="gold")


def test_what_changes_the_decision_changes_the_lane() -> None:
    lanes = {
        lane_with(),
        lane_with(temperature=0.7),
        lane_with(switched_off="tenant-*"),
        lane_with(task="sql"),
        lane_with(decoding=Decoding.VANILLA),
        lane_with(purpose=Purpose.CONTROL),
        lane_with(probe_drafter="lookup"),
        lane_with(probe_drafter="lookup", probe_num_draft_tokens=3),
    }
    assert len(lanes) == 8
