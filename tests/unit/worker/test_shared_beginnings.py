"""Prompts that begin alike run together, as far as the device time that this saves is worth, and nobody starves."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.simulated import SimulatedDevice, lane
from worker.admission import MOST_SLACK_S, READING_SHARE, AdmissionQueue, Beginning, LaneKey

seeded = settings(derandomize=True, deadline=None, max_examples=40)

READ_S = 0.001  #: a token of a prompt
JOB_S = 0.5  #: a job whose beginning is copied
NUM_TOKENS = 512  #: of a beginning; reading it takes a job's time, and its slack is the most: 10.24 s of 10


def text_of(number: int) -> tuple[Beginning, ...]:
    return (Beginning(NUM_TOKENS, number),)


def slack_s(read_s: float) -> float:
    """For a beginning whose tokens take so long each."""
    return min(MOST_SLACK_S, read_s * NUM_TOKENS / READING_SHARE)


def a_queue(num_slots: int = 4, read_s: float = READ_S) -> AdmissionQueue[int]:
    return AdmissionQueue(num_slots=num_slots, read_s=lambda num_tokens: read_s * num_tokens)


def with_texts(read_s: float, texts: dict[int, int], tasks: dict[int, str]) -> float:
    """Device seconds of jobs whose texts are `texts`, by number."""
    queue = a_queue(read_s=read_s)
    for number, text in texts.items():
        queue.add(lane(tasks[number]), number, priority=0, num_bytes=1, now=0.0, beginnings=text_of(text))
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
            alike = (Beginning(32, rng.randrange(9)),)
            queue.add(lane(), number, priority=0, num_bytes=1, now=0.0, beginnings=alike)
        device = SimulatedDevice(queue, 4, lambda *_: 2.0)
        device.run_empty(0.5)
        orders.append([item for _, item in device.admitted])
    assert orders[0] == orders[1] == sorted(orders[0])


def test_a_step_of_priority_is_worth_more_than_a_shared_beginning() -> None:
    """A step is worth 10 s of waiting, and the slack is no longer than that by default."""
    queue = a_queue(num_slots=2)
    for number, (priority, text) in enumerate([(1, 1), (0, 1), (0, 2), (1, 2)]):
        queue.add(lane(), number, priority=priority, num_bytes=1, now=0.0, beginnings=text_of(text))
    assert [item for _, item in queue.next(4, running={})] == [0, 3, 1, 2]


@seeded
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0.0, READ_S / 5, READ_S]))
def test_no_job_is_overtaken_by_more_device_time_than_the_slack(seed: int, num_slots: int, read_s: float) -> None:
    """Whatever a producer floods the task with: later jobs go first for at most the slack, by what jobs take."""
    rng, queue = Random(seed), a_queue(num_slots, read_s)
    device = SimulatedDevice(queue, num_slots, lambda *_: JOB_S)
    place: dict[int, tuple[float, int]] = {}
    overtaken_s: dict[int, float] = {}
    for number in range(250):
        text = 0 if rng.random() < 0.5 else rng.randrange(1, 6)
        priority, now = rng.choice([0, 0, 0, 1]), number / 20
        queue.add(lane(), number, priority=priority, num_bytes=1, now=now, beginnings=text_of(text))
        place[number], overtaken_s[number] = (now - priority * 10.0, number), 0.0
        for _, taken in device.step(0.2) if rng.random() < 0.3 else []:
            at = place.pop(taken)
            del overtaken_s[taken]
            for other in place:
                if place[other] < at:
                    overtaken_s[other] += JOB_S
                    assert overtaken_s[other] <= slack_s(read_s) + 1e-9
                    assert at[0] - place[other][0] < slack_s(read_s)
    device.run_empty(0.2)
    assert len(device.admitted) == 250


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 2**32))
def test_no_task_waits_longer_than_the_slack_and_what_the_slots_hold(seed: int) -> None:
    """The other tasks share one beginning each, so that their turns are as long as they may become."""
    rng, queue = Random(seed), a_queue()
    tasks = ("alike", "many", "rare")
    device = SimulatedDevice(queue, 4, lambda *_: rng.uniform(0, 2 * JOB_S))
    for number in range(1200):
        task = tasks[number % 3]
        alike = () if task == "rare" else text_of(number % 3)
        queue.add(lane(task), number, priority=0, num_bytes=1, now=0.0, beginnings=alike)
    ahead_s = MOST_SLACK_S + 2 * 4 * 2 * JOB_S
    for _ in range(300):
        device.step(0.5)
        assert max(device.device_s.values()) - min(device.device_s[task] for task in tasks) <= ahead_s
