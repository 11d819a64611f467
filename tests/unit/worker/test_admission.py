"""Admission: tasks and their segments share the device by device time, jobs by priority with ageing and arrival."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import groupby, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alphaloop.engine import Sampling
from alphaloop.messages import Body, Decoding, Job, Purpose
from tests.fixtures.simulated import SimulatedDevice, lane
from worker.admission import NORMAL_SHARE, AdmissionQueue, LaneKey, Line, lane_of
from worker.ordering.prefixes import MOST_LEAD_S, READING_SHARE, Prefix
from worker.ordering.segment_order import AGEING_S
from worker.ordering.sharing import MOST_IDLE

TASKS = ("code", "rag", "sql")
PURPOSES = ("traffic", "traffic", "probe", "control")
seeded = settings(derandomize=True, deadline=None, max_examples=40)


def add(queue: AdmissionQueue[int], key: LaneKey, num_jobs: int, now: float = 0.0) -> None:
    """Jobs of one lane that begin to wait at the same moment."""
    for number in range(num_jobs):
        queue.add(key, number, priority=0, num_bytes=1, now=now)


def queue_of(lanes: dict[LaneKey, int], num_slots: int = 8, **rules: Any) -> AdmissionQueue[int]:
    """Jobs that came lane by lane."""
    queue: AdmissionQueue[int] = AdmissionQueue(num_slots=num_slots, **rules)
    for when, (key, num_jobs) in enumerate(lanes.items()):
        add(queue, key, num_jobs, now=float(when))
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
    queue = queue_of({lane(task): 2000 for task in TASKS}, quantum_s=2.0, weight_of=weight_of.__getitem__)
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
    queue = queue_of({lane(task): 4 for task in TASKS}, weight_of=weight_of.__getitem__)
    device = SimulatedDevice(queue, 3, lambda key, _: rng.uniform(0, 2 * mean_s[key.task]))
    # A job that runs alone is charged a whole step, however short it is.
    longest_job_s = max(1.0, 2 * max(mean_s.values()))
    longest_wait_s = sum(weights) * (1.0 + 2 * 3 * longest_job_s / min(weights))
    admitted_at_s = dict.fromkeys(TASKS, 0.0)
    for _ in range(int(2 * longest_wait_s)):
        for key, _ in device.step(1.0):
            admitted_at_s[key.task] = sum(device.device_s.values())
            add(queue, lane(key.task), 1)
        assert sum(device.device_s.values()) - min(admitted_at_s.values()) <= longest_wait_s


def test_a_job_that_took_less_than_expected_is_not_held_against_its_task() -> None:
    queue = queue_of({lane("dear"): 200}, quantum_s=0.5)
    device = SimulatedDevice(queue, 16, lambda key, _: 20.0 if key.task == "dear" else 0.1)
    for _ in range(400):
        device.step(1.0)
    before_s = device.device_s["dear"]
    add(queue, lane("cheap"), 30_000)
    for _ in range(1000):
        device.step(1.0)
    assert device.device_s["cheap"] == pytest.approx(device.device_s["dear"] - before_s, rel=0.35)


def test_tasks_that_had_equally_much_begin_in_the_order_of_their_jobs() -> None:
    """A task's name decides nothing."""
    queue = queue_of({lane(task): 2 for task in ("sql", "code", "rag")}, quantum_s=0.5)
    assert [key.task for key, _ in queue.next(3, running={}, now=0.0)] == ["sql", "code", "rag"]


@pytest.mark.parametrize("is_trickling", [False, True])
def test_an_idle_task_saves_up_no_device_time(is_trickling: bool) -> None:
    """Nor does a task that often has a job running and seldom one waiting."""
    queue = queue_of({lane("busy"): 5000})
    device = SimulatedDevice(queue, 4, lambda *_: 1.0)
    for number in range(800):
        if is_trickling and number % 4 == 0:
            add(queue, lane("idle"), 1)
        device.step(1.0)
    busy_s, idle_s = device.device_s["busy"], device.device_s["idle"]
    assert busy_s > 2 * idle_s
    add(queue, lane("idle"), 500)
    for _ in range(100):
        device.step(1.0)
        ahead_s = (device.device_s["idle"] - idle_s) - (device.device_s["busy"] - busy_s)
        assert abs(ahead_s) <= 1.0 + 2 * 4 * 1.0


def test_after_a_pause_of_all_tasks_nobody_is_owed_anything() -> None:
    queue = queue_of({lane("busy"): 500})
    device = SimulatedDevice(queue, 1, lambda *_: 1.0)
    device.run_empty(1.0)
    for task in ("idle", "busy"):
        add(queue, lane(task), 100)
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
    served = [jobs[item] for _, item in queue.next(len(jobs), running={}, now=0.0)]
    for (first, first_since_s), (second, second_since_s) in pairwise(served):
        assert first_since_s - second_since_s <= (first - second) * AGEING_S + 1e-9


PROBE = lane(purpose="probe")


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
            before = {line.lane for line in device.running}
            lanes = before | {key for key, _ in device.step(0.5)}
            assert len(lanes) == 1 or not any(key.is_measured for key in lanes)
    device.run_empty(0.5)
    assert len(device.admitted) == 100
    assert queue.load(is_high=True) == queue.load(is_high=False) == (0, 0)


def test_the_engine_drains_before_a_measured_lane_and_after_it() -> None:
    queue = queue_of({lane(): 2, PROBE: 3, lane("sql"): 2}, num_slots=2)
    assert queue.next(2, running={}, now=0.0) == [(lane(), 0), (lane(), 1)]
    queue.charge({Line(lane()): 0.1})
    assert queue.next(9, running={Line(lane()): 1}, now=0.0) == []
    assert queue.next(9, running={}, now=0.0) == [(PROBE, 0), (PROBE, 1)]
    queue.charge({Line(lane()): 0.1})
    assert queue.next(9, running={Line(PROBE): 1}, now=0.0) == []
    assert queue.next(1, running={}, now=0.0) == [(lane("sql"), 0)]
    assert queue.next(9, running={Line(lane("sql")): 1}, now=0.0) == [(lane("sql"), 1)]
    assert queue.next(9, running={Line(lane("sql")): 1}, now=0.0) == []
    assert queue.next(9, running={}, now=0.0) == [(PROBE, 2)]


def test_a_flood_of_probes_leaves_others_their_share() -> None:
    queue = queue_of({lane(purpose="probe", drafter=name): 50 for name in ("lookup", "draft")}, num_slots=4)
    add(queue, lane("sql"), 40, now=9.0)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0)
    for _ in range(60):
        device.step(1.0)
    assert device.device_s["sql"] == pytest.approx(30, abs=9)


def test_a_tasks_own_traffic_goes_between_its_probes() -> None:
    queue = queue_of({PROBE: 12, lane(): 12}, num_slots=4)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0)
    device.run_empty(0.5)
    runs = [(purpose, len(list(run))) for purpose, run in groupby(key.purpose for key, _ in device.admitted)]
    assert runs == [("probe", 4), ("traffic", 4)] * 3


def test_discarded_jobs_end_their_lanes_turn() -> None:
    queue = queue_of({PROBE: 2, lane(): 1}, num_slots=4)
    assert queue.next(4, running={Line(lane("sql")): 1}, now=0.0) == []
    queue.add(lane("sql"), 9, priority=0, num_bytes=1, now=0.0)
    queue.discard(lambda number: number < 9)
    assert queue.next(4, running={}, now=0.0) == [(lane("sql"), 9)]


def lane_with(temperature: float = 0.0, switched_off: str = "", **fields: Any) -> LaneKey:
    """The lane of a job that differs from a plain one in these fields."""
    job = Job.model_construct(**{"job_id": "j", "task": "code", "body": Body(prompt="x"), **fields})
    return lane_of(job, Sampling(max_tokens=8, temperature=temperature), switched_off)


def test_what_changes_the_decision_changes_the_lane_and_nothing_else_does() -> None:
    assert lane_with() == lane_with(custom_id="other", priority=3, segment="gold")
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


READ_S = 0.001  #: a token of a prompt
JOB_S = 0.5  #: a job whose prefix is copied
NUM_TOKENS = 512  #: of a prefix; reading it takes a job's time, and its lead is the most: 10.24 s of 10


def text_of(number: int) -> tuple[Prefix, ...]:
    return (Prefix(NUM_TOKENS, number),)


def lead_s(read_s: float) -> float:
    """For a prefix whose tokens take so long each."""
    return min(MOST_LEAD_S, read_s * NUM_TOKENS / READING_SHARE)


def a_queue(num_slots: int = 4, read_s: float = READ_S) -> AdmissionQueue[int]:
    return AdmissionQueue(num_slots=num_slots, read_s=lambda num_tokens: read_s * num_tokens)


def with_texts(read_s: float, texts: dict[int, int], tasks: dict[int, str]) -> float:
    """Device seconds of jobs whose texts are `texts`, by number."""
    queue = a_queue(read_s=read_s)
    for number, text in texts.items():
        queue.add(lane(tasks[number]), number, priority=0, num_bytes=1, now=0.0, prefixes=text_of(text))
    device: SimulatedDevice[int]

    def job_s(_: LaneKey, number: int) -> float:
        is_held = any(texts[other] == texts[number] for other in device.running_items)
        return JOB_S if is_held else JOB_S + READ_S * NUM_TOKENS

    device = SimulatedDevice(queue, 4, job_s)
    device.run_empty(0.1)
    return sum(device.device_s.values())


def test_prompts_of_one_task_that_begin_alike_run_together() -> None:
    rng = Random(5)
    texts = {number: rng.randrange(5) for number in range(400)}
    tasks = dict.fromkeys(texts, "rag")
    assert with_texts(READ_S, texts, tasks) < 0.85 * with_texts(0.0, texts, tasks)


def test_tasks_whose_prompts_begin_alike_take_longer_turns() -> None:
    tasks = {number: f"task-{number % 12}" for number in range(480)}
    texts = {number: number % 12 for number in range(480)}
    assert with_texts(READ_S, texts, tasks) < 0.85 * with_texts(0.0, texts, tasks)


def test_a_beginning_that_is_cheap_to_read_changes_no_order() -> None:
    """32 ms of reading are worth .64 s, which is less than a job is expected to take."""
    orders = []
    for read_s in (0.0, READ_S):
        rng, queue = Random(2), a_queue(read_s=read_s)
        for number in range(200):
            alike = (Prefix(32, rng.randrange(9)),)
            queue.add(lane(), number, priority=0, num_bytes=1, now=0.0, prefixes=alike)
        device = SimulatedDevice(queue, 4, lambda *_: 2.0)
        device.run_empty(0.5)
        orders.append([item for _, item in device.admitted])
    assert orders[0] == orders[1] == sorted(orders[0])


def test_a_step_of_priority_is_worth_more_than_a_shared_beginning() -> None:
    """A step is worth 10 s of waiting, and the lead is no longer than that by default."""
    queue = a_queue(num_slots=2)
    for number, (priority, text) in enumerate([(1, 1), (0, 1), (0, 2), (1, 2)]):
        queue.add(lane(), number, priority=priority, num_bytes=1, now=0.0, prefixes=text_of(text))
    assert [item for _, item in queue.next(4, running={}, now=0.0)] == [0, 3, 1, 2]


@seeded
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0.0, READ_S / 5, READ_S]))
def test_no_job_is_overtaken_by_more_device_time_than_the_lead(seed: int, num_slots: int, read_s: float) -> None:
    """Whatever a producer floods the task with: later jobs go first for at most the lead, by what jobs take."""
    rng, queue = Random(seed), a_queue(num_slots, read_s)
    device = SimulatedDevice(queue, num_slots, lambda *_: JOB_S)
    place: dict[int, tuple[float, int]] = {}
    overtaken_s: dict[int, float] = {}
    for number in range(250):
        text = 0 if rng.random() < 0.5 else rng.randrange(1, 6)
        priority, now = rng.choice([0, 0, 0, 1]), number / 20
        queue.add(lane(), number, priority=priority, num_bytes=1, now=now, prefixes=text_of(text))
        place[number], overtaken_s[number] = (now - priority * 10.0, number), 0.0
        for _, taken in device.step(0.2) if rng.random() < 0.3 else []:
            at = place.pop(taken)
            del overtaken_s[taken]
            for other in place:
                if place[other] < at:
                    overtaken_s[other] += JOB_S
                    assert overtaken_s[other] <= lead_s(read_s) + 1e-9
                    assert at[0] - place[other][0] < lead_s(read_s)
    device.run_empty(0.2)
    assert len(device.admitted) == 250


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 2**32))
def test_no_task_waits_longer_than_the_lead_and_what_the_slots_hold(seed: int) -> None:
    """The other tasks share one prefix each, so that their turns are as long as they may become."""
    rng, queue = Random(seed), a_queue()
    tasks = ("alike", "many", "rare")
    device = SimulatedDevice(queue, 4, lambda *_: rng.uniform(0, 2 * JOB_S))
    for number in range(1200):
        task = tasks[number % 3]
        alike = () if task == "rare" else text_of(number % 3)
        queue.add(lane(task), number, priority=0, num_bytes=1, now=0.0, prefixes=alike)
    ahead_s = MOST_LEAD_S + 2 * 4 * 2 * JOB_S
    for _ in range(300):
        device.step(0.5)
        assert max(device.device_s.values()) - min(device.device_s[task] for task in tasks) <= ahead_s


def two_lanes(num_normal: int, num_high: int) -> AdmissionQueue[str]:
    """Normal jobs that came first, and high ones of which none has a priority."""
    queue: AdmissionQueue[str] = AdmissionQueue(num_slots=4)
    for number in range(num_normal):
        queue.add(lane("code"), f"normal-{number}", priority=100, num_bytes=10, now=0.0)
    for number in range(num_high):
        queue.add(lane("code"), f"high-{number}", priority=-100, num_bytes=1, now=50.0, is_high=True)
    return queue


def test_high_jobs_go_before_earlier_ones_whatever_their_priorities() -> None:
    queue = two_lanes(num_normal=3, num_high=3)
    assert queue.load(is_high=True) == (3, 3)
    assert [name for _, name in queue.next(9, running={}, now=0.0)] == [
        *(f"high-{number}" for number in range(3)),
        *(f"normal-{number}" for number in range(3)),
    ]
    assert queue.load(is_high=True) == queue.load(is_high=False) == (0, 0)


@seeded
@given(st.integers(0, 2**32))
def test_however_high_jobs_come_no_normal_job_starves(seed: int) -> None:
    """Of any starts while both lanes wait, the normal lane has its share to within one."""
    rng, queue = Random(seed), two_lanes(num_normal=40, num_high=1)
    num_starts = num_normal = number = 0
    while queue.load(is_high=False)[0]:
        for _ in range(rng.randint(0, 9)):
            number += 1
            queue.add(lane("code"), f"high-later-{number}", priority=0, num_bytes=1, now=1.0, is_high=True)
        if not queue.load(is_high=True)[0]:
            continue
        for _, name in queue.next(1, running={}, now=0.0):
            num_starts += 1
            num_normal += name.startswith("normal")
            assert num_normal > num_starts * NORMAL_SHARE - 1 - 1e-6


SEGMENTS = ("batch", "gold", "")
few = settings(derandomize=True, deadline=None, max_examples=15)
Item = tuple[str, int]  # segment and number


def segment_of(item: Item) -> str:
    return item[0]


def add_jobs(
    queue: AdmissionQueue[Item], segment: str, num_jobs: int, *, now: float = 0.0, is_high: bool = False
) -> None:
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
        add_jobs(queue, segment, 2000)
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
    order = [item for _, item in together.next(120, running={}, now=0.0)]
    for segment, queue in alone.items():
        expected = [item for _, item in queue.next(120, running={}, now=0.0)]
        assert [item for item in order if item[0] == segment] == expected


def test_a_segment_alone_has_the_whole_device_and_owes_nothing_for_it() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=4)
    add_jobs(queue, "batch", 1000)
    device = SimulatedDevice(queue, 4, lambda *_: 1.0, segment_of)
    for _ in range(100):
        device.step(1.0)
    assert device.segment_s["batch"] == pytest.approx(100)
    add_jobs(queue, "gold", 100)
    before_s = dict(device.segment_s)
    for _ in range(100):
        device.step(1.0)
    gained_s = {segment: device.segment_s[segment] - before_s.get(segment, 0.0) for segment in ("batch", "gold")}
    assert gained_s["gold"] == pytest.approx(gained_s["batch"], abs=2 * 4 * 1.0)


def test_a_segment_with_one_job_at_a_time_gets_no_more_than_its_share() -> None:
    """It is idle between its jobs, and what it had is not forgotten."""
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=1, weight_of_segment=lambda one: 3.0 if one == "b" else 1.0)
    add_jobs(queue, "b", 2000)
    device = SimulatedDevice(queue, 1, lambda *_: 1.0, segment_of)
    for _ in range(400):
        if not queue.num_waiting("code", "a", is_high=False) and ("a", 0) not in device.running_items:
            add_jobs(queue, "a", 1)
        device.step(1.0)
    assert device.segment_s["a"] == pytest.approx(100, abs=4)


def test_the_high_lane_goes_first_and_segments_share_it_too() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=1)
    add_jobs(queue, "normal", 50)
    add_jobs(queue, "batch", 50, is_high=True)
    add_jobs(queue, "gold", 10, now=9.0, is_high=True)
    order = [segment for _, (segment, _) in queue.next(25, running={}, now=0.0)]
    assert (order.count("gold"), order.count("batch"), order.count("normal")) == (10, 10, 5)


def test_a_segment_has_one_share_for_both_lanes() -> None:
    queue: AdmissionQueue[Item] = AdmissionQueue(num_slots=1)
    add_jobs(queue, "both", 100, is_high=True)
    add_jobs(queue, "both", 100)
    add_jobs(queue, "normal", 100)
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
    add_jobs(queue, "batch", 8, now=1.0)
    add_jobs(queue, "gold", 8, now=1.0)
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
    add_jobs(queue, "batch", 200)
    device = SimulatedDevice(queue, 1, lambda *_: 1.0, segment_of)
    for _ in range(20):
        device.step(1.0)
    add_jobs(queue, "gold", 200)
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
    add_jobs(queue, "batch", 4000)
    device = SimulatedDevice(queue, 2, lambda *_: 1.0, segment_of)
    shares = queue._tasks["code"].shares
    for number in range(3000):
        add_jobs(queue, f"made-up-{number}", 1)
        device.step(1.0)
        num_in_use = len(device.running_items) + sum(map(len, queue._tasks["code"].lanes.values()))
        assert len(shares) <= 3 * (MOST_IDLE + num_in_use)
    assert device.segment_s["batch"] > 0
