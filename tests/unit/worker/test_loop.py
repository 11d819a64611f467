"""One turn of the loop over an engine without a model: what starts, in which order, and what a stop does."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from alphaloop.cost import CostTable
from alphaloop.deciding.lengths_together import LengthsTogether
from alphaloop.deciding.policy import Decision, Reason
from alphaloop.errors import (
    AlphaloopError,
    DecodeFailed,
    EngineSick,
    FatalBrokerError,
    StoreError,
    StoreUnavailable,
)
from alphaloop.messages import Failure, Mode, Status
from alphaloop.settings import TaskSettings
from alphaloop.switchback.block import SwitchbackDesign
from alphaloop.switchback.schedule import SwitchbackSchedule
from tests.fakes import FakeEngine
from tests.fixtures.claimed import NOW, VANILLA, claimed_job
from worker.background import BackgroundWrites
from worker.engine import PreparedJob, Step
from worker.intake.delivery import Delivery
from worker.intake.handing_over import HandingOver
from worker.jobs.bounded_queue import BoundedQueue
from worker.jobs.claiming import ClaimedJob, EndedUndecoded
from worker.jobs.lanes import LaneKey
from worker.jobs.recording import EndedJob
from worker.jobs.steering import Steering
from worker.jobs.streaming import ChunkMessage
from worker.loop import Worker
from worker.metrics import WorkerMetrics
from worker.retry import Retry


class MemoryEngine(FakeEngine):
    """Has room for sequences that may put out `num_tokens` together; refuses to admit `refused`."""

    def __init__(self, num_tokens: int = 10**6, *, refused: str = "", **given: Any) -> None:
        super().__init__(**given)
        self._num_tokens, self._refused = num_tokens, refused

    def has_room(self, prepared: PreparedJob) -> bool:
        taken = sum(sequence.prepared.sampling.max_tokens for sequence in self._running)
        return super().has_room(prepared) and taken + prepared.sampling.max_tokens <= self._num_tokens

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        if prepared.job.job_id == self._refused or not self.has_room(prepared):
            raise DecodeFailed("no cache for this one")
        super().admit(prepared, decision)

    @property
    def running(self) -> list[str]:
        return [sequence.prepared.job.job_id for sequence in self._running]


class Feed:
    """The loop's side of the feed."""

    def __init__(self) -> None:
        self.ready: BoundedQueue[ClaimedJob] = BoundedQueue(max_items=99, max_bytes=10**9, num_bytes_of=lambda _: 1)
        self.num_waiting = 0
        self.lanes: Counter[LaneKey] = Counter()
        self.charged: Counter[str] = Counter()

    def started(self) -> None:
        pass

    def ended(self, lanes: Sequence[LaneKey]) -> None:
        self.lanes.update(lanes)

    def charge(self, device_s_by_task: Mapping[str, float]) -> None:
        self.charged.update(device_s_by_task)


class Rebalanced:
    """The loop's side of the intake. `leaving` are the deliveries of partitions that go to another worker."""

    def __init__(self) -> None:
        self.assignment_number = 1
        self.leaving: set[Delivery] = set()
        self.handing_over = HandingOver(0.0)

    def is_current(self, delivery: Delivery) -> bool:
        return delivery not in self.leaving

    def stop_taking(self) -> None:
        pass


class Turning:
    """A worker whose neighbours are played by the test: what they were given is kept."""

    def __init__(self, engine: FakeEngine, *claimed: ClaimedJob) -> None:
        self.engine, self.feed = engine, Feed()
        self.ended: list[EndedJob] = []
        self.decided: list[int] = []
        self.released: list[dict[str, int]] = []
        self.claimed_again: list[tuple[str, int]] = []
        self.lost: set[str] = set()
        self.asked_to_end: set[str] = set()
        self.decision = VANILLA
        self.release_error: Exception | None = None
        self.now = NOW
        self.num_retries = 0
        self.tried_again: list[tuple[str, str]] = []
        self.held = {one.job_id: one.attempt for one in claimed}  #: as the keeper of leases knows them
        self.intake = Rebalanced()
        self.stop, self.hurry = threading.Event(), threading.Event()
        self.feed.ready.put(claimed)
        nothing = lambda *_, **__: None  # noqa: E731
        thread = SimpleNamespace(end=nothing)
        recorder = Recording(self.ended)
        parts = SimpleNamespace(
            owner="w",
            engine=engine,
            feed=self.feed,
            retries=Tries(self._try_again),
            decoding_again=SimpleNamespace(claim=self._claim_again),
            feed_thread=thread,
            recorder=recorder,
            publishing=recorder,
            num_unpublished=0,
            background=BackgroundWrites(self.hurry.wait),
            store_decisions=nothing,
            steering=Steering(
                SwitchbackSchedule(SwitchbackDesign(control_share=0.0), random.Random(1)),
                LengthsTogether(lambda: CostTable(())),
                lambda: NOW,
            ),
            presence=SimpleNamespace(started=nothing, stepped=nothing, say_when_due=nothing, leave=nothing),
            leases=SimpleNamespace(cancelled=lambda: self.asked_to_end, let_go=nothing, held=lambda: dict(self.held)),
            decider=SimpleNamespace(decide_each=self._decide, count_scored=nothing, save=nothing),
            costs=SimpleNamespace(observe=nothing, save=nothing, save_when_due=nothing),
            validation=SimpleNamespace(task=lambda name: TaskSettings()),
            jobs=SimpleNamespace(release=self._release),
            intake=self.intake,
            metrics=WorkerMetrics(),
            retry=Retry(self.hurry),
            check=nothing,
            start=nothing,
            end_neighbours=nothing,
            stop=self.stop,
            hurry=self.hurry,
            drain_s=1.0,
            clock=time.monotonic,
            now=lambda: self.now,
        )
        self.parts = parts
        self.worker = Worker(parts)  # type: ignore[arg-type]

    def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            self.worker.run_once(0.0)

    def waiting(self) -> list[str]:
        """What waits for the loop, in order; it stays there."""
        waiting = self.feed.ready.take_all()
        self.feed.ready.put_back(waiting)
        return [claimed.job_id for claimed in waiting]

    def outcomes(self) -> dict[str, str]:
        assert len({one.claimed.job_id for one in self.ended}) == len(self.ended), "a job ended twice"
        return {one.claimed.job_id: one.outcome.status for one in self.ended}

    def _decide(self, lane: object, jobs: Sequence[object], *_: object, **__: object) -> list[Decision]:
        self.decided.append(len(jobs))
        return [self.decision for _ in jobs]

    def _try_again(self, claimed: ClaimedJob, failure: Failure, now: object) -> bool:
        if has_try := claimed.num_failures < self.num_retries:
            self.tried_again.append((claimed.job_id, failure.code))
        return has_try

    def _claim_again(self, claimed: ClaimedJob) -> ClaimedJob | EndedUndecoded:
        self.claimed_again.append((claimed.job_id, claimed.attempt))
        if claimed.job_id in self.lost:
            return EndedUndecoded(claimed, Status.FAILED, Failure(code="claim_lost", message="lost"))
        return replace(claimed, attempt=claimed.attempt + 1)

    def _release(self, attempts: Mapping[str, int], *, owner: str) -> None:
        if self.release_error:
            raise self.release_error
        self.released.append(dict(attempts))


class Tries:
    """Retries that are sent at once."""

    def __init__(self, put: Callable[..., bool]) -> None:
        self.put = put

    def __len__(self) -> int:
        return 0


class Recording:
    """A recorder that is done at once."""

    def __init__(self, ended: list[EndedJob]) -> None:
        self._ended = ended

    def __len__(self) -> int:
        return 0

    def put(self, ended: Iterable[EndedJob] | ChunkMessage) -> None:
        if not isinstance(ended, ChunkMessage):
            self._ended += ended

    def take_recorded(self) -> list[object]:
        return []


def test_slots_are_filled_in_order_and_refilled_when_a_job_ends() -> None:
    jobs = [claimed_job(name, max_tokens=2 if name == "a" else 9) for name in "abcd"]
    turning = Turning(MemoryEngine(num_slots=2), *jobs)
    turning.turn()
    assert (turning.engine.running, turning.waiting()) == (["a", "b"], ["c", "d"])  # type: ignore[attr-defined]
    turning.turn()
    assert turning.outcomes() == {"a": "succeeded"}
    turning.turn()
    assert (turning.engine.running, turning.waiting()) == (["b", "c"], ["d"])  # type: ignore[attr-defined]


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
    assert turning.engine.running == ["first"]  # type: ignore[attr-defined]
    assert turning.waiting() == ["large", "small", "tiny"]
    assert turning.decided == [2], "what has no room is not decided for again in every round"
    turning.turn(2)
    assert turning.engine.running == ["large"]  # type: ignore[attr-defined]
    turning.turn(12)
    assert turning.outcomes() == dict.fromkeys(["first", "large", "small", "tiny"], "succeeded")


def test_a_job_that_has_no_room_in_an_empty_engine_fails() -> None:
    turning = Turning(MemoryEngine(20), claimed_job("large", max_tokens=21), claimed_job("small", max_tokens=2))
    turning.turn(2)
    assert turning.outcomes() == {"large": "failed", "small": "succeeded"}


def test_a_job_that_the_engine_refuses_fails_alone() -> None:
    jobs = [claimed_job(name, max_tokens=2) for name in "abc"]
    turning = Turning(MemoryEngine(refused="b"), *jobs)
    turning.turn(4)
    assert turning.outcomes() == {"a": "succeeded", "b": "failed", "c": "succeeded"}
    assert turning.feed.lanes.total() == 3, "each made room for one claim"


def test_a_job_with_which_a_worker_died_runs_alone_after_what_runs_and_before_what_waits() -> None:
    engine = MemoryEngine(num_slots=4)
    jobs = [claimed_job("a", max_tokens=3), claimed_job("again", num_crashes=1, max_tokens=3), claimed_job("b")]
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


def test_a_cancelled_job_is_gone_before_the_next_round() -> None:
    engine = MemoryEngine()
    turning = Turning(engine, claimed_job("a", max_tokens=9), claimed_job("b", max_tokens=9))
    turning.turn()
    turning.asked_to_end = {"a"}
    turning.turn()
    assert (engine.running, turning.outcomes()) == (["b"], {"a": "cancelled"})
    turning.turn()
    assert turning.outcomes() == {"a": "cancelled"}


def test_a_job_whose_deadline_passes_while_it_is_decoded_is_gone_before_the_next_round() -> None:
    engine = MemoryEngine()
    soon = (NOW + timedelta(seconds=10)).isoformat()
    turning = Turning(engine, claimed_job("late", max_tokens=9, deadline=soon), claimed_job("free", max_tokens=9))
    turning.turn()
    turning.now = NOW + timedelta(seconds=9)
    turning.turn()
    assert engine.running == ["late", "free"]
    turning.now = NOW + timedelta(seconds=10)
    turning.turn()
    assert (engine.running, turning.outcomes()) == (["free"], {"late": "expired"})
    turning.turn(9)
    assert turning.outcomes() == {"late": "expired", "free": "succeeded"}
    assert turning.feed.lanes.total() == 2, "each made room for one claim"


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


def test_a_job_that_fails_alone_is_tried_again_as_long_as_it_has_tries() -> None:
    jobs = [claimed_job(name, max_tokens=2) for name in "ab"]
    jobs[1] = replace(jobs[1], num_failures=1)
    turning = Turning(FailingEngine(lambda names: DecodeFailed("no luck") if {"a", "b"} & set(names) else None), *jobs)
    turning.num_retries = 1
    turning.turn(6)
    assert turning.tried_again == [("a", "decode_failed")]
    assert turning.outcomes() == {"b": "failed"}
    assert turning.feed.lanes.total() == 2, "each made room for one claim"


def test_a_job_that_failed_before_runs_alone() -> None:
    engine = MemoryEngine(num_slots=4)
    again = replace(claimed_job("again", max_tokens=2), num_failures=1)
    turning = Turning(engine, claimed_job("a", max_tokens=2), again, claimed_job("b", max_tokens=2))
    seen = set()
    for _ in range(9):
        turning.turn()
        seen.add(tuple(engine.running))
    assert not any("again" in together and len(together) > 1 for together in seen)
    assert turning.outcomes() == dict.fromkeys(["a", "again", "b"], "succeeded")


def test_a_step_is_charged_to_the_tasks_in_it() -> None:
    turning = Turning(FakeEngine(), claimed_job("a"), claimed_job("b"), claimed_job("c", task="sql"))
    turning.turn()
    charged = turning.feed.charged
    assert charged["code"] == pytest.approx(2 * charged["sql"])
    assert charged["sql"] > 0


@pytest.mark.parametrize("error", [None, StoreUnavailable("nobody answers")])
def test_a_stop_decodes_what_runs_and_gives_the_rest_back_if_there_is_a_database(error: Exception | None) -> None:
    def stop_in_the_second_step() -> None:
        if turning.engine.num_steps == 2:
            turning.stop.set()

    engine = FakeEngine(num_slots=2, before_step=stop_in_the_second_step)
    turning = Turning(engine, *(claimed_job(name, max_tokens=5) for name in "abc"))
    turning.release_error = error
    turning.worker.run()
    assert turning.outcomes() == {"a": "succeeded", "b": "succeeded"}
    assert turning.released == ([] if error else [{"c": 1}])


def test_in_a_hurry_what_runs_is_given_back_too() -> None:
    def hurry_in_the_second_step() -> None:
        if turning.engine.num_steps == 2:
            turning.stop.set()
            turning.hurry.set()

    engine = FakeEngine(num_slots=2, before_step=hurry_in_the_second_step)
    turning = Turning(engine, *(claimed_job(name, max_tokens=5) for name in "abc"))
    turning.worker.run()
    assert turning.outcomes() == {}
    assert turning.released == [{"c": 1}, {"a": 1, "b": 1}]


@pytest.mark.parametrize("error", [StoreError("no right to write"), FatalBrokerError("fenced")])
def test_a_server_that_refuses_for_good_counts_no_crash_of_any_job(error: AlphaloopError) -> None:
    """What runs did not cause it, and neither did jobs whose outcomes wait to be recorded."""
    turning = Turning(FakeEngine(num_slots=1), claimed_job("a"), claimed_job("b"))
    turning.held["decoded"] = 7

    def check() -> None:
        if turning.engine.num_steps == 1:
            raise error

    turning.worker._c.check = check  # type: ignore[misc]
    with pytest.raises(type(error)):
        turning.worker.run()
    assert turning.released == [{"a": 1, "b": 1, "decoded": 7}]


def test_a_fault_of_the_loop_counts_no_crash_of_jobs_that_never_started() -> None:
    turning = Turning(FakeEngine(num_slots=1), claimed_job("a"), claimed_job("b"))

    def trip(step: object) -> None:
        raise ZeroDivisionError

    turning.parts.costs.observe = trip
    with pytest.raises(ZeroDivisionError):
        turning.worker.run()
    assert turning.released == [{"b": 1}]


class FailingEngine(FakeEngine):
    """Raises what `fails` returns for the jobs of a step."""

    def __init__(self, fails: Callable[[list[str]], Exception | None], **given: Any) -> None:
        super().__init__(**given)
        self._fails = fails
        self.steps: list[list[str]] = []

    def step(self) -> Step:
        jobs = [sequence.prepared.job.job_id for sequence in self._running]
        self.steps.append(jobs)
        if (error := self._fails(jobs)) is not None:
            raise error
        return super().step()


def is_sick(jobs: list[str]) -> Exception | None:
    return RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("num_slots", [1, 4], ids=["alone", "together"])
@pytest.mark.parametrize("num_jobs", [1, 2, 20])
def test_a_sick_engine_fails_no_job_and_ends_the_worker_with_every_job_given_back(
    num_slots: int, num_jobs: int
) -> None:
    names = [f"job-{number}" for number in range(num_jobs)]
    turning = Turning(FailingEngine(is_sick, num_slots=num_slots), *map(claimed_job, names))
    with pytest.raises(EngineSick, match="3 jobs in a row failed"):
        turning.worker.run()
    assert turning.outcomes() == {}
    released = [job_id for group in turning.released for job_id in group]
    assert sorted(released) == sorted(names), "each job is given back once"
    assert turning.worker.ending.reason is not None


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

    turning.parts.decider.decide_each = trip
    turning.turn(3)
    assert turning.outcomes() == {"a": "succeeded"}
    assert json.loads(turning.ended[0].outcome.result)["decoding"]["reason"] == "undecided"


def test_after_a_split_each_job_is_decoded_with_the_claim_for_its_new_decode() -> None:
    jobs = [claimed_job("a", max_tokens=4, stream=True), claimed_job("b", max_tokens=4, stream=True)]
    turning = Turning(FakeEngine(failing_steps=[2]), *jobs)
    turning.turn(20)
    assert turning.outcomes() == {"a": "succeeded", "b": "succeeded"}
    assert turning.claimed_again == [("a", 1), ("b", 1)]
    assert {one.claimed.job_id: one.outcome.attempt for one in turning.ended} == {"a": 2, "b": 2}


def test_a_job_that_another_worker_took_meanwhile_is_not_decoded_again() -> None:
    jobs = [claimed_job("lost", max_tokens=4, stream=True), claimed_job("kept", max_tokens=4, stream=True)]
    turning = Turning(FakeEngine(failing_steps=[2]), *jobs)
    turning.lost = {"lost"}
    turning.turn(20)
    assert turning.outcomes() == {"lost": "failed", "kept": "succeeded"}
    assert {one.claimed.job_id: one.outcome.attempt for one in turning.ended}["lost"] == 1, "the store drops it"
    assert turning.feed.lanes.total() == 2


def test_of_a_partition_that_leaves_only_what_runs_goes_on_and_only_until_it_is_overdue() -> None:
    engine = MemoryEngine(num_slots=2)
    names = {"a": ("code", 0), "b": ("sql", 1), "c": ("code", 2), "d": ("sql", 3)}
    jobs = {name: claimed_job(name, task=task, offset=offset, max_tokens=50) for name, (task, offset) in names.items()}
    turning = Turning(engine, *jobs.values())
    intake, delivered = turning.intake, {name: one.ready.delivery for name, one in jobs.items()}
    intake.handing_over.owe(delivered.values())
    turning.turn()
    assert engine.running == ["a", "b"]
    intake.leaving, intake.assignment_number = {delivered["a"], delivered["c"]}, 2
    intake.handing_over.begin([delivered["a"].partition])
    turning.turn(3)
    assert (engine.running, turning.waiting(), turning.released) == (["a", "b"], ["d"], [{"c": 1}])
    assert intake.handing_over.wait(lambda: True) == 1, "what was given back is not owed any more"
    intake.assignment_number = 3
    turning.turn()
    assert (engine.running, turning.released) == (["b", "d"], [{"c": 1}, {"a": 1}])
    assert turning.outcomes() == {}


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
