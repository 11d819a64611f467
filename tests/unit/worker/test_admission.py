"""Admission: tasks share the device by device time, jobs of a task by priority with ageing and arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fixtures.simulated import SimulatedDevice, lane
from worker.admission import AGEING_S, AdmissionQueue

TASKS = ("code", "rag", "sql")
PURPOSES = ("traffic", "traffic", "probe", "control")
seeded = settings(derandomize=True, deadline=None, max_examples=40)


def add(queue: AdmissionQueue[int], task: str, num_jobs: int) -> None:
    """Jobs of one task that begin to wait at the same moment."""
    for number in range(num_jobs):
        queue.add(lane(task), number, priority=0, num_bytes=1, now=0.0)


def filled(
    num_jobs_by_task: dict[str, int], quantum_s: float = 1.0, weight_of: Callable[[str], float] = lambda _: 1.0
) -> AdmissionQueue[int]:
    """A queue in which jobs of several tasks wait."""
    queue: AdmissionQueue[int] = AdmissionQueue(num_slots=8, quantum_s=quantum_s, weight_of=weight_of)
    for task, num_jobs in num_jobs_by_task.items():
        add(queue, task, num_jobs)
    return queue


@seeded
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_every_job_leaves_once(seed: int, num_slots: int) -> None:
    rng, queue = Random(seed), AdmissionQueue[int](num_slots=3)
    device = SimulatedDevice(queue, num_slots, lambda _, number: 0.1 + number % 5)
    waiting: set[int] = set()
    discarded: list[int] = []
    for number in range(120):
        key = lane(rng.choice(TASKS), rng.choice(PURPOSES), rng.choice(["greedy", "t0.7"]))
        queue.add(key, number, priority=rng.randint(-2, 2), num_bytes=number, now=float(number))
        waiting.add(number)
        if rng.random() < 0.4:
            waiting -= {item for _, item in device.step(1.0)}
        if rng.random() < 0.05:
            queue.discard(lambda item: item % 7 == 3)
            gone = {item for item in waiting if item % 7 == 3}
            discarded += gone
            waiting -= gone
        assert len(queue) == len(waiting)
        assert queue.load(is_high=False) == (len(waiting), sum(waiting))
    device.run_empty(1.0)
    assert sorted([item for _, item in device.admitted] + discarded) == list(range(120))
    assert queue.load(is_high=False) == (0, 0)


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=3, max_size=3))
def test_backlogged_tasks_share_device_time_by_weight(seed: int, weights: list[float]) -> None:
    """Whatever their jobs cost: no task is ahead by more than the quantum and twice what the slots can hold."""
    rng, weight_of = Random(seed), dict(zip(TASKS, weights, strict=True))
    mean_s = {task: rng.choice([0.2, 0.5, 1.0]) for task in TASKS}
    queue = filled(dict.fromkeys(TASKS, 2000), quantum_s=2.0, weight_of=weight_of.__getitem__)
    device = SimulatedDevice(queue, 3, lambda key, _: rng.uniform(0, 2 * mean_s[key.task]))
    ahead_s = 2.0 + 2 * 3 * 2 * max(mean_s.values()) / min(weights)
    for _ in range(800):
        device.step(0.5)
        virtual_s = [device.device_s[task] / weight_of[task] for task in TASKS]
        assert max(virtual_s) - min(virtual_s) <= ahead_s
    assert all(num_admitted < 2000 for num_admitted in Counter(key.task for key, _ in device.admitted).values())


@settings(derandomize=True, deadline=None, max_examples=12)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.1, 1.0, 10.0]), min_size=3, max_size=3))
@example(859, [10.0, 10.0, 10.0])
def test_no_task_starves_whatever_its_weight(seed: int, weights: list[float]) -> None:
    """A task gets a job in before all tasks together had the device time that one task may be ahead, times weight."""
    rng, weight_of = Random(seed), dict(zip(TASKS, weights, strict=True))
    mean_s = {task: rng.choice([0.2, 1.0]) for task in TASKS}
    queue = filled(dict.fromkeys(TASKS, 4), weight_of=weight_of.__getitem__)
    device = SimulatedDevice(queue, 3, lambda key, _: rng.uniform(0, 2 * mean_s[key.task]))
    # A job that runs alone is charged a whole step, however short it is.
    longest_job_s = max(1.0, 2 * max(mean_s.values()))
    longest_wait_s = sum(weights) * (1.0 + 2 * 3 * longest_job_s / min(weights))
    admitted_at_s = dict.fromkeys(TASKS, 0.0)
    for _ in range(int(2 * longest_wait_s)):
        for key, _ in device.step(1.0):
            admitted_at_s[key.task] = sum(device.device_s.values())
            add(queue, key.task, 1)
        assert sum(device.device_s.values()) - min(admitted_at_s.values()) <= longest_wait_s


def test_a_job_that_took_less_than_expected_is_not_held_against_its_task() -> None:
    queue = filled({"dear": 200}, quantum_s=0.5)
    device = SimulatedDevice(queue, 16, lambda key, _: 20.0 if key.task == "dear" else 0.1)
    for _ in range(400):
        device.step(1.0)
    before_s = device.device_s["dear"]
    add(queue, "cheap", 30_000)
    for _ in range(1000):
        device.step(1.0)
    assert device.device_s["cheap"] == pytest.approx(device.device_s["dear"] - before_s, rel=0.35)


@seeded
@given(st.integers(0, 2**32), st.integers(-1, 40))
def test_no_slot_stays_free_while_traffic_waits(seed: int, limit: int) -> None:
    rng = Random(seed)
    queue = filled({task: rng.randint(0, 15) for task in TASKS}, quantum_s=rng.choice([0.0, 1.0, 100.0]))
    queue.charge({task: 1000 * rng.random() for task in TASKS})
    num_waiting = len(queue)
    assert len(queue.next(limit, running={})) == max(0, min(limit, num_waiting))


@pytest.mark.parametrize("is_trickling", [False, True])
def test_an_idle_task_saves_up_no_device_time(is_trickling: bool) -> None:
    """Nor does a task that often has a job running and seldom one waiting."""
    queue = filled({"busy": 5000}, quantum_s=1.0)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0)
    for number in range(800):
        if is_trickling and number % 4 == 0:
            add(queue, "idle", 1)
        device.step(1.0)
    busy_s, idle_s = device.device_s["busy"], device.device_s["idle"]
    assert busy_s > 2 * idle_s
    add(queue, "idle", 500)
    for _ in range(100):
        device.step(1.0)
        ahead_s = (device.device_s["idle"] - idle_s) - (device.device_s["busy"] - busy_s)
        assert abs(ahead_s) <= 1.0 + 2 * 4 * 1.0


def test_after_a_pause_of_all_tasks_nobody_is_owed_anything() -> None:
    queue = filled({"busy": 500}, quantum_s=1.0)
    device = SimulatedDevice(queue, 1, lambda *_: 1.0)
    device.run_empty(1.0)
    for task in ("idle", "busy"):
        add(queue, task, 100)
    for _ in range(40):
        device.step(1.0)
    assert Counter(key.task for key, _ in device.admitted[500:])["busy"] == pytest.approx(20, abs=2)


@seeded
@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 100)), max_size=60))
def test_waiting_is_worth_priority(jobs: list[tuple[int, float]]) -> None:
    """A job is overtaken by one of d steps more only if that one came less than d times `AGEING_S` later."""
    queue: AdmissionQueue[int] = AdmissionQueue(num_slots=1)
    for number, (priority, since_s) in enumerate(jobs):
        queue.add(lane(bucket=f"t{number % 3}"), number, priority=priority, num_bytes=1, now=since_s)
    served = [jobs[item] for _, item in queue.next(len(jobs), running={})]
    for (first, first_since_s), (second, second_since_s) in pairwise(served):
        assert first_since_s - second_since_s <= (first - second) * AGEING_S + 1e-9
