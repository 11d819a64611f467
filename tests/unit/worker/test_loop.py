"""One turn of the loop over an engine without a model: what starts, in which order, and what a stop does."""

from __future__ import annotations

from datetime import timedelta

import pytest

from alphaloop.errors import (
    AlphaloopError,
    FatalBrokerError,
    StoreError,
    StoreUnavailable,
)
from tests.fakes import FakeEngine
from tests.fixtures.publishing import NOW, claimed_job
from tests.fixtures.turning import MemoryEngine, Turning


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


class Undivertible(FakeEngine):
    """What has begun goes on as it began, as requests do."""

    @property
    def can_redraft(self) -> bool:
        return False


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
