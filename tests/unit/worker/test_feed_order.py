"""The order in which the feed hands jobs to the loop, and how far it claims ahead."""

from __future__ import annotations

from alphaloop.messages import Job
from tests.fakes import FakeEngine
from tests.fixtures.turning import Feeding
from worker.engine import PreparedJob, Sampling


def test_jobs_are_claimed_ahead_no_further_than_asked() -> None:
    one = Feeding(num_ahead=2)
    one.send(*"abcde")
    one.feed.turn()
    one.feed.turn()
    assert one.table.calls == [["a", "b"]]
    assert (len(one.feed.ready), one.feed.num_waiting) == (2, 5)
    assert [one.leases.holds(job_id) for job_id in "abc"] == [True, True, False]
    (started,) = one.start()
    one.feed.turn()
    assert (started.job_id, one.table.calls[1:]) == ("a", [["c"]])
    assert one.intake.num_wakes >= 1


def test_the_loop_gets_jobs_by_priority_and_then_by_arrival() -> None:
    one = Feeding(num_ahead=1)
    one.feed.turn()
    one.send("low", priority=0)
    one.send("first", "second", priority=5)
    assert one.decode_all() == ["first", "second", "low"]


def test_a_job_whose_prompt_begins_like_a_running_jobs_goes_first() -> None:
    one = Feeding(num_ahead=1, most_slack_s=10.0)
    texts = {"a": "red " * 70, "b": "blue " * 70}
    for job_id, text in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("a2", "a")):
        one.send(job_id, prompt=texts[text] + job_id)
    order = []
    for _ in range(4):
        one.feed.turn()
        order += [started.job_id for started in one.start()]
    assert order == ["a1", "a2", "b1", "b2"]


def test_jobs_are_claimed_between_prompts_that_take_long_to_read() -> None:
    class Slow(FakeEngine):
        def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
            one.now += 3.0
            return super().prepare(job, sampling)

    one = Feeding(num_ahead=2, engine=Slow())
    one.send("a", "b", "c")
    one.feed.turn()
    assert [claimed.job_id for claimed in one.start(9)] == ["a"], "the device does not wait for the other prompts"
    assert one.feed.num_waiting == 2
    assert one.decode_all() == ["b", "c"]


def test_tasks_share_the_device_by_its_time_and_not_by_who_came_first() -> None:
    one = Feeding(num_ahead=1)
    one.send(*(f"code-{number}" for number in range(30)))
    one.feed.turn()
    one.send(*(f"sql-{number}" for number in range(10)), task="sql")
    order: list[str] = []
    for _ in range(20):
        one.feed.turn()
        (job,) = one.start()
        order.append(job.ready.lane.task)
        one.feed.charge({job.ready.lane.task: 1.0})
        one.end([job])
    assert 8 <= order.count("sql") <= 10, "a backlog of one task keeps no other waiting"
    assert "sql" in order[:5]
