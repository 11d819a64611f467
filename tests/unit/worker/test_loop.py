"""The loop: which jobs start, how each leaves, and what failures of the engine do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.engine import FailedRequest, Load, PreparedJob, Step
from alphaloop.errors import (
    AlphaloopError,
    DecodeFailed,
    EngineSick,
    FatalBrokerError,
    RequestRefused,
    StoreError,
)
from alphaloop.messages import Mode
from tests.fakes import FakeEngine
from tests.fixtures.publishing import NOW, VANILLA, claimed_job
from tests.fixtures.turning import MemoryEngine, Turning
from worker.claims import ClaimedJob
from worker.running import RunningJob, RunningJobs


def test_nobody_overtakes_a_job_for_which_there_is_no_memory() -> None:
    """Two lanes: small jobs of the second would fit, and then the large job of the first would wait for ever."""
    jobs = [
        claimed_job("first", max_tokens=6),
        claimed_job("large", max_tokens=10),
        claimed_job("small", max_tokens=2, task="sql"),
        claimed_job("tiny", max_tokens=1, task="sql"),
    ]
    turning = Turning(MemoryEngine(10, num_slots=4), *jobs)
    turning.turn(5)
    assert turning.engine.running == ["first"]
    assert turning.waiting() == ["large", "small", "tiny"]
    assert turning.decided == [2], "what has no room is not decided for again in every round"
    turning.turn(2)
    assert turning.engine.running == ["large"]
    turning.turn(12)
    assert turning.outcomes() == dict.fromkeys(["first", "large", "small", "tiny"], "succeeded")


class Undivertible(FakeEngine):
    """What has begun goes on as it began, as requests do."""

    can_redraft = False


@pytest.mark.parametrize(("engine", "beside"), [(FakeEngine, [2, 3]), (Undivertible, [8, 8])])
def test_a_request_is_decided_for_what_will_run_beside_it(engine: type[FakeEngine], beside: list[int]) -> None:
    jobs = [claimed_job("a"), claimed_job("b"), claimed_job("c", task="sql")]
    turning = Turning(engine(num_slots=9), *jobs)
    turning.feed.num_in_turn = 5
    turning.turn()
    assert turning.decided_beside == beside
    turning = Turning(engine(num_slots=6), *jobs)
    turning.feed.num_in_turn = 50
    turning.turn()
    assert turning.decided_beside == [min(num, 6) for num in beside], "no more run than there are slots"


class Holding(Undivertible):
    """Some of its jobs wait for the sake of other clients."""

    held = frozenset[str]()

    def load(self) -> Load:
        return replace(super().load(), held=self.held)


def test_what_is_held_for_others_keeps_its_slot_and_runs_beside_no_other() -> None:
    engine = Holding(num_slots=9)
    turning = Turning(engine, claimed_job("a"), claimed_job("b"))
    engine.held = frozenset({"a", "b"})
    turning.turn()
    assert not turning.feed.charged, "no device time"
    assert (engine.load().num_decoding, engine.load().num_free) == (0, 7)
    turning.feed.ready.put([claimed_job("c")])
    turning.feed.num_in_turn = 50
    turning.turn()
    assert turning.decided_beside[-1] == 7, "their places are those of others"


def test_a_job_that_the_engine_refuses_or_that_has_no_room_when_it_is_empty_fails_alone() -> None:
    jobs = [claimed_job("large", max_tokens=21), *(claimed_job(name, max_tokens=2) for name in "abc")]
    turning = Turning(MemoryEngine(20, refused="b"), *jobs)
    turning.turn(5)
    assert turning.outcomes() == {"large": "failed", "a": "succeeded", "b": "failed", "c": "succeeded"}
    assert turning.feed.num_served == {"a": 1, "c": 1}, "how long jobs take is learned from texts"
    assert turning.feed.lines.total() == 4, "each made room for one claim"


@pytest.mark.parametrize("why", [{"num_crashes": 1}, {"num_failures": 1}])
def test_a_job_with_which_a_worker_died_or_that_failed_runs_alone_after_what_runs_and_before_what_waits(
    why: dict[str, Any],
) -> None:
    engine = MemoryEngine(num_slots=4)
    again = replace(claimed_job("again", max_tokens=3), **why)
    jobs = [claimed_job("a", max_tokens=3), again, claimed_job("b")]
    turning = Turning(engine, jobs[0])
    turning.turn()
    turning.feed.ready.put(jobs[1:])
    seen = []
    for _ in range(8):
        seen.append(tuple(engine.running))
        turning.turn()
    assert ("again",) in seen
    assert not any("again" in together and len(together) > 1 for together in seen)
    assert seen.index(("again",)) > seen.index(("a",))
    assert ("b",) in seen
    assert turning.worker.num_waiting == 0


def test_what_is_not_wanted_any_more_is_not_started() -> None:
    past = (NOW - timedelta(seconds=1)).isoformat()
    turning = Turning(FakeEngine(), claimed_job("late", deadline=past), claimed_job("cancelled"), claimed_job("wanted"))
    turning.asked_to_end = {"cancelled", "somebody else's"}
    turning.turn()
    assert turning.outcomes() == {"late": "expired", "cancelled": "cancelled"}
    assert turning.decided == [1]


def test_a_deadline_that_passes_while_a_job_waits_to_run_alone_ends_it() -> None:
    soon = (NOW + timedelta(seconds=10)).isoformat()
    again = claimed_job("again", num_crashes=1, deadline=soon)
    turning = Turning(MemoryEngine(), claimed_job("a", max_tokens=9))
    turning.turn()
    turning.feed.ready.put([again])
    turning.turn()
    assert turning.worker.num_waiting == 1
    turning.now = NOW + timedelta(seconds=10)
    turning.turn()
    assert (turning.outcomes(), turning.worker.num_waiting) == ({"again": "expired"}, 0)


def test_a_step_is_charged_to_the_tasks_in_it() -> None:
    turning = Turning(FakeEngine(), claimed_job("a"), claimed_job("b"), claimed_job("c", task="sql"))
    turning.turn()
    charged = turning.feed.charged
    assert charged["code"] == pytest.approx(2 * charged["sql"])
    assert charged["sql"] > 0


@pytest.mark.parametrize("error", [StoreError("no right to write"), FatalBrokerError("fenced")])
def test_a_server_that_refuses_for_good_counts_no_crash_of_any_job(error: AlphaloopError) -> None:
    """What runs did not cause it, and neither did jobs whose outcomes wait to be recorded."""
    turning = Turning(FakeEngine(num_slots=1), claimed_job("a"), claimed_job("b"))
    turning.held["decoded"] = 7

    def check() -> None:
        if turning.engine.num_steps == 1:
            raise error

    turning.worker.threads.check = check  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        turning.worker.run()
    assert turning.released == [{"a": 1, "b": 1, "decoded": 7}]


def test_a_fault_of_the_loop_counts_no_crash_of_jobs_that_never_started() -> None:
    turning = Turning(FakeEngine(num_slots=1), claimed_job("a"), claimed_job("b"))

    def trip(step: object) -> None:
        raise ZeroDivisionError

    turning.worker.costs.observe = trip
    with pytest.raises(ZeroDivisionError):
        turning.worker.run()
    assert turning.released == [{"b": 1}]


@pytest.mark.parametrize("answers", [(True, False), (False, True)])
def test_a_partition_whose_state_changes_while_jobs_are_sorted_neither_loses_nor_doubles_a_job(
    answers: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, waits = claimed_job("a", max_tokens=50), claimed_job("b", offset=1)
    turning = Turning(MemoryEngine(num_slots=1), runs, waits)
    turning.turn()
    changing = iter(answers)  # the thread that polls changes the answer between two questions
    monkeypatch.setattr(turning.intake, "is_current", lambda _: next(changing))
    turning.intake.assignment_number = 2
    turning.turn()
    kept, given_back = turning.waiting(), [job_id for jobs in turning.released for job_id in jobs]
    assert kept + given_back == ["b"]


class WaitingEngine(FakeEngine):
    """Jobs of `absent` are not decoded as long as they are in it."""

    def __init__(self, *absent: str) -> None:
        super().__init__(num_slots=2)
        self.absent = set(absent)

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
    turning.intake.revoked = [gone.ready.delivery]
    turning.feed.suspects = ["a suspect"]
    turning.turn()
    assert [*map(sorted, turning.released)] == [["a", "gone"]]
    assert turning.feed.again == ["a"], "the other one's partition went to another worker"
    assert (turning.feed.aside, turning.feed.lines.total()) == ({}, 2)


def test_slots_are_counted_within_a_bound_of_jobs_that_wait() -> None:
    waiting = frozenset(f"job-{number}" for number in range(300))
    load = Load(num_running=304, num_slots=8, waiting=waiting)
    assert (load.num_decoding, load.num_free) == (4, 0)
    assert replace(load, num_running=258, waiting=frozenset(list(waiting)[:256])).num_free == 6


def start(running: RunningJobs, *claimed: ClaimedJob, alone: bool = False) -> None:
    for one in claimed:
        running.start(RunningJob(one, VANILLA, UUID(int=1), NOW, DraftSetting()), alone=alone)


def names(claimed: Iterable[ClaimedJob]) -> list[str]:
    return [one.job_id for one in claimed]


def test_a_sequence_drafts_in_another_way_only_when_its_setting_changes() -> None:
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
    ended = []
    while len(running):
        ended += [job.job_id for job, _ in running.step().finished]
    assert ended == ["two"]


def test_a_control_request_says_that_its_decision_was_not_followed() -> None:
    decision = replace(VANILLA, drafter="lookup", num_draft_tokens=3, explanation="lookup is expected to be faster")
    job = RunningJob(claimed_job("a"), decision, UUID(int=1), NOW, DraftSetting(), is_control=True)
    assert job.recorded.explanation.startswith("decoded vanilla as a control request")
    assert job.recorded.explanation.endswith("decided was: lookup is expected to be faster")
    assert job.recorded.reason is Reason.CONTROL
    assert RunningJob(claimed_job("b"), decision, UUID(int=1), NOW, decision.setting).recorded is decision


def test_a_job_that_fails_alone_is_tried_again_as_long_as_it_has_tries() -> None:
    jobs = [claimed_job(name, max_tokens=2) for name in "ab"]
    jobs[1] = replace(jobs[1], num_failures=1)
    turning = Turning(FailingEngine(lambda names: DecodeFailed("no luck") if {"a", "b"} & set(names) else None), *jobs)
    turning.num_retries = 1
    turning.turn(6)
    assert turning.tried_again == [("a", "decode_failed")]
    assert turning.outcomes() == {"b": "failed"}
    assert turning.feed.lines.total() == 2, "each made room for one claim"


class FailingEngine(FakeEngine):
    """Raises what `fails` returns for the jobs of a step."""

    def __init__(self, fails: Callable[[list[str]], Exception | None], **given: Any) -> None:
        super().__init__(**given)
        self._fails = fails
        self.steps: list[list[str]] = []

    def step(self) -> Step:
        self.steps.append(self.running)
        if (error := self._fails(self.running)) is not None:
            raise error
        return super().step()


@pytest.mark.parametrize("num_slots", [1, 4], ids=["alone", "together"])
@pytest.mark.parametrize("num_jobs", [1, 2, 20])
def test_a_sick_engine_fails_no_job_and_ends_the_worker_with_every_job_given_back(
    num_slots: int, num_jobs: int
) -> None:
    names = [f"job-{number}" for number in range(num_jobs)]
    engine = FailingEngine(lambda _: RuntimeError("CUDA error: an illegal memory access"), num_slots=num_slots)
    turning = Turning(engine, *map(claimed_job, names))
    with pytest.raises(EngineSick, match="3 jobs in a row failed"):
        turning.worker.run()
    assert turning.outcomes() == {}
    released = [job_id for group in turning.released for job_id in group]
    assert sorted(released) == sorted(names), "each job is given back once"
    assert turning.worker.end_reason is not None


def test_an_engine_that_cannot_even_be_emptied_or_admit_is_sick_too() -> None:
    class Dead(FakeEngine):
        def admit(self, prepared: PreparedJob, decision: Decision) -> None:
            raise RuntimeError("CUDA error")

        def abandon(self) -> None:
            raise RuntimeError("CUDA error")

    turning = Turning(Dead(num_slots=2), *map(claimed_job, "abcd"))
    with pytest.raises(EngineSick):
        turning.worker.run()
    assert turning.outcomes() == {}
    assert sorted(job_id for group in turning.released for job_id in group) == list("abcd")


def test_bad_jobs_in_a_row_fail_by_their_own_fault_while_the_engine_decodes_other_texts() -> None:
    """Were five bad jobs taken for a sick engine, no worker could ever pass them."""
    bad = [f"bad-{number}" for number in range(5)]
    engine = FailingEngine(lambda jobs: ValueError("secret prompt") if {*bad} & {*jobs} else None, num_slots=2)
    turning = Turning(engine, *(claimed_job(name, max_tokens=2) for name in (*bad, "good")))
    turning.turn(40)
    assert turning.outcomes() == {**dict.fromkeys(bad, "failed"), "good": "succeeded"}
    told = b"".join(one.outcome.result for one in turning.ended)
    assert b"ValueError" in told
    assert b"secret" not in told, "the text of a foreign exception may quote the prompt"


def test_a_job_that_failed_while_the_engine_was_ill_for_a_moment_is_decoded() -> None:
    left = iter([True] * 4)  # the step of both jobs, the first job alone, the test, the second job alone
    engine = FailingEngine(lambda jobs: RuntimeError("away") if next(left, False) else None, num_slots=2)
    turning = Turning(engine, claimed_job("a", max_tokens=2), claimed_job("b", max_tokens=2))
    turning.turn(20)
    assert turning.outcomes() == {"a": "succeeded", "b": "failed"}


def test_the_engine_is_tested_with_the_drafter_of_the_failed_job() -> None:
    """A draft model that fails in every round would otherwise fail each job that it drafts for."""

    class BrokenDrafter(FakeEngine):
        def step(self) -> Step:
            if any(sequence.drafting for sequence in self._running):
                raise RuntimeError("the draft model is broken")
            return super().step()

    turning = Turning(BrokenDrafter(num_slots=2), *map(claimed_job, "abcd"))
    turning.decision = Decision(Mode.SPECULATIVE, "lookup", "fake-1", 3, Reason.FORCED, "a test")
    with pytest.raises(EngineSick):
        turning.worker.run()
    assert turning.outcomes() == {}


def test_a_job_that_cannot_be_decided_is_decoded_vanilla() -> None:
    turning = Turning(FakeEngine(), claimed_job("a", max_tokens=2))

    def trip(*_: object, **__: object) -> list[Decision]:
        raise OverflowError("a clock far away")

    turning.worker.decider.decide_each = trip
    turning.turn(3)
    assert turning.outcomes() == {"a": "succeeded"}
    assert json.loads(turning.ended[0].outcome.result)["decoding"]["reason"] == "undecided"


def test_a_job_that_another_worker_took_meanwhile_is_not_decoded_again() -> None:
    jobs = [claimed_job("lost", max_tokens=4, stream=True), claimed_job("kept", max_tokens=4, stream=True)]
    turning = Turning(FakeEngine(failing_steps=[2]), *jobs)
    turning.lost = {"lost"}
    turning.turn(20)
    assert turning.outcomes() == {"lost": "failed", "kept": "succeeded"}
    attempts = {one.claimed.job_id: one.outcome.attempt for one in turning.ended}
    assert attempts == {"lost": 1, "kept": 2}, "the store drops the one, and the other has the claim for its new decode"
    assert turning.feed.lines.total() == 2
