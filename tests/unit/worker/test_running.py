"""What runs in the engine: failures meet the job that caused them, and every job leaves exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.deciding.decision import Reason
from alphaloop.deciding.policy import DraftSetting
from alphaloop.errors import DecodeFailed, RequestRefused
from tests.fakes import FakeEngine
from tests.fixtures.publishing import NOW, VANILLA, claimed_job
from worker.claims import ClaimedJob
from worker.engine import FailedRequest, Step
from worker.running import RunningJob, RunningJobs


def start(running: RunningJobs, *claimed: ClaimedJob, alone: bool = False) -> None:
    for one in claimed:
        running.start(RunningJob(one, VANILLA, UUID(int=1), NOW, DraftSetting()), alone=alone)


def names(claimed: Iterable[ClaimedJob]) -> list[str]:
    return [one.job_id for one in claimed]


def run_out(running: RunningJobs) -> list[str]:
    """Step until nothing runs; the jobs in the order of their ends."""
    ended: list[str] = []
    while len(running):
        stepped = running.step()
        ended += [job.job_id for job, _ in stepped.finished]
        ended += [job.job_id for job, _ in stepped.failed]
    return ended


def test_jobs_leave_as_they_finish_and_free_their_slots() -> None:
    running = RunningJobs(FakeEngine(num_slots=2))
    start(running, claimed_job("long", max_tokens=6), claimed_job("short", max_tokens=2))
    assert running.num_free() == 0
    first, second = running.step(), running.step()
    assert (first.finished, [job.job_id for job, _ in second.finished]) == ([], ["short"])
    assert len(second.lanes) == 2
    assert running.num_free() == 1
    start(running, claimed_job("next", max_tokens=2))
    assert run_out(running) == ["next", "long"]


def test_a_failed_step_empties_the_engine_and_its_jobs_run_one_by_one() -> None:
    engine = FakeEngine(num_slots=4, failing_steps=[1, 2])
    running = RunningJobs(engine)
    start(running, *(claimed_job(name, max_tokens=3) for name in "abc"))
    running.step()
    failed = running.step()
    assert (failed.step, failed.failed, failed.finished) == (None, [], [])
    assert len(failed.lanes) == 3
    assert (len(running), engine.load().num_running, running.num_to_run_alone) == (0, 0, 3)

    ended = []
    while alone := running.next_alone():
        start(running, alone, alone=True)
        assert running.num_free() == 0, "no other starts while a job runs alone"
        assert running.next_alone() is None
        ended.append((alone.job_id, run_out(running)))
    assert ended == [("a", ["a"]), ("b", ["b"]), ("c", ["c"])]
    assert running.num_free() == 4


def test_a_job_that_fails_alone_has_failed() -> None:
    running = RunningJobs(FakeEngine(failing_steps=[0]))
    start(running, claimed_job("a"))
    stepped = running.step()
    ((job, error),) = stepped.failed
    assert job.job_id == "a"
    assert isinstance(error, DecodeFailed)
    assert (len(running), running.num_to_run_alone) == (0, 0)


def test_a_job_that_is_to_run_alone_waits_for_an_empty_engine_and_keeps_others_out() -> None:
    running = RunningJobs(FakeEngine(num_slots=4))
    start(running, claimed_job("a", max_tokens=2))
    running.run_alone_later([claimed_job("again", num_crashes=1)])
    assert running.num_free() == 0
    assert running.next_alone() is None
    run_out(running)
    assert running.num_free() == 0
    alone = running.next_alone()
    assert alone is not None
    assert (alone.job_id, running.num_to_run_alone) == ("again", 0)


def test_a_cancelled_job_leaves_whether_it_runs_or_waits_to_run_alone() -> None:
    engine = FakeEngine(num_slots=4)
    running = RunningJobs(engine)
    start(running, claimed_job("a"), claimed_job("b"))
    running.run_alone_later([claimed_job("c", num_crashes=1), claimed_job("d", num_crashes=1)])
    assert names(running.drop({"a", "c", "somebody else's"})) == ["a", "c"]
    assert (list(running.by_id()), engine.load().num_running, running.num_to_run_alone) == (["b"], 1, 1)
    assert running.drop({"a", "c"}) == []
    assert run_out(running) == ["b"]


def test_a_sequence_is_told_how_to_draft_only_when_that_changes() -> None:
    told: list[tuple[str, str | None, int]] = []

    class Noting(FakeEngine):
        def redraft(self, job_id, drafter, num_draft_tokens):
            told.append((job_id, drafter, num_draft_tokens))

    running = RunningJobs(Noting())
    start(running, claimed_job("a"), claimed_job("b"))
    wanted = {"a": DraftSetting(), "b": DraftSetting("lookup", 3)}
    for _ in range(2):
        running.redraft(lambda job: wanted[job.job_id])
    wanted["b"] = DraftSetting()
    running.redraft(lambda job: wanted[job.job_id])
    assert told == [("b", "lookup", 3), ("b", None, 0)]


def test_what_waits_to_run_alone_can_be_taken_out_while_others_run_on() -> None:
    running = RunningJobs(FakeEngine())
    start(running, claimed_job("a"))
    running.run_alone_later([claimed_job("b", num_crashes=1)])
    assert names(running.take_waiting_alone()) == ["b"]
    assert running.take_waiting_alone() == []
    assert (len(running), running.num_to_run_alone) == (1, 0)
    assert running.num_free() > 0


@pytest.mark.parametrize("num_running", [0, 3])
def test_giving_back_empties_everything_exactly_once(num_running: int) -> None:
    engine = FakeEngine(num_slots=4)
    running = RunningJobs(engine)
    start(running, *(claimed_job(f"r{number}") for number in range(num_running)))
    running.run_alone_later([claimed_job("alone", num_crashes=1)])
    assert names(running.give_back()) == [*(f"r{number}" for number in range(num_running)), "alone"]
    assert (len(running), engine.load().num_running, running.num_to_run_alone) == (0, 0, 0)
    assert running.give_back() == []
    assert running.next_alone() is None


ACTS = st.lists(st.sampled_from(["start", "again", "step", "cancel", "alone"]), max_size=40)


@given(acts=ACTS, failing=st.sets(st.integers(0, 12)))
def test_every_job_leaves_exactly_once_whatever_happens(acts: list[str], failing: set[int]) -> None:
    running = RunningJobs(FakeEngine(num_slots=3, failing_steps=sorted(failing)))
    came: list[str] = []
    left: list[str] = []
    for act in acts:
        if act == "start" and running.num_free():
            came.append(f"job-{len(came)}")
            start(running, claimed_job(came[-1], max_tokens=3))
        elif act == "again":
            came.append(f"job-{len(came)}")
            running.run_alone_later([claimed_job(came[-1], num_crashes=1)])
        elif act == "alone" and (alone := running.next_alone()):
            start(running, alone, alone=True)
        elif act == "cancel" and came:
            left += names(running.drop(came[::2]))
        elif act == "step" and len(running):
            stepped = running.step()
            left += [job.job_id for job, _ in stepped.finished] + [job.job_id for job, _ in stepped.failed]
    left += names(running.give_back())
    assert sorted(left) == sorted(came)


def test_a_job_that_a_server_refuses_leaves_alone() -> None:
    class Server(FakeEngine):
        """Refuses one job."""

        def step(self) -> Step:
            step = super().step()
            if not self.cancel("one"):
                return step
            return replace(step, failed=(FailedRequest("one", RequestRefused("no"), is_final=True),))

    running = RunningJobs(Server(num_slots=2))
    start(running, claimed_job("one"), claimed_job("two"))
    stepped = running.step()
    assert [(job.job_id, failed.error.code) for job, failed in stepped.refused] == [("one", "request_refused")]
    assert list(running.by_id()) == ["two"]
    assert run_out(running) == ["two"]


def test_a_control_request_says_that_its_decision_was_not_followed() -> None:
    decision = replace(VANILLA, drafter="lookup", num_draft_tokens=3, explanation="lookup is expected to be faster")
    job = RunningJob(claimed_job("a"), decision, UUID(int=1), NOW, DraftSetting(), is_control=True)
    assert job.recorded.explanation.startswith("decoded vanilla as a control request")
    assert job.recorded.explanation.endswith("decided was: lookup is expected to be faster")
    assert job.recorded.reason is Reason.CONTROL
    assert RunningJob(claimed_job("b"), decision, UUID(int=1), NOW, decision.setting).recorded is decision
