"""Segments of a task share its device time by weight; inside a segment the order is as if it were alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.simulated import SimulatedDevice, lane
from worker.admission import AGEING_S, AdmissionQueue
from worker.sharing import MOST_IDLE

SEGMENTS = ("batch", "gold", "")
few = settings(derandomize=True, deadline=None, max_examples=15)
Item = tuple[str, int]  # segment and number


def segment_of(item: Item) -> str:
    return item[0]


def add(queue: AdmissionQueue[Item], segment: str, num_jobs: int, *, now: float = 0.0, is_high: bool = False) -> None:
    for number in range(num_jobs):
        item = segment, number
        queue.add(lane(), item, priority=0, num_bytes=1, now=now, segment=segment, is_high=is_high)


@few
@given(st.integers(0, 2**32), st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=3, max_size=3))
def test_waiting_segments_share_device_time_by_weight(seed: int, weights: list[float]) -> None:
    """Whatever their jobs cost: none is ahead by more than twice what the slots can hold, at any time."""
    rng, weight_of = Random(seed), dict(zip(SEGMENTS, weights, strict=True))
    mean_s = {segment: rng.choice([0.2, 0.5, 1.0]) for segment in SEGMENTS}
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=8, weight_of_segment=weight_of.__getitem__)
    for segment in SEGMENTS:
        add(queue, segment, 2000)
    device = SimulatedDevice(queue, 3, lambda _, item: rng.uniform(0, 2 * mean_s[item[0]]), segment_of)
    ahead_s = 2 * 3 * 2 * max(mean_s.values()) / min(weights)
    for _ in range(800):
        device.step(0.5)
        virtual_s = [device.segment_s[segment] / weight_of[segment] for segment in SEGMENTS]
        assert max(virtual_s) - min(virtual_s) <= ahead_s
    assert min(queue.num_waiting("code", segment, is_high=False) for segment in SEGMENTS) > 0


@few
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_of_random_arrivals_nobody_starves_and_no_slot_stays_free(seed: int, num_slots: int) -> None:
    """A segment that sends one job at a time waits for at most a few jobs of each other one, however many they send."""
    rng, queue = Random(seed), AdmissionQueue[Item](num_slots=num_slots)
    device = SimulatedDevice(queue, num_slots, lambda *_: rng.uniform(0.2, 1.0), segment_of)
    numbers, latest_s = Counter[str](), dict[Item, float]()
    for _ in range(300):
        for segment, num_jobs in (("batch", rng.choice([0, 0, 9])), ("gold", rng.choice([0, 0, 0, 1])), ("", 1)):
            for _ in range(num_jobs):
                item = segment, numbers[segment]
                numbers[segment] += 1
                queue.add(lane(), item, priority=0, num_bytes=1, now=float(numbers[segment]), segment=segment)
                # Its share is a third, and no other is ahead by more than twice what the slots hold. No job and no
                # step charges more than a second.
                num_ahead = 2 * num_slots + 2 + queue.num_waiting("code", segment, is_high=False)
                latest_s[item] = sum(device.segment_s.values()) + 3 * num_ahead
        num_free = num_slots - len(device.running_items)
        num_waiting = len(queue)
        admitted = device.step(0.6)
        assert len(admitted) == min(num_free, num_waiting), "a slot stayed free while jobs waited"
        assert all(sum(device.segment_s.values()) <= latest_s[item] for _, item in admitted if item[0] == "gold")
    assert numbers["gold"] > 30


@few
@given(st.integers(0, 2**32))
def test_inside_a_segment_the_order_is_as_if_it_were_alone(seed: int) -> None:
    rng = Random(seed)
    together: AdmissionQueue[Item] = AdmissionQueue(num_slots=4)
    alone: dict[str, AdmissionQueue[Item]] = defaultdict(lambda: AdmissionQueue(num_slots=4))
    for number in range(120):
        item, now = (rng.choice(SEGMENTS), number), rng.uniform(0, 5 * AGEING_S)
        priority = rng.randint(-3, 3)
        for queue in (together, alone[item[0]]):
            queue.add(lane(), item, priority=priority, num_bytes=1, now=now, segment=item[0])
    order = [item for _, item in together.next(120, running={})]
    for segment, queue in alone.items():
        expected = [item for _, item in queue.next(120, running={})]
        assert [item for item in order if item[0] == segment] == expected


def test_a_segment_alone_has_the_whole_device_and_owes_nothing_for_it() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=4)
    add(queue, "batch", 1000)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0, segment_of)
    for _ in range(100):
        device.step(1.0)
    assert device.segment_s["batch"] == pytest.approx(100)
    add(queue, "gold", 100)
    before_s = dict(device.segment_s)
    for _ in range(100):
        device.step(1.0)
    gained_s = {segment: device.segment_s[segment] - before_s.get(segment, 0.0) for segment in ("batch", "gold")}
    assert gained_s["gold"] == pytest.approx(gained_s["batch"], abs=2 * 4 * 1.0)


def test_a_segment_with_one_job_at_a_time_gets_no_more_than_its_share() -> None:
    """It is idle between its jobs, and what it had is not forgotten."""
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=1, weight_of_segment=lambda one: 3.0 if one == "b" else 1.0)
    add(queue, "b", 2000)
    device = SimulatedDevice(queue, 1, lambda *_: 1.0, segment_of)
    for _ in range(400):
        if not queue.num_waiting("code", "a", is_high=False) and ("a", 0) not in device.running_items:
            add(queue, "a", 1)
        device.step(1.0)
    assert device.segment_s["a"] == pytest.approx(100, abs=4)


def test_the_high_lane_goes_first_and_segments_share_it_too() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=1)
    add(queue, "normal", 50)
    add(queue, "batch", 50, is_high=True)
    add(queue, "gold", 10, now=9.0, is_high=True)
    order = [segment for _, (segment, _) in queue.next(25, running={})]
    assert (order.count("gold"), order.count("batch"), order.count("normal")) == (10, 10, 5)


def test_a_segment_has_one_share_for_both_lanes() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=1)
    add(queue, "both", 100, is_high=True)
    add(queue, "both", 100)
    add(queue, "normal", 100)
    device = SimulatedDevice(queue, 1, lambda *_: 1.0, segment_of)
    for _ in range(50):
        device.step(1.0)
    # One start in five is normal, and "both" had more than its half by its high jobs.
    assert device.segment_s["normal"] == pytest.approx(10, abs=1)


def test_probes_count_for_no_segment_and_run_alone_as_before() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=4)
    probe = lane(purpose="probe")
    for number in range(8):
        queue.add(probe, ("probed", number), priority=0, num_bytes=1, now=0.0, segment="batch")
    add(queue, "batch", 8, now=1.0)
    add(queue, "gold", 8, now=1.0)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0, segment_of)
    while len(queue) or device.running_items:
        device.step(0.5)
        lanes = {line.lane for line in device.running}
        assert len(lanes) <= 1 or not any(one.is_measured for one in lanes)
    order = [item[0] for _, item in device.admitted]
    assert sorted(order) == sorted(["probed"] * 8 + ["batch"] * 8 + ["gold"] * 8)
    traffic = [one for one in order if one != "probed"]
    assert abs(traffic[:8].count("batch") - 4) <= 1


def test_what_leaves_with_its_partition_changes_no_share() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=1)
    add(queue, "batch", 200)
    device = SimulatedDevice(queue, 1, lambda *_: 1.0, segment_of)
    for _ in range(20):
        device.step(1.0)
    add(queue, "gold", 200)
    for _ in range(20):
        device.step(1.0)
    queue.discard(lambda item: item[1] % 2 == 0)
    before_s = dict(device.segment_s)
    for _ in range(40):
        device.step(1.0)
    gained_s = {segment: device.segment_s[segment] - before_s[segment] for segment in before_s}
    assert gained_s["gold"] == pytest.approx(gained_s["batch"], abs=3)
    queue.discard(lambda item: item[0] == "gold")
    assert queue.num_waiting("code", "gold", is_high=False) == 0
    device.run_empty(1.0)
    assert queue.load(is_high=False) == (0, 0)


def test_however_many_segments_are_made_up_few_are_remembered() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=2)
    add(queue, "batch", 4000)
    device = SimulatedDevice(queue, 2, lambda *_: 1.0, segment_of)
    shares = queue._tasks["code"].shares
    for number in range(3000):
        add(queue, f"made-up-{number}", 1)
        device.step(1.0)
        num_in_use = len(device.running_items) + sum(map(len, queue._tasks["code"].lanes.values()))
        assert len(shares) <= 3 * (MOST_IDLE + num_in_use)
    assert device.segment_s["batch"] > 0
