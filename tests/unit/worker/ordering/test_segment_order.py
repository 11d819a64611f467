"""Inside a segment: bands of priority, then slack, then arrival; nobody starves, and what is lost displaces nobody."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.simulated import lane
from worker.admission import AdmissionQueue, Line
from worker.ordering.prefixes import Prefix
from worker.ordering.segment_order import AGEING_S, TOP_PRIORITY, UNDATED_SHARE

TOP_S = TOP_PRIORITY * AGEING_S  #: a job of priority 0 that has waited so long is in the top band
seeded = settings(derandomize=True, deadline=None, max_examples=40)


@dataclass(eq=False)
class Sent:
    """A job, and the longest that it may wait."""

    segment: str
    sent_s: float
    deadline_s: float = math.inf
    bound_s: float = math.inf
    started_s: float = math.inf

    def wait_in(self, queue: AdmissionQueue[Sent], task: str, priority: int) -> None:
        queue.add(
            lane(task),
            self,
            priority=priority,
            num_bytes=1,
            now=self.sent_s,
            segment=self.segment,
            deadline_s=self.deadline_s,
        )


class Order:
    """A queue on one slot, with a clock that the test moves; jobs are named."""

    def __init__(self, service_s: float = 10.0) -> None:
        self.service_s = service_s
        self.queue: AdmissionQueue[str] = AdmissionQueue(num_slots=1, service_s=lambda *_: self.service_s)

    def add(
        self,
        name: str,
        within_s: float = math.inf,
        *,
        now: float = 0.0,
        priority: int = 0,
        purpose: str = "traffic",
        prefixes: tuple[Prefix, ...] = (),
    ) -> None:
        self.queue.add(
            lane(purpose=purpose),
            name,
            priority=priority,
            num_bytes=1,
            now=now,
            deadline_s=now + within_s,
            prefixes=prefixes,
        )

    def next(self, limit: int = 99, *, now: float) -> list[str]:
        return [name for _, name in self.queue.next(limit, running={}, now=now)]


def test_in_one_band_the_least_slack_goes_first_and_then_jobs_without_a_deadline_as_they_came() -> None:
    order = Order()
    for name, within_s in (("first", math.inf), ("later", 500.0), ("soon", 50.0), ("second", math.inf)):
        order.add(name, within_s)
    assert order.next(now=1.0) == ["soon", "later", "first", "second"]


def test_the_slack_is_what_is_left_of_the_deadline_after_the_expected_service() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(
        num_slots=1, service_s=lambda _, name: {"long": 90.0, "short": 5.0}[name]
    )
    for name, within_s in (("short", 60.0), ("long", 100.0)):
        queue.add(lane(), name, priority=0, num_bytes=1, now=0.0, deadline_s=within_s)
    assert [name for _, name in queue.next(2, running={}, now=1.0)] == ["long", "short"]


def test_a_band_of_priority_counts_more_than_slack() -> None:
    order = Order()
    order.add("soon", 60.0)
    order.add("important", 9000.0, priority=1)
    order.add("important, undated", priority=1)
    assert order.next(now=1.0) == ["important", "important, undated", "soon"]


def test_ageing_raises_the_band_and_beyond_the_highest_priority_slack_alone_counts() -> None:
    for wait_s, expected in ((TOP_S - 2 * AGEING_S, ["old", "new"]), (TOP_S + 5 * AGEING_S, ["new", "old"])):
        order = Order()
        order.add("old", 99_999.0)
        order.add("new", 99_000.0, now=3 * AGEING_S)
        assert order.next(now=wait_s) == expected


def test_a_job_of_the_highest_priority_is_ordered_by_slack_at_once() -> None:
    order = Order()
    order.add("old", 99_999.0)
    order.add("urgent", 60.0, now=TOP_S + 95.0, priority=TOP_PRIORITY)
    assert order.next(now=TOP_S + 95.0) == ["urgent", "old"]


def test_what_can_no_longer_make_it_displaces_nobody_and_starts_when_nobody_else_waits() -> None:
    order = Order()
    order.add("lost", 12.0, priority=TOP_PRIORITY)
    order.add("can", 60.0)
    order.add("undated")
    assert order.next(now=5.0) == ["can", "undated", "lost"]


def test_a_job_is_lost_by_what_services_take_when_it_is_at_its_turn() -> None:
    order = Order(service_s=1.0)
    order.add("tight", 30.0)
    order.add("easy", 90.0)
    order.service_s = 40.0
    assert order.next(now=0.0) == ["easy", "tight"]


def test_a_job_whose_service_has_become_shorter_has_more_slack_at_its_turn() -> None:
    service_s = {"shorter": 90.0, "other": 5.0}
    queue: AdmissionQueue[str] = AdmissionQueue(num_slots=1, service_s=lambda _, name: service_s[name])
    for name, within_s in (("shorter", 100.0), ("other", 50.0)):
        queue.add(lane(), name, priority=0, num_bytes=1, now=0.0, deadline_s=within_s)
    service_s["shorter"] = 5.0
    assert [name for _, name in queue.next(2, running={}, now=1.0)] == ["other", "shorter"]


def test_a_job_whose_deadline_has_passed_leaves_at_once_without_a_share_of_the_device() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(num_slots=1, service_s=lambda *_: 5.0)
    for number in range(20):
        queue.add(lane(), f"gold-{number}", priority=0, num_bytes=1, now=0.0, segment="gold")
        queue.add(lane(), f"over-{number}", priority=0, num_bytes=1, now=0.0, segment="silver", deadline_s=9.0)
    queue.add(lane(), "silver", priority=0, num_bytes=1, now=0.0, segment="silver")
    taken = [name for _, name in queue.next(2, running={}, now=10.0)]
    assert sorted(taken[:20]) == sorted(f"over-{number}" for number in range(20))
    assert sorted(taken[20:]) == ["gold-0", "silver"], "twenty ends cost the segment nothing"
    assert len(queue) == 19
    assert queue.num_waiting("code", "silver", is_high=False) == 0


def test_probes_are_not_ordered_by_their_deadlines() -> None:
    order = Order()
    order.add("traffic")
    order.add("probe", 5.0, purpose="probe")
    assert order.next(now=9.0) == ["traffic"]
    assert order.next(now=9.0) == ["probe"]


def test_undated_jobs_have_their_share_of_starts_however_many_deadlines_are_near() -> None:
    order = Order()
    for number in range(30):
        order.add(f"undated-{number}")
    for number in range(400):
        order.add(f"dated-{number}", 99_999.0, priority=TOP_PRIORITY)
    taken = order.next(300, now=TOP_S + AGEING_S)
    for num_starts in range(20, 301, 20):
        num_undated = sum(name.startswith("undated") for name in taken[:num_starts])
        assert abs(num_undated - num_starts * UNDATED_SHARE) <= 1


def test_a_shared_prefix_makes_no_job_late() -> None:
    """Without a deadline near, a job whose prompt begins like a running one's goes first."""
    for within_s, expected in ((60.0, ["first", "near", "alike"]), (9000.0, ["first", "alike", "near"])):
        queue: AdmissionQueue[str] = AdmissionQueue(
            num_slots=2, read_s=lambda num_tokens: num_tokens / 1000, service_s=lambda *_: 55.0
        )
        for name, alike, deadline_s in (("first", 1, 1e4), ("near", 2, within_s), ("alike", 1, within_s + 1.0)):
            queue.add(
                lane(),
                name,
                priority=1 if name == "first" else 0,
                num_bytes=1,
                now=0.0,
                prefixes=(Prefix(512, alike),),
                deadline_s=deadline_s,
            )
        assert [name for _, name in queue.next(3, running={}, now=0.0)] == expected


@seeded
@given(st.integers(0, 2**32))
def test_every_job_leaves_once_and_what_left_is_not_kept(seed: int) -> None:
    """Whatever comes: deadlines near and far, lost and over, with estimates that change, and partitions that leave."""
    rng, order = Random(seed), Order()
    waiting: set[str] = set()
    gone: set[str] = set()
    now = 0.0
    for number in range(400):
        now += rng.uniform(0, 20)
        order.service_s = rng.choice([1.0, 10.0, 60.0])
        within_s = rng.choice([math.inf, rng.uniform(0, 100), rng.uniform(0, 3000), 99_999.0])
        order.add(str(number), within_s, now=now, priority=rng.randint(-100, 100))
        waiting.add(str(number))
        if rng.random() < 0.5:
            for name in order.next(rng.randint(1, 3), now=now):
                waiting.remove(name)
                gone.add(name)
        if rng.random() < 0.02:
            order.queue.discard(lambda name: int(name) % 5 == 0)
            gone |= {name for name in waiting if int(name) % 5 == 0}
            waiting = {name for name in waiting if int(name) % 5}
        assert len(order.queue) == len(waiting)
    assert len(order.queue._by_deadline) <= 2 * len(order.queue) + 32
    gone |= set(order.next(400, now=now))
    assert (len(gone), len(order.queue)) == (400, 0)


@seeded
@given(st.integers(0, 2**32))
def test_below_full_load_the_lowest_priority_ends_within_the_bound_that_ageing_gives(seed: int) -> None:
    """One slot, .9 of it used: a job of priority -100 without a deadline starts once it has the highest priority."""
    rng, order = Random(seed), Order()
    now, free_at, started = 0.0, 0.0, dict[str, float]()
    sent = dict[str, float]()
    for number in range(1500):
        now += rng.expovariate(0.09)
        while free_at <= now and len(order.queue):
            (name,) = order.next(1, now=free_at)
            started[name] = free_at
            free_at += 10.0
        free_at = max(free_at, now)
        name = f"low-{number}" if number % 10 == 0 else str(number)
        sent[name] = now
        if name.startswith("low"):
            order.add(name, now=now, priority=-TOP_PRIORITY)
        else:
            order.add(name, rng.choice([400.0, 4000.0]), now=now, priority=TOP_PRIORITY)
    waits = [started[name] - sent[name] for name in started if name.startswith("low")]
    # From then on it has one start in ten beside jobs with deadlines, of which a handful wait.
    assert max(waits) <= 2 * TOP_S + AGEING_S + 600.0
    assert len(waits) > 100


@seeded
@given(st.integers(0, 2**32))
def test_in_overload_the_lowest_priority_starts_within_the_bound_of_its_segments_share(seed: int) -> None:
    """Two tasks, one of two segments, all of them overloaded: the segment of these jobs has a quarter of the device.

    With n jobs without a deadline before it, itself among them, a job of priority -100 starts at the latest when it is
    in the top band and its segment has started 10 * n jobs more.
    """
    rng, queue = Random(seed), AdmissionQueue[Sent](num_slots=1, service_s=lambda *_: 10.0)
    device_s, share, waiting = 10.0, 0.25, list[Sent]()
    for number in range(3000):
        now = number * device_s
        for task, segment in (("chat", ""), ("code", "gold"), ("code", "")):
            while queue.num_waiting(task, segment, True, is_high=False) < 4:
                job = Sent(segment, now, now + rng.choice([100.0, 1000.0, 9000.0]))
                job.wait_in(queue, task, priority=rng.choice([0, TOP_PRIORITY]))
        if rng.random() < 0.9 * UNDATED_SHARE * share:
            job = Sent("", now)
            job.wait_in(queue, "code", priority=-TOP_PRIORITY)
            num_before = queue.num_waiting("code", "", False, is_high=False)
            job.bound_s = 2 * TOP_S + AGEING_S + num_before / UNDATED_SHARE * device_s / share
            waiting.append(job)
        for taken_lane, job in queue.next(1, running={}, now=now):
            if job.deadline_s > now:
                job.started_s = now
                queue.charge({Line(taken_lane, job.segment): device_s})
    assert sum(job.started_s < math.inf for job in waiting) > 20
    assert all(min(job.started_s, now) - job.sent_s <= job.bound_s for job in waiting)
