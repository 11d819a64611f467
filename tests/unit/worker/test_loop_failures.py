"""What the loop does when jobs fail, and when the engine does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.engine import PreparedJob, Step
from alphaloop.errors import (
    DecodeFailed,
    EngineSick,
)
from alphaloop.messages import Mode
from tests.fakes import FakeEngine
from tests.fixtures.publishing import claimed_job
from tests.fixtures.turning import Turning


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
