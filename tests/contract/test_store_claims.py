"""Claims against a real PostgreSQL: who gets a job, when, at which attempt."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from alphaloop.store.database import Database
from alphaloop.store.jobs import Claim, ClaimRequest, ClaimState, JobStore
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures.postgres import wait_until_blocked
from tests.fixtures.runs import claim_request, outcome, recorded_results

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]


@pytest.fixture
def jobs(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def outcomes(database: Database) -> OutcomeStore:
    return OutcomeStore(database)


def claim(
    jobs: JobStore, *requests: ClaimRequest, owner: str = "w1", max_attempts: int = 3, alone: bool = True
) -> list[Claim]:
    return jobs.claim(requests, owner=owner, lease_s=60.0, max_attempts=max_attempts, alone=alone)


def expire_leases(database: Database) -> None:
    database.change(text("UPDATE jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running'"))


def states(claims: list[Claim]) -> list[tuple[ClaimState, int]]:
    return [(found.state, found.attempt) for found in claims]


def test_new_jobs_are_claimed_and_answered_in_order(jobs: JobStore) -> None:
    answers = claim(jobs, claim_request("b"), claim_request("a"), claim_request("c"))
    assert [answer.job_id for answer in answers] == ["b", "a", "c"]
    assert states(answers) == [(ClaimState.CLAIMED, 1)] * 3


def test_a_job_twice_in_one_call_is_claimed_once(jobs: JobStore) -> None:
    first, second, conflict = claim(jobs, claim_request("a"), claim_request("a"), claim_request("a", b"other"))
    assert (first.state, first.attempt) == (ClaimState.CLAIMED, 1)
    assert (second.state, second.held_for_s) == (ClaimState.HELD, 60.0)
    assert conflict.state is ClaimState.CONFLICT


def test_another_payload_is_a_conflict_while_running_and_after(jobs: JobStore, outcomes: OutcomeStore) -> None:
    claim(jobs, claim_request("a"))
    assert states(claim(jobs, claim_request("a", b"other"), owner="w2")) == [(ClaimState.CONFLICT, 1)]
    outcomes.record([outcome("a")], owner="w1")
    assert states(claim(jobs, claim_request("a", b"other"), owner="w2")) == [(ClaimState.CONFLICT, 1)]


@pytest.mark.parametrize("content", ["plain", "NUL \x00 inside", "é 漢字 🙂 \u2028", 'line\nbreak\t\\ "quoted"'])
def test_an_ended_job_answers_with_its_recorded_bytes(jobs: JobStore, outcomes: OutcomeStore, content: str) -> None:
    claim(jobs, claim_request("a"))
    recorded = outcome("a", text=content)
    outcomes.record([recorded], owner="w1")
    [answer] = claim(jobs, claim_request("a"), owner="w2")
    assert (answer.state, answer.attempt, answer.outcome) == (ClaimState.ENDED, 1, recorded.result)
    assert recorded_results(jobs._database, ["a", "unknown"]) == {"a": recorded.result}


def test_anothers_lease_is_respected_until_it_is_over(jobs: JobStore, database: Database) -> None:
    claim(jobs, claim_request("a"))
    [held] = claim(jobs, claim_request("a"), owner="w2")
    assert (held.state, held.attempt) == (ClaimState.HELD, 1)
    assert held.held_for_s is not None
    assert 0 < held.held_for_s <= 60
    expire_leases(database)
    assert states(claim(jobs, claim_request("a"), owner="w2")) == [(ClaimState.CLAIMED, 2)]
    assert states(claim(jobs, claim_request("a"), owner="w1")) == [(ClaimState.HELD, 2)]


def test_a_job_with_which_too_many_workers_died_is_claimed_to_be_failed(
    jobs: JobStore, outcomes: OutcomeStore, database: Database
) -> None:
    """The first crash is not counted against the job, because the worker may have died of another one."""
    for attempt in (1, 2, 3):
        [found] = claim(jobs, claim_request("a"), owner=f"w{attempt}", max_attempts=2)
        assert (found.state, found.attempt, found.num_crashes) == (ClaimState.CLAIMED, attempt, attempt - 1)
        expire_leases(database)
    [found] = claim(jobs, claim_request("a"), owner="w4", max_attempts=2)
    assert (found.state, found.attempt, found.num_crashes) == (ClaimState.EXHAUSTED, 4, 3)
    assert len(outcomes.record([outcome("a", 4)], owner="w4")) == 1


def test_a_suspect_is_counted_once_and_held_by_nobody_until_it_is_asked_for_alone(
    jobs: JobStore, database: Database
) -> None:
    """Workers may die as often as they like between the claim of a group and its end: a suspect is none of theirs."""
    claim(jobs, claim_request("a"), claim_request("b"))
    expire_leases(database)
    for number in range(5):
        owner = f"died-{number}"
        answers = claim(jobs, claim_request("a"), claim_request("b"), owner=owner, max_attempts=3, alone=False)
        assert [(one.state, one.num_crashes) for one in answers] == [(ClaimState.SUSPECT, 1)] * 2
        expire_leases(database)
    [found] = claim(jobs, claim_request("a"), owner="alone", max_attempts=3)
    assert (found.state, found.num_crashes) == (ClaimState.CLAIMED, 1)
    expire_leases(database)
    [found] = claim(jobs, claim_request("a"), owner="next", max_attempts=1, alone=False)
    assert (found.state, found.num_crashes) == (ClaimState.EXHAUSTED, 2)


def test_a_claim_whose_answer_was_lost_is_no_crash(jobs: JobStore) -> None:
    """The connection breaks after the commit, and the same worker asks again."""
    for attempt in range(1, 10):
        [found] = claim(jobs, claim_request("a"), max_attempts=1)
        assert (found.state, found.attempt, found.num_crashes) == (ClaimState.CLAIMED, attempt, 0)


def test_a_cancelled_job_is_claimed_to_be_cancelled(jobs: JobStore, outcomes: OutcomeStore, database: Database) -> None:
    jobs.request_cancel("unseen")
    jobs.request_cancel("unseen")
    claim(jobs, claim_request("running"))
    jobs.request_cancel("running")
    assert jobs.cancelled(["running", "unseen", "other"]) == {"running", "unseen"}
    assert states(claim(jobs, claim_request("unseen"))) == [(ClaimState.CANCELLED, 1)]
    assert states(claim(jobs, claim_request("running"), owner="w2")) == [(ClaimState.HELD, 1)]
    expire_leases(database)
    assert states(claim(jobs, claim_request("running"), owner="w2", max_attempts=1)) == [(ClaimState.CANCELLED, 2)]
    outcomes.record([outcome("running", 2)], owner="w2")
    assert jobs.cancelled(["running", "unseen"]) == {"unseen"}


def test_a_request_to_cancel_comes_too_late_for_a_job_that_ended(jobs: JobStore, outcomes: OutcomeStore) -> None:
    claim(jobs, claim_request("a"))
    outcomes.record([outcome("a")], owner="w1")
    jobs.request_cancel("a")
    assert states(claim(jobs, claim_request("a"))) == [(ClaimState.ENDED, 1)]


def test_renewing_keeps_only_what_is_still_held(jobs: JobStore, outcomes: OutcomeStore, database: Database) -> None:
    claim(jobs, *(claim_request(job_id) for job_id in ("mine", "ended", "taken", "newer")))
    outcomes.record([outcome("ended")], owner="w1")
    expire_leases(database)
    claim(jobs, claim_request("taken"), owner="w2")
    claim(jobs, claim_request("newer"))
    attempts = {"mine": 1, "ended": 1, "taken": 1, "newer": 1, "unknown": 1}
    assert jobs.renew(attempts, owner="w1", lease_s=60) == {"mine"}
    assert states(claim(jobs, claim_request("mine"), owner="w2")) == [(ClaimState.HELD, 1)]


def test_a_released_job_is_free_at_once_and_no_crash_is_counted(jobs: JobStore, database: Database) -> None:
    claim(jobs, claim_request("new"), claim_request("again"), claim_request("taken"))
    assert states(claim(jobs, claim_request("again"))) == [(ClaimState.CLAIMED, 2)]
    expire_leases(database)
    claim(jobs, claim_request("taken"), owner="w2")
    assert jobs.release({"new": 1, "again": 2, "taken": 1}, owner="w1") == {"new", "again"}
    answers = claim(jobs, claim_request("new"), claim_request("again"), claim_request("taken"), owner="w3")
    assert states(answers) == [(ClaimState.CLAIMED, 2), (ClaimState.CLAIMED, 3), (ClaimState.HELD, 2)]
    assert [found.num_crashes for found in answers] == [0, 0, 0]
    expire_leases(database)
    [found] = claim(jobs, claim_request("taken"), owner="w3")
    assert found.num_crashes == 2  # of w1 and of w2


def test_a_released_job_never_gets_an_earlier_attempt_again(jobs: JobStore, outcomes: OutcomeStore) -> None:
    """Else what the first claim still sends, streamed text or an outcome, would pass for the second claim's."""
    for attempt in range(1, 6):
        assert states(claim(jobs, claim_request("a"), max_attempts=1)) == [(ClaimState.CLAIMED, attempt)]
        assert jobs.release({"a": attempt}, owner="w1") == {"a"}
        assert outcomes.record([outcome("a", attempt)], owner="w1") == []


def test_of_many_racing_workers_exactly_one_gets_each_job(jobs: JobStore) -> None:
    num_workers, job_ids = 4, [f"job-{n}" for n in range(20)]
    barrier = threading.Barrier(num_workers)

    def race(number: int) -> list[Claim]:
        # Each asks in another order: whoever locked in order of asking would deadlock here.
        asked = job_ids[number * 5 :] + job_ids[: number * 5]
        barrier.wait()
        return claim(jobs, *map(claim_request, asked if number % 2 else asked[::-1]), owner=f"w{number}")

    with ThreadPoolExecutor(num_workers) as pool:
        answers = [answer for answers in pool.map(race, range(num_workers)) for answer in answers]
    for job_id in job_ids:
        found = sorted(answer.state for answer in answers if answer.job_id == job_id)
        assert found == [ClaimState.CLAIMED] + [ClaimState.HELD] * (num_workers - 1)


def test_an_expired_lease_is_taken_over_by_exactly_one(jobs: JobStore, database: Database) -> None:
    job_ids = [f"job-{n}" for n in range(20)]
    claim(jobs, *map(claim_request, job_ids), owner="dead")
    expire_leases(database)
    barrier = threading.Barrier(3)

    def race(number: int) -> list[Claim]:
        barrier.wait()
        return claim(jobs, *map(claim_request, job_ids[::-1] if number else job_ids), owner=f"w{number}")

    with ThreadPoolExecutor(3) as pool:
        answers = [answer for answers in pool.map(race, range(3)) for answer in answers]
    winners = [answer.job_id for answer in answers if answer.state is ClaimState.CLAIMED]
    assert sorted(winners) == sorted(job_ids)
    assert {answer.attempt for answer in answers} == {2}


def test_a_claim_waits_for_a_row_that_is_being_deleted(jobs: JobStore, database: Database) -> None:
    """Retention may delete the row that a claim waits for; the claim must then find itself first."""
    claim(jobs, claim_request("a"))
    with ThreadPoolExecutor(1) as pool:
        with database.begin() as connection:
            connection.execute(text("DELETE FROM jobs WHERE job_id = 'a'"))
            waiting = pool.submit(claim, jobs, claim_request("a"), owner="w2")
            wait_until_blocked(database)
        assert states(waiting.result(30)) == [(ClaimState.CLAIMED, 1)]


def test_a_failure_is_counted_once_and_gives_the_claim_back(jobs: JobStore) -> None:
    claim(jobs, claim_request("a"), claim_request("b"))
    assert jobs.fail({"a": 1, "b": 7}, owner="w1") == {"a"}, "b is not held at this attempt"
    assert jobs.fail({"a": 1}, owner="w1") == set(), "the claim is gone: a repeated call counts nothing"
    assert jobs.fail({"b": 1}, owner="w2") == set()
    (again,) = claim(jobs, claim_request("a"), owner="w2")
    assert again == Claim("a", ClaimState.CLAIMED, attempt=2, num_crashes=0, num_failures=1)
    assert jobs.fail({}, owner="w1") == set()
