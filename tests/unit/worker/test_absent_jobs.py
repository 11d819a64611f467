"""Jobs that wait for servers which are away: the worker goes on beside them, and gives them back where they hinder."""

from __future__ import annotations

from dataclasses import replace

from tests.fakes import FakeEngine
from tests.fixtures.publishing import claimed_job
from tests.fixtures.turning import Turning
from worker.engine import Load, Step


class WaitingEngine(FakeEngine):
    """Jobs of `absent` are not decoded as long as they are in it."""

    def __init__(self, *absent: str, num_slots: int = 2) -> None:
        super().__init__(num_slots=num_slots)
        self.absent = set(absent)

    @property
    def running(self) -> list[str]:
        return [sequence.job_id for sequence in self._running]

    def load(self) -> Load:
        waiting = frozenset(self.absent & set(self.running))
        return Load(len(self._running), self._num_slots, waiting, waiting)

    def step(self) -> Step:
        waiting = [sequence for sequence in self._running if sequence.job_id in self.absent]
        self._running = [sequence for sequence in self._running if sequence not in waiting]
        step = super().step()
        self._running += waiting
        return step


def test_a_job_that_waits_for_its_server_takes_no_slot_no_device_time_and_does_not_lead_a_drain() -> None:
    turning = Turning(WaitingEngine("a", "b"), *(claimed_job(name, max_tokens=2) for name in "ab"))
    turning.feed.ready.put(claimed_job(name, task="sql", max_tokens=2) for name in "cde")
    turning.turn(8)
    assert turning.outcomes() == dict.fromkeys("cde", "succeeded")
    assert turning.feed.aside.keys() == {"a", "b"}
    assert turning.feed.charged.keys() == {"sql"}
    turning.worker.drain()
    assert turning.released == [{"a": 1, "b": 1}]


def test_a_job_that_runs_alone_does_not_wait_for_one_that_waits_for_its_server() -> None:
    alone = claimed_job("alone", num_crashes=1, max_tokens=2)
    turning = Turning(WaitingEngine("a"), claimed_job("a"), alone, claimed_job("b", max_tokens=2))
    turning.turn(6)
    assert turning.outcomes() == {"alone": "succeeded", "b": "succeeded"}


def test_a_job_alone_that_waits_for_its_server_keeps_nobody_out() -> None:
    alone = claimed_job("alone", num_crashes=1, max_tokens=2)
    engine = WaitingEngine("alone")
    turning = Turning(engine, alone, claimed_job("b", max_tokens=2))
    turning.turn(6)
    assert turning.outcomes() == {"b": "succeeded"}
    engine.absent = set()
    turning.turn(6)
    assert turning.outcomes() == {"alone": "succeeded", "b": "succeeded"}
    assert turning.feed.aside == {}


def test_what_waits_is_given_back_where_a_suspect_waits_until_this_worker_has_no_claim() -> None:
    gone = claimed_job("gone")
    turning = Turning(WaitingEngine("a", "gone"), claimed_job("a"), gone)
    turning.turn(2)
    assert (turning.released, turning.feed.aside.keys()) == ([], {"a", "gone"})
    turning.intake.leaving = {gone.ready.delivery}
    turning.feed.num_suspects = 1
    turning.turn()
    assert [*map(sorted, turning.released)] == [["a", "gone"]]
    assert turning.feed.again == ["a"], "the other one's partition went to another worker"
    assert (turning.feed.aside, turning.feed.lanes.total()) == ({}, 2)


def test_slots_are_counted_within_a_bound_of_jobs_that_wait() -> None:
    waiting = frozenset(f"job-{number}" for number in range(300))
    load = Load(num_running=304, num_slots=8, waiting=waiting)
    assert (load.num_decoding, load.num_free) == (4, 0)
    assert replace(load, num_running=258, waiting=frozenset(list(waiting)[:256])).num_free == 6
